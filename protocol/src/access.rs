//! Access to the host itself, which an administrator grants: the section `[allow]` of vnode's
//! configuration and of each host's. Both must agree, so that a virtual node in wrong hands
//! reaches no more of a host than the host's own file says.

use std::path::{Component, Path, PathBuf};

use serde::Deserialize;

/// What pods may reach of their host. Nothing, unless it is said.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct HostAccess {
    /// `spec.hostNetwork`.
    pub host_network: bool,
    /// `spec.hostPID`.
    pub host_pid: bool,
    /// `spec.hostIPC`.
    pub host_ipc: bool,
    /// `securityContext.privileged`.
    pub privileged: bool,
    /// `ports[].hostPort` of pods that have a network of their own.
    pub host_ports: bool,
    /// Folders and files that hostPath volumes may name, or lie in.
    pub host_path: Vec<PathBuf>,
}

impl HostAccess {
    /// Checks the section; the error begins with the key within it.
    ///
    /// # Errors
    /// A path that is not absolute and plain.
    pub fn check(&self) -> Result<(), String> {
        match self.host_path.iter().find(|path| !is_plain(path)) {
            Some(path) => Err(format!(
                "host_path: {:?} is not an absolute path without \"..\"",
                path.display()
            )),
            None => Ok(()),
        }
    }

    /// The longest allowed path that a hostPath volume's path is, or lies in. Only text is
    /// looked at: that no link leads out of it is for the host to see to.
    #[must_use]
    pub fn host_path_root(&self, path: &Path) -> Option<&Path> {
        if !is_plain(path) {
            return None;
        }
        let allowed = self.host_path.iter().map(PathBuf::as_path);
        allowed
            .filter(|allowed| path.starts_with(allowed))
            .max_by_key(|allowed| allowed.components().count())
    }
}

fn is_plain(path: &Path) -> bool {
    path.is_absolute()
        && !path
            .components()
            .any(|part| matches!(part, Component::ParentDir))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> HostAccess {
        toml::from_str(text).unwrap()
    }

    #[test]
    fn nothing_is_allowed_unless_it_is_said() {
        let access = parse("");
        assert_eq!(access, HostAccess::default());
        assert!(!access.host_network && !access.privileged);
        assert_eq!(access.host_path_root(Path::new("/")), None);
    }

    #[test]
    fn paths_are_compared_by_their_parts() {
        let access = parse("host_path = [\"/srv/data\", \"/srv\", \"/etc/hosts\"]");
        access.check().unwrap();
        for (path, root) in [
            ("/srv", Some("/srv")),
            ("/srv//data/./x", Some("/srv/data")),
            ("/srv/database", Some("/srv")),
            ("/etc/hosts", Some("/etc/hosts")),
            ("/etc/hostname", None),
            ("/srv/../etc/shadow", None),
            ("srv", None),
            ("", None),
        ] {
            let found = access.host_path_root(Path::new(path));
            assert_eq!(found, root.map(Path::new), "{path}");
        }
        assert!(
            parse("host_path = [\"/\"]")
                .host_path_root(Path::new("/a"))
                .is_some()
        );
    }

    #[test]
    fn a_wrong_path_is_named() {
        for path in ["srv", "/srv/../etc", ""] {
            let access = HostAccess {
                host_path: vec![path.into()],
                ..HostAccess::default()
            };
            assert!(
                access.check().unwrap_err().starts_with("host_path"),
                "{path}"
            );
        }
        assert!(toml::from_str::<HostAccess>("host_paths = []").is_err());
    }
}
