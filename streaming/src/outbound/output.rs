//! The handler's end of a stream towards the client.

use std::{
    io,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use tokio::{
    io::AsyncWrite,
    sync::{OwnedSemaphorePermit, Semaphore, mpsc::UnboundedSender},
};
use tokio_util::sync::PollSemaphore;

use super::{Item, LEAST_COST, MAX_FRAME};

/// Bytes to the client, in order. Dropping it, or shutting it down, ends the stream.
///
/// A write waits while the client is slow. Once the client has gone (see `client_gone`
/// of the session) writes fail with [`io::ErrorKind::BrokenPipe`].
pub struct Output {
    stream: Arc<Stream>,
    budget: PollSemaphore,
}

/// Ends an [`Output`] that a handler holds.
pub(crate) struct OutputControl(Arc<Stream>);

struct Stream {
    id: u32,
    items: UnboundedSender<Item>,
    ended: AtomicBool,
}

impl Stream {
    fn end(&self) {
        if !self.ended.swap(true, Ordering::Relaxed) {
            // Without a writer there is nobody to tell.
            let _ = self.items.send(Item::End { stream: self.id });
        }
    }
}

impl OutputControl {
    /// Ends the stream: what was written before is sent, what comes later fails.
    pub(crate) fn end(&self) {
        self.0.end();
    }

    /// Makes later writes fail without telling the client, which dropped the stream.
    pub(crate) fn abandon(&self) {
        self.0.ended.store(true, Ordering::Relaxed);
    }
}

impl Output {
    pub(super) fn new(
        stream: u32,
        items: UnboundedSender<Item>,
        budget: Arc<Semaphore>,
    ) -> (Self, OutputControl) {
        let stream = Arc::new(Stream {
            id: stream,
            items,
            ended: AtomicBool::new(false),
        });
        let control = OutputControl(Arc::clone(&stream));
        (
            Self {
                stream,
                budget: PollSemaphore::new(budget),
            },
            control,
        )
    }

    /// Sends a whole chunk without copying it, in frames of at most 64 KiB.
    ///
    /// Not cancel safe: a cancelled call may have sent a part.
    ///
    /// # Errors
    /// `BrokenPipe` if the client has gone or the stream was ended.
    pub async fn write_chunk(&mut self, mut chunk: Bytes) -> io::Result<()> {
        while !chunk.is_empty() {
            let piece = chunk.split_to(chunk.len().min(MAX_FRAME));
            let permit = std::future::poll_fn(|cx| self.poll_permit(cx, piece.len())).await?;
            self.send(piece, permit)?;
        }
        Ok(())
    }

    fn poll_permit(
        &mut self,
        cx: &mut Context<'_>,
        length: usize,
    ) -> Poll<io::Result<OwnedSemaphorePermit>> {
        // At most MAX_FRAME, which the budget always holds.
        let cost = length.max(LEAST_COST) as u32;
        let permit = ready!(self.budget.poll_acquire_many(cx, cost));
        Poll::Ready(permit.ok_or_else(|| io::ErrorKind::BrokenPipe.into()))
    }

    fn send(&mut self, payload: Bytes, permit: OwnedSemaphorePermit) -> io::Result<()> {
        if self.stream.ended.load(Ordering::Relaxed) {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        self.stream
            .items
            .send(Item::Data {
                stream: self.stream.id,
                payload,
                permit,
            })
            .map_err(|_| io::ErrorKind::BrokenPipe.into())
    }
}

impl AsyncWrite for Output {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        data: &[u8],
    ) -> Poll<io::Result<usize>> {
        if data.is_empty() {
            return Poll::Ready(Ok(0));
        }
        let taken = data.len().min(MAX_FRAME);
        let permit = ready!(self.poll_permit(cx, taken))?;
        self.send(Bytes::copy_from_slice(&data[..taken]), permit)?;
        Poll::Ready(Ok(taken))
    }

    /// Data is on its way as soon as it is written.
    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.stream.end();
        Poll::Ready(Ok(()))
    }
}

impl Drop for Output {
    fn drop(&mut self) {
        self.stream.end();
    }
}
