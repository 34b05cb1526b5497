//! Waiting for several things at once, without a timer.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use super::check;
use super::process::full_set;

/// Bytes can be read, or the other side is gone.
pub(crate) const READABLE: u32 = libc::EPOLLIN as u32;
/// Bytes can be written.
pub(crate) const WRITABLE: u32 = libc::EPOLLOUT as u32;

/// Most events that are taken at a time.
const BATCH: usize = 8;

/// A set of descriptors to wait for, each under a number.
pub(crate) struct Events(OwnedFd);

impl Events {
    /// An empty set.
    pub(crate) fn new() -> io::Result<Self> {
        // SAFETY: takes a number.
        let fd = check(unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) })?;
        // SAFETY: just made, nobody else owns it.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    /// Adds a descriptor; dropping its last copy takes it out again.
    pub(crate) fn add(&self, fd: BorrowedFd<'_>, number: u64, what: u32) -> io::Result<()> {
        self.control(libc::EPOLL_CTL_ADD, fd, number, what)
    }

    /// Waits for something else of a descriptor.
    pub(crate) fn change(&self, fd: BorrowedFd<'_>, number: u64, what: u32) -> io::Result<()> {
        self.control(libc::EPOLL_CTL_MOD, fd, number, what)
    }

    /// Takes a descriptor out that others may hold copies of.
    pub(crate) fn remove(&self, fd: BorrowedFd<'_>) -> io::Result<()> {
        self.control(libc::EPOLL_CTL_DEL, fd, 0, 0)
    }

    fn control(&self, how: i32, fd: BorrowedFd<'_>, number: u64, what: u32) -> io::Result<()> {
        let mut event = libc::epoll_event {
            events: what,
            u64: number,
        };
        // SAFETY: both are open and `event` lives for the call.
        check(unsafe { libc::epoll_ctl(self.0.as_raw_fd(), how, fd.as_raw_fd(), &raw mut event) })
            .map(drop)
    }

    /// Waits until something has happened, and says to which numbers.
    pub(crate) fn wait(&self) -> io::Result<impl Iterator<Item = u64> + use<>> {
        let mut events = [libc::epoll_event { events: 0, u64: 0 }; BATCH];
        loop {
            // SAFETY: the array has room for as many as the call is told.
            let got = unsafe {
                libc::epoll_wait(
                    self.0.as_raw_fd(),
                    events.as_mut_ptr(),
                    BATCH as libc::c_int,
                    -1,
                )
            };
            match check(got) {
                Ok(count) => {
                    let count = usize::try_from(count).unwrap_or_default();
                    return Ok(events.into_iter().take(count).map(|event| event.u64));
                }
                Err(error) if error.raw_os_error() == Some(libc::EINTR) => {}
                Err(error) => return Err(error),
            }
        }
    }
}

/// A descriptor from which all blocked signals can be read.
pub(crate) fn signals() -> io::Result<OwnedFd> {
    let all = full_set();
    // SAFETY: `all` is an initialised set.
    let fd = check(unsafe { libc::signalfd(-1, &all, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK) })?;
    // SAFETY: just made, nobody else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Takes one pending signal, if there is one.
pub(crate) fn next_signal(signals: BorrowedFd<'_>) -> io::Result<Option<i32>> {
    let mut info = std::mem::MaybeUninit::<libc::signalfd_siginfo>::uninit();
    let size = size_of::<libc::signalfd_siginfo>();
    // SAFETY: `info` has room for `size` bytes.
    let got = unsafe { libc::read(signals.as_raw_fd(), info.as_mut_ptr().cast(), size) };
    match usize::try_from(got) {
        Ok(length) if length == size => {
            // SAFETY: the kernel has filled all of it.
            let info = unsafe { info.assume_init() };
            Ok(Some(info.ssi_signo.cast_signed()))
        }
        Ok(_) => Ok(None),
        Err(_) => match io::Error::last_os_error() {
            error if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
            error => Err(error),
        },
    }
}
