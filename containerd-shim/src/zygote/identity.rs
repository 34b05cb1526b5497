//! From all rights to exactly the process's own.

use super::child::{Context, Step};
use super::plan::{Capabilities, Process};
use crate::sys::privileges::{self, CapSets};

/// CAP_SYS_ADMIN (linux/capability.h).
const SYS_ADMIN: u64 = 1 << 21;

/// What the process is to have in the end, and what it holds until then.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rights {
    wanted: Capabilities,
    held: u64,
}

/// Becomes the user: limits, bounding set, groups, ids. What is permitted is kept for
/// [`confine`], but is not in effect beyond what the process will have.
pub(super) fn become_user(process: &Process) -> Step<Rights> {
    for (resource, soft, hard) in &process.limits {
        privileges::set_limit(*resource, *soft, *hard)
            .step(|| format!("set {} to {soft}:{hard}", limit_name(*resource)))?;
    }
    let held = privileges::capabilities()
        .step(|| "read the capabilities".into())?
        .permitted;
    let wanted = available(process.capabilities, held);
    privileges::limit_bounding(wanted.bounding)
        .step(|| "limit the bounding set of capabilities".into())?;
    privileges::keep_capabilities(true).step(|| "keep capabilities".into())?;
    privileges::set_user(process.uid, process.gid, &process.groups).step(|| {
        format!(
            "become user {}:{} with groups {:?}",
            process.uid, process.gid, process.groups
        )
    })?;
    privileges::keep_capabilities(false).step(|| "keep capabilities".into())?;
    set(wanted.effective, held, wanted.inheritable)?;
    Ok(Rights { wanted, held })
}

/// Takes the rest away and filters system calls: afterwards only exec is left to do.
pub(super) fn confine(process: &Process, rights: Rights) -> Step<()> {
    let Rights { wanted, held } = rights;
    if process.no_new_privileges {
        privileges::no_new_privileges().step(|| "set no_new_privs".into())?;
        drop_rights(wanted)?;
        return filter(process);
    }
    // Without no_new_privs the kernel lets only an administrator install a filter.
    if process.seccomp.is_some() {
        set(wanted.effective | SYS_ADMIN, held, wanted.inheritable)?;
        filter(process)?;
    }
    drop_rights(wanted)
}

fn filter(process: &Process) -> Step<()> {
    match &process.seccomp {
        Some(seccomp) => privileges::set_seccomp(&seccomp.program, seccomp.flags)
            .step(|| "install the seccomp filter".into()),
        None => Ok(()),
    }
}

fn drop_rights(wanted: Capabilities) -> Step<()> {
    set(wanted.effective, wanted.permitted, wanted.inheritable)?;
    privileges::set_ambient(wanted.ambient).step(|| "set ambient capabilities".into())
}

fn set(effective: u64, permitted: u64, inheritable: u64) -> Step<()> {
    privileges::set_capabilities(CapSets {
        effective,
        permitted,
        inheritable,
    })
    .step(|| "set the capabilities".into())
}

/// What of `wanted` this host has to give. As runc, one that it lacks itself is left out.
fn available(wanted: Capabilities, held: u64) -> Capabilities {
    let permitted = wanted.permitted & held;
    let inheritable = wanted.inheritable & held;
    Capabilities {
        bounding: wanted.bounding & held,
        effective: wanted.effective & permitted,
        permitted,
        inheritable,
        ambient: wanted.ambient & permitted & inheritable,
    }
}

fn limit_name(resource: u32) -> &'static str {
    match resource {
        libc::RLIMIT_AS => "RLIMIT_AS",
        libc::RLIMIT_CORE => "RLIMIT_CORE",
        libc::RLIMIT_CPU => "RLIMIT_CPU",
        libc::RLIMIT_DATA => "RLIMIT_DATA",
        libc::RLIMIT_FSIZE => "RLIMIT_FSIZE",
        libc::RLIMIT_LOCKS => "RLIMIT_LOCKS",
        libc::RLIMIT_MEMLOCK => "RLIMIT_MEMLOCK",
        libc::RLIMIT_MSGQUEUE => "RLIMIT_MSGQUEUE",
        libc::RLIMIT_NICE => "RLIMIT_NICE",
        libc::RLIMIT_NOFILE => "RLIMIT_NOFILE",
        libc::RLIMIT_NPROC => "RLIMIT_NPROC",
        libc::RLIMIT_RSS => "RLIMIT_RSS",
        libc::RLIMIT_RTPRIO => "RLIMIT_RTPRIO",
        libc::RLIMIT_RTTIME => "RLIMIT_RTTIME",
        libc::RLIMIT_SIGPENDING => "RLIMIT_SIGPENDING",
        libc::RLIMIT_STACK => "RLIMIT_STACK",
        _ => "a resource limit",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_gets_what_the_host_lacks() {
        let all = u64::MAX;
        let wanted = Capabilities {
            bounding: all,
            effective: all,
            permitted: 0b0111,
            inheritable: 0b0011,
            ambient: all,
        };
        let got = available(wanted, 0b0110);
        assert_eq!(
            got,
            Capabilities {
                bounding: 0b0110,
                effective: 0b0110,
                permitted: 0b0110,
                inheritable: 0b0010,
                ambient: 0b0010,
            }
        );
    }
}
