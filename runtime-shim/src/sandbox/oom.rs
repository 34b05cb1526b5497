//! Whether the kernel killed a process of a cgroup for want of memory, on cgroup v1 and v2.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

const ROOT: &str = "/sys/fs/cgroup";

/// Asks the counters of `cgroup`, a path as in the OCI spec. One that is gone or that counts no
/// memory of its own tells nothing.
#[must_use]
pub(super) fn killed(cgroup: &Path) -> Option<bool> {
    count(Path::new(ROOT), cgroup).map(|kills| kills > 0)
}

/// Kills in the cgroup that containers without a memory limit share. Whose they were is not said:
/// each explains one exit by SIGKILL.
#[derive(Debug)]
pub struct SharedKills {
    cgroup: PathBuf,
    /// Kills that explained an exit, or were before this process.
    explained: Mutex<u64>,
}

impl SharedKills {
    /// For this cgroup, a path as in the OCI spec.
    #[must_use]
    pub fn new(cgroup: PathBuf) -> Self {
        let before = count(Path::new(ROOT), &cgroup).unwrap_or_default();
        Self {
            cgroup,
            explained: Mutex::new(before),
        }
    }

    /// Whether there was a kill that explained nothing yet. It now does.
    pub(super) fn take(&self) -> bool {
        let kills = count(Path::new(ROOT), &self.cgroup).unwrap_or_default();
        let mut explained = self
            .explained
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let left = kills > *explained;
        *explained += u64::from(left);
        left
    }
}

fn count(root: &Path, cgroup: &Path) -> Option<u64> {
    let below = cgroup.strip_prefix("/").unwrap_or(cgroup);
    [
        root.join(below).join("memory.events"),
        root.join("memory").join(below).join("memory.oom_control"),
    ]
    .iter()
    .find_map(|file| std::fs::read_to_string(file).ok())
    .map(|text| kills(&text))
}

fn kills(text: &str) -> u64 {
    let count = text.lines().find_map(|line| line.strip_prefix("oom_kill "));
    count
        .and_then(|count| count.trim().parse().ok())
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_versions_are_read() {
        assert_eq!(kills("oom_kill_disable 0\nunder_oom 0\noom_kill 2\n"), 2);
        assert_eq!(
            kills("low 0\nmax 3\noom 1\noom_kill 1\noom_group_kill 0\n"),
            1
        );
        assert_eq!(kills("oom_kill_disable 1\n"), 0);
        assert_eq!(killed(Path::new("/sandman/none")), None);
    }

    #[test]
    fn a_shared_kill_explains_one_exit() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("memory.events");
        std::fs::write(&file, "oom_kill 3\n").unwrap();
        // A path below the root that leads back here.
        let cgroup = PathBuf::from("../../..").join(dir.path().strip_prefix("/").unwrap());
        let kills = SharedKills::new(cgroup);
        assert!(!kills.take(), "these were before");
        std::fs::write(&file, "oom_kill 5\n").unwrap();
        assert_eq!(
            [kills.take(), kills.take(), kills.take()],
            [true, true, false]
        );
    }
}
