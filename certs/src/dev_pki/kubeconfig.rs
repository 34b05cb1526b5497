//! Kubeconfig files with everything embedded, so that one file is enough to reach the cluster.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::json;

/// Renders a kubeconfig for `user`. Equal input gives equal text: an existing file is verified by rendering it again.
pub(super) fn render(
    server: &str,
    user: &str,
    ca_pem: &str,
    cert_pem: &str,
    key_pem: &str,
) -> Result<String, serde_yaml_ng::Error> {
    let cluster = "sandman-dev";
    let context = format!("{user}@{cluster}");
    serde_yaml_ng::to_string(&json!({
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{
            "name": cluster,
            "cluster": {
                "server": server,
                "certificate-authority-data": STANDARD.encode(ca_pem),
            },
        }],
        "users": [{
            "name": user,
            "user": {
                "client-certificate-data": STANDARD.encode(cert_pem),
                "client-key-data": STANDARD.encode(key_pem),
            },
        }],
        "contexts": [{
            "name": context,
            "context": { "cluster": cluster, "user": user },
        }],
        "current-context": context,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kube_can_read_it() {
        let text = render("https://10.1.0.1:6443", "admin", "CA", "CERT", "KEY").unwrap();
        let config = kube::config::Kubeconfig::from_yaml(&text).unwrap();
        assert_eq!(config.current_context.as_deref(), Some("admin@sandman-dev"));
        let cluster = config.clusters[0].cluster.as_ref().unwrap();
        assert_eq!(cluster.server.as_deref(), Some("https://10.1.0.1:6443"));
        assert_eq!(cluster.certificate_authority_data.as_deref(), Some("Q0E="));
    }
}
