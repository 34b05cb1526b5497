//! Where a process's cgroups are, in either version.

use std::collections::HashMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// Folders by v1 controller, or the one of v2.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Cgroups {
    by_controller: HashMap<String, PathBuf>,
    unified: Option<PathBuf>,
}

impl Cgroups {
    /// Those of `pid`.
    pub(crate) fn of(pid: i32) -> io::Result<Self> {
        let membership = fs::read_to_string(format!("/proc/{pid}/cgroup"))?;
        let mounts = fs::read_to_string("/proc/self/mountinfo")?;
        Ok(Self::from_text(&membership, &mounts))
    }

    /// Folder of a v1 controller. There is none for memory that counts together with others'.
    pub(crate) fn controller(&self, name: &str) -> Option<&Path> {
        self.by_controller.get(name).map(PathBuf::as_path)
    }

    /// The one folder, if no v1 controller is in use.
    pub(crate) fn unified(&self) -> Option<&Path> {
        self.unified.as_deref()
    }

    fn from_text(membership: &str, mountinfo: &str) -> Self {
        let mounts: Vec<(&str, &str, Vec<&str>)> =
            mountinfo.lines().filter_map(parse_mount).collect();
        let mut cgroups = Self::default();
        for line in membership.lines() {
            let mut parts = line.splitn(3, ':');
            let (Some(_), Some(controllers), Some(path)) =
                (parts.next(), parts.next(), parts.next())
            else {
                continue;
            };
            let below = Path::new(path.trim_start_matches('/'));
            if controllers.is_empty() {
                let mount = mounts.iter().find(|(kind, ..)| *kind == "cgroup2");
                cgroups.unified = mount.map(|(_, point, _)| Path::new(point).join(below));
                continue;
            }
            for controller in controllers.split(',') {
                let mount = mounts
                    .iter()
                    .find(|(kind, _, options)| *kind == "cgroup" && options.contains(&controller));
                if let Some((_, point, _)) = mount {
                    let dir = Path::new(point).join(below);
                    cgroups.by_controller.insert(controller.to_owned(), dir);
                }
            }
        }
        let below = |name: &str| {
            let line = membership.lines().find_map(|line| {
                let (_, rest) = line.split_once(':')?;
                let (controllers, path) = rest.split_once(':')?;
                controllers
                    .split(',')
                    .any(|own| own == name)
                    .then_some(path)
            });
            line.map(str::to_owned)
        };
        // Every sandbox has these two; where they part, memory is shared.
        if below("pids").is_some_and(|pids| below("memory") != Some(pids)) {
            cgroups.by_controller.remove("memory");
        }
        // Beside v1 controllers, v2 has none of those that count here.
        if cgroups.by_controller.contains_key("memory") || cgroups.by_controller.contains_key("cpu")
        {
            cgroups.unified = None;
        }
        cgroups
    }
}

/// Kind, mount point and superblock options of a line of mountinfo.
fn parse_mount(line: &str) -> Option<(&str, &str, Vec<&str>)> {
    let (mount, superblock) = line.split_once(" - ")?;
    let mut mount = mount.split(' ').skip(3);
    // A bind of a part of the tree is not where paths start.
    let whole = mount.next()? == "/";
    let point = mount.next()?;
    let mut superblock = superblock.split(' ');
    let kind = superblock.next()?;
    let options = superblock.nth(1)?.split(',').collect();
    whole.then_some((kind, point, options))
}

/// The number in `dir/file`; 0 if there is none, as for a limit that is not set up.
pub(crate) fn number(dir: &Path, file: &str) -> u64 {
    fs::read_to_string(dir.join(file))
        .ok()
        .and_then(|text| parse_number(text.trim()))
        .unwrap_or_default()
}

/// A number, or `max`.
pub(crate) fn parse_number(text: &str) -> Option<u64> {
    if text == "max" {
        Some(u64::MAX)
    } else {
        text.parse().ok()
    }
}

/// The pairs `name number` of `dir/file`.
pub(crate) fn table(dir: &Path, file: &str) -> HashMap<String, u64> {
    let text = fs::read_to_string(dir.join(file)).unwrap_or_default();
    text.lines()
        .filter_map(|line| {
            let (name, value) = line.split_once(' ')?;
            Some((name.to_owned(), value.trim().parse().ok()?))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::Cgroups;

    #[test]
    fn both_versions_and_the_mixture() {
        let v1 = "30 24 0:26 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n\
                  31 24 0:27 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n";
        let v2 = "32 24 0:28 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n";
        let mixed = Cgroups::from_text(
            "5:memory:/a/b\n4:cpu,cpuacct:/a\n1:name=systemd:/x\n0::/u\n",
            &format!("{v1}{v2}"),
        );
        assert_eq!(
            mixed.controller("memory"),
            Some(Path::new("/sys/fs/cgroup/memory/a/b"))
        );
        assert_eq!(
            mixed.controller("cpuacct"),
            Some(Path::new("/sys/fs/cgroup/cpu,cpuacct/a"))
        );
        assert_eq!(mixed.unified(), None);

        let shared = "5:memory:/a\n4:cpu,cpuacct:/a/b\n3:pids:/a/b\n";
        assert_eq!(Cgroups::from_text(shared, v1).controller("memory"), None);

        let alone = Cgroups::from_text("0::/u/v\n", v2);
        assert_eq!(
            alone.unified(),
            Some(Path::new("/sys/fs/cgroup/unified/u/v"))
        );
        assert_eq!(Cgroups::from_text("garbage", "garbage"), Cgroups::default());
    }
}
