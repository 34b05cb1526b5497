//! Gives everything up but the streams that are open.

use std::{collections::BTreeMap, fs, os::fd::RawFd};

use nix::{
    sys::{
        prctl,
        resource::{Resource, setrlimit},
    },
    unistd::{Gid, Uid, close, geteuid, setgroups, setresgid, setresuid},
};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule,
};

/// Owner of nothing.
const NOBODY: u32 = 65_534;
/// Address space, in bytes: windows and the tree of a large layer, with room.
const MEMORY: u64 = 4 << 30;
/// Processor time, in seconds. The largest archive that is allowed takes a few minutes.
const SECONDS: u64 = 1800;

/// Enters the confinement for good. Output files may grow to `file_size` bytes.
pub(super) fn enter(file_size: u64) -> Result<(), String> {
    let failed = |what: &'static str| move |error| format!("cannot {what}: {error}");
    for (resource, limit) in [
        (Resource::RLIMIT_AS, MEMORY),
        (Resource::RLIMIT_CPU, SECONDS),
        (Resource::RLIMIT_CORE, 0),
        (Resource::RLIMIT_FSIZE, file_size.saturating_add(1)),
        // Those that are open stay so.
        (Resource::RLIMIT_NOFILE, 0),
        (Resource::RLIMIT_NPROC, 0),
    ] {
        setrlimit(resource, limit, limit).map_err(failed("limit itself"))?;
    }
    if geteuid().is_root() {
        setgroups(&[]).map_err(failed("drop its groups"))?;
        let group = Gid::from_raw(NOBODY);
        setresgid(group, group, group).map_err(failed("drop its group"))?;
        let user = Uid::from_raw(NOBODY);
        setresuid(user, user, user).map_err(failed("drop its user"))?;
    }
    prctl::set_dumpable(false).map_err(failed("forbid to be traced"))?;
    prctl::set_no_new_privs().map_err(failed("forbid new privileges"))?;
    let filter =
        filter().map_err(|error| format!("cannot make its system call filter: {error}"))?;
    seccompiler::apply_filter(&filter)
        .map_err(|error| format!("cannot filter its system calls: {error}"))
}

/// Closes whatever a careless caller let us inherit. Nothing may have been opened before.
pub(super) fn close_inherited() -> Result<(), String> {
    let failed = |error| format!("cannot list its descriptors: {error}");
    let open: Vec<RawFd> = fs::read_dir("/proc/self/fd")
        .map_err(failed)?
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .filter(|fd| *fd > 2)
        .collect();
    for fd in open {
        // The listing's own is among them, and is closed already.
        let _ = close(fd);
    }
    Ok(())
}

/// Only what moves bytes, allocates, and ends. Everything else ends the process.
fn filter() -> Result<BpfProgram, seccompiler::Error> {
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> = [
        libc::SYS_read,
        libc::SYS_write,
        libc::SYS_close,
        libc::SYS_munmap,
        libc::SYS_mremap,
        libc::SYS_madvise,
        libc::SYS_brk,
        libc::SYS_futex,
        libc::SYS_getrandom,
        libc::SYS_clock_gettime,
        libc::SYS_sigaltstack,
        libc::SYS_rt_sigaction,
        libc::SYS_rt_sigprocmask,
        libc::SYS_rt_sigreturn,
        libc::SYS_restart_syscall,
        libc::SYS_exit,
        libc::SYS_exit_group,
    ]
    .into_iter()
    .map(|call| (call, Vec::new()))
    .collect();
    // Memory, but none that can be executed.
    for call in [libc::SYS_mmap, libc::SYS_mprotect] {
        let executable = libc::PROT_EXEC as u64;
        let condition = SeccompCondition::new(
            2,
            SeccompCmpArgLen::Qword,
            SeccompCmpOp::MaskedEq(executable),
            0,
        )?;
        rules.insert(call, vec![SeccompRule::new(vec![condition])?]);
    }
    // What the standard library asserts before it closes a file, where assertions are on.
    let condition = SeccompCondition::new(
        1,
        SeccompCmpArgLen::Dword,
        SeccompCmpOp::Eq,
        libc::F_GETFD as u64,
    )?;
    rules.insert(libc::SYS_fcntl, vec![SeccompRule::new(vec![condition])?]);
    let architecture = std::env::consts::ARCH.try_into()?;
    let filter = SeccompFilter::new(
        rules,
        SeccompAction::KillProcess,
        SeccompAction::Allow,
        architecture,
    )?;
    Ok(BpfProgram::try_from(filter)?)
}
