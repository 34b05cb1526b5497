//! Seccomp filters of containers: the runtime default as a table, nothing, or a host's own file.
//!
//! The default allows what containerd's default profile allows (contrib/seccomp), so that an
//! image behaves here as it does there; what differs by capability is opened with it.

use oci_spec::runtime::{
    Arch, Capabilities, Capability, LinuxSeccomp, LinuxSeccompAction, LinuxSeccompArg,
    LinuxSeccompArgBuilder, LinuxSeccompBuilder, LinuxSeccompOperator, LinuxSyscall,
    LinuxSyscallBuilder,
};

use super::SpecError;

/// System calls that every container may make, whatever its arguments.
const ALLOWED: &str = "
    accept accept4 access adjtimex alarm bind brk cachestat capget capset chdir chmod chown chown32
    clock_adjtime clock_adjtime64 clock_getres clock_getres_time64 clock_gettime clock_gettime64
    clock_nanosleep clock_nanosleep_time64 close close_range connect copy_file_range creat dup dup2
    dup3 epoll_create epoll_create1 epoll_ctl epoll_ctl_old epoll_pwait epoll_pwait2 epoll_wait
    epoll_wait_old eventfd eventfd2 execve execveat exit exit_group faccessat faccessat2 fadvise64
    fadvise64_64 fallocate fanotify_mark fchdir fchmod fchmodat fchmodat2 fchown fchown32 fchownat
    fcntl fcntl64 fdatasync fgetxattr flistxattr flock fork fremovexattr fsetxattr fstat fstat64
    fstatat64 fstatfs fstatfs64 fsync ftruncate ftruncate64 futex futex_requeue futex_time64
    futex_wait futex_waitv futex_wake futimesat getcpu getcwd getdents getdents64 getegid getegid32
    geteuid geteuid32 getgid getgid32 getgroups getgroups32 getitimer getpeername getpgid getpgrp
    getpid getppid getpriority getrandom getresgid getresgid32 getresuid getresuid32 getrlimit
    get_robust_list getrusage getsid getsockname getsockopt get_thread_area gettid gettimeofday
    getuid getuid32 getxattr inotify_add_watch inotify_init inotify_init1 inotify_rm_watch io_cancel
    ioctl io_destroy io_getevents io_pgetevents io_pgetevents_time64 ioprio_get ioprio_set io_setup
    io_submit ipc kill landlock_add_rule landlock_create_ruleset landlock_restrict_self lchown
    lchown32 lgetxattr link linkat listen listxattr llistxattr _llseek lremovexattr lseek lsetxattr
    lstat lstat64 madvise map_shadow_stack membarrier memfd_create memfd_secret mincore mkdir mkdirat
    mknod mknodat mlock mlock2 mlockall mmap mmap2 mprotect mq_getsetattr mq_notify mq_open
    mq_timedreceive mq_timedreceive_time64 mq_timedsend mq_timedsend_time64 mq_unlink mremap msgctl
    msgget msgrcv msgsnd msync munlock munlockall munmap nanosleep newfstatat _newselect open openat
    openat2 pause pidfd_open pidfd_send_signal pipe pipe2 pkey_alloc pkey_free pkey_mprotect poll
    ppoll ppoll_time64 prctl pread64 preadv preadv2 prlimit64 process_mrelease pselect6
    pselect6_time64 ptrace pwrite64 pwritev pwritev2 read readahead readlink readlinkat readv recv
    recvfrom recvmmsg recvmmsg_time64 recvmsg remap_file_pages removexattr rename renameat renameat2
    restart_syscall rmdir rseq rt_sigaction rt_sigpending rt_sigprocmask rt_sigqueueinfo rt_sigreturn
    rt_sigsuspend rt_sigtimedwait rt_sigtimedwait_time64 rt_tgsigqueueinfo sched_getaffinity
    sched_getattr sched_getparam sched_get_priority_max sched_get_priority_min sched_getscheduler
    sched_rr_get_interval sched_rr_get_interval_time64 sched_setaffinity sched_setattr
    sched_setparam sched_setscheduler sched_yield seccomp select semctl semget semop semtimedop
    semtimedop_time64 send sendfile sendfile64 sendmmsg sendmsg sendto setfsgid setfsgid32 setfsuid
    setfsuid32 setgid setgid32 setgroups setgroups32 setitimer setpgid setpriority setregid
    setregid32 setresgid setresgid32 setresuid setresuid32 setreuid setreuid32 setrlimit
    set_robust_list setsid setsockopt set_thread_area set_tid_address setuid setuid32 setxattr shmat
    shmctl shmdt shmget shutdown sigaltstack signalfd signalfd4 sigprocmask sigreturn socketcall
    socketpair splice stat stat64 statfs statfs64 statx symlink symlinkat sync sync_file_range syncfs
    sysinfo tee tgkill time timer_create timer_delete timerfd_create timerfd_gettime
    timerfd_gettime64 timerfd_settime timerfd_settime64 timer_getoverrun timer_gettime
    timer_gettime64 timer_settime timer_settime64 times tkill truncate truncate64 ugetrlimit umask
    uname unlink unlinkat utime utimensat utimensat_time64 utimes vfork vmsplice wait4 waitid waitpid
    write writev
