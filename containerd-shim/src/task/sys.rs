//! The system calls of the task service that have no safe wrapper.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::Command;

use nix::libc;
use tokio::io::unix::AsyncFd;

/// Gives `command` the descriptors `fds` as 3, 4, 5 and so on, and a session of its own.
pub(crate) fn pass_from_3(command: &mut Command, fds: Vec<OwnedFd>) {
    let count = libc::c_int::try_from(fds.len()).unwrap_or(libc::c_int::MAX);
    // SAFETY: the closure only makes async-signal-safe calls and does not allocate.
    unsafe {
        command.pre_exec(move || {
            // Out of the way first: a source may sit where another one is to go.
            let mut moved = [-1; MAX_PASSED];
            for (place, fd) in moved.iter_mut().zip(&fds) {
                *place = libc::fcntl(fd.as_raw_fd(), libc::F_DUPFD_CLOEXEC, 3 + count);
                if *place == -1 {
                    return Err(io::Error::last_os_error());
                }
            }
            for (target, fd) in (3..).zip(moved.iter().take(fds.len())) {
                if libc::dup2(*fd, target) == -1 {
                    return Err(io::Error::last_os_error());
                }
            }
            libc::setsid();
            Ok(())
        });
    }
}

/// Most descriptors that [`pass_from_3`] takes.
const MAX_PASSED: usize = 4;

/// The descriptor `fd`, which the parent of this process has left open for it. Closed on exec from
/// now on. Call it once, before anything else is opened.
pub(crate) fn inherited(fd: i32) -> io::Result<OwnedFd> {
    // SAFETY: takes plain numbers.
    if unsafe { libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC) } == -1 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: it is open, and nobody else in this process knows of it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Drives `fd`, which is non-blocking, by readiness.
pub(crate) fn watch(fd: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an `OwnedFd` is the same open descriptor until it is dropped, and `AsyncFd` gives it
    // away only after it has deregistered it.
    Ok(unsafe { AsyncFd::register(fd) }?)
}
