//! Memory of the machine, and what the kernel has it for.

use std::collections::BTreeMap;
use std::path::Path;
use std::{fmt, fs, io};

/// Kibibytes in a megabyte, as results give memory.
const KIB_PER_MB: f64 = 1e6 / 1024.0;
/// What memory may be spent on, by the names of `/proc/meminfo`. Together they are nearly all.
const KINDS: [&str; 9] = [
    "AnonPages",
    "Shmem",
    "SUnreclaim",
    "KernelStack",
    "PageTables",
    "Percpu",
    "VmallocUsed",
    "Cached",
    "SReclaimable",
];
/// Memory cgroups that are made for a moment, to see what one costs.
const PROBES: usize = 64;
/// One unit of what each memory cgroup holds for 64 superblocks, in the slab that it comes from.
const SHRINKER_UNITS: &str = "kmalloc-1k";

/// Memory at one moment.
pub(crate) struct Memory {
    /// What the machine can still give, in MB.
    pub(crate) available_mb: f64,
    /// What the control plane and this process have, shared pages by their share, in MB.
    pub(crate) control_mb: f64,
    kinds: BTreeMap<&'static str, f64>,
}

impl Memory {
    /// Measures.
    pub(crate) fn measure(control_plane: &[u32]) -> io::Result<Self> {
        let text = fs::read_to_string("/proc/meminfo")?;
        let figure = |name: &str| Some(kib(&text, &format!("{name}:"))? / KIB_PER_MB);
        let kinds = KINDS.iter().filter_map(|kind| Some((*kind, figure(kind)?)));
        Ok(Self {
            available_mb: figure("MemAvailable").ok_or_else(unreadable)?,
            control_mb: resident_mb(control_plane)?,
            kinds: kinds.collect(),
        })
    }

    /// What memory is spent on now and was not before.
    pub(crate) fn since(&self, before: &Self) -> Spent {
        let more = |(kind, now): (&&'static str, &f64)| {
            let before = before.kinds.get(kind).copied().unwrap_or_default();
            (*kind, now - before)
        };
        Spent(self.kinds.iter().map(more).collect())
    }
}

/// MB by kind.
pub(crate) struct Spent(BTreeMap<&'static str, f64>);

impl fmt::Display for Spent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut kinds: Vec<_> = self.0.iter().collect();
        kinds.sort_by(|a, b| b.1.total_cmp(a.1));
        let mut separator = "";
        for (kind, mb) in kinds.into_iter().filter(|(_, mb)| mb.abs() >= 1.0) {
            write!(f, "{separator}{kind} {mb:+.0} MB")?;
            separator = ", ";
        }
        Ok(())
    }
}

fn resident_mb(pids: &[u32]) -> io::Result<f64> {
    let mut sum = 0.0;
    for pid in pids.iter().copied().chain([std::process::id()]) {
        let text = fs::read_to_string(format!("/proc/{pid}/smaps_rollup"))?;
        sum += kib(&text, "Pss:").ok_or_else(unreadable)?;
    }
    Ok(sum / KIB_PER_MB)
}

/// What one more memory cgroup costs the kernel, in KB. It follows the most superblocks there ever
/// were since the machine started, which is not to be seen otherwise. Nothing where it cannot be
/// tried out.
pub(crate) fn memory_cgroup_kb(parent: &str) -> Option<f64> {
    let root = ["/sys/fs/cgroup/memory", "/sys/fs/cgroup"]
        .map(Path::new)
        .into_iter()
        .find(|root| root.join("memory.stat").exists() || root.join("cgroup.procs").exists())?;
    let dir = root
        .join(parent.trim_matches('/'))
        .join(format!("probe-{}", std::process::id()));
    let units = || slab_objects(&fs::read_to_string("/proc/slabinfo").ok()?, SHRINKER_UNITS);
    fs::create_dir_all(&dir).ok()?;
    let before = units();
    let made = (0..PROBES).all(|probe| fs::create_dir(dir.join(probe.to_string())).is_ok());
    let after = units();
    for probe in 0..PROBES {
        let _ = fs::remove_dir(dir.join(probe.to_string()));
    }
    let _ = fs::remove_dir(&dir);
    let more = after?.saturating_sub(before?);
    #[expect(
        clippy::cast_precision_loss,
        reason = "a count of objects in memory is far below 2^52"
    )]
    made.then_some(more as f64 / PROBES as f64)
}