";

/// System calls that a capability opens.
const BY_CAPABILITY: &[(Capability, &str)] = &[
    (Capability::Bpf, "bpf"),
    (Capability::DacReadSearch, "open_by_handle_at"),
    (Capability::Perfmon, "perf_event_open"),
    (
        Capability::SysAdmin,
        "bpf clone clone3 fanotify_init fsconfig fsmount fsopen fspick lookup_dcookie mount \
         mount_setattr move_mount name_to_handle_at open_tree perf_event_open quotactl \
         quotactl_fd setdomainname sethostname setns syslog umount umount2 unshare",
    ),
    (Capability::SysBoot, "reboot"),
    (Capability::SysChroot, "chroot"),
    (
        Capability::SysModule,
        "delete_module finit_module init_module",
    ),
    (Capability::SysPacct, "acct"),
    (
        Capability::SysPtrace,
        "kcmp pidfd_getfd process_madvise process_vm_readv process_vm_writev",
    ),
    (Capability::SysRawio, "ioperm iopl"),
    (
        Capability::SysTime,
        "clock_settime clock_settime64 settimeofday stime",
    ),
    (Capability::SysTtyConfig, "vhangup"),
    (Capability::Syslog, "syslog"),
];

#[cfg(target_arch = "x86_64")]
const BY_ARCHITECTURE: &str = "arch_prctl modify_ldt";
#[cfg(target_arch = "aarch64")]
const BY_ARCHITECTURE: &str =
    "arm_fadvise64_64 arm_sync_file_range breakpoint cacheflush set_tls sync_file_range2";
#[cfg(target_arch = "riscv64")]
const BY_ARCHITECTURE: &str = "riscv_flush_icache";

/// `personality` values that change nothing that matters: Linux, 32 bit, UNAME26 and "ask".
const PERSONALITIES: [u64; 5] = [0x0, 0x8, 0x2_0000, 0x2_0008, 0xffff_ffff];

/// Namespace bits that `clone` may not set without CAP_SYS_ADMIN.
const CLONE_NAMESPACES: u64 = (libc::CLONE_NEWNS
    | libc::CLONE_NEWUTS
    | libc::CLONE_NEWIPC
    | libc::CLONE_NEWUSER
    | libc::CLONE_NEWPID
    | libc::CLONE_NEWNET
    | libc::CLONE_NEWCGROUP) as u64;

/// Vsock reaches hypervisors and their guests around the network namespace.
const AF_VSOCK: u64 = libc::AF_VSOCK as u64;

fn architectures() -> Vec<Arch> {
    if cfg!(target_arch = "x86_64") {
        vec![Arch::ScmpArchX86_64, Arch::ScmpArchX86, Arch::ScmpArchX32]
    } else if cfg!(target_arch = "aarch64") {
        vec![Arch::ScmpArchArm, Arch::ScmpArchAarch64]
    } else {
        vec![Arch::ScmpArchNative]
    }
}

fn names(list: &str) -> Vec<String> {
    list.split_whitespace().map(str::to_owned).collect()
}

