//! Signals, children and the controlling terminal.

use std::ffi::{CStr, CString};
use std::io::{self, Read};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::{fs, mem, ptr};

use super::check;

/// A process id as the kernel gives it; never zero or negative here.
pub(crate) type Pid = libc::pid_t;

/// How a child ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ended {
    /// `exit(code)`.
    Exited(u8),
    /// Killed by this signal.
    Signaled(u8),
}

/// What kept a child from becoming its program.
#[derive(Debug)]
pub(crate) enum SpawnError {
    /// No process could be made, or it failed before `execve`.
    Setup(io::Error),
    /// `execve` refused the program.
    Exec(io::Error),
}

/// Blocks every signal for this thread, so that all of them stay pending until
/// [`wait_signal`] takes them. SIGCHLD gets its default disposition back: an
/// inherited "ignore" would make the kernel reap behind our back.
pub(crate) fn block_all_signals() -> io::Result<()> {
    // SAFETY: setting a standard disposition takes no pointer.
    let previous = unsafe { libc::signal(libc::SIGCHLD, libc::SIG_DFL) };
    if previous == libc::SIG_ERR {
        return Err(io::Error::last_os_error());
    }
    let all = full_set();
    // SAFETY: `all` is an initialised set; a null old set is allowed.
    check(unsafe { libc::sigprocmask(libc::SIG_SETMASK, &all, ptr::null_mut()) }).map(drop)
}

/// Waits for the next pending signal and takes it, without any timer.
pub(crate) fn wait_signal() -> io::Result<i32> {
    let all = full_set();
    loop {
        // SAFETY: `all` is an initialised set; a null info is allowed.
        match check(unsafe { libc::sigwaitinfo(&all, ptr::null_mut()) }) {
            // A stop and continue of this process interrupts the wait.
            Err(error) if error.raw_os_error() == Some(libc::EINTR) => {}
            other => return other,
        }
    }
}

/// Takes `signal` off the pending set if it is there.
pub(crate) fn discard_pending(signal: i32) {
    let now = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    let mut set = empty_set();
    // SAFETY: `set` is initialised; a bad number only returns an error.
    unsafe { libc::sigaddset(&mut set, signal) };
    // SAFETY: both structures outlive the call, which returns at once.
    unsafe { libc::sigtimedwait(&set, ptr::null_mut(), &now) };
}

/// Takes the exit status of one ended child, if there is one.
///
/// # Errors
/// Whatever `waitpid` says, except that no children at all is `None`.
pub(crate) fn reap() -> io::Result<Option<(Pid, Ended)>> {
    let mut status = 0;
    loop {
        // SAFETY: `status` is a valid place for the result.
        match check(unsafe { libc::waitpid(-1, &mut status, libc::WNOHANG) }) {
            Ok(0) => return Ok(None),
            Ok(pid) => return Ok(Some((pid, ended(status)))),
            Err(error) => match error.raw_os_error() {
                Some(libc::EINTR) => {}
                Some(libc::ECHILD) => return Ok(None),
                _ => return Err(error),
            },
        }
    }
}

fn ended(status: libc::c_int) -> Ended {
    // Both values are at most 8 bits wide by the encoding of wait statuses.
    if libc::WIFSIGNALED(status) {
        Ended::Signaled(libc::WTERMSIG(status).to_le_bytes()[0])
    } else {
        Ended::Exited(libc::WEXITSTATUS(status).to_le_bytes()[0])
    }
}

/// Sends `signal` to the one process `pid`.
pub(crate) fn kill(pid: Pid, signal: i32) -> io::Result<()> {
    // SAFETY: takes no pointers.
    check(unsafe { libc::kill(pid, signal) }).map(drop)
}

/// Makes orphans of the calling process's tree its own children when it is not
/// PID 1 of its namespace.
pub(crate) fn become_subreaper() -> io::Result<()> {
    // SAFETY: this option takes plain numbers.
    check(unsafe { libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) }).map(drop)
}

/// True if `fd` is the controlling terminal of a session that this process leads.
pub(crate) fn leads_terminal(fd: BorrowedFd<'_>) -> bool {
    // SAFETY: the descriptor is open for the length of the call.
    let leader = unsafe { libc::tcgetsid(fd.as_raw_fd()) };
    leader != -1 && leader.cast_unsigned() == std::process::id()
}

/// Lets go of the controlling terminal, so that another session can take it.
/// The kernel sends SIGHUP and SIGCONT to the foreground group for this.
pub(crate) fn release_terminal(fd: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: this request has no argument and the descriptor is open.
    check(unsafe { libc::ioctl(fd.as_raw_fd(), libc::TIOCNOTTY) }).map(drop)
}

