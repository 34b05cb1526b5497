//! What a pod is called on the network.

use k8s_openapi::api::core::v1::{Pod, PodSpec};

use crate::config::Config;

/// Longest host name that Linux takes.
const MAX_HOSTNAME: usize = 63;

pub(super) struct Names {
    pub(super) hostname: String,
    pub(super) fqdn: String,
}

/// `GeneratePodHostNameAndDomain` of `pkg/kubelet/kubelet_pods.go`.
pub(super) fn names(config: &Config, pod: &Pod, spec: &PodSpec) -> Names {
    if let Some(name) = spec
        .hostname_override
        .as_ref()
        .filter(|name| !name.is_empty())
    {
        return Names {
            hostname: name.clone(),
            fqdn: String::new(),
        };
    }
    let name = pod.metadata.name.as_deref().unwrap_or_default();
    let hostname = match spec.hostname.as_deref() {
        Some(hostname) if !hostname.is_empty() => hostname,
        _ => name
            .get(..MAX_HOSTNAME)
            .unwrap_or(name)
            .trim_end_matches(['-', '.']),
    };
    let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
    let fqdn = match spec.subdomain.as_deref() {
        Some(subdomain) if !subdomain.is_empty() => {
            format!(
                "{hostname}.{subdomain}.{namespace}.svc.{}",
                config.cluster_domain
            )
        }
        _ => String::new(),
    };
    let hostname = if spec.set_hostname_as_fqdn == Some(true) && !fqdn.is_empty() {
        fqdn.clone()
    } else {
        hostname.to_owned()
    };
    Names { hostname, fqdn }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use crate::pods::spec::tests::build;

    #[test]
    fn host_names() {
        for (spec, hostname, fqdn) in [
            (json!({}), "web-1", ""),
            (json!({"hostname": "h"}), "h", ""),
            (
                json!({"hostname": "h", "subdomain": "s"}),
                "h",
                "h.s.ns.svc.cluster.local",
            ),
            (
                json!({"subdomain": "s", "setHostnameAsFQDN": true}),
                "web-1.s.ns.svc.cluster.local",
                "web-1.s.ns.svc.cluster.local",
            ),
            (json!({"setHostnameAsFQDN": true}), "web-1", ""),
            (
                json!({"hostname": "h", "hostnameOverride": "other.example"}),
                "other.example",
                "",
            ),
        ] {
            let built = build(spec.clone());
            assert_eq!(
                (built.hostname.as_str(), built.fqdn.as_str()),
                (hostname, fqdn),
                "{spec}"
            );
        }
    }
}
