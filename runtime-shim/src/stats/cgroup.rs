//! Both cgroup versions: where their hierarchies are mounted, which file says
//! what, and how a cgroup is removed.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use sandman_protocol::v1::Usage;

use super::parse::{anonymous_pages, keyed, single};
use crate::spec::resources::{PERIOD, PodLimits};

/// Processes of one cgroup whose memory is looked at one by one.
const MAX_PROCESSES: usize = 4096;

/// The mounted hierarchies of this host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Hierarchies {
    /// One for all controllers.
    V2 { root: PathBuf },
    /// One a controller. In hybrid mode a version 2 tree without controllers
    /// stands beside them; it counts only for removal.
    V1 {
        cpu: Option<PathBuf>,
        cpuacct: PathBuf,
        memory: PathBuf,
        pids: Option<PathBuf>,
        all: Vec<PathBuf>,
    },
}

impl Hierarchies {
    pub(super) fn from_mountinfo(text: &str) -> io::Result<Self> {
        let mut unified = None;
        let mut version_1: Vec<(PathBuf, Vec<&str>)> = Vec::new();
        for line in text.lines() {
            // "36 35 0:31 / /sys/fs/cgroup/memory rw ... - cgroup cgroup rw,memory"
            let Some((before, after)) = line.split_once(" - ") else {
                continue;
            };
            let mut after = after.split(' ');
            let (kind, options) = (after.next(), after.nth(1).unwrap_or_default());
            let Some(target) = before.split(' ').nth(4).map(unescape) else {
                continue;
            };
            match kind {
                Some("cgroup2") => unified = unified.or(Some(target)),
                Some("cgroup") => version_1.push((target, options.split(',').collect())),
                _ => {}
            }
        }
        let with = |controller: &str| {
            let found = version_1
                .iter()
                .find(|(_, options)| options.contains(&controller));
            found.map(|(target, _)| target.clone())
        };
        if let (Some(cpuacct), Some(memory)) = (with("cpuacct"), with("memory")) {
            let (cpu, pids) = (with("cpu"), with("pids"));
            let mut all: Vec<_> = version_1.into_iter().map(|(target, _)| target).collect();
            all.extend(unified);
            return Ok(Self::V1 {
                cpu,
                cpuacct,
                memory,
                pids,
                all,
            });
        }
        let root = unified.ok_or_else(|| {
            io::Error::new(
                io::ErrorKind::NotFound,
                "no cgroup hierarchy with memory is mounted",
            )
        })?;
        Ok(Self::V2 { root })
    }

    pub(super) fn usage(&self, path: &Path) -> io::Result<Usage> {
        match self {
            Self::V2 { root } => {
                let folder = root.join(path);
                let mut usage = usage_v2(&folder)?;
                if !folder.join("memory.current").exists() {
                    add_anonymous(&mut usage, &folder)?;
                }
                Ok(usage)
            }
            Self::V1 {
                cpuacct,
                memory,
                pids,
                ..
            } => {
                let pids = pids.as_ref().map(|root| root.join(path));
                let (cpuacct, memory) = (cpuacct.join(path), memory.join(path));
                let mut usage = usage_v1(&cpuacct, &memory, pids.as_deref())?;
                if !memory.exists() {
                    add_anonymous(&mut usage, &cpuacct)?;
                }
                Ok(usage)
            }
        }
    }

