//! Processes: clone, namespaces, exec, and the waits of their one parent.

use std::convert::Infallible;
use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::ptr;

use super::check;

/// clone3 flag (linux/sched.h); libc's constant is too narrow for it.
const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;

/// Which side of a clone this is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The caller, with the child's id as this PID namespace numbers it.
    Parent(i32),
    /// The child.
    Child,
}

/// Clones this process as fork(2) does, with `CLONE_*` flags, and into a cgroup v2 folder if given.
/// The parent gets SIGCHLD; with `CLONE_PARENT` it is the caller's own parent who does.
///
/// # Safety
/// The process has one thread: the child goes on with copies of all locks as they are.
///
/// # Errors
/// As clone3(2).
pub unsafe fn clone(flags: u64, cgroup: Option<BorrowedFd<'_>>) -> io::Result<Side> {
    // SAFETY: the structure is plain numbers, for which zero is valid.
    let mut args: libc::clone_args = unsafe { std::mem::zeroed() };
    args.flags = flags;
    // With CLONE_PARENT the signal is the one of the caller's own end and may not be given.
    if flags & libc::CLONE_PARENT as u64 == 0 {
        args.exit_signal = libc::SIGCHLD as u64;
    }
    if let Some(cgroup) = cgroup {
        args.flags |= CLONE_INTO_CGROUP;
        args.cgroup = cgroup.as_raw_fd() as u64;
    }
    // SAFETY: without CLONE_VM and a stack of its own the child is a copy, as after fork(2).
    let pid = check(unsafe {
        libc::syscall(
            libc::SYS_clone3,
            &raw mut args,
            size_of::<libc::clone_args>(),
        )
    })?;
    Ok(match i32::try_from(pid) {
        Ok(0) | Err(_) => Side::Child,
        Ok(pid) => Side::Parent(pid),
    })
}

/// A descriptor of a process, which cannot come to mean another one.
///
/// # Errors
/// There is none of this number.
pub fn open_process(pid: i32) -> io::Result<OwnedFd> {
    // SAFETY: takes numbers.
    super::check_fd(unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) })
}

/// Joins the namespace(s) of `fd`; `kind` is a `CLONE_NEW*`, or several with a pidfd.
///
/// # Errors
/// As setns(2).
pub fn join(fd: BorrowedFd<'_>, kind: i32) -> io::Result<()> {
    // SAFETY: takes an open descriptor and a number.
    check(unsafe { libc::setns(fd.as_raw_fd(), kind) }.into()).map(drop)
}

/// Replaces this process by the program open at `program`.
///
/// # Errors
/// As execve(2); does not return otherwise.
pub fn exec_file(
    program: BorrowedFd<'_>,
    args: &[CString],
    env: &[CString],
) -> io::Result<Infallible> {
    let (args, env) = (pointers(args), pointers(env));
    // SAFETY: both arrays end with null and their strings outlive the call.
    check(unsafe {
        libc::syscall(
            libc::SYS_execveat,
            program.as_raw_fd(),
            c"".as_ptr(),
            args.as_ptr(),
            env.as_ptr(),
            libc::AT_EMPTY_PATH,
        )
    })?;
    Err(io::Error::from_raw_os_error(libc::ENOSYS))
}

/// Replaces this process by the program at `path`, which a script's interpreter gets to see.
///
/// # Errors
/// As execve(2); does not return otherwise.
pub fn exec_path(path: &CStr, args: &[CString], env: &[CString]) -> io::Result<Infallible> {
    let (args, env) = (pointers(args), pointers(env));
    // SAFETY: the path is a C string; both arrays end with null and their strings outlive the call.
    check(unsafe { libc::execve(path.as_ptr(), args.as_ptr(), env.as_ptr()) }.into())?;
    Err(io::Error::from_raw_os_error(libc::ENOSYS))
}

fn pointers(strings: &[CString]) -> Vec<*const libc::c_char> {
    let mut pointers: Vec<_> = strings.iter().map(|string| string.as_ptr()).collect();
    pointers.push(ptr::null());
    pointers
}

/// A child that ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ended {
    /// Its id.
    pub pid: i32,
    /// Exit code, or 128 + signal.
    pub code: u32,
}

/// Whom to wait for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Whose {
    /// Any child.
    Any,
    /// This child.
    Child(i32),
}

/// The next child that has ended, if there is one. With `leave` it stays a zombie, whose id
/// nobody else can get. Never blocks.
///
/// # Errors
/// `ECHILD` when there is no such child; other errors do not occur.
pub fn ended(whose: Whose, leave: bool) -> io::Result<Option<Ended>> {
    let (kind, id) = match whose {
        Whose::Any => (libc::P_ALL, 0),
        Whose::Child(pid) => (libc::P_PID, pid.cast_unsigned()),
    };
    let leave = if leave { libc::WNOWAIT } else { 0 };
    // SAFETY: the structure is plain memory, for which zero is valid.
    let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
    loop {
        // SAFETY: `info` is a valid place for the result.
        let result = unsafe {
            libc::waitid(
                kind,
                id,
                &raw mut info,
                libc::WEXITED | libc::WNOHANG | leave,
            )
        };
        match check(result.into()) {
            Err(error) if error.raw_os_error() == Some(libc::EINTR) => {}
            Err(error) => return Err(error),
            Ok(_) => break,
        }
    }
    // SAFETY: waitid has filled the child's part, or left the zeros.
    let (pid, status) = unsafe { (info.si_pid(), info.si_status()) };
    if pid == 0 {
        return Ok(None);
    }
    let status = status.cast_unsigned();
    let code = if info.si_code == libc::CLD_EXITED {
        status & 0xff
    } else {
        128 + (status & 0x7f)
    };
    Ok(Some(Ended { pid, code }))
}

