//! What this host does for its peers.

use std::collections::HashMap;
use std::io;
use std::os::unix::fs::FileExt as _;

use bytes::Bytes;
use tokio::sync::oneshot;

use super::Filler;
use crate::peers::Offer;
use crate::{LayerDigest, Span};

/// Peers that wait for spans at once; further ones are told that there is nothing.
const MAX_PROMISES: usize = 1024;

/// Peers that wait for spans which this host fetches.
#[derive(Debug, Default)]
pub(super) struct Promises {
    open: HashMap<(LayerDigest, u32), Vec<oneshot::Sender<Bytes>>>,
    count: usize,
}

impl Promises {
    fn make(&mut self, layer: LayerDigest, span: u32) -> Option<oneshot::Receiver<Bytes>> {
        if self.count >= MAX_PROMISES {
            return None;
        }
        let (send, receive) = oneshot::channel();
        let waiting = self.open.entry((layer, span)).or_default();
        let before = waiting.len();
        // Who gave up waits no more.
        waiting.retain(|waiter| !waiter.is_closed());
        waiting.push(send);
        self.count = self.count + waiting.len() - before;
        Some(receive)
    }

    /// Whether a peer relies on this host for a span.
    pub(super) fn has(&self, layer: LayerDigest, span: u32) -> bool {
        self.open.contains_key(&(layer, span))
    }

    /// The span is there.
    pub(super) fn kept(&mut self, layer: LayerDigest, span: u32, plain: &[u8]) {
        let waiting = self.take(layer, span);
        if waiting.is_empty() {
            return;
        }
        let bytes = Bytes::copy_from_slice(plain);
        for waiter in waiting {
            // Who gave up needs it no more.
            let _ = waiter.send(bytes.clone());
        }
    }

    /// The span could not be had.
    pub(super) fn broken(&mut self, layer: LayerDigest, span: u32) {
        drop(self.take(layer, span));
    }

    /// Nothing of a layer will come.
    pub(super) fn forget(&mut self, layer: LayerDigest) {
        self.open.retain(|(of, _), _| *of != layer);
        self.count = self.open.values().map(Vec::len).sum();
    }

    fn take(&mut self, layer: LayerDigest, span: u32) -> Vec<oneshot::Sender<Bytes>> {
        let waiting = self.open.remove(&(layer, span)).unwrap_or_default();
        self.count -= waiting.len();
        waiting
    }
}

impl Filler {
    /// Answers a peer that wants a span: with the span if it is here, else with the promise to
    /// fetch it from the registry, behind this host's own readers. Blocks for a read of the disk.
    ///
    /// Only what was verified is offered. Layers that this filler does not fill are absent.
    #[must_use]
    pub fn offer(&self, layer: LayerDigest, span: u32) -> Offer {
        let mut state = self.inner.lock();
        let Some(known) = state.layers.get(&layer).cloned() else {
            return Offer::Absent;
        };
        let Some(found) = known.index.span(span) else {
            return Offer::Absent;
        };
        let filled = state.plan.filled(layer);
        if !filled.is_some_and(|filled| filled.contains(span)) {
            let Some(promise) = state.promises.make(layer, span) else {
                return Offer::Absent;
            };
            state.plan.expect(layer, [span]);
            drop(state);
            self.inner.wake.notify_one();
            return Offer::Coming(promise);
        }
        drop(state);
        match read(&known.blob, &found) {
            Ok(bytes) => Offer::Here(bytes),
            Err(_) => Offer::Absent,
        }
    }
}

/// A span of a blob that holds it.
fn read(blob: &std::fs::File, span: &Span) -> io::Result<Bytes> {
    let length = span.uncompressed.end - span.uncompressed.start;
    let mut bytes = vec![0; usize::try_from(length).map_err(io::Error::other)?];
    blob.read_exact_at(&mut bytes, span.uncompressed.start)?;
    Ok(bytes.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    const LAYER: LayerDigest = LayerDigest([1; 32]);

    #[test]
    fn promises_are_kept_or_broken_once() {
        let mut promises = Promises::default();
        let mut first = promises.make(LAYER, 1).unwrap();
        let mut second = promises.make(LAYER, 1).unwrap();
        let mut other = promises.make(LAYER, 2).unwrap();
        assert!(promises.has(LAYER, 1) && !promises.has(LAYER, 3));
        promises.kept(LAYER, 1, b"x");
        assert_eq!(first.try_recv().unwrap(), "x");
        assert_eq!(second.try_recv().unwrap(), "x");
        promises.broken(LAYER, 2);
        assert_eq!(other.try_recv(), Err(oneshot::error::TryRecvError::Closed));
        assert_eq!((promises.count, promises.open.len()), (0, 0));
    }

    #[test]
    fn there_is_a_limit_of_promises_that_those_who_leave_do_not_fill() {
        let mut promises = Promises::default();
        for _ in 0..MAX_PROMISES + 10 {
            drop(promises.make(LAYER, 1).unwrap());
        }
        let held: Vec<_> = (0..).map_while(|span| promises.make(LAYER, span)).collect();
        assert!(held.len() >= MAX_PROMISES - 1 && held.len() <= MAX_PROMISES);
        promises.forget(LAYER);
        assert_eq!(promises.count, 0);
    }
}
