//! Fetches spans, writes them, and completes layers.

use std::io;
use std::os::fd::AsFd as _;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use sha2::{Digest as _, Sha256};

use super::plan::{Job, Urgency};
use super::{FillerEvent, Inner, Layer, State};
use crate::digest::DiffId;
use crate::keeper::{Controller, Verdict};
use crate::origin::{Fetched, Source, WholeBlob};
use crate::{cache, layout};

/// Between two rounds over sources that all failed.
const SHORTEST_ROUND: Duration = Duration::from_millis(20);
/// Jobs that wait for peers at once.
const MAX_WAITING: usize = 256;
const VERIFY_BYTES: usize = 1 << 20;

/// Why a span is not there.
enum Missed {
    /// The blob cannot be written.
    Write(io::Error),
    /// No source had it in time. Each says why.
    Sources(String),
    /// The filler ends.
    Closing,
}

/// Starts what the plan says, until the filler ends.
pub(super) async fn run(inner: &Arc<Inner>) {
    while !inner.is_closing() {
        let full = std::mem::take(&mut inner.lock().full);
        for layer in full {
            let inner = Arc::clone(inner);
            tokio::task::spawn_blocking(move || complete(&inner, &layer));
        }
        while let Some(job) = next(inner) {
            let inner = Arc::clone(inner);
            tokio::spawn(async move { work(&inner, job).await });
        }
        inner.wake.notified().await;
    }
}

/// The next job for which there is a worker.
fn next(inner: &Inner) -> Option<Job<crate::LayerDigest>> {
    let mut state = inner.lock();
    // Background work has workers of its own, so that it never takes one from a reader. It waits
    // while all others are busy: then the network is.
    if state.running >= inner.config.workers.max(1) || state.waiting >= MAX_WAITING {
        return None;
    }
    let least = match state.running_background < inner.config.background_workers {
        true => Urgency::Background,
        false => Urgency::Trace,
    };
    let job = state.plan.next(least)?;
    *state.workers(job.urgency) += 1;
    Some(job)
}

impl State {
    /// Those who work at jobs of this urgency.
    fn workers(&mut self, urgency: Urgency) -> &mut usize {
        match urgency {
            Urgency::Background => &mut self.running_background,
            Urgency::Demand | Urgency::Trace => &mut self.running,
        }
    }
}

async fn work(inner: &Arc<Inner>, job: Job<crate::LayerDigest>) {
    let layer = inner.lock().layers.get(&job.layer).cloned();
    let result = match &layer {
        Some(layer) => fetch(inner, layer, job).await,
        None => Ok(()),
    };
    match result {
        // Whoever wrote it has said so.
        Ok(()) => {}
        Err(Missed::Closing) => inner.lock().plan.put_back(job),
        Err(Missed::Write(error)) => {
            let verdict = match error.raw_os_error() {
                Some(libc::ENOSPC | libc::EDQUOT) => Verdict::NoSpace,
                _ => Verdict::InputOutputError,
            };
            fail(
                inner,
                job,
                verdict,
                format!("cannot write the blob: {error}"),
            );
        }
        Err(Missed::Sources(why)) => fail(inner, job, Verdict::InputOutputError, why),
    }
    *inner.lock().workers(job.urgency) -= 1;
    inner.wake.notify_one();
}

fn fail(inner: &Inner, job: Job<crate::LayerDigest>, verdict: Verdict, why: String) {
    let ended = {
        let mut state = inner.lock();
        state.promises.broken(job.layer, job.span);
        state.plan.failed(job.layer, job.span)
    };
    if !ended.is_empty() {
        inner.answer(&ended, verdict);
        let layer = job.layer;
        (inner.listener)(FillerEvent::ReaderFailed { layer, why });
    }
}

/// A span from the peer whose turn it is, else from a registry.
async fn fetch(
    inner: &Arc<Inner>,
    layer: &Arc<Layer>,
    job: Job<crate::LayerDigest>,
) -> Result<(), Missed> {
    let Some(peers) = inner.peers.get() else {
        return from_registry(inner, layer, job).await;
    };
    if inner.lock().promises.has(job.layer, job.span) {
        // Somebody relies on us. Were we to rely on others for it, all might wait for each other.
        return from_registry(inner, layer, job).await;
    }
    let mut peer = std::pin::pin!(peers.span(&layer.index, job.span));
    let first = {
        let _idle = Idle::new(inner, job.urgency);
        tokio::time::timeout(peers.patience().hedge, &mut peer).await
    };
    match first {
        Ok(Some(bytes)) => return keep(inner, layer, job.span, bytes).await,
        Ok(None) => return from_registry(inner, layer, job).await,
        Err(_) => {}
    }
    let bytes = tokio::select! {
        Some(bytes) = &mut peer => bytes,
        done = from_registry(inner, layer, job) => return done,
    };
    keep(inner, layer, job.span, bytes).await
}

/// A job that waits for a peer, whose worker is free for another: two hosts that wait for each other
/// with all their workers would wait long.
struct Idle<'i> {
    inner: &'i Inner,
    urgency: Urgency,
}

