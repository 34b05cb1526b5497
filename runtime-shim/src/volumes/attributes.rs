//! Inode attributes of `chattr`: a container with CAP_LINUX_IMMUTABLE can leave
//! files that even root cannot delete until their flags are cleared.
#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd as _;

/// `FS_IMMUTABLE_FL` and `FS_APPEND_FL` of the kernel's `linux/fs.h`.
const PROTECTING: libc::c_long = 0x10 | 0x20;

nix::ioctl_read!(get_flags, b'f', 1, libc::c_long);
nix::ioctl_write_ptr!(set_flags, b'f', 2, libc::c_long);

/// Clears the flags that forbid deletion; true if there were any.
pub(super) fn unprotect(file: &File) -> io::Result<bool> {
    let mut flags: libc::c_long = 0;
    // SAFETY: the descriptor is open for the duration of the call, and the kernel
    // writes at most one long into `flags`.
    unsafe { get_flags(file.as_raw_fd(), &raw mut flags) }?;
    if flags & PROTECTING == 0 {
        return Ok(false);
    }
    flags &= !PROTECTING;
    // SAFETY: as above; the kernel only reads `flags`.
    unsafe { set_flags(file.as_raw_fd(), &raw const flags) }?;
    Ok(true)
}
