//! Connections to the keeper.

use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use super::protocol::{Kept, Limits, Notice, Request, Status};
use super::socket::{self, Packet};
use super::table::EventId;
use crate::LayerDigest;
use crate::sys::fanotify::{ByteRange, Verdict};

/// How long a keeper may take to answer a request; it does nothing slow.
const PATIENCE: Duration = Duration::from_secs(10);

/// Why the keeper did not do what it was asked for.
#[derive(Debug, thiserror::Error)]
pub enum KeeperError {
    /// There is no keeper, or the connection broke.
    #[error("the layer keeper cannot be reached: {0}")]
    Unreachable(#[source] io::Error),
    /// The keeper refused.
    #[error("the layer keeper could not {what}")]
    Refused {
        /// The system's error number.
        errno: i32,
        /// What failed, and why.
        what: String,
    },
    /// It is another program, or another version.
    #[error("what listens at the keeper's socket does not speak its protocol")]
    Protocol,
}

/// A controller's connection: one request, one answer.
#[derive(Debug)]
pub struct Controller {
    socket: OwnedFd,
}

impl Controller {
    /// Connects to the keeper that listens at `path`.
    ///
    /// # Errors
    /// [`KeeperError::Unreachable`].
    pub fn connect(path: &Path) -> Result<Self, KeeperError> {
        let socket = socket::connect(path).map_err(KeeperError::Unreachable)?;
        set_patience(&socket, Some(PATIENCE))?;
        Ok(Self { socket })
    }

    /// Turns the connection into one that listens for as long as it takes.
    fn into_listener(self, request: Request) -> Result<OwnedFd, KeeperError> {
        self.done(request, None)?;
        set_patience(&self.socket, None)?;
        Ok(self.socket)
    }

    /// Makes a new group.
    ///
    /// # Errors
    /// Any; refused when there is a group already.
    pub fn start(&self, limits: Limits) -> Result<(), KeeperError> {
        self.done(Request::Start(limits), None)
    }

    /// Hands back a copy of what the keeper before this one had.
    ///
    /// # Errors
    /// Any; refused when there is a group already.
    pub fn restore(&self, kept: Kept, fd: BorrowedFd<'_>) -> Result<(), KeeperError> {
        self.done(Request::Restore(kept), Some(fd))
    }

    /// Says that all copies are handed back.
    ///
    /// # Errors
    /// Any; refused when the group or the journal is missing.
    pub fn restored(&self, limits: Limits) -> Result<(), KeeperError> {
        self.done(Request::Restored(limits), None)
    }

    /// Marks a layer's blob. The descriptor is the one way to write it; the caller mounts the layer
    /// only after this.
    ///
    /// # Errors
    /// Any; refused when the blob is missing or its file system has no pre-content events.
    pub fn watch(&self, layer: LayerDigest) -> Result<OwnedFd, KeeperError> {
        self.descriptor(Request::Watch(layer))
    }

    /// Removes the mark of a complete blob.
    ///
    /// # Errors
    /// Any.
    pub fn unwatch(&self, layer: LayerDigest) -> Result<(), KeeperError> {
        self.done(Request::Unwatch(layer), None)
    }

    /// The descriptor of a watched blob.
    ///
    /// # Errors
    /// Any; refused when the layer is not watched.
    pub fn blob(&self, layer: LayerDigest) -> Result<OwnedFd, KeeperError> {
        self.descriptor(Request::Blob(layer))
    }

    /// Gives a layer's mount into custody.
    ///
    /// # Errors
    /// Any.
    pub fn keep_mount(&self, layer: LayerDigest, mount: BorrowedFd<'_>) -> Result<(), KeeperError> {
        self.done(Request::KeepMount(layer), Some(mount))
    }

    /// A layer's mount.
    ///
    /// # Errors
    /// Any; refused when there is none.
    pub fn mount(&self, layer: LayerDigest) -> Result<OwnedFd, KeeperError> {
        self.descriptor(Request::Mount(layer))
    }

    /// The folder of the FUSE file system.
    ///
    /// # Errors
    /// Any; refused when there is none.
    pub fn tree(&self) -> Result<OwnedFd, KeeperError> {
        self.descriptor(Request::Tree)
    }

    /// Lets a layer's mount go. A missing one is no error.
    ///
    /// # Errors
    /// Any.
    pub fn drop_mount(&self, layer: LayerDigest) -> Result<(), KeeperError> {
        self.done(Request::DropMount(layer), None)
    }

    /// Counters and state.
    ///
    /// # Errors
    /// Any.
    pub fn status(&self) -> Result<Status, KeeperError> {
        match self.ask(Request::Status, None)? {
            (Notice::Status(status), _) => Ok(status),
            _ => Err(KeeperError::Protocol),
        }
    }