    pub(super) fn bound(&self, path: &Path, limits: &PodLimits) -> io::Result<()> {
        self.weigh(path, limits.cpu_shares)?;
        let quota = |unlimited: &str| {
            limits
                .cpu_quota
                .map_or(unlimited.to_owned(), |quota| quota.to_string())
        };
        let memory = |unlimited: &str| {
            limits
                .memory
                .map_or(unlimited.to_owned(), |bytes| bytes.to_string())
        };
        match self {
            Self::V2 { root } => {
                let group = root.join(path);
                let max = format!("{} {PERIOD}", quota("max"));
                fs::write(group.join("cpu.max"), max)?;
                fs::write(group.join("memory.max"), memory("max"))
            }
            Self::V1 {
                cpu,
                memory: memory_root,
                ..
            } => {
                if let Some(cpu) = cpu {
                    let group = cpu.join(path);
                    fs::write(group.join("cpu.cfs_period_us"), PERIOD.to_string())?;
                    fs::write(group.join("cpu.cfs_quota_us"), quota("-1"))?;
                }
                let group = memory_root.join(path);
                fs::create_dir_all(&group)?;
                fs::write(group.join("memory.limit_in_bytes"), memory("-1"))
            }
        }
    }

    pub(super) fn limit_memory(&self, path: &Path, bytes: u64) -> io::Result<()> {
        let (group, file) = match self {
            Self::V2 { root } => {
                make_v2(root, path)?;
                (root.join(path), "memory.max")
            }
            Self::V1 { memory, .. } => {
                let group = memory.join(path);
                fs::create_dir_all(&group)?;
                (group, "memory.limit_in_bytes")
            }
        };
        fs::write(group.join(file), bytes.to_string())
    }

    pub(super) fn weigh(&self, path: &Path, cpu_shares: u64) -> io::Result<()> {
        match self {
            Self::V2 { root } => {
                make_v2(root, path)?;
                // The range 2 to 262144 becomes 1 to 10000, as the kubelet and runc have it.
                let weight = 1 + cpu_shares.saturating_sub(2) * 9999 / 262_142;
                fs::write(root.join(path).join("cpu.weight"), weight.to_string())
            }
            Self::V1 { cpu: None, .. } => Ok(()),
            Self::V1 { cpu: Some(cpu), .. } => {
                let group = cpu.join(path);
                fs::create_dir_all(&group)?;
                fs::write(group.join("cpu.shares"), cpu_shares.to_string())
            }
        }
    }

    pub(super) fn remove(&self, path: &Path) -> io::Result<()> {
        let roots = match self {
            Self::V2 { root } => std::slice::from_ref(root),
            Self::V1 { all, .. } => all,
        };
        roots
            .iter()
            .try_for_each(|root| remove_tree(&root.join(path)))
    }
}

/// Makes a cgroup and hands the controllers down to it.
fn make_v2(root: &Path, path: &Path) -> io::Result<()> {
    let mut group = root.to_owned();
    for part in path.components() {
        // One that is handed down already, or that this host lacks, is no error here: the file of
        // a missing controller will be.
        for controller in ["+cpu", "+memory", "+pids"] {
            let _ = fs::write(group.join("cgroup.subtree_control"), controller);
        }
        group.push(part);
        match fs::create_dir(&group) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            Ok(()) | Err(_) => {}
        }
    }
    Ok(())
}

/// Mount points are written with octal escapes for white space and backslashes.
fn unescape(text: &str) -> PathBuf {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((byte, tail)) = rest.split_first() {
        let octal = tail.get(..3).filter(|_| *byte == b'\\');
        let code =
            octal.and_then(|digits| u8::from_str_radix(std::str::from_utf8(digits).ok()?, 8).ok());
        (rest, _) = match code {
            Some(code) => (&tail[3..], bytes.push(code)),
            None => (tail, bytes.push(*byte)),
        };
    }
    PathBuf::from(std::ffi::OsString::from(
        String::from_utf8_lossy(&bytes).into_owned(),
    ))
}

