//! Non-blocking descriptors, and copying between them without a buffer while nothing flows.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use tokio::io::AsyncWriteExt;
use tokio::io::unix::AsyncFd;

use crate::task::sys;

/// Read and written at once: what a pipe holds by default.
const CHUNK: usize = 64 << 10;

/// A pipe, FIFO or terminal driven by readiness. Clones share it.
#[derive(Clone)]
pub(crate) struct Channel(Arc<AsyncFd<OwnedFd>>);

impl Channel {
    /// Takes `fd` over and makes it non-blocking.
    pub(crate) fn new(fd: OwnedFd) -> io::Result<Self> {
        rustix::io::ioctl_fionbio(&fd, true)?;
        Ok(Self(Arc::new(sys::watch(fd)?)))
    }

    /// The descriptor.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }

    /// What is there to be read; empty at the end. The end of a terminal counts as one.
    pub(crate) async fn read(&self) -> io::Result<Vec<u8>> {
        loop {
            let mut ready = self.0.readable().await?;
            let mut buffer = vec![0; CHUNK];
            match ready.try_io(|fd| Ok(rustix::io::read(fd, &mut buffer[..])?)) {
                Ok(Ok(count)) => {
                    buffer.truncate(count);
                    return Ok(buffer);
                }
                // The last process has closed its side of the terminal.
                Ok(Err(error)) if error.raw_os_error() == Some(nix::libc::EIO) => {
                    return Ok(Vec::new());
                }
                Ok(Err(error)) if error.kind() == io::ErrorKind::Interrupted => {}
                Ok(Err(error)) => return Err(error),
                Err(_not_ready) => {}
            }
        }
    }

    async fn write_all(&self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let mut ready = self.0.writable().await?;
            match ready.try_io(|fd| Ok(rustix::io::write(fd, bytes)?)) {
                Ok(Ok(count)) => bytes = &bytes[count..],
                Ok(Err(error)) if error.kind() == io::ErrorKind::Interrupted => {}
                Ok(Err(error)) => return Err(error),
                Err(_not_ready) => {}
            }
        }
        Ok(())
    }
}

/// Where copied bytes go.
pub(crate) enum Sink {
    /// Something that can be waited for.
    Channel(Channel),
    /// A regular file.
    File(tokio::fs::File),
    /// Nobody wants them; they are read all the same, so that the writer goes on.
    Nobody,
}

/// Copies until `source` ends. A sink that fails is a reader that has gone: the rest is dropped,
/// because a container does not stop for its log.
pub(crate) async fn copy(source: Channel, mut sink: Sink) {
    loop {
        let bytes = match source.read().await {
            Ok(bytes) if bytes.is_empty() => break,
            Ok(bytes) => bytes,
            Err(error) => {
                tracing::warn!(%error, "reading a stream");
                break;
            }
        };
        let written = match &mut sink {
            Sink::Channel(channel) => channel.write_all(&bytes).await,
            Sink::File(file) => file.write_all(&bytes).await,
            Sink::Nobody => Ok(()),
        };
        if let Err(error) = written {
            tracing::warn!(%error, "writing a stream; the rest of it is dropped");
            sink = Sink::Nobody;
        }
    }
    if let Sink::File(file) = &mut sink
        && let Err(error) = file.flush().await
    {
        tracing::warn!(%error, "writing a stream");
    }
}
