//! Usage of processor, memory and processes: of single cgroups (version 1 or 2
//! behind one interface) and of the whole host.

use std::io;
use std::path::{Path, PathBuf};

use sandman_protocol::v1;

mod cgroup;
mod parse;

use self::cgroup::Hierarchies;
use crate::spec::resources::PodLimits;

/// Reads cgroups and `/proc`.
#[derive(Clone, Debug)]
pub struct Stats {
    hierarchies: Hierarchies,
    proc: PathBuf,
}

impl Stats {
    /// Finds out which cgroup version this host mounts and where.
    ///
    /// # Errors
    /// No cgroup hierarchy with a memory controller is mounted.
    pub fn detect() -> io::Result<Self> {
        let mounts = std::fs::read_to_string("/proc/self/mountinfo")?;
        let hierarchies = Hierarchies::from_mountinfo(&mounts)?;
        Ok(Self {
            hierarchies,
            proc: PathBuf::from("/proc"),
        })
    }

    /// Usage of a cgroup and all below it, by its path as in the OCI
    /// specification (`/sandman/host-0/pod.../...`).
    ///
    /// # Errors
    /// The cgroup does not exist (any more).
    pub fn cgroup_usage(&self, path: &str) -> io::Result<v1::Usage> {
        self.hierarchies.usage(relative(path)?)
    }

    /// Usage of the file system that `path` is on.
    ///
    /// # Errors
    /// The path does not exist.
    pub fn file_system(&self, path: &Path) -> io::Result<v1::FileUsage> {
        let fs = nix::sys::statvfs::statvfs(path)?;
        let bytes = |blocks| fs.fragment_size().saturating_mul(blocks);
        Ok(v1::FileUsage {
            capacity_bytes: bytes(fs.blocks()),
            available_bytes: bytes(fs.blocks_available()),
            used_bytes: bytes(fs.blocks().saturating_sub(fs.blocks_free())),
            inodes: fs.files(),
            inodes_free: fs.files_free(),
            inodes_used: fs.files().saturating_sub(fs.files_free()),
        })
    }

    /// Makes a cgroup, if it is not there, with the limits of a pod.
    ///
    /// # Errors
    /// The kernel refuses a value.
    pub fn bound(&self, path: &str, limits: &PodLimits) -> io::Result<()> {
        self.hierarchies.bound(relative(path)?, limits)
    }

    /// Makes a cgroup, if it is not there, that has a weight for the processor (of version 1,
    /// 2 to 262144) and no limits.
    ///
    /// # Errors
    /// The kernel refuses the value.
    pub fn weigh(&self, path: &str, cpu_shares: u64) -> io::Result<()> {
        self.hierarchies.weigh(relative(path)?, cpu_shares)
    }

    /// Makes a cgroup, if it is not there, in which no more memory than this can be used.
    ///
    /// # Errors
    /// The kernel refuses the value.
    pub fn limit_memory(&self, path: &str, bytes: u64) -> io::Result<()> {
        self.hierarchies.limit_memory(relative(path)?, bytes)
    }

    /// Removes a cgroup without processes, and those below it, from every
    /// hierarchy; succeeds if it is not there.
    ///
    /// # Errors
    /// A process is still in it.
    pub fn remove_cgroup(&self, path: &str) -> io::Result<()> {
        self.hierarchies.remove(relative(path)?)
    }

    /// Usage of the whole host.
    ///
    /// # Errors
    /// `/proc` is unreadable.
    pub fn host_usage(&self) -> io::Result<v1::Usage> {
        let stat = std::fs::read_to_string(self.proc.join("stat"))?;
        let memory = std::fs::read_to_string(self.proc.join("meminfo"))?;
        let load = std::fs::read_to_string(self.proc.join("loadavg"))?;
        let ticks = nix::unistd::sysconf(nix::unistd::SysconfVar::CLK_TCK)?;
        let ticks = ticks
            .and_then(|ticks| u64::try_from(ticks).ok())
            .unwrap_or(100);
        let invalid = || io::Error::new(io::ErrorKind::InvalidData, "unreadable /proc");
        parse::host_usage(&stat, &memory, &load, ticks).ok_or_else(invalid)
    }
}

/// Paths are joined to mount points: nothing may lead out of them.
fn relative(path: &str) -> io::Result<&Path> {
    let path = Path::new(path.trim_start_matches('/'));
    let normal = |component| matches!(component, std::path::Component::Normal(_));
    if path.as_os_str().is_empty() || !path.components().all(normal) {
        let text = format!("cgroup path {path:?} is not absolute and plain");
        return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
    }
    Ok(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_stay_inside_the_hierarchy() {
        for path in ["", "/", "..", "/a/../b", "/a/./../b"] {
            assert!(relative(path).is_err(), "{path}");
        }
        assert_eq!(
            relative("/sandman/host-0").unwrap(),
            Path::new("sandman/host-0")
        );
    }

    #[test]
    fn this_machine_has_usage() {
        let stats = Stats::detect().unwrap();
        let usage = stats.host_usage().unwrap();
        assert!(usage.cpu_nanos > 0 && usage.memory_working_set_bytes > 0);
        assert!(usage.memory_usage_bytes >= usage.memory_working_set_bytes);
        assert!(usage.processes > 0);
        let files = stats.file_system(Path::new("/")).unwrap();
        assert!(files.capacity_bytes > files.used_bytes && files.used_bytes > 0);
    }

    #[test]
    fn a_cgroup_that_is_gone_is_removed_already() {
        let stats = Stats::detect().unwrap();
        let path = "/sandman-test-never-made";
        stats.remove_cgroup(path).unwrap();
        assert_eq!(
            stats.cgroup_usage(path).unwrap_err().kind(),
            io::ErrorKind::NotFound
        );
    }
}