/// Starts `program` in a session of its own, with default dispositions, no
/// blocked signal, this process's environment and, if `terminal`, descriptor 0
/// as controlling terminal. Returns once the program runs.
///
/// The caller has one thread and has blocked all signals: none reaches the child
/// before its dispositions are reset.
pub(crate) fn spawn(program: &CStr, argv: &[CString], terminal: bool) -> Result<Pid, SpawnError> {
    let mut arguments: Vec<*const libc::c_char> = argv.iter().map(|a| a.as_ptr()).collect();
    arguments.push(ptr::null());
    let (reader, writer) = pipe().map_err(SpawnError::Setup)?;

    // SAFETY: the process has one thread, so the child may go on as usual.
    let pid = check(unsafe { libc::fork() }).map_err(SpawnError::Setup)?;
    if pid == 0 {
        // `arguments` is null-terminated and its strings live in `argv`.
        let failure = exec_child(program, &arguments, terminal);
        let mut record = [0; RECORD_LEN];
        record[0] = u8::from(matches!(failure, SpawnError::Exec(_)));
        let (SpawnError::Setup(error) | SpawnError::Exec(error)) = failure;
        record[1..].copy_from_slice(&error.raw_os_error().unwrap_or(libc::EIO).to_ne_bytes());
        // SAFETY: the buffer is valid for its length. Nobody is left to tell if
        // the write fails; the parent then sees an exit code.
        unsafe { libc::write(writer.as_raw_fd(), record.as_ptr().cast(), RECORD_LEN) };
        // SAFETY: ends the child without running the parent's exit handlers.
        unsafe { libc::_exit(127) };
    }
    drop(writer);

    // The write end closes on exec: end of file means that the program runs.
    let mut record = Vec::with_capacity(RECORD_LEN);
    fs::File::from(reader)
        .read_to_end(&mut record)
        .map_err(SpawnError::Setup)?;
    match <[u8; RECORD_LEN]>::try_from(record.as_slice()) {
        Err(_) => Ok(pid),
        Ok([stage, errno @ ..]) => {
            let error = io::Error::from_raw_os_error(i32::from_ne_bytes(errno));
            Err(if stage == 1 {
                SpawnError::Exec(error)
            } else {
                SpawnError::Setup(error)
            })
        }
    }
}

/// The stage that failed, then errno.
const RECORD_LEN: usize = 1 + size_of::<i32>();

/// Handler, flags, restorer and mask of the kernel's `struct sigaction`.
const KERNEL_SIGACTION_LEN: usize = 32;
/// The kernel's signal set: a bit for each of 64 signals.
const KERNEL_SIGSET_LEN: usize = 8;

/// The child's half of [`spawn`]; returns only if it failed.
fn exec_child(program: &CStr, argv: &[*const libc::c_char], terminal: bool) -> SpawnError {
    // SAFETY: takes no arguments. It cannot fail: a new child leads no group.
    unsafe { libc::setsid() };
    if terminal {
        // SAFETY: the argument is a number; 0 means not to steal the terminal.
        if let Err(error) = check(unsafe { libc::ioctl(0, libc::TIOCSCTTY, 0) }) {
            return SpawnError::Setup(error);
        }
    }
    if let Err(error) = reset_signals() {
        return SpawnError::Setup(error);
    }
    // SAFETY: `program` is a C string and `argv` a null-terminated array of
    // them. execv passes the environment on byte for byte.
    unsafe { libc::execv(program.as_ptr(), argv.as_ptr()) };
    SpawnError::Exec(io::Error::last_os_error())
}

/// Default dispositions and no blocked signal, for a program that is run next.
fn reset_signals() -> io::Result<()> {
    // exec resets handlers but keeps "ignored", which std sets for SIGPIPE. By
    // the system call, because libc leaves out the two signals of its threads.
    for signal in 1..=libc::SIGRTMAX() {
        let default = [0_u8; KERNEL_SIGACTION_LEN];
        // SAFETY: zero bytes are the kernel's structure for the default action,
        // and it copies them. Refused, harmlessly, for SIGKILL and SIGSTOP.
        unsafe {
            libc::syscall(
                libc::SYS_rt_sigaction,
                signal,
                default.as_ptr(),
                ptr::null_mut::<u8>(),
                KERNEL_SIGSET_LEN,
            )
        };
    }
    let none = empty_set();
    // SAFETY: `none` is an initialised set; a null old set is allowed.
    check(unsafe { libc::sigprocmask(libc::SIG_SETMASK, &none, ptr::null_mut()) }).map(drop)
}

