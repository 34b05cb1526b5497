//! The forwarded connections that live, shared by the reader, which feeds them, and
//! the session, which ends them.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use tokio_util::sync::CancellationToken;

use crate::{outbound::OutputControl, pipe::Feed};

/// Live connections by their data stream.
#[derive(Clone, Default)]
pub(super) struct Table {
    connections: Arc<Mutex<HashMap<u32, Live>>>,
}

struct Live {
    feed: Arc<Feed>,
    control: OutputControl,
    closed: CancellationToken,
}

impl Table {
    fn lock(&self) -> MutexGuard<'_, HashMap<u32, Live>> {
        // No code that can panic runs under the lock.
        self.connections
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn len(&self) -> usize {
        self.lock().len()
    }

    pub(super) fn insert(
        &self,
        data: u32,
        feed: Arc<Feed>,
        control: OutputControl,
        closed: CancellationToken,
    ) {
        self.lock().insert(
            data,
            Live {
                feed,
                control,
                closed,
            },
        );
    }

    /// Where input of a connection goes.
    pub(super) fn feed(&self, data: u32) -> Option<Arc<Feed>> {
        self.lock().get(&data).map(|live| Arc::clone(&live.feed))
    }

    /// The client dropped a connection: its handler learns of it, and is still running.
    pub(super) fn reset(&self, data: u32) {
        if let Some(live) = self.lock().get(&data) {
            live.feed.end();
            live.control.abandon();
            live.closed.cancel();
        }
    }

    /// The handler of a connection has returned.
    pub(super) fn remove(&self, data: u32) {
        if let Some(live) = self.lock().remove(&data) {
            live.control.end();
        }
    }

    /// No input comes any more, for any connection.
    pub(super) fn end_input(&self) {
        self.lock().values().for_each(|live| live.feed.end());
    }

    /// The client is gone for good.
    pub(super) fn close_all(&self) {
        self.lock().values().for_each(|live| live.closed.cancel());
    }
}
