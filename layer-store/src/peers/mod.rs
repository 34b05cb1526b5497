//! Spans from other hosts of the fleet.
//!
//! When many hosts start the same image at once, each span is fetched from the registry by one of
//! them, [`choice::first`]; the others ask him and get it as soon as he has it. Nobody coordinates
//! this, and nothing depends on it: what a peer sends is verified against the layer's index like a
//! registry's bytes, and the registry is asked instead as soon as a peer is absent, wrong or late.
//! A peer that fails is left alone for a while ([`Standing`]).
//!
//! This module speaks no network. Connections are a [`Peer`] each, made by who has the fleet's
//! certificates; requests of others are answered by [`crate::filler::Filler::offer`].

pub mod choice;
mod standing;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use bytes::Bytes;
use tokio::sync::oneshot;
use tokio::time::timeout;

pub use self::standing::{Fault, Standing};
use crate::LayerDigest;
use crate::index::LayerIndex;

/// What a host says when it is asked for a span.
#[derive(Debug)]
pub enum Offer {
    /// It does not have it and will not get it.
    Absent,
    /// The span's bytes, uncompressed.
    Here(Bytes),
    /// It is fetching it. The other end is dropped if it fails.
    Coming(oneshot::Receiver<Bytes>),
}

/// A connection to another host.
#[async_trait]
pub trait Peer: Send + Sync {
    /// Asks for a span. Returns as soon as the other host says what it will do.
    ///
    /// # Errors
    /// It cannot be reached, or the connection broke.
    async fn span(&self, layer: LayerDigest, span: u32) -> Result<Offer, String>;
}

/// How long a peer may keep us waiting.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    /// Until it says what it will do; a healthy host does so at once.
    pub answer: Duration,
    /// Until the registry is asked as well, while the peer is fetching.
    pub hedge: Duration,
    /// Until it is given up.
    pub arrival: Duration,
}

impl Default for Patience {
    fn default() -> Self {
        Self {
            answer: Duration::from_millis(50),
            hedge: Duration::from_millis(500),
            arrival: Duration::from_secs(10),
        }
    }
}

/// Counts since the start.
#[derive(Debug, Default)]
pub struct PeerCounters {
    bytes: AtomicU64,
    spans: AtomicU64,
    absent: AtomicU64,
    faults: [AtomicU64; Fault::ALL.len()],
}

impl PeerCounters {
    /// Verified bytes of spans that peers sent, uncompressed.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Verified spans that peers sent.
    #[must_use]
    pub fn spans(&self) -> u64 {
        self.spans.load(Ordering::Relaxed)
    }

    /// Spans that a peer did not have.
    #[must_use]
    pub fn absent(&self) -> u64 {
        self.absent.load(Ordering::Relaxed)
    }

    /// Failures of one cause.
    #[must_use]
    pub fn faults(&self, fault: Fault) -> u64 {
        self.faults[fault as usize].load(Ordering::Relaxed)
    }
}

struct Known {
    peer: Arc<dyn Peer>,
    standing: Standing,
}

/// The other hosts, as one of them sees them.
pub struct Peers {
    me: String,
    patience: Patience,
    known: Mutex<BTreeMap<String, Known>>,
    counters: PeerCounters,
}

impl fmt::Debug for Peers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Peers")
            .field("me", &self.me)
            .finish_non_exhaustive()
    }
}

impl Peers {
    /// Nobody yet. `me` is this host's name in the fleet.
    #[must_use]
    pub fn new(me: &str, patience: Patience) -> Self {
        Self {
            me: me.to_owned(),
            patience,
            known: Mutex::default(),
            counters: PeerCounters::default(),
        }
    }

    /// Sets who is there, by name in the fleet. Who stays keeps its standing; this host itself is
    /// left out.
    pub fn set(&self, all: impl IntoIterator<Item = (String, Arc<dyn Peer>)>) {
        let mut known = self.lock();
        let mut before = std::mem::take(&mut *known);
        for (name, peer) in all.into_iter().filter(|(name, _)| *name != self.me) {
            let standing = before.remove(&name).map(|known| known.standing);
            let standing = standing.unwrap_or_default();
            known.insert(name, Known { peer, standing });
        }
    }

    /// How long they may keep us waiting.
    #[must_use]
    pub fn patience(&self) -> Patience {
        self.patience
    }

    /// Counts for metrics.
    #[must_use]
    pub fn counters(&self) -> &PeerCounters {
        &self.counters
    }

    /// Asks the host whose turn it is for a span. None when that is this host, or the other does
    /// not have it, is late, or sends something else: the registry has to be asked.
    pub async fn span(&self, index: &LayerIndex, span: u32) -> Option<Bytes> {
        let (layer, now) = (index.layer(), Instant::now());
        let (name, peer) = {
            let known = self.lock();
            let good = known
                .iter()
                .filter(|(_, known)| known.standing.is_good(now));
            let names = good.map(|(name, _)| name.as_str());
            let first = choice::first(layer, span, names.chain([self.me.as_str()]))?;
            (first.to_owned(), Arc::clone(&known.get(first)?.peer))
        };
        let mut asking = Asking {
            peers: self,
            name: &name,
            since: now,
            open: true,
        };
        let offer = timeout(self.patience.answer, peer.span(layer, span)).await;
        let bytes = match offer {
            Ok(Ok(Offer::Here(bytes))) => bytes,
            Ok(Ok(Offer::Coming(coming))) => match timeout(self.patience.arrival, coming).await {
                Ok(Ok(bytes)) => bytes,
                // It tried. Its registry may be the one that failed.
                Ok(Err(_)) => return asking.absent(),
                Err(_) => return asking.failed(Fault::Slow),
            },
            Ok(Ok(Offer::Absent)) => return asking.absent(),
            Ok(Err(_)) => return asking.failed(Fault::Dead),
            Err(_) => return asking.failed(Fault::Slow),
        };
        match index.verify_span(span, &bytes) {
            Ok(()) => Some(asking.delivered(bytes)),
            Err(_) => asking.failed(Fault::Lie),
        }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Known>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn judge(&self, name: &str, fault: Option<Fault>) {
        if let Some(known) = self.lock().get_mut(name) {
            match fault {
                None => known.standing.delivered(),
                Some(fault) => known.standing.failed(fault, Instant::now()),
            }
        }
        if let Some(fault) = fault {
            self.counters.faults[fault as usize].fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// A question to a peer. Dropped without an end, the registry was faster.
struct Asking<'p> {
    peers: &'p Peers,
    name: &'p str,
    since: Instant,
    open: bool,
}

impl Asking<'_> {
    fn absent(&mut self) -> Option<Bytes> {
        self.open = false;
        self.peers.counters.absent.fetch_add(1, Ordering::Relaxed);
        None
    }

    fn failed(&mut self, fault: Fault) -> Option<Bytes> {
        self.open = false;
        self.peers.judge(self.name, Some(fault));
        None
    }

    fn delivered(&mut self, bytes: Bytes) -> Bytes {
        self.open = false;
        let counters = &self.peers.counters;
        counters.spans.fetch_add(1, Ordering::Relaxed);
        counters
            .bytes
            .fetch_add(bytes.len() as u64, Ordering::Relaxed);
        self.peers.judge(self.name, None);
        bytes
    }
}

impl Drop for Asking<'_> {
    fn drop(&mut self) {
        if self.open && self.since.elapsed() >= self.peers.patience.hedge {
            self.peers.judge(self.name, Some(Fault::Slow));
        }
    }
}
