//! All that pods might leave behind, counted by name, so that what stays says what it is.

use std::collections::BTreeMap;
use std::path::Path;
use std::{fmt, fs};

use serde::{Deserialize, Serialize};

use crate::census::Census;
use crate::cluster::{Cluster, Session};
use crate::ctr;
use crate::memory::slab_objects;

/// Cgroups of the whole machine, those included that are removed and still hold memory.
const MEMORY_CGROUPS: &str = "memory cgroups";
/// Network namespaces of the whole machine; the kernel frees them in batches.
const NET_NAMESPACES: &str = "network namespaces";
/// What the names of counts of descriptors begin with.
const FILES: &str = "files of ";

/// Numbers of things by their names.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Things(BTreeMap<String, u64>);

impl Things {
    /// Counts.
    pub(super) async fn count(cluster: &Cluster, session: &Session) -> anyhow::Result<Self> {
        let mut things = Self::default();
        let census = Census::take(&session.place)?;
        things.add("processes", census.processes as u64);
        things.add("mounts", census.mounts as u64);
        things.add("cgroups", census.cgroups as u64);
        let cgroups = fs::read_to_string("/proc/cgroups").unwrap_or_default();
        if let Some(count) = memory_cgroups(&cgroups) {
            things.add(MEMORY_CGROUPS, count);
        }
        let slabs = fs::read_to_string("/proc/slabinfo").unwrap_or_default();
        if let Some(count) = slab_objects(&slabs, "net_namespace") {
            things.add(NET_NAMESPACES, count);
        }
        things.add_daemons(cluster, session).await?;
        let (program, sockets) = &session.containerd;
        for socket in sockets {
            for (kind, count) in ctr::records(program, socket).await? {
                things.add(kind, count);
            }
        }
        Ok(things)
    }

    /// Descriptors of each daemon, and the mounts that it sees: pins of namespaces are in mount
    /// namespaces of its own.
    async fn add_daemons(&mut self, cluster: &Cluster, session: &Session) -> anyhow::Result<()> {
        let components = cluster.components().await?;
        let programs = Path::new(session.variable("SANDMAN_STATE_DIR")?).join("bin");
        for entry in fs::read_dir("/proc")?.flatten() {
            let name = entry.file_name();
            let Some(pid) = name.to_str().and_then(|name| name.parse::<u32>().ok()) else {
                continue;
            };
            let component = components.iter().find(|(_, other)| **other == pid);
            // Shims and holders are containerd's to start: they are told by their programs.
            let program = fs::read_link(entry.path().join("exe")).unwrap_or_default();
            let name = match component {
                Some((name, _)) => name.clone(),
                None if program.parent() == Some(&programs) => {
                    let name = program.file_name().unwrap_or_default();
                    name.to_string_lossy().into_owned()
                }
                None => continue,
            };
            // One that ends meanwhile has none.
            if let Ok(files) = fs::read_dir(entry.path().join("fd")) {
                self.add(&format!("{FILES}{name}"), files.count() as u64);
            }
            if let Ok(mounts) = fs::read_to_string(entry.path().join("mountinfo")) {
                self.add(&format!("mounts of {name}"), mounts.lines().count() as u64);
            }
        }
        Ok(())
    }

    fn add(&mut self, name: &str, count: u64) {
        *self.0.entry(name.to_owned()).or_default() += count;
    }

    /// What there is more of than before, and cannot be explained.
    pub(super) fn grown(&self, before: &Self) -> Vec<String> {
        self.0
            .iter()
            .filter_map(|(name, now)| {
                let before = before.0.get(name).copied().unwrap_or_default();
                let more = now.saturating_sub(before);
                (more > allowance(name)).then(|| format!("{name}: {before} before, {now} now"))
            })
            .collect()
    }

    /// Descriptors of all daemons together, more than before.
    pub(super) fn files_more(&self, before: &Self) -> f64 {
        let files = |things: &Self| {
            let files = things.0.iter().filter(|(name, _)| name.starts_with(FILES));
            files.map(|(_, count)| *count).sum::<u64>()
        };
        difference(files(before), files(self))
    }

    /// Cgroups of the machine, more than before.
    pub(super) fn memory_cgroups_more(&self, before: &Self) -> f64 {
        let count = |things: &Self| things.0.get(MEMORY_CGROUPS).copied().unwrap_or_default();
        difference(count(before), count(self))
    }
}

impl fmt::Display for Things {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut separator = "";
        for (name, count) in &self.0 {
            write!(f, "{separator}{name} {count}")?;
            separator = ", ";
        }
        Ok(())
    }
}

/// How much more is no leak: connections that are open for a while, and what the kernel frees
/// when it needs the memory.
fn allowance(name: &str) -> u64 {
    match name {
        MEMORY_CGROUPS => 512,
        NET_NAMESPACES => 64,
        _ if name.starts_with(FILES) => 32,
        _ => 0,
    }
}

#[expect(
    clippy::cast_precision_loss,
    reason = "counts of files and cgroups are far below 2^52"
)]
fn difference(before: u64, after: u64) -> f64 {
    after as f64 - before as f64
}

/// The third column of `/proc/cgroups`.
fn memory_cgroups(table: &str) -> Option<u64> {
    let line = table.lines().find(|line| line.starts_with("memory\t"))?;
    line.split_whitespace().nth(2)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn things(counts: &[(&str, u64)]) -> Things {
        let mut things = Things::default();
        for (name, count) in counts {
            things.add(name, *count);
        }
        things
    }

    #[test]
    fn a_leak_names_itself() {
        let before = things(&[("mounts", 3), ("tasks", 1), ("files of vnode", 100)]);
        let after = things(&[
            ("mounts", 2),
            ("tasks", 2),
            ("files of vnode", 132),
            ("mounts of sandman-holder", 1),
            (MEMORY_CGROUPS, 512),
        ]);
        assert_eq!(
            after.grown(&before),
            [
                "mounts of sandman-holder: 0 before, 1 now",
                "tasks: 1 before, 2 now"
            ]
        );
        assert!(before.grown(&before).is_empty());
        assert_eq!(after.files_more(&before), 32.0);
        assert_eq!(before.memory_cgroups_more(&after), -512.0);
    }

    #[test]
    fn the_kernel_counts_what_is_dying_too() {
        let table =
            "#subsys_name\thierarchy\tnum_cgroups\tenabled\ncpu\t2\t9\t1\nmemory\t8\t61\t1\n";
        assert_eq!(memory_cgroups(table), Some(61));
        assert_eq!(memory_cgroups(""), None);
    }
}