impl<'i> Idle<'i> {
    fn new(inner: &'i Inner, urgency: Urgency) -> Self {
        let mut state = inner.lock();
        *state.workers(urgency) -= 1;
        state.waiting += 1;
        drop(state);
        inner.wake.notify_one();
        Self { inner, urgency }
    }
}

impl Drop for Idle<'_> {
    fn drop(&mut self) {
        let mut state = self.inner.lock();
        state.waiting -= 1;
        *state.workers(self.urgency) += 1;
    }
}

/// Writes a span that a peer sent and that was verified.
async fn keep(
    inner: &Arc<Inner>,
    layer: &Arc<Layer>,
    span: u32,
    plain: bytes::Bytes,
) -> Result<(), Missed> {
    let (worker, target) = (Arc::clone(inner), Arc::clone(layer));
    let kept = tokio::task::spawn_blocking(move || write(&worker, &target, span, &plain)).await;
    match kept {
        Ok(done) => done.map_err(Missed::Write),
        Err(_) => Err(Missed::Sources("a worker of the filler ended".to_owned())),
    }
}

/// Tries all sources, again and again, until the span is there. Without a reader one round is
/// enough: what is not urgent comes up again.
async fn from_registry(
    inner: &Arc<Inner>,
    layer: &Arc<Layer>,
    job: Job<crate::LayerDigest>,
) -> Result<(), Missed> {
    let started = Instant::now();
    let mut reasons = String::from("no source was ready");
    loop {
        let mut failures = Vec::new();
        for source in layer.origin.ready(Instant::now()) {
            if inner.is_closing() {
                return Err(Missed::Closing);
            }
            match attempt(inner, layer, &source, job.span).await {
                Ok(true) => return Ok(()),
                Ok(false) => failures.push(format!("{}: its bytes are wrong", source.name())),
                Err(Attempt::Source(why)) => failures.push(why),
                Err(Attempt::Write(error)) => return Err(Missed::Write(error)),
            }
        }
        if !failures.is_empty() {
            reasons = failures.join("; ");
        }
        let wanted = inner.lock().plan.is_wanted(job.layer, job.span);
        let left = inner.config.give_up.saturating_sub(started.elapsed());
        if left.is_zero() || (!wanted && job.urgency == Urgency::Trace) {
            return Err(Missed::Sources(reasons));
        }
        if inner.is_closing() {
            return Err(Missed::Closing);
        }
        let now = Instant::now();
        let pause = layer
            .origin
            .next_ready(now)
            .map_or(left, |ready| ready - now);
        tokio::time::sleep(pause.max(SHORTEST_ROUND).min(left)).await;
    }
}

/// Why one source did not help.
enum Attempt {
    Source(String),
    Write(io::Error),
}

/// One source, once. False when it sent wrong bytes.
async fn attempt(
    inner: &Arc<Inner>,
    layer: &Arc<Layer>,
    source: &Arc<Source>,
    span: u32,
) -> Result<bool, Attempt> {
    let Some(found) = layer.index.span(span) else {
        return Err(Attempt::Source("the index has no such span".to_owned()));
    };
    let fetched = source.read(found.compressed).await;
    match fetched.map_err(|error| Attempt::Source(error.to_string()))? {
        Fetched::Range(bytes) => take(inner, layer, source, span, bytes).await,
        Fetched::Whole(whole) => take_all(inner, layer, source, span, whole).await,
    }
}

/// Decodes, verifies and writes a span. False when the bytes are wrong.
async fn take(
    inner: &Arc<Inner>,
    layer: &Arc<Layer>,
    source: &Arc<Source>,
    span: u32,
    bytes: Vec<u8>,
) -> Result<bool, Attempt> {
    let (worker, target) = (Arc::clone(inner), Arc::clone(layer));
    let decoded = tokio::task::spawn_blocking(move || store(&worker, &target, span, &bytes)).await;
    match decoded {
        Ok(Ok(true)) => Ok(true),
        Ok(Ok(false)) => {
            source.was_corrupt();
            Ok(false)
        }
        Ok(Err(error)) => Err(Attempt::Write(error)),
        Err(_) => Err(Attempt::Source("a worker of the filler ended".to_owned())),
    }
}

fn store(inner: &Arc<Inner>, layer: &Arc<Layer>, span: u32, bytes: &[u8]) -> io::Result<bool> {
    let Ok(plain) = layer.index.decode_span(span, bytes) else {
        return Ok(false);
    };
    write(inner, layer, span, &plain)?;
    Ok(true)
}

/// Writes a verified span, and tells who waits for it.
fn write(inner: &Arc<Inner>, layer: &Arc<Layer>, span: u32, plain: &[u8]) -> io::Result<()> {
    let at = layer
        .index
        .span(span)
        .map_or(0, |span| span.uncompressed.start);
    layer.blob.write_all_at(plain, at)?;
    inner.counters.spans.fetch_add(1, Ordering::Relaxed);
    let (answered, full) = {
        let mut state = inner.lock();
        let done = state.plan.done(layer.digest, span);
        state.promises.kept(layer.digest, span, plain);
        if let Some(set) = state.plan.filled(layer.digest) {
            // Readers need not wait for a record that only saves a fetch after a restart.
            let _ = layer.filled.record(set, span);
        }
        done
    };
    inner.answer(&answered, Verdict::Allow);
    if full {
        complete(inner, layer);
    }
    Ok(())
}

