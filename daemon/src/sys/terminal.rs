//! Pseudo terminals, the null device, and whom streams belong to.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use super::check;

/// Opens a new terminal of the sandbox's own: master and slave.
pub(crate) fn open(width: u16, height: u16) -> io::Result<(OwnedFd, OwnedFd)> {
    // Root inside may have put something else there, which must not hold PID 1 up.
    let flags = libc::O_RDWR | libc::O_NOCTTY | libc::O_CLOEXEC | libc::O_NONBLOCK;
    let master = open_file(c"/dev/ptmx", flags)?;
    let unlocked: libc::c_int = 0;
    // SAFETY: the number lives for the call.
    check(unsafe { libc::ioctl(master.as_raw_fd(), libc::TIOCSPTLCK, &raw const unlocked) })?;
    let flags = libc::O_RDWR | libc::O_NOCTTY | libc::O_CLOEXEC;
    // SAFETY: takes numbers.
    let slave = check(unsafe { libc::ioctl(master.as_raw_fd(), libc::TIOCGPTPEER, flags) })?;
    // SAFETY: just made, nobody else owns it.
    let slave = unsafe { OwnedFd::from_raw_fd(slave) };
    if width > 0 && height > 0 {
        let size = libc::winsize {
            ws_row: height,
            ws_col: width,
            ws_xpixel: 0,
            ws_ypixel: 0,
        };
        // SAFETY: `size` lives for the call.
        check(unsafe { libc::ioctl(slave.as_raw_fd(), libc::TIOCSWINSZ, &raw const size) })?;
    }
    Ok((master, slave))
}

fn open_file(path: &CStr, flags: i32) -> io::Result<OwnedFd> {
    // SAFETY: `path` is a C string.
    let fd = check(unsafe { libc::open(path.as_ptr(), flags) })?;
    // SAFETY: just made, nobody else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Makes `terminal` the controlling one of the session that this process leads.
pub(crate) fn control(terminal: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: the argument is a number; 0 means not to steal it.
    check(unsafe { libc::ioctl(terminal.as_raw_fd(), libc::TIOCSCTTY, 0) }).map(drop)
}

/// Gives `stream` to the user `uid`, group and mode aside.
pub(crate) fn give(stream: BorrowedFd<'_>, uid: u32) -> io::Result<()> {
    // SAFETY: takes numbers; -1 leaves the group.
    check(unsafe { libc::fchown(stream.as_raw_fd(), uid, u32::MAX) }).map(drop)
}

/// Whether `stream` is a null device.
pub(crate) fn is_null(stream: BorrowedFd<'_>) -> io::Result<bool> {
    let mut stat = std::mem::MaybeUninit::<libc::stat>::uninit();
    // SAFETY: `stat` has room.
    check(unsafe { libc::fstat(stream.as_raw_fd(), stat.as_mut_ptr()) })?;
    // SAFETY: filled by the successful call.
    let stat = unsafe { stat.assume_init() };
    Ok(stat.st_mode & libc::S_IFMT == libc::S_IFCHR && stat.st_rdev == libc::makedev(1, 3))
}

/// Opens the sandbox's own null device.
pub(crate) fn open_null() -> io::Result<OwnedFd> {
    let flags =
        libc::O_RDWR | libc::O_CLOEXEC | libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_NOCTTY;
    let null = open_file(c"/dev/null", flags)?;
    if is_null(null.as_fd())? {
        Ok(null)
    } else {
        Err(io::Error::other("it is not the null device"))
    }
}