    fn done(&self, request: Request, fd: Option<BorrowedFd<'_>>) -> Result<(), KeeperError> {
        match self.ask(request, fd)? {
            (Notice::Done, _) => Ok(()),
            _ => Err(KeeperError::Protocol),
        }
    }

    fn descriptor(&self, request: Request) -> Result<OwnedFd, KeeperError> {
        match self.ask(request, None)? {
            (Notice::Descriptor, Some(fd)) => Ok(fd),
            _ => Err(KeeperError::Protocol),
        }
    }

    fn ask(
        &self,
        request: Request,
        fd: Option<BorrowedFd<'_>>,
    ) -> Result<(Notice, Option<OwnedFd>), KeeperError> {
        socket::send(&self.socket, &request.encode(), fd).map_err(KeeperError::Unreachable)?;
        let (notice, fd) = next(&self.socket)?;
        match notice {
            Notice::Failed { errno, what } => Err(KeeperError::Refused { errno, what }),
            notice => Ok((notice, fd)),
        }
    }
}

/// The filler's connection.
#[derive(Debug)]
pub struct FillerLink {
    socket: OwnedFd,
}

/// A question as the filler gets it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Asked {
    /// By which it is answered, on this connection.
    pub event: EventId,
    /// Whose blob.
    pub layer: LayerDigest,
    /// Which bytes of it.
    pub range: ByteRange,
}

impl FillerLink {
    /// Connects as the filler. One that was connected before is dismissed, and every open question
    /// comes again.
    ///
    /// # Errors
    /// Any.
    pub fn connect(path: &Path) -> Result<Self, KeeperError> {
        let socket = Controller::connect(path)?.into_listener(Request::Fill)?;
        Ok(Self { socket })
    }

    /// Waits for the next question.
    ///
    /// # Errors
    /// [`KeeperError::Unreachable`] when the keeper is gone or has another filler.
    pub fn next(&self) -> Result<Asked, KeeperError> {
        match next(&self.socket)? {
            (Notice::Question(event, layer, range), _) => Ok(Asked {
                event,
                layer,
                range,
            }),
            _ => Err(KeeperError::Protocol),
        }
    }

    /// Answers a question, once its bytes are in the blob or cannot be had.
    ///
    /// # Errors
    /// [`KeeperError::Unreachable`].
    pub fn answer(&self, event: EventId, verdict: Verdict) -> Result<(), KeeperError> {
        let packet = Request::Answer(event, verdict).encode();
        socket::send(&self.socket, &packet, None).map_err(KeeperError::Unreachable)
    }

    /// Ends the connection from another thread: [`Self::next`] returns.
    pub fn close(&self) {
        // Fails only when the keeper has ended it.
        let _ = rustix::net::shutdown(&self.socket, rustix::net::Shutdown::Both);
    }
}

/// A holder's connection.
#[derive(Debug)]
pub(super) struct HolderLink {
    socket: OwnedFd,
}

/// What a holder hears.
#[derive(Debug)]
pub(super) enum Custody {
    Keep(Kept, OwnedFd),
    Drop(Kept),
    UpToDate,
}

impl HolderLink {
    pub(super) fn connect(path: &Path) -> Result<Self, KeeperError> {
        let socket = Controller::connect(path)?.into_listener(Request::Hold)?;
        Ok(Self { socket })
    }

    pub(super) fn next(&self) -> Result<Custody, KeeperError> {
        match next(&self.socket)? {
            (Notice::Keep(kept), Some(fd)) => Ok(Custody::Keep(kept, fd)),
            (Notice::Drop(kept), _) => Ok(Custody::Drop(kept)),
            (Notice::UpToDate, _) => Ok(Custody::UpToDate),
            _ => Err(KeeperError::Protocol),
        }
    }

    /// A second handle, by which another thread can end the connection.
    pub(super) fn closer(&self) -> io::Result<OwnedFd> {
        self.socket.as_fd().try_clone_to_owned()
    }
}

fn set_patience(socket: &OwnedFd, patience: Option<Duration>) -> Result<(), KeeperError> {
    let which = rustix::net::sockopt::Timeout::Recv;
    rustix::net::sockopt::set_socket_timeout(socket, which, patience)
        .map_err(|errno| KeeperError::Unreachable(errno.into()))
}

fn next(socket: &OwnedFd) -> Result<(Notice, Option<OwnedFd>), KeeperError> {
    let ended = || KeeperError::Unreachable(io::ErrorKind::UnexpectedEof.into());
    let received = loop {
        match socket::receive(socket) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            other => break other.map_err(KeeperError::Unreachable)?,
        }
    };
    let packet: Packet = received.ok_or_else(ended)?;
    let notice = Notice::decode(packet.bytes()).ok_or(KeeperError::Protocol)?;
    Ok((notice, packet.fd))
}
