//! The kernel's end of a FUSE file system.

use std::io::{self, IoSlice};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use super::wire::{self, Call, Request};
use crate::mount;

/// How long the kernel may take to say the first word; it does so when the file system is made.
const PATIENCE: Duration = Duration::from_secs(10);
/// Room for any request. The least that the kernel takes is 8192.
pub(super) const REQUEST_BYTES: usize = 16 << 10;

/// A connection. Any number of processes may hold its descriptor; with the last one gone, all reads
/// fail.
#[derive(Debug)]
pub(crate) struct Connection {
    device: OwnedFd,
}

impl Connection {
    /// A new file system, mounted nowhere: the connection and the folder's descriptor.
    ///
    /// # Errors
    /// What failed, with the system's error.
    pub(crate) fn new() -> Result<(Self, OwnedFd), (&'static str, io::Error)> {
        let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let device = rustix::fs::open("/dev/fuse", flags, Mode::empty())
            .map_err(|errno| ("open /dev/fuse", errno.into()))?;
        let tree = mount::fuse(device.as_fd())
            .map_err(|error| ("make a FUSE file system", io::Error::other(error)))?;
        let connection = Self { device };
        connection
            .negotiate()
            .map_err(|error| ("speak with the kernel's FUSE", error))?;
        Ok((connection, tree))
    }

    /// Takes over a connection that another process made.
    #[must_use]
    pub(crate) fn kept(device: OwnedFd) -> Self {
        Self { device }
    }

    fn negotiate(&self) -> io::Result<()> {
        let mut buffer = vec![0; REQUEST_BYTES];
        let patience = Timespec::try_from(PATIENCE).map_err(io::Error::other)?;
        loop {
            let mut wanted = [PollFd::new(self, PollFlags::IN)];
            if poll(&mut wanted, Some(&patience))? == 0 {
                return Err(io::ErrorKind::TimedOut.into());
            }
            let Some(Request { unique, call, .. }) = self.next(&mut buffer)? else {
                continue;
            };
            return match call {
                Call::Init {
                    major,
                    flags,
                    flags2,
                } if wire::speaks(major) => self.reply(unique, &wire::init(flags, flags2)),
                _ => Err(io::ErrorKind::Unsupported.into()),
            };
        }
    }

    /// Whether nobody can read through it any more, as after its abortion by the administrator.
    #[must_use]
    pub(crate) fn is_dead(&self) -> bool {
        let mut state = [PollFd::new(self, PollFlags::IN)];
        let none = Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        poll(&mut state, Some(&none)).is_err() || state[0].revents().contains(PollFlags::ERR)
    }

    /// The next request; none when there is none at the moment.
    ///
    /// # Errors
    /// `ENODEV` when the connection is dead.
    pub(super) fn next<'b>(&self, buffer: &'b mut [u8]) -> io::Result<Option<Request<'b>>> {
        match rustix::io::read(&self.device, &mut *buffer) {
            Ok(length) => {
                let request = wire::parse(buffer.get(..length).unwrap_or_default());
                let strange = || io::Error::new(io::ErrorKind::InvalidData, "no request of FUSE");
                request.map(Some).ok_or_else(strange)
            }
            // Of an interrupted request nothing is left.
            Err(Errno::AGAIN | Errno::NOENT | Errno::INTR) => Ok(None),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Answers with content. A request that is gone is no error.
    ///
    /// # Errors
    /// Those of `writev(2)`.
    pub(super) fn reply(&self, unique: u64, content: &[u8]) -> io::Result<()> {
        let head = wire::head(unique, content.len());
        self.send(&[IoSlice::new(&head), IoSlice::new(content)])
    }

    /// Answers with an error, or with success when `errno` is 0.
    ///
    /// # Errors
    /// Those of [`Self::reply`].
    pub(super) fn reply_plain(&self, unique: u64, errno: i32) -> io::Result<()> {
        self.send(&[IoSlice::new(&wire::plain(unique, errno))])
    }

    /// Has the kernel send again what was taken and not answered.
    ///
    /// # Errors
    /// `EINVAL` before Linux 6.9.
    pub(crate) fn resend(&self) -> io::Result<()> {
        self.send(&[IoSlice::new(&wire::resend())])
    }

    fn send(&self, parts: &[IoSlice<'_>]) -> io::Result<()> {
        match rustix::io::writev(&self.device, parts) {
            Ok(_) | Err(Errno::NOENT) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.device.as_fd()
    }
}