/// Fills in the memory of a cgroup that counts none, because its memory counts together with
/// others': what its processes have for themselves, without files.
fn add_anonymous(usage: &mut Usage, folder: &Path) -> io::Result<()> {
    let mut processes = Vec::new();
    collect(folder, &mut processes)?;
    let page = nix::unistd::sysconf(nix::unistd::SysconfVar::PAGE_SIZE)?;
    let page = page.and_then(|bytes| u64::try_from(bytes).ok());
    let pages: u64 = processes
        .into_iter()
        .take(MAX_PROCESSES)
        // One that ends in this moment has none.
        .filter_map(|pid| fs::read_to_string(format!("/proc/{pid}/statm")).ok())
        .filter_map(|statm| anonymous_pages(&statm))
        .sum();
    let bytes = pages.saturating_mul(page.unwrap_or(4096));
    usage.memory_usage_bytes = bytes;
    usage.memory_working_set_bytes = bytes;
    usage.memory_rss_bytes = bytes;
    Ok(())
}

/// Processes of a cgroup and of those below it.
fn collect(folder: &Path, processes: &mut Vec<u32>) -> io::Result<()> {
    let own = read(folder.join("cgroup.procs"))?;
    processes.extend(own.lines().filter_map(|pid| pid.parse::<u32>().ok()));
    for entry in fs::read_dir(folder)?.flatten() {
        if processes.len() < MAX_PROCESSES && entry.file_type()?.is_dir() {
            collect(&entry.path(), processes)?;
        }
    }
    Ok(())
}

/// A missing controller counts nothing; a missing cgroup is an error.
fn read(path: PathBuf) -> io::Result<String> {
    match fs::read_to_string(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(String::new()),
        other => other,
    }
}

fn usage_v2(path: &Path) -> io::Result<Usage> {
    fs::metadata(path)?;
    let cpu = read(path.join("cpu.stat"))?;
    let stat = read(path.join("memory.stat"))?;
    let usage = single(&read(path.join("memory.current"))?).unwrap_or_default();
    let inactive_file = keyed(&stat, "inactive_file").unwrap_or_default();
    let micros = |key| keyed(&cpu, key).unwrap_or_default().saturating_mul(1000);
    Ok(Usage {
        cpu_nanos: micros("usage_usec"),
        memory_working_set_bytes: usage.saturating_sub(inactive_file),
        memory_usage_bytes: usage,
        memory_rss_bytes: keyed(&stat, "anon").unwrap_or_default(),
        swap_bytes: single(&read(path.join("memory.swap.current"))?).unwrap_or_default(),
        processes: single(&read(path.join("pids.current"))?).unwrap_or_default(),
        cpu_user_nanos: micros("user_usec"),
        cpu_system_nanos: micros("system_usec"),
        cpu_periods: keyed(&cpu, "nr_periods").unwrap_or_default(),
        cpu_throttled_periods: keyed(&cpu, "nr_throttled").unwrap_or_default(),
        cpu_throttled_nanos: micros("throttled_usec"),
        memory_cache_bytes: keyed(&stat, "file").unwrap_or_default(),
        page_faults: keyed(&stat, "pgfault").unwrap_or_default(),
        major_page_faults: keyed(&stat, "pgmajfault").unwrap_or_default(),
        oom_kills: keyed(&read(path.join("memory.events"))?, "oom_kill").unwrap_or_default(),
    })
}

