//! Clients that are attached to a container: each gets the output as it comes,
//! beside the log.
//!
//! A client that reads slowly slows the container down, as a terminal would,
//! but only while it makes progress: one that takes nothing for a while loses
//! its place, so that it holds up neither the log nor the others.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use futures::future::join_all;
use tokio::sync::mpsc;
use tokio::sync::mpsc::error::TrySendError;
use tokio::time::timeout;

use super::entry::Stream;

/// Pieces that wait for a client; each is one read of at most 64 KiB.
const WAITING: usize = 16;
/// How long a client with a full queue is waited for.
const PATIENCE: Duration = Duration::from_secs(3);
/// Most clients of one container; each may hold [`WAITING`] pieces.
const MAX_LISTENERS: usize = 64;

/// A piece of output.
#[derive(Clone, Debug)]
pub struct Piece {
    /// It was written to stderr; never with a terminal.
    pub stderr: bool,
    /// As the container wrote it.
    pub data: Bytes,
}

/// All clients that listen to one attempt of a container. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct Listeners {
    inner: Arc<Mutex<Inner>>,
}

#[derive(Debug, Default)]
struct Inner {
    senders: Vec<Sender>,
    /// The output is over.
    closed: bool,
}

#[derive(Clone, Debug)]
struct Sender {
    pieces: mpsc::Sender<Piece>,
    dropped: Arc<AtomicBool>,
}

/// One client's view of the output, from the moment it was made.
#[derive(Debug)]
pub struct Listener {
    pieces: mpsc::Receiver<Piece>,
    dropped: Arc<AtomicBool>,
}

/// Why nobody can listen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ListenError {
    /// The container has ended.
    #[error("the container has ended")]
    Ended,
    /// There are too many clients already.
    #[error("{MAX_LISTENERS} clients are attached already, more cannot be")]
    Full,
}

impl Listeners {
    /// Adds a client.
    ///
    /// # Errors
    /// See [`ListenError`].
    pub fn listen(&self) -> Result<Listener, ListenError> {
        let mut inner = self.lock();
        // Nothing tells of one that left while the container is silent.
        inner.senders.retain(|sender| !sender.pieces.is_closed());
        if inner.closed {
            return Err(ListenError::Ended);
        }
        if inner.senders.len() >= MAX_LISTENERS {
            return Err(ListenError::Full);
        }
        let (sender, pieces) = mpsc::channel(WAITING);
        let dropped = Arc::<AtomicBool>::default();
        inner.senders.push(Sender {
            pieces: sender,
            dropped: dropped.clone(),
        });
        Ok(Listener { pieces, dropped })
    }

    /// Whether nobody listens.
    pub(super) fn is_empty(&self) -> bool {
        self.lock().senders.is_empty()
    }

    /// Hands a piece to every client. Returns once each has it or lost its place.
    pub(super) async fn deliver(&self, stream: Stream, data: Bytes) {
        let piece = Piece {
            stderr: stream == Stream::Stderr,
            data,
        };
        let mut full = Vec::new();
        self.lock()
            .senders
            .retain(|sender| match sender.pieces.try_send(piece.clone()) {
                Ok(()) => true,
                Err(TrySendError::Closed(_)) => false,
                Err(TrySendError::Full(_)) => {
                    full.push(sender.clone());
                    true
                }
            });
        if full.is_empty() {
            return;
        }
        let waits = full.iter().map(|sender| {
            let piece = piece.clone();
            async move { timeout(PATIENCE, sender.pieces.send(piece)).await }
        });
        for (sender, sent) in full.iter().zip(join_all(waits).await) {
            if sent.is_ok() {
                continue;
            }
            sender.dropped.store(true, Ordering::Relaxed);
            self.lock()
                .senders
                .retain(|other| !other.pieces.same_channel(&sender.pieces));
        }
    }

    /// Tells every client that nothing more comes.
    pub(super) fn close(&self) {
        let mut inner = self.lock();
        inner.closed = true;
        inner.senders.clear();
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        // No code that can panic runs under the lock.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Listener {
    /// The next piece; `None` once the container has ended, or this client was
    /// too slow, see [`Self::was_dropped`].
    pub async fn next(&mut self) -> Option<Piece> {
        self.pieces.recv().await
    }

    /// Output was lost because this client took none for too long.
    #[must_use]
    pub fn was_dropped(&self) -> bool {
        self.dropped.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn say(listeners: &Listeners, text: &str) {
        let data = Bytes::copy_from_slice(text.as_bytes());
        listeners.deliver(Stream::Stdout, data).await;
    }

    async fn rest(mut listener: Listener) -> (String, bool) {
        let mut text = String::new();
        while let Some(piece) = listener.next().await {
            text.push_str(std::str::from_utf8(&piece.data).unwrap());
        }
        (text, listener.was_dropped())
    }

    #[tokio::test]
    async fn everyone_gets_what_comes_after_they_did() {
        let listeners = Listeners::default();
        let early = listeners.listen().unwrap();
        say(&listeners, "one ").await;
        let late = listeners.listen().unwrap();
        say(&listeners, "two").await;
        listeners.close();
        assert_eq!(rest(early).await, ("one two".into(), false));
        assert_eq!(rest(late).await, ("two".into(), false));
        assert_eq!(listeners.listen().unwrap_err(), ListenError::Ended);
    }

    #[tokio::test(start_paused = true)]
    async fn one_that_does_not_read_loses_its_place_and_nobody_else_does() {
        let listeners = Listeners::default();
        let stuck = listeners.listen().unwrap();
        let mut reading = listeners.listen().unwrap();
        let reader = tokio::spawn(async move {
            let mut count = 0;
            while reading.next().await.is_some() {
                count += 1;
            }
            (count, reading.was_dropped())
        });
        for _ in 0..4 * WAITING {
            say(&listeners, "x").await;
        }
        listeners.close();
        assert_eq!(reader.await.unwrap(), (4 * WAITING, false));
        assert_eq!(rest(stuck).await, ("x".repeat(WAITING), true));
    }

    #[tokio::test]
    async fn those_who_left_make_room() {
        let listeners = Listeners::default();
        let all: Vec<_> = (0..MAX_LISTENERS)
            .map(|_| listeners.listen().unwrap())
            .collect();
        assert_eq!(listeners.listen().unwrap_err(), ListenError::Full);
        drop(all);
        assert!(listeners.listen().is_ok());
    }
}
