//! Names in fleet certificates. Each certificate carries exactly one URI SAN
//! that says which fleet it belongs to, which role it may play and its name;
//! both ends of every connection check it.

use std::fmt;
use std::str::FromStr;

const PREFIX: &str = "spiffe://sandman.dev/fleet/";

/// What the holder of a fleet certificate may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    /// Places pods and commands hosts.
    Vnode,
    /// Runs sandboxes for vnodes.
    Host,
    /// Serves layer spans to other hosts.
    Peer,
}

impl Role {
    /// The path segment that stands for this role.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Vnode => "vnode",
            Self::Host => "host",
            Self::Peer => "peer",
        }
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// The URI SAN of a fleet certificate:
/// `spiffe://sandman.dev/fleet/<fleet>/<role>/<name>`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct RoleUri {
    fleet: String,
    role: Role,
    name: String,
}

/// Why a text is no role URI.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum RoleUriError {
    /// Not of the form `spiffe://sandman.dev/fleet/<fleet>/<role>/<name>`.
    #[error("not a fleet identity: {0:?} (want {PREFIX}<fleet>/<role>/<name>)")]
    Form(String),
    /// The role segment is none of vnode, host, peer.
    #[error("unknown role {0:?} in a fleet identity (want vnode, host or peer)")]
    Role(String),
    /// A fleet or name segment is not a DNS-1123 subdomain.
    #[error(
        "{0:?} is not a valid name: lower case letters, digits, '-' and '.', at most 253 characters"
    )]
    Name(String),
}

impl RoleUri {
    /// Builds an identity from its parts.
    ///
    /// # Errors
    /// [`RoleUriError::Name`] when `fleet` or `name` is not a DNS-1123 subdomain.
    pub fn new(fleet: &str, role: Role, name: &str) -> Result<Self, RoleUriError> {
        for part in [fleet, name] {
            if !is_dns1123_subdomain(part) {
                return Err(RoleUriError::Name(part.to_owned()));
            }
        }
        Ok(Self {
            fleet: fleet.to_owned(),
            role,
            name: name.to_owned(),
        })
    }

    /// Fleet that the holder belongs to.
    #[must_use]
    pub fn fleet(&self) -> &str {
        &self.fleet
    }

    /// Role that the holder may play.
    #[must_use]
    pub fn role(&self) -> Role {
        self.role
    }

    /// Name of the holder within its fleet and role.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }
}

impl fmt::Display for RoleUri {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{PREFIX}{}/{}/{}", self.fleet, self.role, self.name)
    }
}

impl FromStr for RoleUri {
    type Err = RoleUriError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let form = || RoleUriError::Form(text.to_owned());
        let mut parts = text.strip_prefix(PREFIX).ok_or_else(form)?.split('/');
        let (Some(fleet), Some(role), Some(name), None) =
            (parts.next(), parts.next(), parts.next(), parts.next())
        else {
            return Err(form());
        };
        let role = match role {
            "vnode" => Role::Vnode,
            "host" => Role::Host,
            "peer" => Role::Peer,
            other => return Err(RoleUriError::Role(other.to_owned())),
        };
        Self::new(fleet, role, name)
    }
}

/// RFC 1123 subdomain as Kubernetes validates object names.
#[must_use]
pub fn is_dns1123_subdomain(text: &str) -> bool {
    fn is_label(label: &str) -> bool {
        let inner = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit();
        let bytes = label.as_bytes();
        match (bytes.first(), bytes.last()) {
            (Some(&first), Some(&last)) => {
                inner(first) && inner(last) && bytes.iter().all(|&b| inner(b) || b == b'-')
            }
            _ => false,
        }
    }
    text.len() <= 253 && text.split('.').all(is_label)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn round_trips() {
        let uri = RoleUri::new("dev", Role::Host, "host-0").unwrap();
        assert_eq!(
            uri.to_string(),
            "spiffe://sandman.dev/fleet/dev/host/host-0"
        );
        assert_eq!(uri.to_string().parse::<RoleUri>().unwrap(), uri);
    }

    #[test]
    fn refuses_other_forms() {
        for text in [
            "",
            "host-0",
            "spiffe://example.com/fleet/dev/host/host-0",
            "spiffe://sandman.dev/fleet/dev/host",
            "spiffe://sandman.dev/fleet/dev/host/a/b",
        ] {
            assert_eq!(
                text.parse::<RoleUri>(),
                Err(RoleUriError::Form(text.to_owned()))
            );
        }
        let text = "spiffe://sandman.dev/fleet/dev/admin/a";
        assert_eq!(
            text.parse::<RoleUri>(),
            Err(RoleUriError::Role("admin".to_owned()))
        );
    }

    #[test]
    fn refuses_bad_names() {
        for name in ["", "A", "-a", "a-", "a..b", "a/b", "ä"] {
            assert!(RoleUri::new("dev", Role::Host, name).is_err(), "{name:?}");
        }
        assert!(RoleUri::new("dev", Role::Host, &"a".repeat(254)).is_err());
        assert!(RoleUri::new("dev", Role::Host, "rack-1.host-0").is_ok());
    }
}