/// Leaves without running anything that the parent registered.
pub fn exit(code: i32) -> ! {
    // SAFETY: ends the process.
    unsafe { libc::_exit(code) }
}

/// Marks all descriptors from `first` close-on-exec, whoever opened them.
///
/// # Errors
/// None in practice.
pub fn close_on_exec_from(first: RawFd) -> io::Result<()> {
    close_range(first, libc::CLOSE_RANGE_CLOEXEC)
}

/// Closes all descriptors from `first`.
///
/// # Safety
/// Nothing owns any of them any more, or whoever does is never run again.
///
/// # Errors
/// None in practice.
pub unsafe fn close_from(first: RawFd) -> io::Result<()> {
    close_range(first, 0)
}

fn close_range(first: RawFd, flags: u32) -> io::Result<()> {
    // SAFETY: closing is the point; callers answer for the owners (see `close_from`).
    check(unsafe {
        libc::syscall(
            libc::SYS_close_range,
            first.cast_unsigned(),
            u32::MAX,
            flags,
        )
    })
    .map(drop)
}

/// Makes descriptor `number` a copy of `fd` that survives exec.
///
/// # Safety
/// Nothing owns `number`.
///
/// # Errors
/// As dup2(2).
pub unsafe fn place(fd: BorrowedFd<'_>, number: RawFd) -> io::Result<()> {
    if fd.as_raw_fd() == number {
        // SAFETY: takes an open descriptor and numbers.
        return check(unsafe { libc::fcntl(number, libc::F_SETFD, 0) }.into()).map(drop);
    }
    // SAFETY: takes an open descriptor; callers answer for the other.
    check(unsafe { libc::dup2(fd.as_raw_fd(), number) }.into()).map(drop)
}

/// Takes over a descriptor that this process was started with.
///
/// # Safety
/// It is open, and this is the only call for it.
pub unsafe fn inherited(number: RawFd) -> OwnedFd {
    // SAFETY: by the contract above.
    unsafe { OwnedFd::from_raw_fd(number) }
}

/// Gives every signal its default meaning and unblocks all: exec resets handlers, but neither
/// what is ignored (std ignores SIGPIPE) nor what is blocked.
///
/// # Errors
/// None in practice.
pub fn reset_signals() -> io::Result<()> {
    for signal in 1..=libc::SIGRTMAX() {
        let default = [0_u8; 32];
        // SAFETY: zero bytes are the kernel's `struct sigaction` for the default action. Refused,
        // harmlessly, for SIGKILL and SIGSTOP; by system call, as libc leaves out its own two.
        unsafe {
            libc::syscall(
                libc::SYS_rt_sigaction,
                signal,
                default.as_ptr(),
                ptr::null_mut::<u8>(),
                8,
            )
        };
    }
    let none = 0_u64;
    // SAFETY: the kernel's signal set is eight bytes; a null old set is allowed.
    check(unsafe {
        libc::syscall(
            libc::SYS_rt_sigprocmask,
            libc::SIG_SETMASK,
            &raw const none,
            ptr::null_mut::<u64>(),
            8,
        )
    })
    .map(drop)
}

/// Brings the loopback interface of this network namespace up.
///
/// # Errors
/// Without CAP_NET_ADMIN in it.
pub fn loopback_up() -> io::Result<()> {
    // SAFETY: takes numbers.
    let socket = super::check_fd(
        unsafe { libc::socket(libc::AF_INET, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0) }.into(),
    )?;
    // SAFETY: the structure is plain memory, for which zero is valid.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (place, byte) in request.ifr_name.iter_mut().zip(*b"lo") {
        *place = byte.cast_signed();
    }
    request.ifr_ifru.ifru_flags = libc::IFF_UP as libc::c_short;
    // SAFETY: the request lives for the call.
    check(unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFFLAGS, &raw const request) }.into())
        .map(drop)
}

/// Opens the other end of a pseudo terminal.
///
/// # Errors
/// `master` is none.
pub fn terminal_peer(master: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let unlocked: libc::c_int = 0;
    // SAFETY: the number lives for the call.
    let done = unsafe { libc::ioctl(master.as_raw_fd(), libc::TIOCSPTLCK, &raw const unlocked) };
    check(done.into())?;
    let flags = libc::O_RDWR | libc::O_NOCTTY | libc::O_CLOEXEC;
    // SAFETY: takes numbers.
    super::check_fd(unsafe { libc::ioctl(master.as_raw_fd(), libc::TIOCGPTPEER, flags) }.into())
}

/// Sets the size of a terminal in characters.
///
/// # Errors
/// It is none.
pub fn set_terminal_size(terminal: BorrowedFd<'_>, width: u16, height: u16) -> io::Result<()> {
    let size = libc::winsize {
        ws_row: height,
        ws_col: width,
        ws_xpixel: 0,
        ws_ypixel: 0,
    };
    // SAFETY: `size` lives for the call.
    check(unsafe { libc::ioctl(terminal.as_raw_fd(), libc::TIOCSWINSZ, &raw const size) }.into())
        .map(drop)
}

/// Makes `terminal` the controlling one of this session.
///
/// # Errors
/// This process leads no session, or the terminal belongs to another.
pub fn take_terminal(terminal: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: the argument is a number; 0 means not to steal it.
    check(unsafe { libc::ioctl(terminal.as_raw_fd(), libc::TIOCSCTTY, 0) }.into()).map(drop)
}
