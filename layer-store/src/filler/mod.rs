//! Brings the bytes that readers wait for, and some that they will.
//!
//! Questions come from the keeper, bytes from a layer's [`Origin`]. A span is written into the blob
//! only after it was verified against the layer's index, and only through the descriptor that the
//! keeper opened before it marked the blob; then the questions about it are answered. [`plan`]
//! decides what is next; this module carries it out, on threads and a runtime of its own: the rest
//! of the process may wait for a lazy file, and must not keep the filler from filling it.
//!
//! A filler that dies loses nothing: the keeper gives its questions to the next.

mod fetch;
mod link;
mod offer;
mod plan;
mod spans;
mod trace;

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;

pub use self::plan::{Job, Plan, Urgency};
pub use self::spans::SpanSet;
pub use self::trace::Trace;
use crate::cache::{BootId, FilledFile};
use crate::index::LayerIndex;
use crate::keeper::{Asked, EventId, FillerLink, Verdict};
use crate::origin::Origin;
use crate::peers::Peers;
use crate::{LayerDigest, layout};

/// How the filler works.
#[derive(Clone, Debug)]
pub struct FillerConfig {
    /// Where the keeper listens.
    pub socket: PathBuf,
    /// Folder of the store.
    pub root: PathBuf,
    /// Spans fetched at once for readers and traces.
    pub workers: usize,
    /// Spans fetched at once to complete layers.
    pub background_workers: usize,
    /// How long a reader's span is tried. Less than the keeper's deadline, so that the reason is
    /// known here.
    pub give_up: Duration,
}

/// What the filler tells its user. It must return soon.
pub type Listener = Arc<dyn Fn(FillerEvent) + Send + Sync>;

/// What happened.
#[derive(Clone, Debug)]
pub enum FillerEvent {
    /// A reader got an error.
    ReaderFailed {
        /// Whose bytes are missing.
        layer: LayerDigest,
        /// Why.
        why: String,
    },
    /// The layer is complete, verified and on disk; the keeper no longer watches it.
    Sealed(LayerDigest),
    /// All spans are there, and yet the archive is not what its diff ID says. Its record is void.
    Corrupt(LayerDigest),
}

/// Counts since the start.
#[derive(Debug, Default)]
pub struct FillerCounters {
    questions: AtomicU64,
    filled_at_once: AtomicU64,
    spans: AtomicU64,
    failed: AtomicU64,
}

impl FillerCounters {
    /// Questions that the keeper handed on.
    #[must_use]
    pub fn questions(&self) -> u64 {
        self.questions.load(Ordering::Relaxed)
    }

    /// Those whose bytes were there already.
    #[must_use]
    pub fn filled_at_once(&self) -> u64 {
        self.filled_at_once.load(Ordering::Relaxed)
    }

    /// Spans that were written.
    #[must_use]
    pub fn spans(&self) -> u64 {
        self.spans.load(Ordering::Relaxed)
    }

    /// Questions that ended with an error.
    #[must_use]
    pub fn failed(&self) -> u64 {
        self.failed.load(Ordering::Relaxed)
    }
}

/// A layer to be filled.
#[derive(Debug)]
pub struct LayerSource {
    /// Its index, which was accepted by signature or made here.
    pub index: LayerIndex,
    /// The blob, as the keeper opened it.
    pub blob: OwnedFd,
    /// Where its bytes are.
    pub origin: Origin,
}

/// Why a layer is not filled.
#[derive(Debug, thiserror::Error)]
pub enum AddError {
    /// It can only be decoded from the beginning; it has to be converted whole.
    #[error("layer {0} has no random access and cannot be filled lazily")]
    NoRandomAccess(LayerDigest),
    /// Its record of filled spans cannot be used.
    #[error("cannot open the record of what is filled: {0}")]
    Io(#[from] io::Error),
}

#[derive(Debug)]
struct Layer {
    digest: LayerDigest,
    folder: PathBuf,
    index: LayerIndex,
    blob: File,
    filled: FilledFile,
    origin: Origin,
    /// Held by whoever takes in a whole blob; others wait for what it brings.
    stream: tokio::sync::Mutex<()>,
}

/// A question, and on which connection it came: a successor of the keeper does not know the names
/// that its predecessor gave.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Ticket {
    connection: u64,
    event: EventId,
}