/// Gives back what was allocated and is free again: this process is resident once per container,
/// and idle for almost all of its life.
pub(crate) fn trim_memory() {
    #[cfg(target_env = "gnu")]
    // SAFETY: takes a number; the heap belongs to this thread alone.
    unsafe {
        libc::malloc_trim(0)
    };
}

/// What a fork returns to either side.
pub(crate) enum Side {
    /// The new process. It ends by [`leave`] or by becoming a program.
    Child,
    /// The old one, with the new one's id.
    Parent(Pid),
}

/// Makes a copy of this process, which has one thread, so the copy may go on as usual.
pub(crate) fn fork() -> io::Result<Side> {
    // SAFETY: see above.
    match check(unsafe { libc::fork() })? {
        0 => Ok(Side::Child),
        pid => Ok(Side::Parent(pid)),
    }
}

/// Ends this process without the exit handlers of the one it was copied from.
pub(crate) fn leave(code: i32) -> ! {
    // SAFETY: takes a number and does not return.
    unsafe { libc::_exit(code) }
}

/// Leads a session of its own, which a new child always can.
pub(crate) fn new_session() {
    // SAFETY: takes no arguments.
    unsafe { libc::setsid() };
}

/// Becomes `program`, with `streams` as its three descriptors and no others, with default
/// dispositions and no blocked signal. Returns only what went wrong.
///
/// To be called in a child that does nothing else afterwards but [`leave`].
pub(crate) fn become_program(
    program: &CStr,
    argv: &[CString],
    env: &[CString],
    streams: [BorrowedFd<'_>; 3],
) -> io::Error {
    let pointers = |strings: &[CString]| {
        let mut pointers: Vec<*const libc::c_char> = strings.iter().map(|s| s.as_ptr()).collect();
        pointers.push(ptr::null());
        pointers
    };
    let (argv, env) = (pointers(argv), pointers(env));
    for (number, stream) in (0..).zip(streams) {
        // SAFETY: takes numbers. The streams came in above these three, which are the child's
        // to replace.
        if let Err(error) = check(unsafe { libc::dup2(stream.as_raw_fd(), number) }) {
            return error;
        }
    }
    close_on_exec_from(3);
    if let Err(error) = reset_signals() {
        return error;
    }
    // SAFETY: `program` is a C string, both arrays are null-terminated and their strings alive.
    unsafe { libc::execve(program.as_ptr(), argv.as_ptr(), env.as_ptr()) };
    io::Error::last_os_error()
}

/// Closes all descriptors from `first` on when a program is run.
fn close_on_exec_from(first: u32) {
    // SAFETY: takes numbers.
    let done = unsafe {
        libc::syscall(
            libc::SYS_close_range,
            first,
            u32::MAX,
            libc::CLOSE_RANGE_CLOEXEC,
        )
    };
    if done == 0 {
        return;
    }
    // An old kernel or a seccomp profile. What we open is closed on exec anyway, so this is
    // about what the runtime may have left open, with the lowest numbers.
    for number in first.cast_signed()..1024 {
        // SAFETY: takes numbers; one that is not open only returns an error.
        unsafe { libc::fcntl(number, libc::F_SETFD, libc::FD_CLOEXEC) };
    }
}

/// A pipe that is closed on exec: reader, writer.
pub(crate) fn pipe() -> io::Result<(OwnedFd, OwnedFd)> {
    let mut fds = [-1; 2];
    // SAFETY: `fds` has room for the two descriptors.
    check(unsafe { libc::pipe2(fds.as_mut_ptr(), libc::O_CLOEXEC) })?;
    // SAFETY: both were just made and have no other owner.
    Ok(unsafe { (OwnedFd::from_raw_fd(fds[0]), OwnedFd::from_raw_fd(fds[1])) })
}

/// All signals.
pub(super) fn full_set() -> libc::sigset_t {
    // SAFETY: a set of zero bytes is valid, and sigfillset overwrites it.
    unsafe {
        let mut set = mem::zeroed();
        libc::sigfillset(&mut set);
        set
    }
}

fn empty_set() -> libc::sigset_t {
    // SAFETY: a set of zero bytes is valid, and sigemptyset overwrites it.
    unsafe {
        let mut set = mem::zeroed();
        libc::sigemptyset(&mut set);
        set
    }
}