fn allow(list: &str, args: Vec<LinuxSeccompArg>) -> Result<LinuxSyscall, SpecError> {
    let builder = LinuxSyscallBuilder::default()
        .names(names(list))
        .action(LinuxSeccompAction::ScmpActAllow);
    let builder = if args.is_empty() {
        builder
    } else {
        builder.args(args)
    };
    Ok(builder.build()?)
}

fn first_argument(op: LinuxSeccompOperator, value: u64) -> Result<LinuxSeccompArg, SpecError> {
    Ok(LinuxSeccompArgBuilder::default()
        .index(0_usize)
        .value(value)
        .op(op)
        .build()?)
}

/// The `RuntimeDefault` profile for a container with these capabilities.
///
/// # Errors
/// None in practice; the builders of the OCI types can in theory refuse.
pub fn runtime_default(capabilities: &Capabilities) -> Result<LinuxSeccomp, SpecError> {
    let mut syscalls = vec![
        allow(ALLOWED, vec![])?,
        allow(BY_ARCHITECTURE, vec![])?,
        allow(
            "socket",
            vec![first_argument(LinuxSeccompOperator::ScmpCmpNe, AF_VSOCK)?],
        )?,
    ];
    for value in PERSONALITIES {
        let argument = first_argument(LinuxSeccompOperator::ScmpCmpEq, value)?;
        syscalls.push(allow("personality", vec![argument])?);
    }
    for (capability, list) in BY_CAPABILITY {
        if capabilities.contains(capability) {
            syscalls.push(allow(list, vec![])?);
        }
    }
    if !capabilities.contains(&Capability::SysAdmin) {
        let no_namespaces = LinuxSeccompArgBuilder::default()
            .index(0_usize)
            .value(CLONE_NAMESPACES)
            .value_two(0_u64)
            .op(LinuxSeccompOperator::ScmpCmpMaskedEq)
            .build()?;
        syscalls.push(allow("clone", vec![no_namespaces])?);
        // The flags of clone3 lie in memory, out of a filter's sight. ENOSYS makes libc fall
        // back to clone, where EPERM would be taken for the answer.
        syscalls.push(
            LinuxSyscallBuilder::default()
                .names(names("clone3"))
                .action(LinuxSeccompAction::ScmpActErrno)
                .errno_ret(libc::ENOSYS as u32)
                .build()?,
        );
    }
    Ok(LinuxSeccompBuilder::default()
        .default_action(LinuxSeccompAction::ScmpActErrno)
        .architectures(architectures())
        .syscalls(syscalls)
        .build()?)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn find<'a>(profile: &'a LinuxSeccomp, name: &str) -> Vec<&'a LinuxSyscall> {
        let all = profile.syscalls().as_ref().unwrap();
        all.iter()
            .filter(|rule| rule.names().iter().any(|n| n == name))
            .collect()
    }

    #[test]
    fn the_table_has_no_repeats() {
        let list = names(ALLOWED);
        assert_eq!(list.iter().collect::<BTreeSet<_>>().len(), list.len());
    }

    #[test]
    fn dangerous_calls_need_their_capability() {
        let plain = runtime_default(&Capabilities::new()).unwrap();
        for name in [
            "mount",
            "bpf",
            "setns",
            "unshare",
            "keyctl",
            "kexec_load",
            "io_uring_setup",
        ] {
            assert!(find(&plain, name).is_empty(), "{name}");
        }
        assert_eq!(find(&plain, "clone")[0].args().as_ref().unwrap().len(), 1);
        assert_eq!(
            find(&plain, "clone3")[0].errno_ret(),
            Some(libc::ENOSYS as u32)
        );
        assert_eq!(
            find(&plain, "socket")[0].args().as_ref().unwrap()[0].value(),
            AF_VSOCK
        );

        let admin = runtime_default(&Capabilities::from([Capability::SysAdmin])).unwrap();
        assert!(find(&admin, "clone")[0].args().is_none());
        assert_eq!(find(&admin, "mount").len(), 1);
        assert_eq!(
            find(&admin, "clone3")[0].action(),
            LinuxSeccompAction::ScmpActAllow
        );
    }
}