struct State {
    plan: Plan<LayerDigest, Ticket>,
    recorder: trace::Recorder,
    layers: HashMap<LayerDigest, Arc<Layer>>,
    /// Questions about layers that have not been added yet, as after a restart.
    early: Vec<(u64, Asked)>,
    /// Full when they were added: a filler before this one ended between the last span and the seal.
    full: Vec<Arc<Layer>>,
    link: Option<Arc<FillerLink>>,
    /// Counts connections.
    connection: u64,
    running: usize,
    running_background: usize,
    /// Jobs that wait for a peer and take no worker meanwhile.
    waiting: usize,
    promises: offer::Promises,
}

struct Inner {
    config: FillerConfig,
    boot: BootId,
    state: Mutex<State>,
    wake: Notify,
    closing: AtomicBool,
    counters: FillerCounters,
    listener: Listener,
    peers: OnceLock<Arc<Peers>>,
}

/// A running filler. Dropping it ends its threads; questions wait for the next.
pub struct Filler {
    inner: Arc<Inner>,
    threads: Vec<std::thread::JoinHandle<()>>,
}

impl std::fmt::Debug for Filler {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Filler")
            .field("config", &self.inner.config)
            .finish_non_exhaustive()
    }
}

impl Filler {
    /// Starts to serve the keeper's questions.
    ///
    /// # Errors
    /// No thread or no runtime can be made.
    pub fn start(
        config: FillerConfig,
        boot: BootId,
        listener: impl Fn(FillerEvent) + Send + Sync + 'static,
    ) -> io::Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .max_blocking_threads(config.workers.max(1) + config.background_workers)
            .thread_name("layer-filler")
            .build()?;
        let inner = Arc::new(Inner {
            config,
            boot,
            state: Mutex::new(State {
                plan: Plan::default(),
                recorder: trace::Recorder::default(),
                layers: HashMap::new(),
                early: Vec::new(),
                full: Vec::new(),
                link: None,
                connection: 0,
                running: 0,
                running_background: 0,
                waiting: 0,
                promises: offer::Promises::default(),
            }),
            wake: Notify::new(),
            closing: AtomicBool::new(false),
            counters: FillerCounters::default(),
            listener: Arc::new(listener),
            peers: OnceLock::new(),
        });
        let mut filler = Self {
            inner: Arc::clone(&inner),
            threads: Vec::new(),
        };
        let named = |name: &str| std::thread::Builder::new().name(name.to_owned());
        let fetching = Arc::clone(&inner);
        let work = move || runtime.block_on(fetch::run(&fetching));
        filler.threads.push(named("layer-filler").spawn(work)?);
        let listening = move || link::run(&inner);
        filler
            .threads
            .push(named("layer-questions").spawn(listening)?);
        Ok(filler)
    }

    /// Takes a layer in. One that is known stays as it is.
    ///
    /// # Errors
    /// It cannot be filled.
    pub fn add(&self, source: LayerSource) -> Result<(), AddError> {
        let digest = source.index.layer();
        if !source.index.random_access() {
            return Err(AddError::NoRandomAccess(digest));
        }
        let mut state = self.inner.lock();
        if state.plan.knows(digest) {
            return Ok(());
        }
        let folder = self.inner.config.root.join(layout::folder_name(digest));
        let spans = source.index.span_count();
        let (filled, set) = FilledFile::open(&folder, self.inner.boot, spans)?;
        let layer = Layer {
            digest,
            folder,
            index: source.index,
            blob: File::from(source.blob),
            filled,
            origin: source.origin,
            stream: tokio::sync::Mutex::default(),
        };
        let layer = Arc::new(layer);
        if set.is_full() {
            state.full.push(Arc::clone(&layer));
        }
        state.layers.insert(digest, layer);
        state.plan.add(digest, set);
        let all = std::mem::take(&mut state.early);
        let (ours, others): (Vec<_>, _) = all
            .into_iter()
            .partition(|(_, asked)| asked.layer == digest);
        state.early = others;
        drop(state);
        for (connection, asked) in ours {
            self.inner.ask(connection, asked);
        }
        self.inner.wake.notify_one();
        Ok(())
    }

    /// Forgets a layer that nothing mounts any more. Readers that still wait get an error.
    pub fn remove(&self, layer: LayerDigest) {
        let mut state = self.inner.lock();
        state.layers.remove(&layer);
        state.promises.forget(layer);
        let ended = state.plan.remove(layer);
        drop(state);
        self.inner.answer(&ended, Verdict::InputOutputError);
    }

    /// Asks other hosts of the fleet before the registry, from now on. The first call counts.
    pub fn use_peers(&self, peers: Arc<Peers>) {
        // A second set of peers would be a mistake of the caller that harms nobody.
        let _ = self.inner.peers.set(peers);
    }

    /// Fetches these spans before anybody asks for them.
    pub fn expect(&self, layer: LayerDigest, spans: impl IntoIterator<Item = u32>) {
        self.inner.lock().plan.expect(layer, spans);
        self.inner.wake.notify_one();
    }

    /// Begins to record what readers want of these layers, as for the first minute of an image.
    /// The recording ends with [`Self::recorded`].
    #[must_use]
    pub fn record(&self, layers: impl IntoIterator<Item = LayerDigest>) -> u64 {
        self.inner.lock().recorder.begin(layers)
    }

    /// Ends a recording.
    #[must_use]
    pub fn recorded(&self, recording: u64) -> Trace {
        self.inner.lock().recorder.end(recording)
    }

    /// Fetches what an earlier start wanted. Layers that are not known are passed by.
    pub fn replay(&self, trace: &Trace) {
        let mut state = self.inner.lock();
        for (layer, span) in trace.spans() {
            state.plan.expect(*layer, [*span]);
        }
        drop(state);
        self.inner.wake.notify_one();
    }

    /// Completes a layer in the background.
    pub fn complete(&self, layer: LayerDigest) {
        self.inner.lock().plan.complete(layer);
        self.inner.wake.notify_one();
    }

    /// What is there of a layer.
    #[must_use]
    pub fn filled(&self, layer: LayerDigest) -> Option<SpanSet> {
        self.inner.lock().plan.filled(layer).cloned()
    }

    /// Counts for metrics.
    #[must_use]
    pub fn counters(&self) -> &FillerCounters {
        &self.inner.counters
    }
}

