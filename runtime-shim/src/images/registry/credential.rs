//! Which of a pod's credentials count for an image, and hashes by which an
//! accepted credential is remembered without keeping it. Pure.

use sandman_protocol::v1;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use crate::images::reference::Name;

/// What a registry is shown.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(in crate::images) enum Credential {
    /// User name and password.
    Password {
        /// User name.
        username: String,
        /// Password.
        password: String,
    },
    /// An OAuth2 refresh token.
    IdentityToken(String),
}

impl std::fmt::Debug for Credential {
    // Never the secret itself: errors and traces print what they hold.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Credential")
    }
}

/// Identifies a credential for one registry within this process.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(in crate::images) struct CredentialHash([u8; 32]);

impl Credential {
    /// The credential of a configuration or of a pod, if there is any in it.
    pub(in crate::images) fn new(
        username: &str,
        password: &str,
        identity_token: &str,
    ) -> Option<Self> {
        if !identity_token.is_empty() {
            return Some(Self::IdentityToken(identity_token.to_owned()));
        }
        let (username, password) = (username.to_owned(), password.to_owned());
        (!username.is_empty() || !password.is_empty())
            .then_some(Self::Password { username, password })
    }

    /// `salt` is random and never leaves the process, so a hash says nothing
    /// about a weak password.
    pub(in crate::images) fn hash(&self, salt: &[u8; 16]) -> CredentialHash {
        let mut hasher = Sha256::new();
        hasher.update(salt);
        let parts: [&str; 3] = match self {
            Self::Password { username, password } => ["password", username, password],
            Self::IdentityToken(token) => ["token", token, ""],
        };
        for part in parts {
            hasher.update((part.len() as u64).to_le_bytes());
            hasher.update(part);
        }
        CredentialHash(hasher.finalize().into())
    }
}

/// The credentials that are for this image, in the given order.
pub(in crate::images) fn matching(name: &Name, all: &[v1::RegistryCredential]) -> Vec<Credential> {
    all.iter()
        .filter(|credential| covers(&credential.registry, name))
        .filter_map(|credential| {
            Credential::new(
                &credential.username,
                &credential.password,
                &credential.identity_token,
            )
        })
        .collect()
}

/// Whether a docker config key such as `https://index.docker.io/v1/`,
/// `registry.example.com/team` or `*.example.com` covers the repository.
fn covers(key: &str, name: &Name) -> bool {
    let key = key
        .strip_prefix("https://")
        .or_else(|| key.strip_prefix("http://"))
        .unwrap_or(key);
    let key = key.trim_end_matches('/');
    let (host, path) = key.split_once('/').unwrap_or((key, ""));
    let path = if matches!(path, "v1" | "v2") {
        ""
    } else {
        path
    };
    let host = match host {
        "index.docker.io" | "registry-1.docker.io" => "docker.io",
        other => other,
    };
    let path_covers = path.is_empty()
        || name
            .repository()
            .strip_prefix(path)
            .is_some_and(|rest| rest.is_empty() || rest.starts_with('/'));
    host_covers(host, name.registry()) && path_covers
}

/// Label by label, `*` standing for one whole label, as in the kubelet's keyring.
fn host_covers(pattern: &str, host: &str) -> bool {
    let (pattern_name, pattern_port) = pattern.split_once(':').unwrap_or((pattern, ""));
    let (host_name, host_port) = host.split_once(':').unwrap_or((host, ""));
    if pattern_port != host_port {
        return false;
    }
    let pattern_labels: Vec<&str> = pattern_name.split('.').collect();
    let host_labels: Vec<&str> = host_name.split('.').collect();
    pattern_labels.len() == host_labels.len()
        && pattern_labels
            .iter()
            .zip(&host_labels)
            .all(|(want, have)| *want == "*" || want == have)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_cover_hosts_and_paths() {
        for (key, image, covered) in [
            ("https://index.docker.io/v1/", "busybox", true),
            ("docker.io", "team/app", true),
            ("registry.example.com", "registry.example.com/a", true),
            (
                "registry.example.com/team",
                "registry.example.com/team/app",
                true,
            ),
            (
                "registry.example.com/team",
                "registry.example.com/teams/app",
                false,
            ),
            ("registry.example.com:5000", "registry.example.com/a", false),
            ("*.example.com", "registry.example.com/a", true),
            ("*.example.com", "a.registry.example.com/a", false),
            ("*", "registry.example.com/a", false),
        ] {
            assert_eq!(
                covers(key, &Name::parse(image).unwrap()),
                covered,
                "{key} {image}"
            );
        }
    }

    #[test]
    fn hashes_tell_credentials_apart() {
        let hash = |user: &str, password: &str| {
            Credential::new(user, password, "").unwrap().hash(&[7; 16])
        };
        assert_eq!(hash("a", "b"), hash("a", "b"));
        assert_ne!(hash("ab", "c"), hash("a", "bc"));
        assert_ne!(
            Credential::new("a", "b", "").unwrap().hash(&[1; 16]),
            Credential::new("a", "b", "").unwrap().hash(&[2; 16])
        );
        assert!(Credential::new("", "", "").is_none());
    }
}
