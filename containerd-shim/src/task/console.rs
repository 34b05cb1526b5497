//! The socket by which runc hands over a new terminal's master.

use std::fs;
use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};

/// A listening socket in a short folder: a bundle's path may be longer than a socket's may be.
pub(crate) struct Console {
    listener: UnixListener,
    path: PathBuf,
}

impl Console {
    /// Binds a new one in `dir`.
    pub(crate) fn bind(dir: &Path) -> io::Result<Self> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = dir.join(format!("pty-{}-{number}", std::process::id()));
        // Of an earlier process with this number.
        drop(fs::remove_file(&path));
        let listener = UnixListener::bind(&path)?;
        listener.set_nonblocking(true)?;
        Ok(Self { listener, path })
    }

    /// Where runc is to connect.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// The master that was sent. runc has ended: it is there, or never will be.
    pub(crate) fn receive(&self) -> io::Result<OwnedFd> {
        let (stream, _) = self
            .listener
            .accept()
            .map_err(|_| io::Error::other("runc sent no terminal"))?;
        stream.set_nonblocking(true)?;
        // The message is the terminal's name, which nobody needs.
        let mut name = [0; 4096];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        recvmsg(
            &stream,
            &mut [IoSliceMut::new(&mut name)],
            &mut ancillary,
            RecvFlags::CMSG_CLOEXEC,
        )?;
        ancillary
            .drain()
            .find_map(|message| match message {
                RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
                _ => None,
            })
            .ok_or_else(|| io::Error::other("runc sent no terminal"))
    }
}

impl Drop for Console {
    fn drop(&mut self) {
        drop(fs::remove_file(&self.path));
    }
}