impl Drop for Filler {
    fn drop(&mut self) {
        self.inner.closing.store(true, Ordering::SeqCst);
        if let Some(link) = self.inner.lock().link.take() {
            link.close();
        }
        self.inner.wake.notify_one();
        for thread in self.threads.drain(..) {
            // A panic in there has been printed, and there is nobody else to tell.
            let _ = thread.join();
        }
    }
}

impl Inner {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_closing(&self) -> bool {
        self.closing.load(Ordering::SeqCst)
    }

    /// Takes a question in, and answers it if its bytes are there.
    fn ask(&self, connection: u64, asked: Asked) {
        let mut state = self.lock();
        if state.connection != connection {
            return;
        }
        let Some(layer) = state.layers.get(&asked.layer).cloned() else {
            state.early.push((connection, asked));
            return;
        };
        let ticket = Ticket {
            connection,
            event: asked.event,
        };
        let end = asked.range.offset.saturating_add(asked.range.count.max(1));
        let spans = layer.index.spans_covering(asked.range.offset..end);
        state.recorder.wanted(asked.layer, spans.clone());
        let there = state.plan.ask(ticket, asked.layer, spans);
        drop(state);
        self.counters.questions.fetch_add(1, Ordering::Relaxed);
        match there {
            true => {
                self.counters.filled_at_once.fetch_add(1, Ordering::Relaxed);
                self.answer(&[ticket], Verdict::Allow);
            }
            false => self.wake.notify_one(),
        }
    }

    /// Answers questions of the present connection. Those of an earlier one come again.
    fn answer(&self, tickets: &[Ticket], verdict: Verdict) {
        if verdict != Verdict::Allow {
            let failed = tickets.len() as u64;
            self.counters.failed.fetch_add(failed, Ordering::Relaxed);
        }
        let state = self.lock();
        let (link, connection) = (state.link.clone(), state.connection);
        drop(state);
        let Some(link) = link else { return };
        for ticket in tickets
            .iter()
            .filter(|ticket| ticket.connection == connection)
        {
            // Without the keeper the question is asked again.
            let _ = link.answer(ticket.event, verdict);
        }
    }
}