/// Kind of the file system that a folder is on, and a word about it if figures taken there drift.
pub(crate) fn file_system(dir: &Path) -> Option<(String, Option<&'static str>)> {
    let mounts = fs::read_to_string("/proc/self/mountinfo").ok()?;
    let (kind, device) = mount_of(&mounts, &dir.canonicalize().ok()?)?;
    let device = device.rsplit('/').next().unwrap_or_default().to_owned();
    let journal = fs::read_dir("/proc/fs/jbd2").is_ok_and(|entries| {
        let names = entries.flatten().map(|entry| entry.file_name());
        names
            .into_iter()
            .any(|name| name.to_string_lossy().starts_with(&format!("{device}-")))
    });
    // The root may be known under another name.
    let seen = device != "root";
    let drifts = kind == "ext4" && seen && !journal;
    let word = drifts.then_some(
        "without a journal: making folders there slows down after many were removed; for figures, \
         use a --state-dir on tmpfs or on ext4 with a journal",
    );
    Some((kind, word))
}

/// Type and source of the mount that a path is on.
fn mount_of(mountinfo: &str, path: &Path) -> Option<(String, String)> {
    let mounts = mountinfo.lines().filter_map(|line| {
        let (mount, rest) = line.split_once(" - ")?;
        let point = Path::new(mount.split(' ').nth(4)?);
        let mut rest = rest.split(' ');
        let (kind, source) = (rest.next()?, rest.next()?);
        path.starts_with(point)
            .then(|| (point, kind.to_owned(), source.to_owned()))
    });
    // Of two at the same place, the later one is on top.
    let found = mounts.max_by_key(|(point, ..)| point.components().count());
    found.map(|(_, kind, source)| (kind, source))
}

/// Objects in use of a kind, in `/proc/slabinfo`.
pub(crate) fn slab_objects(slabs: &str, kind: &str) -> Option<u64> {
    let mut lines = slabs.lines().map(str::split_whitespace);
    lines.find_map(|mut columns| {
        (columns.next() == Some(kind)).then(|| columns.next()?.parse().ok())?
    })
}

/// A figure of a file whose lines are `Name: 123 kB`.
fn kib(text: &str, name: &str) -> Option<f64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    line.split_whitespace().next()?.parse().ok()
}

fn unreadable() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "/proc does not tell of memory")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_have_names() {
        let text = "MemTotal:       100 kB\nMemAvailable:    50 kB\n";
        assert_eq!(kib(text, "MemAvailable:"), Some(50.0));
        assert_eq!(kib(text, "SUnreclaim:"), None);
        let now = Memory::measure(&[]).unwrap();
        assert!(now.available_mb > 0.0 && now.control_mb > 0.1);
        assert_eq!(now.since(&now).to_string(), "");
    }

    #[test]
    fn what_grew_is_told_largest_first() {
        let spent = Spent(BTreeMap::from([
            ("Shmem", 2.0),
            ("AnonPages", 300.4),
            ("Percpu", 0.2),
            ("Cached", -5.0),
        ]));
        let text = "AnonPages +300 MB, Shmem +2 MB, Cached -5 MB";
        assert_eq!(spent.to_string(), text);
    }

    #[test]
    fn a_path_is_on_the_nearest_mount() {
        let mounts = "1 0 254:0 / / rw - ext4 /dev/vda rw\n2 1 0:9 / /run rw - tmpfs none rw\n";
        let on = |path: &str| mount_of(mounts, Path::new(path)).unwrap();
        assert_eq!(on("/run/x"), ("tmpfs".to_owned(), "none".to_owned()));
        assert_eq!(on("/running"), ("ext4".to_owned(), "/dev/vda".to_owned()));
        assert!(file_system(Path::new("/proc")).unwrap().1.is_none());
    }

    #[test]
    fn slabs_are_told_apart() {
        let slabs = "slabinfo - version: 2.1\nnet_namespace_x 9 9\nnet_namespace 7 8 4352 7\n";
        assert_eq!(slab_objects(slabs, "net_namespace"), Some(7));
        assert_eq!(slab_objects(slabs, "kmalloc"), None);
    }
}
