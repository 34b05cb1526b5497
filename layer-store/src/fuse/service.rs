//! Answers what can be answered at once, and hands on the reads that somebody must fill.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use super::connection::REQUEST_BYTES;
use super::files::State;
use super::wire::{self, Call, MAX_READ};
use super::{Connection, Files};
use crate::LayerDigest;
use crate::sys::fanotify::{ByteRange, Verdict};

/// A read that waits for an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Arrived {
    /// By which it is answered.
    pub unique: u64,
    /// Whose bytes.
    pub layer: LayerDigest,
    /// Which.
    pub range: ByteRange,
}

/// What one request of the kernel came to.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// There was none.
    Idle,
    /// It is answered.
    Done,
    /// It was about a file that nobody has, and got an error.
    Unknown,
    /// A read that the filler must see to.
    Question(Arrived),
    /// The last user of a layer's file is gone, and so is the file.
    Gone(LayerDigest),
}

/// A served file system.
pub(crate) struct Service {
    connection: Connection,
    tree: OwnedFd,
    files: Files,
    request: Box<[u8]>,
    data: Box<[u8]>,
}

impl std::fmt::Debug for Service {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Service")
            .field("files", &self.files)
            .finish_non_exhaustive()
    }
}

impl Service {
    /// A new file system.
    ///
    /// # Errors
    /// What failed, with the system's error.
    pub(crate) fn start() -> Result<Self, (&'static str, io::Error)> {
        let (connection, tree) = Connection::new()?;
        Ok(Self::new(connection, tree))
    }

    /// The file system of a process before this one. Once the files are inserted,
    /// [`Self::resend`] brings its open questions back.
    #[must_use]
    pub(crate) fn kept(connection: Connection, tree: OwnedFd) -> Self {
        Self::new(connection, tree)
    }

    fn new(connection: Connection, tree: OwnedFd) -> Self {
        Self {
            connection,
            tree,
            files: Files::default(),
            request: vec![0; REQUEST_BYTES].into_boxed_slice(),
            data: vec![0; MAX_READ as usize].into_boxed_slice(),
        }
    }

    /// Has all open questions asked again.
    ///
    /// # Errors
    /// Those of [`Connection::resend`].
    pub(crate) fn resend(&self) -> io::Result<()> {
        self.connection.resend()
    }

    /// The folder.
    #[must_use]
    pub(crate) fn tree(&self) -> BorrowedFd<'_> {
        self.tree.as_fd()
    }

    /// The layers.
    #[must_use]
    pub(crate) fn files(&self) -> &Files {
        &self.files
    }

    /// The layers, to change them.
    pub(crate) fn files_mut(&mut self) -> &mut Files {
        &mut self.files
    }

    /// Takes one request.
    ///
    /// # Errors
    /// The connection is dead.
    pub(crate) fn step(&mut self) -> io::Result<Step> {
        let Some(request) = self.connection.next(&mut self.request)? else {
            return Ok(Step::Idle);
        };
        let (unique, node) = (request.unique, request.node);
        let connection = &self.connection;
        let found = |reply: Option<Vec<u8>>| match reply {
            Some(reply) => connection.reply(unique, &reply),
            None => connection.reply_plain(unique, libc::ENOENT),
        };
        match request.call {
            Call::Lookup(name) => found(self.files.lookup(name).map(wire::entry))?,
            Call::Attributes => found(self.files.node(node).map(wire::attributes))?,
            Call::Open if self.files.open(node) => connection.reply(unique, &wire::opened())?,
            Call::Open => connection.reply_plain(unique, libc::ENOENT)?,
            Call::StatFs => connection.reply(unique, &wire::statfs())?,
            Call::Release => {
                let gone = self.files.release(node);
                connection.reply_plain(unique, 0)?;
                return Ok(gone.map_or(Step::Done, Step::Gone));
            }
            Call::Read { offset, size } => return self.read(unique, node, offset, size),
            Call::Flush | Call::Destroy => connection.reply_plain(unique, 0)?,
            Call::Silent => {}
            Call::Init { .. } | Call::Other => connection.reply_plain(unique, libc::ENOSYS)?,
        }
        Ok(Step::Done)
    }

    fn read(&mut self, unique: u64, node: u64, offset: u64, size: u32) -> io::Result<Step> {
        let range = ByteRange {
            offset,
            count: size.into(),
        };
        match self.files.reading(node) {
            Some((layer, State::Watched)) if size <= MAX_READ => Ok(Step::Question(Arrived {
                unique,
                layer,
                range,
            })),
            Some((layer, State::Complete)) if size <= MAX_READ => {
                self.send(unique, layer, range)?;
                Ok(Step::Done)
            }
            _ => {
                self.connection.reply_plain(unique, libc::EIO)?;
                Ok(Step::Unknown)
            }
        }
    }

    /// Answers a read. One that is gone is no error.
    ///
    /// # Errors
    /// The connection is dead.
    pub(crate) fn answer(
        &mut self,
        unique: u64,
        layer: LayerDigest,
        range: ByteRange,
        verdict: Verdict,
    ) -> io::Result<()> {
        match verdict {
            Verdict::Allow => self.send(unique, layer, range),
            Verdict::InputOutputError => self.connection.reply_plain(unique, libc::EIO),
            Verdict::NoSpace => self.connection.reply_plain(unique, libc::ENOSPC),
        }
    }

    /// Sends bytes of a blob: all that are wanted or an error, for EROFS shows zeros for the rest of
    /// a short answer.
    fn send(&mut self, unique: u64, layer: LayerDigest, range: ByteRange) -> io::Result<()> {
        let Some((blob, size)) = self.files.blob(layer) else {
            return self.connection.reply_plain(unique, libc::EIO);
        };
        let left = size.saturating_sub(range.offset).min(range.count);
        let wanted = usize::try_from(left).unwrap_or(usize::MAX);
        let Some(data) = self.data.get_mut(..wanted) else {
            return self.connection.reply_plain(unique, libc::EIO);
        };
        match read_exact(blob, data, range.offset) {
            Ok(()) => self.connection.reply(unique, data),
            Err(_) => self.connection.reply_plain(unique, libc::EIO),
        }
    }
}

impl AsFd for Service {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.connection.as_fd()
    }
}

fn read_exact(file: BorrowedFd<'_>, mut bytes: &mut [u8], mut at: u64) -> io::Result<()> {
    while !bytes.is_empty() {
        match rustix::io::pread(file, &mut *bytes, at) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(read) => {
                bytes = bytes.get_mut(read..).unwrap_or_default();
                at += read as u64;
            }
            Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(())
}