fn usage_v1(cpuacct: &Path, memory: &Path, pids: Option<&Path>) -> io::Result<Usage> {
    fs::metadata(cpuacct)?;
    let stat = read(memory.join("memory.stat"))?;
    let usage = single(&read(memory.join("memory.usage_in_bytes"))?).unwrap_or_default();
    let inactive_file = keyed(&stat, "total_inactive_file").unwrap_or_default();
    let pids = pids.map_or(Ok(String::new()), |path| read(path.join("pids.current")))?;
    let cpu = read(cpuacct.join("cpu.stat"))?;
    let oom = read(memory.join("memory.oom_control"))?;
    Ok(Usage {
        cpu_nanos: single(&read(cpuacct.join("cpuacct.usage"))?).unwrap_or_default(),
        memory_working_set_bytes: usage.saturating_sub(inactive_file),
        memory_usage_bytes: usage,
        memory_rss_bytes: keyed(&stat, "total_rss").unwrap_or_default(),
        swap_bytes: keyed(&stat, "total_swap").unwrap_or_default(),
        processes: single(&pids).unwrap_or_default(),
        cpu_user_nanos: single(&read(cpuacct.join("cpuacct.usage_user"))?).unwrap_or_default(),
        cpu_system_nanos: single(&read(cpuacct.join("cpuacct.usage_sys"))?).unwrap_or_default(),
        // cpu and cpuacct are one hierarchy everywhere that systemd set up.
        cpu_periods: keyed(&cpu, "nr_periods").unwrap_or_default(),
        cpu_throttled_periods: keyed(&cpu, "nr_throttled").unwrap_or_default(),
        cpu_throttled_nanos: keyed(&cpu, "throttled_time").unwrap_or_default(),
        memory_cache_bytes: keyed(&stat, "total_cache").unwrap_or_default(),
        page_faults: keyed(&stat, "total_pgfault").unwrap_or_default(),
        major_page_faults: keyed(&stat, "total_pgmajfault").unwrap_or_default(),
        oom_kills: keyed(&oom, "oom_kill").unwrap_or_default(),
    })
}

