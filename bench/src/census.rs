//! What there is on the machine: counted before and after, so that nothing stays unnoticed.

use std::path::{Path, PathBuf};
use std::{fmt, fs, io};

/// Where the pods of one cluster leave traces, apart from what others do on the machine.
#[derive(Clone, Debug)]
pub(crate) struct Place {
    /// Parent of all its cgroups, below the root of each hierarchy.
    pub(crate) cgroup_parent: String,
    /// Parts of the paths of its mounts.
    pub(crate) mount_marks: Vec<String>,
}

/// Things that pods are made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Census {
    /// Processes in the cluster's cgroups.
    pub(crate) processes: usize,
    /// Its mounts, as this namespace sees them.
    pub(crate) mounts: usize,
    /// Its cgroups, in the hierarchy that has most of them.
    pub(crate) cgroups: usize,
}

impl Census {
    /// Counts.
    ///
    /// # Errors
    /// The file system's, other than that something went away meanwhile.
    pub(crate) fn take(place: &Place) -> io::Result<Self> {
        let mounts = fs::read_to_string("/proc/self/mountinfo")?;
        let mut census = Self {
            processes: 0,
            mounts: ours(&mounts, &place.mount_marks),
            cgroups: 0,
        };
        for root in hierarchies()? {
            let (cgroups, processes) = tree(&root.join(place.cgroup_parent.trim_matches('/')))?;
            census.cgroups = census.cgroups.max(cgroups);
            census.processes = census.processes.max(processes);
        }
        Ok(census)
    }

    /// Whether there is no more of anything than before.
    pub(crate) fn is_back(&self, before: &Self) -> bool {
        self.processes <= before.processes
            && self.mounts <= before.mounts
            && self.cgroups <= before.cgroups
    }
}

impl fmt::Display for Census {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            processes,
            mounts,
            cgroups,
        } = self;
        write!(
            f,
            "{processes} processes, {mounts} mounts, {cgroups} cgroups"
        )
    }
}

fn ours(mountinfo: &str, marks: &[String]) -> usize {
    mountinfo
        .lines()
        .filter_map(|line| line.split(' ').nth(4))
        .filter(|point| marks.iter().any(|mark| point.contains(mark.as_str())))
        .count()
}

/// The one hierarchy of cgroup v2, or each of v1.
fn hierarchies() -> io::Result<Vec<PathBuf>> {
    let root = Path::new("/sys/fs/cgroup");
    if root.join("cgroup.controllers").exists() {
        return Ok(vec![root.to_owned()]);
    }
    fs::read_dir(root)?.map(|entry| Ok(entry?.path())).collect()
}

/// Number of cgroups below this one, it included, and of processes in them.
fn tree(dir: &Path) -> io::Result<(usize, usize)> {
    let entries = match fs::read_dir(dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok((0, 0)),
        entries => entries?,
    };
    let procs = fs::read_to_string(dir.join("cgroup.procs")).unwrap_or_default();
    let (mut cgroups, mut processes) = (1, procs.lines().count());
    for entry in entries.flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            let (below, inside) = tree(&entry.path())?;
            cgroups += below;
            processes += inside;
        }
    }
    Ok((cgroups, processes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mounts_of_others_do_not_count() {
        let text = "54 27 0:40 / /run/sandman-a/x rw - tmpfs s rw\n55 27 0:4 / /tmp/a rw - x y z\n";
        assert_eq!(ours(text, &["sandman-a".to_owned()]), 1);
        assert_eq!(ours(text, &[]), 0);
    }

    #[test]
    fn a_tree_is_counted_whole() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(tree(&dir.path().join("absent")).unwrap(), (0, 0));
        fs::create_dir_all(dir.path().join("a/b")).unwrap();
        fs::write(dir.path().join("a/b/cgroup.procs"), "1\n2\n").unwrap();
        fs::write(dir.path().join("a/cgroup.procs"), "3\n").unwrap();
        assert_eq!(tree(dir.path()).unwrap(), (3, 3));
    }

    #[test]
    fn more_of_anything_is_not_back() {
        let before = Census {
            processes: 3,
            mounts: 3,
            cgroups: 3,
        };
        assert!(before.is_back(&before));
        assert!(
            !Census {
                mounts: 4,
                ..before
            }
            .is_back(&before)
        );
        assert!(
            !Census {
                cgroups: 4,
                ..before
            }
            .is_back(&before)
        );
        assert!(
            !Census {
                processes: 4,
                ..before
            }
            .is_back(&before)
        );
    }
}
