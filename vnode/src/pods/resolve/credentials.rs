//! Registry credentials in pull secrets (`k8s.io/kubernetes/pkg/credentialprovider`).

use std::collections::BTreeMap;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use k8s_openapi::api::core::v1::Secret;
use sandman_protocol::v1::RegistryCredential;
use serde::Deserialize;

#[derive(Deserialize)]
struct DockerConfig {
    auths: BTreeMap<String, Entry>,
}

#[derive(Deserialize)]
struct Entry {
    #[serde(default)]
    username: String,
    #[serde(default)]
    password: String,
    #[serde(default)]
    auth: String,
    #[serde(default, rename = "identitytoken")]
    identity_token: String,
}

/// The credentials in a pull secret; `None` if it is none or malformed.
pub(super) fn parse(secret: &Secret) -> Option<Vec<RegistryCredential>> {
    let data = secret.data.as_ref()?;
    let entries = match secret.type_.as_deref() {
        Some("kubernetes.io/dockerconfigjson") => {
            let json = data.get(".dockerconfigjson")?;
            serde_json::from_slice::<DockerConfig>(&json.0).ok()?.auths
        }
        Some("kubernetes.io/dockercfg") => {
            serde_json::from_slice::<BTreeMap<String, Entry>>(&data.get(".dockercfg")?.0).ok()?
        }
        _ => return None,
    };
    entries
        .into_iter()
        .map(|(registry, entry)| entry.credential(&registry))
        .collect()
}

/// Most specific first, as the kubelet tries them.
pub(super) fn sort(credentials: &mut [RegistryCredential]) {
    credentials.sort_by(|a, b| b.registry.cmp(&a.registry));
}

// === impl Entry ===

impl Entry {
    fn credential(self, registry: &str) -> Option<RegistryCredential> {
        let (username, password) = if self.auth.is_empty() {
            (self.username, self.password)
        } else {
            let decoded = STANDARD.decode(self.auth.trim()).ok()?;
            let text = String::from_utf8(decoded).ok()?;
            let (username, password) = text.split_once(':')?;
            (username.to_owned(), password.to_owned())
        };
        Some(RegistryCredential {
            registry: normalise(registry),
            username,
            password,
            identity_token: self.identity_token,
        })
    }
}

/// Docker wrote URLs of the registry API as keys; an image only names the host
/// and perhaps a path.
fn normalise(key: &str) -> String {
    let key = key
        .trim_start_matches("https://")
        .trim_start_matches("http://");
    let key = key.trim_end_matches('/');
    let key = key.trim_end_matches("/v1").trim_end_matches("/v2");
    match key {
        "index.docker.io" | "registry-1.docker.io" => "docker.io".to_owned(),
        other => other.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use k8s_openapi::ByteString;

    fn secret(kind: &str, key: &str, json: &str) -> Secret {
        Secret {
            type_: Some(kind.to_owned()),
            data: Some(BTreeMap::from([(
                key.to_owned(),
                ByteString(json.as_bytes().to_vec()),
            )])),
            ..Secret::default()
        }
    }

    #[test]
    fn both_formats_and_all_ways_to_write_a_login() {
        let json = r#"{"auths": {
            "https://index.docker.io/v1/": {"auth": "dTpwOng="},
            "registry.example.com/team": {"username": "a", "password": "b"},
            "registry.example.com": {"identitytoken": "t"}
        }}"#;
        let secret_json = secret("kubernetes.io/dockerconfigjson", ".dockerconfigjson", json);
        let mut found = parse(&secret_json).unwrap();
        sort(&mut found);
        let names: Vec<_> = found.iter().map(|c| c.registry.as_str()).collect();
        assert_eq!(
            names,
            [
                "registry.example.com/team",
                "registry.example.com",
                "docker.io"
            ]
        );
        assert_eq!(
            (found[2].username.as_str(), found[2].password.as_str()),
            ("u", "p:x")
        );
        assert_eq!(found[1].identity_token, "t");

        let old = secret(
            "kubernetes.io/dockercfg",
            ".dockercfg",
            r#"{"r:5000": {"auth": "dTpw"}}"#,
        );
        assert_eq!(parse(&old).unwrap()[0].registry, "r:5000");
    }

    #[test]
    fn malformed_secrets_are_none() {
        for json in [
            "",
            "{}",
            r#"{"auths": {"r": {"auth": "???"}}}"#,
            r#"{"auths": 1}"#,
        ] {
            let secret = secret("kubernetes.io/dockerconfigjson", ".dockerconfigjson", json);
            assert!(parse(&secret).is_none(), "{json}");
        }
        assert!(parse(&secret("Opaque", ".dockerconfigjson", "{}")).is_none());
    }
}
