//! The cgroups of containers, in whichever hierarchies the machine has.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// A cgroup can be removed a moment after its last process is gone.
const EMPTY_WITHIN: Duration = Duration::from_secs(10);

/// All cgroups at or below this path, children first.
pub(super) fn find(parent: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for hierarchy in hierarchies() {
        collect(&hierarchy.join(parent.trim_start_matches('/')), &mut found);
    }
    found
}

fn collect(group: &Path, found: &mut Vec<PathBuf>) {
    let Ok(entries) = fs::read_dir(group) else {
        return;
    };
    for entry in entries.flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            collect(&entry.path(), found);
        }
    }
    found.push(group.to_owned());
}

/// Removes them; gives how many there were.
pub(super) async fn remove(parent: &str) -> usize {
    let deadline = Instant::now() + EMPTY_WITHIN;
    let total = find(parent).len();
    loop {
        let groups = find(parent);
        if groups.is_empty() || Instant::now() > deadline {
            return total;
        }
        // Only what is still busy stays, and is looked at again.
        let busy = groups
            .iter()
            .filter(|group| fs::remove_dir(group).is_err())
            .count();
        if busy > 0 {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
}

/// Where the hierarchies are mounted.
pub(crate) fn hierarchies() -> Vec<PathBuf> {
    let table = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    parse_hierarchies(&table)
}

fn parse_hierarchies(table: &str) -> Vec<PathBuf> {
    table
        .lines()
        .filter_map(|line| {
            let (left, right) = line.split_once(" - ")?;
            let kind = right.split(' ').next()?;
            let point = left.split(' ').nth(4)?;
            matches!(kind, "cgroup" | "cgroup2").then(|| PathBuf::from(point))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_kinds_of_hierarchy_are_found() {
        let table = "\
1 0 0:1 / /sys/fs/cgroup rw - tmpfs tmpfs rw
2 1 0:2 / /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory
3 1 0:3 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw
";
        assert_eq!(
            parse_hierarchies(table),
            [
                Path::new("/sys/fs/cgroup/memory"),
                Path::new("/sys/fs/cgroup/unified")
            ]
        );
    }
}
