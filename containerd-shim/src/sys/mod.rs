//! The system calls that neither std nor nix offers safely. All `unsafe` of this crate is below.

#![allow(unsafe_code, reason = "this module exists for it")]

pub mod memfd;
pub mod message;
pub mod mount;
pub mod privileges;
pub mod process;

use std::io;
use std::os::fd::{FromRawFd, OwnedFd};

/// A system call's result as Rust has it.
fn check(result: libc::c_long) -> io::Result<libc::c_long> {
    if result == -1 {
        Err(io::Error::last_os_error())
    } else {
        Ok(result)
    }
}

/// A system call's new descriptor.
fn check_fd(result: libc::c_long) -> io::Result<OwnedFd> {
    let fd = check(result)?;
    let fd = i32::try_from(fd).map_err(|_| io::Error::from_raw_os_error(libc::EBADF))?;
    // SAFETY: the kernel has just made it for us; nobody else knows it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}
