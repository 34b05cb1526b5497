//! What a process may do: ids, capabilities, limits, seccomp.

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
pub struct CapSets {
    /// Effective.
    pub effective: u64,
    /// Permitted.
    pub permitted: u64,
    /// Inheritable.
    pub inheritable: u64,
}

fn low(bits: u64) -> u32 {
    let [a, b, c, d, ..] = bits.to_le_bytes();
    u32::from_le_bytes([a, b, c, d])
}

fn join(low: u32, high: u32) -> u64 {
    u64::from(low) | (u64::from(high) << 32)
}

/// Reads this process's sets.
///
/// # Errors
/// None in practice.
pub fn capabilities() -> io::Result<CapSets> {
    let mut header = CapHeader {
        version: CAPABILITY_VERSION,
        pid: 0,
    };
    let mut data = [CapData::default(); 2];
    // SAFETY: both are laid out as the kernel's version 3 has them and live for the call.
    check(unsafe { libc::syscall(libc::SYS_capget, &raw mut header, data.as_mut_ptr()) })?;
    let [a, b] = data;
    Ok(CapSets {
        effective: join(a.effective, b.effective),
        permitted: join(a.permitted, b.permitted),
        inheritable: join(a.inheritable, b.inheritable),
    })
}

/// Sets this process's sets.
///
/// # Errors
/// A set holds what is not permitted.
pub fn set_capabilities(sets: CapSets) -> io::Result<()> {
    let mut header = CapHeader {
        version: CAPABILITY_VERSION,
        pid: 0,
    };
    let word = |shift: u32| CapData {
        effective: low(sets.effective >> shift),
        permitted: low(sets.permitted >> shift),
        inheritable: low(sets.inheritable >> shift),
    };
    let data = [word(0), word(32)];
    // SAFETY: both are laid out as the kernel's version 3 has them and live for the call.
    check(unsafe { libc::syscall(libc::SYS_capset, &raw mut header, data.as_ptr()) }).map(drop)
}

fn prctl(option: i32, a: u64, b: u64) -> io::Result<i64> {
    // SAFETY: only options that take numbers are used below.
    check(unsafe { libc::prctl(option, a, b, 0, 0) }.into())
}

/// Takes everything out of the bounding set that is not in `keep`.
///
/// # Errors
/// Without CAP_SETPCAP.
pub fn limit_bounding(keep: u64) -> io::Result<()> {
    for capability in 0..64 {
        // Fails beyond the last one that this kernel knows.
        if prctl(libc::PR_CAPBSET_READ, capability, 0).is_err() {
            break;
        }
        if keep & (1 << capability) == 0 {
            prctl(libc::PR_CAPBSET_DROP, capability, 0)?;
        }
    }
    Ok(())
}

/// Replaces the ambient set.
///
/// # Errors
/// One is not both permitted and inheritable.
pub fn set_ambient(set: u64) -> io::Result<()> {
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
///
/// # Errors
/// None in practice.
pub fn keep_capabilities(keep: bool) -> io::Result<()> {
    prctl(libc::PR_SET_KEEPCAPS, keep.into(), 0).map(drop)
}

/// No program run from now on gains rights by its file.
///
/// # Errors
/// None in practice.
pub fn no_new_privileges() -> io::Result<()> {
    prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0).map(drop)
}

/// Closes `/proc/self` and ptrace to those without CAP_SYS_PTRACE over us, until the next exec.
///
/// # Errors
/// None in practice.
pub fn set_undumpable() -> io::Result<()> {
    prctl(libc::PR_SET_DUMPABLE, 0, 0).map(drop)
}

/// Gives this process a session keyring that nobody else has: without, it would share root's keys.
///
/// # Errors
/// The user's quota of keys. A kernel without keys is fine.
pub fn own_keyring() -> io::Result<()> {
    /// `KEYCTL_JOIN_SESSION_KEYRING` (linux/keyctl.h).
    const JOIN: libc::c_long = 1;
    let unnamed = ptr::null::<libc::c_char>();
    // SAFETY: takes a number and no name.
    match check(unsafe { libc::syscall(libc::SYS_keyctl, JOIN, unnamed) }) {
        Err(error) if error.raw_os_error() != Some(libc::ENOSYS) => Err(error),
        _ => Ok(()),
    }
}

/// Orphans of this process's tree become its children.
///
/// # Errors
/// None in practice.
pub fn become_subreaper() -> io::Result<()> {
    prctl(libc::PR_SET_CHILD_SUBREAPER, 1, 0).map(drop)
}

/// Becomes this user with these groups. By system call: libc's versions reach for threads.
///
/// # Errors
/// Not permitted, or an id that the user namespace does not map.
pub fn set_user(uid: u32, gid: u32, groups: &[u32]) -> io::Result<()> {
    // SAFETY: pointer and length are of one slice.
    check(unsafe { libc::syscall(libc::SYS_setgroups, groups.len(), groups.as_ptr()) })?;
    // SAFETY: takes numbers.
    check(unsafe { libc::syscall(libc::SYS_setresgid, gid, gid, gid) })?;
    // SAFETY: takes numbers.
    check(unsafe { libc::syscall(libc::SYS_setresuid, uid, uid, uid) }).map(drop)
}

/// Sets one resource limit (`RLIMIT_*`) of this process.
///
/// # Errors
/// Raising a hard limit without CAP_SYS_RESOURCE, or soft above hard.
pub fn set_limit(resource: u32, soft: u64, hard: u64) -> io::Result<()> {
    let limit = libc::rlimit64 {
        rlim_cur: soft,
        rlim_max: hard,
    };
    // SAFETY: `limit` lives for the call; a null old limit is allowed.
    check(unsafe {
        libc::syscall(
            libc::SYS_prlimit64,
            0,
            resource,
            &raw const limit,
            ptr::null_mut::<libc::rlimit64>(),
        )
    })
    .map(drop)
}

/// One instruction of a seccomp program (`struct sock_filter`).
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Instruction {
    /// Operation.
    pub code: u16,
    /// Instructions to skip when a comparison holds.
    pub jt: u8,
    /// Instructions to skip when it does not.
    pub jf: u8,
    /// Operand.
    pub k: u32,
}

#[repr(C)]
struct Program {
    length: u16,
    instructions: *const Instruction,
}

/// Filters this process's system calls from now on.
///
/// # Errors
/// Without no_new_privs and CAP_SYS_ADMIN, or a program that the kernel does not take.
pub fn set_seccomp(program: &[Instruction], flags: u32) -> io::Result<()> {
    let length =
        u16::try_from(program.len()).map_err(|_| io::Error::from_raw_os_error(libc::E2BIG))?;
    let program = Program {
        length,
        instructions: program.as_ptr(),
    };
    // SAFETY: laid out as `struct sock_fprog`; the instructions outlive the call.
    check(unsafe {
        libc::syscall(
            libc::SYS_seccomp,
            libc::SECCOMP_SET_MODE_FILTER,
            flags,
            &raw const program,
        )
    })
    .map(drop)
}
