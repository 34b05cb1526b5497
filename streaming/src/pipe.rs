//! A bounded in-memory pipe from the connection's reader to a session's handler.
//!
//! The reader stops reading the socket while a pipe is full: TCP then slows the
//! client down, which is the only flow control that SPDY and WebSocket clients know.

use std::{
    io,
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll, Waker},
};

use bytes::{Buf, Bytes, BytesMut};
use tokio::io::{AsyncRead, ReadBuf};

/// Buffers above this are given back to the allocator once they are empty.
const KEPT_CAPACITY: usize = 16 * 1024;

/// Makes a pipe that counts as full from `limit` bytes on.
pub(crate) fn pipe(limit: usize) -> (Feed, Input) {
    let shared = Arc::new(Shared {
        limit: limit.max(1),
        state: Mutex::default(),
    });
    (
        Feed {
            shared: Arc::clone(&shared),
        },
        Input { shared },
    )
}

struct Shared {
    limit: usize,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    buffer: BytesMut,
    /// Nothing more will be fed.
    ended: bool,
    /// The handler reads no more.
    reader_gone: bool,
    reader: Option<Waker>,
    feeder: Option<Waker>,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // No code that can panic runs under the lock.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The connection's end of a pipe.
pub(crate) struct Feed {
    shared: Arc<Shared>,
}

impl Feed {
    /// Waits until the pipe takes more. A pipe without a reader takes everything.
    pub(crate) async fn ready(&self) {
        std::future::poll_fn(|cx| {
            let mut state = self.shared.lock();
            if state.reader_gone || state.buffer.len() < self.shared.limit {
                return Poll::Ready(());
            }
            state.feeder = Some(cx.waker().clone());
            Poll::Pending
        })
        .await;
    }

    /// Appends, whatever the fill: call [`Feed::ready`] first, then the excess is at
    /// most one piece. The bytes are copied so that a small piece does not keep the
    /// whole receive buffer alive.
    pub(crate) fn push(&self, piece: &[u8]) {
        let mut state = self.shared.lock();
        if state.reader_gone || state.ended {
            return;
        }
        state.buffer.extend_from_slice(piece);
        wake(&mut state.reader);
    }

    /// Ends the pipe: the handler still gets what was fed, then end of file.
    pub(crate) fn end(&self) {
        let mut state = self.shared.lock();
        state.ended = true;
        wake(&mut state.reader);
    }
}

impl Drop for Feed {
    fn drop(&mut self) {
        self.end();
    }
}

/// Bytes from the client, in order, until it ends the stream or goes away.
///
/// Dropping it discards what still comes; the client is not told.
pub struct Input {
    shared: Arc<Shared>,
}

impl Input {
    /// Everything that has arrived, at least one byte; `None` at end of file.
    ///
    /// Cancel safe. Avoids the copy that [`AsyncRead`] makes.
    pub async fn read_chunk(&mut self) -> Option<Bytes> {
        std::future::poll_fn(|cx| {
            let mut state = self.shared.lock();
            if !state.buffer.is_empty() {
                wake(&mut state.feeder);
                return Poll::Ready(Some(state.buffer.split().freeze()));
            }
            if state.ended {
                return Poll::Ready(None);
            }
            state.reader = Some(cx.waker().clone());
            Poll::Pending
        })
        .await
    }
}

impl AsyncRead for Input {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        out: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let mut state = self.shared.lock();
        if state.buffer.is_empty() {
            if state.ended || out.remaining() == 0 {
                return Poll::Ready(Ok(()));
            }
            state.reader = Some(cx.waker().clone());
            return Poll::Pending;
        }
        let taken = state.buffer.len().min(out.remaining());
        out.put_slice(&state.buffer[..taken]);
        state.buffer.advance(taken);
        if state.buffer.is_empty() && state.buffer.capacity() > KEPT_CAPACITY {
            state.buffer = BytesMut::new();
        }
        wake(&mut state.feeder);
        Poll::Ready(Ok(()))
    }
}

impl Drop for Input {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        state.reader_gone = true;
        state.buffer = BytesMut::new();
        wake(&mut state.feeder);
    }
}

fn wake(waker: &mut Option<Waker>) {
    if let Some(waker) = waker.take() {
        waker.wake();
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;
    use tokio::io::AsyncReadExt as _;

    use super::*;

    #[tokio::test]
    async fn delivers_everything_then_end_of_file() {
        let (feed, mut input) = pipe(4);
        feed.push(b"hello ");
        feed.push(b"world");
        drop(feed);
        let mut two = [0; 2];
        input.read_exact(&mut two).await.unwrap();
        assert_eq!(&two, b"he");
        assert_eq!(input.read_chunk().await.unwrap(), "llo world");
        assert_eq!(input.read_chunk().await, None);
        assert_eq!(input.read(&mut two).await.unwrap(), 0);
    }

    #[tokio::test]
    async fn a_full_pipe_waits_for_the_reader() {
        let (feed, mut input) = pipe(4);
        assert!(feed.ready().now_or_never().is_some());
        feed.push(b"12345678");
        assert!(feed.ready().now_or_never().is_none());
        let (chunk, ()) = tokio::join!(input.read_chunk(), feed.ready());
        assert_eq!(chunk.unwrap(), "12345678");
    }

    #[tokio::test]
    async fn a_pipe_without_reader_takes_and_drops_everything() {
        let (feed, input) = pipe(1);
        feed.push(b"12345678");
        let ((), ()) = tokio::join!(feed.ready(), async { drop(input) });
        feed.push(b"more");
        assert_eq!(feed.shared.lock().buffer.len(), 0);
    }
}