/// A source that knows no ranges sends everything: so everything is taken. Other workers that meet
/// such a source wait here, and usually find their span filled.
async fn take_all(
    inner: &Arc<Inner>,
    layer: &Arc<Layer>,
    source: &Arc<Source>,
    wanted: u32,
    mut whole: WholeBlob,
) -> Result<bool, Attempt> {
    let _alone = layer.stream.lock().await;
    if is_filled(inner, layer, wanted) {
        return Ok(true);
    }
    let (mut held, mut held_from) = (Vec::new(), 0_u64);
    let mut span = 0;
    loop {
        let part = source.next(&mut whole).await;
        let part = part.map_err(|error| Attempt::Source(error.to_string()))?;
        let Some(part) = part else { break };
        held.extend_from_slice(&part);
        while let Some(range) = layer.index.span(span).map(|span| span.compressed) {
            if held_from + (held.len() as u64) < range.end {
                break;
            }
            let from = usize::try_from(range.start.saturating_sub(held_from)).unwrap_or(usize::MAX);
            let to = usize::try_from(range.end - held_from).unwrap_or(usize::MAX);
            if !is_filled(inner, layer, span) {
                let bytes = held.get(from..to).unwrap_or_default().to_vec();
                if !take(inner, layer, source, span, bytes).await? {
                    return Ok(false);
                }
            }
            span += 1;
            // Neighbours may share a byte.
            let keep = layer
                .index
                .span(span)
                .map_or(range.end, |next| next.compressed.start);
            let drop = usize::try_from(keep.saturating_sub(held_from)).unwrap_or(usize::MAX);
            held.drain(..drop.min(held.len()));
            held_from = keep;
        }
        if inner.is_closing() {
            break;
        }
    }
    match is_filled(inner, layer, wanted) {
        true => Ok(true),
        false => Err(Attempt::Source(format!(
            "{}: its blob ended early",
            source.name()
        ))),
    }
}

fn is_filled(inner: &Inner, layer: &Layer, span: u32) -> bool {
    let state = inner.lock();
    state
        .plan
        .filled(layer.digest)
        .is_some_and(|set| set.contains(span))
}

/// Verifies a full blob as a whole, puts it on disk, and lets go of it.
fn complete(inner: &Arc<Inner>, layer: &Arc<Layer>) {
    let event = match finish(inner, layer) {
        Ok(true) => FillerEvent::Sealed(layer.digest),
        Ok(false) => FillerEvent::Corrupt(layer.digest),
        // It stays watched and unsealed, and is completed after the next start.
        Err(why) => FillerEvent::ReaderFailed {
            layer: layer.digest,
            why: format!("cannot seal the layer: {why}"),
        },
    };
    (inner.listener)(event);
}

fn finish(inner: &Inner, layer: &Layer) -> Result<bool, String> {
    let text = |error: io::Error| error.to_string();
    let size = layer.index.tar_size();
    if archive_digest(layer, size).map_err(text)? != layer.index.diff_id() {
        return Ok(false);
    }
    // The seal speaks of what is found under the name.
    let named = std::fs::metadata(layer.folder.join(layout::BLOB)).map_err(text)?;
    let ours = layer.blob.metadata().map_err(text)?;
    if (named.dev(), named.ino()) != (ours.dev(), ours.ino()) {
        return Err("the blob in the store's folder is another file".to_owned());
    }
    layer.blob.sync_data().map_err(text)?;
    cache::seal(&layer.folder, layer.index.diff_id(), size).map_err(text)?;
    // EROFS keeps the pages that are in use; ours would be a second copy.
    let advice = rustix::fs::Advice::DontNeed;
    let _ = rustix::fs::fadvise(layer.blob.as_fd(), 0, None, advice);
    let controller = Controller::connect(&inner.config.socket);
    controller
        .and_then(|controller| controller.unwatch(layer.digest))
        .map_err(|error| error.to_string())?;
    Ok(true)
}

/// Reads through the keeper's descriptor, which raises no questions.
fn archive_digest(layer: &Layer, size: u64) -> io::Result<DiffId> {
    let mut hasher = Sha256::new();
    let mut buffer = vec![0; VERIFY_BYTES];
    let mut at = 0;
    while at < size {
        let length = usize::try_from(size - at)
            .unwrap_or(VERIFY_BYTES)
            .min(VERIFY_BYTES);
        let part = buffer.get_mut(..length).unwrap_or_default();
        layer.blob.read_exact_at(part, at)?;
        hasher.update(&*part);
        at += length as u64;
    }
    Ok(DiffId(hasher.finalize().into()))
}
