//! What this process itself may do, which bounds what it can give to containers.

use std::io;

use nix::sys::resource::{Resource, getrlimit};
use oci_spec::runtime::Capability;

use crate::config::Config;
use crate::spec::HostLimits;
use crate::spec::caps::from_bits;

/// Limits of every container on this host.
///
/// # Errors
/// `/proc` is unreadable.
pub(crate) fn limits(config: &Config, memory_bytes: u64) -> io::Result<HostLimits> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let capabilities = from_bits(bounding_set(&status).unwrap_or(0));
    let oom_floor = if capabilities.contains(&Capability::SysResource) {
        None
    } else {
        // Without CAP_SYS_RESOURCE a process may only raise its score. Shims run with one more
        // than containerd, so that is what a container starts from.
        let own = std::fs::read_to_string("/proc/self/oom_score_adj")?;
        Some(
            own.trim()
                .parse::<i32>()
                .map_err(io::Error::other)?
                .saturating_add(1),
        )
    };
    let (_, nofile) = getrlimit(Resource::RLIMIT_NOFILE)?;
    Ok(HostLimits {
        allow_privileged: config.allow.privileged,
        pids_limit: config.pids_limit,
        cgroup_parent: config.cgroup_parent.clone(),
        capabilities,
        oom_floor,
        nofile,
        memory_bytes,
        cgroup_namespace: std::path::Path::new("/sys/fs/cgroup/cgroup.controllers").exists(),
    })
}

fn bounding_set(status: &str) -> Option<u64> {
    let bits = status
        .lines()
        .find_map(|line| line.strip_prefix("CapBnd:"))?;
    u64::from_str_radix(bits.trim(), 16).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_the_kernels_notation() {
        assert_eq!(
            bounding_set("Name:\tx\nCapBnd:\t000001ffffffffff\n"),
            Some(0x1ff_ffff_ffff)
        );
        assert_eq!(bounding_set("Name:\tx\n"), None);
    }
}