/// Child cgroups first: a cgroup with children cannot be removed, and its
/// files cannot be removed at all.
fn remove_tree(path: &Path) -> io::Result<()> {
    let entries = match fs::read_dir(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        other => other?,
    };
    for entry in entries {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            remove_tree(&entry.path())?;
        }
    }
    // Pages of files that it read would keep a removed v1 memory cgroup, and what the kernel holds
    // for it, until memory is short. Other cgroups have no such file.
    let mut options = fs::OpenOptions::new();
    if let Ok(mut empty) = options.write(true).open(path.join("memory.force_empty")) {
        let _ = empty.write_all(b"0");
    }
    match fs::remove_dir(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recognises_each_layout() {
        let v2 = "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n";
        let root = PathBuf::from("/sys/fs/cgroup");
        assert_eq!(
            Hierarchies::from_mountinfo(v2).unwrap(),
            Hierarchies::V2 { root }
        );
        let hybrid = "\
30 23 0:26 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755
31 30 0:27 / /sys/fs/cgroup/unified rw shared:9 - cgroup2 cgroup2 rw
32 30 0:28 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct
33 30 0:29 / /sys/fs/cgroup/my\\040memory rw - cgroup cgroup rw,memory
";
        let Hierarchies::V1 {
            cpuacct,
            memory,
            pids,
            all,
            ..
        } = Hierarchies::from_mountinfo(hybrid).unwrap()
        else {
            panic!("not version 1");
        };
        assert_eq!(cpuacct, Path::new("/sys/fs/cgroup/cpu,cpuacct"));
        assert_eq!(memory, Path::new("/sys/fs/cgroup/my memory"));
        assert_eq!((pids, all.len()), (None, 3));
        assert!(Hierarchies::from_mountinfo("").is_err());
    }

    #[test]
    fn reads_both_versions() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("pod/container");
        fs::create_dir_all(&path).unwrap();
        for (name, content) in [
            ("cpu.stat", "usage_usec 7\nuser_usec 1\nnr_throttled 5\n"),
            ("memory.current", "1000\n"),
            (
                "memory.stat",
                "anon 300\ninactive_file 400\ntotal_rss 301\ntotal_inactive_file 100\n",
            ),
            ("pids.current", "3\n"),
            ("memory.events", "oom 2\noom_kill 1\n"),
            ("cpuacct.usage", "9\n"),
            ("memory.usage_in_bytes", "2000\n"),
        ] {
            fs::write(path.join(name), content).unwrap();
        }
        let root = folder.path().to_owned();
        let v2 = Hierarchies::V2 { root: root.clone() };
        let usage = v2.usage(Path::new("pod/container")).unwrap();
        assert_eq!(
            (usage.cpu_nanos, usage.memory_working_set_bytes),
            (7000, 600)
        );
        assert_eq!((usage.memory_rss_bytes, usage.processes), (300, 3));
        assert_eq!(
            (usage.cpu_user_nanos, usage.cpu_throttled_periods),
            (1000, 5)
        );
        assert_eq!(usage.oom_kills, 1);

        let all = vec![root.clone()];
        let v1 = Hierarchies::V1 {
            cpu: None,
            cpuacct: root.clone(),
            memory: root.clone(),
            pids: Some(root),
            all,
        };
        let usage = v1.usage(Path::new("pod/container")).unwrap();
        assert_eq!((usage.cpu_nanos, usage.memory_working_set_bytes), (9, 1900));
        assert_eq!((usage.memory_rss_bytes, usage.processes), (301, 3));
        assert!(v1.usage(Path::new("gone")).is_err());
    }

    #[test]
    fn memory_that_counts_with_others_is_that_of_the_processes() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("cpuacct/pod/c");
        fs::create_dir_all(&path).unwrap();
        // The second one has ended.
        let processes = format!("{}\n4194305\n", std::process::id());
        fs::write(path.join("cgroup.procs"), processes).unwrap();
        let root = folder.path().join("cpuacct");
        let v1 = Hierarchies::V1 {
            cpu: None,
            cpuacct: root.clone(),
            memory: folder.path().join("memory"),
            pids: None,
            all: vec![root.clone()],
        };
        for hierarchies in [v1, Hierarchies::V2 { root }] {
            // Those below count, too.
            let usage = hierarchies.usage(Path::new("pod")).unwrap();
            assert!(usage.memory_rss_bytes > 100_000);
            assert_eq!(usage.memory_working_set_bytes, usage.memory_rss_bytes);
        }
    }

    #[test]
    fn pods_are_bounded_in_both_versions() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().to_owned();
        let pod = Path::new("sandman/burstable/podu");
        let limits = PodLimits {
            cpu_shares: 1024,
            cpu_quota: Some(50_000),
            memory: Some(4096),
        };
        let unbounded = PodLimits {
            cpu_shares: 2,
            cpu_quota: None,
            memory: None,
        };
        let read = |file: &str| fs::read_to_string(root.join(pod).join(file)).unwrap();
        let v2 = Hierarchies::V2 { root: root.clone() };
        v2.bound(pod, &limits).unwrap();
        assert_eq!(read("cpu.weight"), "39");
        assert_eq!(
            (read("cpu.max"), read("memory.max")),
            ("50000 100000".into(), "4096".into())
        );
        let parent = root.join("sandman/burstable/cgroup.subtree_control");
        assert!(parent.exists());
        v2.bound(pod, &unbounded).unwrap();
        assert_eq!(
            (read("cpu.weight"), read("cpu.max"), read("memory.max")),
            ("1".into(), "max 100000".into(), "max".into())
        );

        let v1 = Hierarchies::V1 {
            cpu: Some(root.clone()),
            cpuacct: root.clone(),
            memory: root.clone(),
            pids: None,
            all: vec![root.clone()],
        };
        v1.bound(pod, &limits).unwrap();
        assert_eq!(read("cpu.shares"), "1024");
        assert_eq!(
            (read("cpu.cfs_quota_us"), read("memory.limit_in_bytes")),
            ("50000".into(), "4096".into())
        );
        v1.bound(pod, &unbounded).unwrap();
        assert_eq!(read("cpu.cfs_quota_us"), "-1");
    }

    #[test]
    fn removes_children_first() {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir_all(folder.path().join("pod/a/b")).unwrap();
        let v2 = Hierarchies::V2 {
            root: folder.path().to_owned(),
        };
        v2.remove(Path::new("pod")).unwrap();
        v2.remove(Path::new("pod")).unwrap();
        assert!(!folder.path().join("pod").exists());
    }
}
