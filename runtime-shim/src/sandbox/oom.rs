//! Whether the kernel killed a process of a cgroup for want of memory, on cgroup v1 and v2.

use std::path::Path;

const ROOT: &str = "/sys/fs/cgroup";

/// Asks the counters of `cgroup`, a path as in the OCI spec. A cgroup that is gone tells nothing.
#[must_use]
pub(super) fn killed(cgroup: &Path) -> bool {
    let below = cgroup.strip_prefix("/").unwrap_or(cgroup);
    let root = Path::new(ROOT);
    [
        root.join(below).join("memory.events"),
        root.join("memory").join(below).join("memory.oom_control"),
    ]
    .iter()
    .filter_map(|file| std::fs::read_to_string(file).ok())
    .any(|text| kills(&text) > 0)
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
        assert!(!killed(Path::new("/sandman/none")));
    }
}
