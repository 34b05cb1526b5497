//! Where this host has its cgroup file systems.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

/// What v2 has to hand down for our limits.
const DELEGATED: [&str; 3] = ["cpu", "memory", "pids"];

/// Mounted cgroup file systems.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Hierarchies {
    /// v2 alone, at this path.
    Unified(PathBuf),
    /// v1, by controller; what v2 there is beside it is not used.
    Legacy(BTreeMap<String, PathBuf>),
}

impl Hierarchies {
    /// Finds them in this process's mounts.
    ///
    /// # Errors
    /// There are none.
    pub fn detect() -> io::Result<Self> {
        let mounts = std::fs::read_to_string("/proc/self/mountinfo")?;
        parse(&mounts)
            .ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, "no cgroup file system mounted"))
    }

    /// Root of a controller's hierarchy.
    #[must_use]
    pub fn root(&self, controller: &str) -> Option<&Path> {
        match self {
            Self::Unified(root) => Some(root),
            Self::Legacy(roots) => roots.get(controller).map(PathBuf::as_path),
        }
    }

    /// Names under which a container sees the hierarchies, with their controllers; v1.
    #[must_use]
    pub fn legacy(&self) -> Vec<(&str, &Path)> {
        match self {
            Self::Unified(_) => Vec::new(),
            Self::Legacy(roots) => roots
                .iter()
                .map(|(name, root)| (name.as_str(), root.as_path()))
                .collect(),
        }
    }
}

/// Reads proc_pid_mountinfo(5).
fn parse(mounts: &str) -> Option<Hierarchies> {
    let mut legacy = BTreeMap::new();
    let mut unified = None;
    for line in mounts.lines() {
        let Some((left, right)) = line.split_once(" - ") else {
            continue;
        };
        let mut left = left.split(' ').skip(3);
        let (Some(root), Some(point)) = (left.next(), left.next()) else {
            continue;
        };
        let mut right = right.split(' ');
        let (Some(kind), _, Some(options)) = (right.next(), right.next(), right.next()) else {
            continue;
        };
        // A bind of a part of it is not the hierarchy.
        if root != "/" {
            continue;
        }
        match kind {
            "cgroup2" => {
                unified.get_or_insert_with(|| PathBuf::from(point));
            }
            "cgroup" => {
                for controller in options.split(',') {
                    let plain = controller
                        .bytes()
                        .all(|b| b.is_ascii_lowercase() || b == b'_');
                    if plain && !["rw", "ro", "xattr", "clone_children"].contains(&controller) {
                        legacy
                            .entry(controller.to_owned())
                            .or_insert_with(|| point.into());
                    }
                }
            }
            _ => {}
        }
    }
    match unified {
        Some(root) if legacy.is_empty() => Some(Hierarchies::Unified(root)),
        _ if legacy.is_empty() => None,
        _ => Some(Hierarchies::Legacy(legacy)),
    }
}

/// Hands our controllers down to the parent of `path`, as far as the host has them; memory no
/// further than to `shared`, whose descendants count theirs together.
pub(super) fn delegate(root: &Path, path: &Path, shared: Option<&Path>) -> io::Result<()> {
    let mut folder = root.to_owned();
    let mut below = PathBuf::new();
    for part in path {
        let available =
            std::fs::read_to_string(folder.join("cgroup.controllers")).unwrap_or_default();
        let together = shared.is_some_and(|shared| below.starts_with(shared));
        let handed = DELEGATED
            .iter()
            .filter(|it| !(together && **it == "memory"));
        for controller in handed {
            if available.split_whitespace().any(|name| name == *controller) {
                let file = folder.join("cgroup.subtree_control");
                super::write(&file, &format!("+{controller}"))
                    .map_err(|e| super::context(&e, "write to", &file))?;
            }
        }
        folder.push(part);
        below.push(part);
        match std::fs::create_dir(&folder) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                return Err(super::context(&error, "make", &folder));
            }
            _ => {}
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn memory_is_handed_down_to_the_one_who_shares_it() {
        let root = tempfile::tempdir().unwrap();
        let controllers = |below: &str| {
            let folder = root.path().join(below);
            fs::create_dir_all(&folder).unwrap();
            fs::write(folder.join("cgroup.controllers"), "cpu memory pids\n").unwrap();
            fs::write(folder.join("cgroup.subtree_control"), "").unwrap();
        };
        for below in ["", "h", "h/besteffort", "h/besteffort/pod"] {
            controllers(below);
        }
        let path = Path::new("h/besteffort/pod/c");
        delegate(root.path(), path, Some(Path::new("h/besteffort"))).unwrap();
        assert!(root.path().join(path).is_dir());
        // Commands to the kernel, which a file keeps over each other: of the longest the end stays.
        let handed = |below: &str| {
            fs::read_to_string(root.path().join(below).join("cgroup.subtree_control")).unwrap()
        };
        for (below, kept) in [("", "+pidsry"), ("h", "+pidsry"), ("h/besteffort", "+pids")] {
            assert_eq!(handed(below), kept, "{below:?}");
        }
    }

    #[test]
    fn hierarchies_are_found_in_the_mounts() {
        let v1 = "\
30 25 0:26 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
31 25 0:27 / /sys/fs/cgroup/cpu,cpuacct rw,relatime shared:9 - cgroup cgroup rw,cpu,cpuacct
32 25 0:28 / /sys/fs/cgroup/systemd rw,relatime - cgroup cgroup rw,xattr,name=systemd
33 25 0:29 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
34 25 0:26 /docker /x rw,relatime - cgroup cgroup rw,memory
";
        let found = parse(v1).unwrap();
        assert_eq!(
            found.root("memory"),
            Some(Path::new("/sys/fs/cgroup/memory"))
        );
        assert_eq!(
            found.root("cpuacct"),
            Some(Path::new("/sys/fs/cgroup/cpu,cpuacct"))
        );
        assert_eq!(found.root("pids"), None);
        assert_eq!(found.legacy().len(), 3);

        let v2 = "30 25 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n";
        assert_eq!(
            parse(v2),
            Some(Hierarchies::Unified("/sys/fs/cgroup".into()))
        );
        assert_eq!(parse("1 2 0:3 / / rw - ext4 /dev/vda rw\n"), None);
    }
}
