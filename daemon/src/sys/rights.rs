//! What a process may do: ids, capabilities, limits. By system call where libc's versions reach
//! for threads.

use std::io;
use std::ptr;

use super::check;

/// `_LINUX_CAPABILITY_VERSION_3` (linux/capability.h): two words a set.
const CAPABILITY_VERSION: u32 = 0x2008_0522;

#[repr(C)]
struct CapHeader {
    version: u32,
    pid: i32,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct CapData {
    effective: u32,
    permitted: u32,
    inheritable: u32,
}

/// Capability sets of this process, a bit each by the kernel's numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct CapSets {
    pub(crate) effective: u64,
    pub(crate) permitted: u64,
    pub(crate) inheritable: u64,
}

/// Reads this process's sets.
pub(crate) fn capabilities() -> io::Result<CapSets> {
    let mut header = CapHeader {
        version: CAPABILITY_VERSION,
        pid: 0,
    };
    let mut data = [CapData::default(); 2];
    // SAFETY: both are laid out as the kernel's version 3 has them and live for the call.
    syscall(unsafe { libc::syscall(libc::SYS_capget, &raw mut header, data.as_mut_ptr()) })?;
    let [a, b] = data;
    let join = |low: u32, high: u32| u64::from(low) | (u64::from(high) << 32);
    Ok(CapSets {
        effective: join(a.effective, b.effective),
        permitted: join(a.permitted, b.permitted),
        inheritable: join(a.inheritable, b.inheritable),
    })
}

/// Sets this process's sets.
pub(crate) fn set_capabilities(sets: CapSets) -> io::Result<()> {
    let mut header = CapHeader {
        version: CAPABILITY_VERSION,
        pid: 0,
    };
    let word = |shift: u32| {
        let part = |set: u64| (set >> shift & u64::from(u32::MAX)) as u32;
        CapData {
            effective: part(sets.effective),
            permitted: part(sets.permitted),
            inheritable: part(sets.inheritable),
        }
    };
    let data = [word(0), word(32)];
    // SAFETY: both are laid out as the kernel's version 3 has them and live for the call.
    syscall(unsafe { libc::syscall(libc::SYS_capset, &raw mut header, data.as_ptr()) })
}

/// Whether the bounding set has `capability`; `None` beyond the last one of this kernel.
pub(crate) fn bounded(capability: u32) -> Option<bool> {
    prctl(libc::PR_CAPBSET_READ, capability.into(), 0)
        .ok()
        .map(|has| has == 1)
}

/// Takes `capability` out of the bounding set.
pub(crate) fn unbound(capability: u32) -> io::Result<()> {
    prctl(libc::PR_CAPBSET_DROP, capability.into(), 0).map(drop)
}

/// Replaces the ambient set.
pub(crate) fn set_ambient(set: u64) -> io::Result<()> {
    prctl(
        libc::PR_CAP_AMBIENT,
        libc::PR_CAP_AMBIENT_CLEAR_ALL as u64,
        0,
    )?;
    for capability in (0..64).filter(|capability| set & (1 << capability) != 0) {
        prctl(
            libc::PR_CAP_AMBIENT,
            libc::PR_CAP_AMBIENT_RAISE as u64,
            capability,
        )?;
    }
    Ok(())
}

/// Keeps permitted capabilities over a change of user until the next exec.
pub(crate) fn keep_capabilities(keep: bool) -> io::Result<()> {
    prctl(libc::PR_SET_KEEPCAPS, keep.into(), 0).map(drop)
}

/// No program run from now on gains rights by its file.
pub(crate) fn no_new_privileges() -> io::Result<()> {
    prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0).map(drop)
}

fn prctl(option: i32, a: u64, b: u64) -> io::Result<i32> {
    // SAFETY: only options that take numbers are used above.
    check(unsafe { libc::prctl(option, a, b, 0, 0) })
}

/// Further groups of this process.
pub(crate) fn groups() -> io::Result<Vec<u32>> {
    // SAFETY: with no room it only counts.
    let count = check(unsafe { libc::getgroups(0, ptr::null_mut()) })?;
    let mut groups = vec![0; usize::try_from(count).unwrap_or_default()];
    // SAFETY: `groups` has room for `count`.
    let count = check(unsafe { libc::getgroups(count, groups.as_mut_ptr()) })?;
    groups.truncate(usize::try_from(count).unwrap_or_default());
    Ok(groups)
}

/// Replaces the further groups.
pub(crate) fn set_groups(groups: &[u32]) -> io::Result<()> {
    // SAFETY: length and pointer are of one slice.
    syscall(unsafe { libc::syscall(libc::SYS_setgroups, groups.len(), groups.as_ptr()) })
}

/// Becomes this user and group, real, effective and saved.
pub(crate) fn set_user(uid: u32, gid: u32) -> io::Result<()> {
    // SAFETY: takes numbers.
    syscall(unsafe { libc::syscall(libc::SYS_setresgid, gid, gid, gid) })?;
    // SAFETY: takes numbers.
    syscall(unsafe { libc::syscall(libc::SYS_setresuid, uid, uid, uid) })
}

/// Sets one resource limit (`RLIMIT_*`).
pub(crate) fn set_limit(resource: u32, soft: u64, hard: u64) -> io::Result<()> {
    let limit = libc::rlimit64 {
        rlim_cur: soft,
        rlim_max: hard,
    };
    // SAFETY: `limit` lives for the call; a null old limit is allowed.
    syscall(unsafe {
        libc::syscall(
            libc::SYS_prlimit64,
            0,
            resource,
            &raw const limit,
            ptr::null_mut::<libc::rlimit64>(),
        )
    })
}

/// Sets the file mode mask.
pub(crate) fn set_umask(mask: u32) {
    // SAFETY: takes a number and cannot fail.
    unsafe { libc::umask(mask & 0o777) };
}

fn syscall(result: libc::c_long) -> io::Result<()> {
    if result == -1 {
        Err(io::Error::last_os_error())
    } else {
        Ok(())
    }
}
