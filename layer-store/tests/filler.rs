//! Keeper, filler and a registry that misbehaves: readers see right bytes or an error.
//!
//! Needs what `keeper.rs` needs, and says so where it is not there.
#![allow(clippy::unwrap_used)]

mod registry;

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt as _;
use std::sync::mpsc::{self, Receiver};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use registry::{Fault as Trouble, Registry, client};
use rustix::fs::{Mode, OFlags};
use rustix::process::{Pid, Signal, kill_process};
use sandman_layer_store::cache::{self, BootId};
use sandman_layer_store::chain::{self, Member, image};
use sandman_layer_store::filler::{Filler, FillerConfig, FillerEvent, LayerSource, SpanSet};
use sandman_layer_store::index::{Encoding, IndexWriter, LayerFacts, LayerIndex};
use sandman_layer_store::keeper::{Custodian, KeeperConfig, KeeperEvent, Limits};
use sandman_layer_store::origin::{Anonymous, Origin, Patience, Source};
use sandman_layer_store::{DiffId, LayerDigest, SpanDigest, layout};
use sha2::{Digest as _, Sha256};

/// As the index cuts a plain archive.
const SPAN: usize = 1 << 20;
const SPANS: usize = 32;
const SIZE: usize = SPAN * SPANS;
const BOOT: [u8; 36] = [b'x'; 36];
/// Nothing here takes this long; it only ends a test that hangs.
const PATIENCE: Duration = Duration::from_secs(60);

/// Made once; no byte of it is zero.
fn content() -> &'static [u8] {
    static CONTENT: OnceLock<Vec<u8>> = OnceLock::new();
    CONTENT.get_or_init(|| {
        let byte = |n: u64| (n.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56) as u8 | 1;
        (0..SIZE as u64).map(byte).collect()
    })
}

/// The index of a blob that is its own archive.
fn index(content: &[u8], diff_id: [u8; 32]) -> Vec<u8> {
    let mut writer = IndexWriter::new(Encoding::Plain);
    writer.data(content);
    let facts = LayerFacts {
        layer: LayerDigest(Sha256::digest(content).into()),
        diff_id: DiffId(diff_id),
        compressed_size: content.len() as u64,
        tar_size: content.len() as u64,
        meta_size: 0,
        meta_digest: SpanDigest::of(&[]),
        implicit_directories: 0,
        inodes: 2,
    };
    let mut bytes = Vec::new();
    writer.finish(&facts, &mut bytes).unwrap();
    bytes
}

/// The way of being asked that is tested: `SANDMAN_TEST_LAYERS=fuse` forces the second.
fn member() -> Member {
    let name = std::env::var("SANDMAN_TEST_LAYERS");
    name.map_or(Member::Fanotify, |name| name.parse().unwrap())
}

struct Host {
    folder: tempfile::TempDir,
    layer: LayerDigest,
    index: Vec<u8>,
    custodian: Option<Custodian>,
    keeper_events: Mutex<Receiver<KeeperEvent>>,
    blob: OwnedFd,
    mount: OwnedFd,
}

impl Host {
    fn new() -> Option<Self> {
        let digest = Sha256::digest(content()).into();
        Self::with_diff_id(digest)
    }

    fn with_diff_id(diff_id: [u8; 32]) -> Option<Self> {
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        if let Err(error) = chain::probe(member(), folder.path()) {
            eprintln!("skipped: {error}");
            return None;
        }
        let index = index(content(), diff_id);
        let layer = LayerIndex::from_bytes(index.clone()).unwrap().layer();
        let at = folder.path().join(layout::folder_name(layer));
        std::fs::create_dir(&at).unwrap();
        std::fs::write(
            at.join(layout::META),
            image::one_file(SIZE.try_into().unwrap()),
        )
        .unwrap();
        File::create(at.join(layout::BLOB))
            .unwrap()
            .set_len(SIZE as u64)
            .unwrap();
        let config = KeeperConfig {
            root: folder.path().to_owned(),
            socket: folder.path().join("socket"),
            program: Some(env!("CARGO_BIN_EXE_sandman-layer-keeper").into()),
            limits: Limits {
                deadline_ms: u32::try_from(PATIENCE.as_millis()).unwrap(),
                slots: 1024,
                gate: member().gate(),
            },
        };
        let (send, keeper_events) = mpsc::channel();
        let custodian = Custodian::new(config, None, move |event| {
            let _ = send.send(event);
        });
        let custodian = custodian.unwrap();
        let blob = custodian.watch(layer).unwrap();
        let device = custodian.device(layer, &at.join(layout::BLOB)).unwrap();
        let mount = device.mount(&at.join(layout::META)).unwrap();
        Some(Self {
            folder,
            layer,
            index,
            custodian: Some(custodian),
            keeper_events: Mutex::new(keeper_events),
            blob,
            mount,
        })
    }

    /// A filler that knows the layer and these registries.
    fn filler(&self, registries: &[&Registry], give_up: Duration) -> Work {
        self.filler_into(self.blob.try_clone().unwrap(), registries, give_up)
    }

    fn filler_into(&self, blob: OwnedFd, registries: &[&Registry], give_up: Duration) -> Work {
        let (send, events) = mpsc::channel();
        let config = FillerConfig {
            socket: self.folder.path().join("socket"),
            root: self.folder.path().to_owned(),
            workers: 8,
            background_workers: 2,
            give_up,
        };
        let filler = Filler::start(config, BootId::from_bytes(BOOT), move |event| {
            let _ = send.send(event);
        });
        let filler = filler.unwrap();
        let patience = Patience {
            answer: Duration::from_millis(500),
            silence: Duration::from_millis(500),
        };
        let sources = registries.iter().map(|registry| {
            let (url, size) = (registry.blob_url(), SIZE as u64);
            Arc::new(Source::new(
                client(),
                url,
                size,
                Arc::new(Anonymous),
                patience,
            ))
        });
        let sources: Vec<_> = sources.collect();
        let source = LayerSource {
            index: LayerIndex::from_bytes(self.index.clone()).unwrap(),
            blob,
            origin: Origin::new(sources.clone()),
        };
        filler.add(source).unwrap();
        Work {
            filler,
            sources,
            events,
        }
    }

    async fn read(&self, offset: usize, length: usize) -> io::Result<()> {
        let file = rustix::fs::openat(&self.mount, image::FILE, OFlags::CLOEXEC, Mode::empty());
        let file = File::from(file.unwrap());
        let read = tokio::task::spawn_blocking(move || {
            let mut bytes = vec![0; length];
            file.read_exact_at(&mut bytes, offset as u64)?;
            Ok(bytes)
        });
        let bytes: io::Result<Vec<u8>> = read.await.unwrap();
        assert_eq!(
            bytes?,
            content()[offset..offset + length],
            "wrong bytes at {offset}"
        );
        Ok(())
    }

    fn kill_keeper(&self) {
        let pid = self.custodian.as_ref().unwrap().keeper_pid().unwrap();
        kill_process(
            Pid::from_raw(pid.try_into().unwrap()).unwrap(),
            Signal::KILL,
        )
        .unwrap();
        let event = self
            .keeper_events
            .lock()
            .unwrap()
            .recv_timeout(PATIENCE)
            .unwrap();
        assert_eq!(event, KeeperEvent::Resumed);
    }

    fn is_sealed(&self) -> bool {
        let index = LayerIndex::from_bytes(self.index.clone()).unwrap();
        let folder = self.folder.path().join(layout::folder_name(self.layer));
        cache::is_sealed(&folder, index.diff_id(), SIZE as u64).unwrap()
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        let Some(pid) = self.custodian.as_ref().and_then(Custodian::keeper_pid) else {
            return;
        };
        self.custodian = None;
        let pid = Pid::from_raw(pid.try_into().unwrap()).unwrap();
        kill_process(pid, Signal::KILL).unwrap();
        let _ = rustix::process::waitpid(Some(pid), rustix::process::WaitOptions::empty());
    }
}

struct Work {
    filler: Filler,
    sources: Vec<Arc<Source>>,
    events: Receiver<FillerEvent>,
}

impl Work {
    /// Waits for an event without keeping the registry from its work.
    async fn hears(self) -> (FillerEvent, Self) {
        let waits = tokio::task::spawn_blocking(move || {
            let event = self.events.recv_timeout(PATIENCE).unwrap();
            (event, self)
        });
        waits.await.unwrap()
    }
}

/// Waits for something that nobody tells.
async fn until(done: impl Fn() -> bool) {
    let waits = async {
        while !done() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(PATIENCE, waits).await.unwrap();
}

fn failed_with(event: &FillerEvent, words: &str) {
    let FillerEvent::ReaderFailed { why, .. } = event else {
        panic!("{event:?}");
    };
    assert!(why.contains(words), "{why}");
}

#[tokio::test]
async fn only_what_is_read_is_fetched() {
    let Some(host) = Host::new() else { return };
    let registry = Registry::start(content().to_vec()).await;
    let work = host.filler(&[&registry], PATIENCE);
    host.read(SPAN * 20 + 5, 100).await.unwrap();
    let filled = work.filler.filled(host.layer).unwrap();
    assert!(
        filled.contains(20) && filled.members() < 4,
        "{}",
        filled.members()
    );
    assert!(work.sources[0].counters().bytes() < SIZE as u64 / 8);
    // What is known is not asked for again.
    let before = registry.seen().len();
    host.read(SPAN * 20 + 500, 100).await.unwrap();
    assert_eq!(registry.seen().len(), before);
    assert!(!host.is_sealed());
}

#[tokio::test]
async fn the_next_filler_goes_on() {
    let Some(host) = Host::new() else { return };
    let registry = Registry::start(content().to_vec()).await;
    registry.with(|state| state.always = Some(Trouble::Hang));
    let first = host.filler(&[&registry], PATIENCE);
    let reading = host.read(SPAN * 20, 100);
    // It ends in the middle of a fetch.
    let next = async {
        until(|| !registry.seen().is_empty()).await;
        drop(first);
        registry.with(|state| state.always = None);
        host.filler(&[&registry], PATIENCE)
    };
    let (read, work) = tokio::join!(reading, next);
    read.unwrap();
    assert!(work.filler.filled(host.layer).unwrap().contains(20));
}

#[tokio::test]
async fn a_later_filler_knows_what_is_filled() {
    let Some(host) = Host::new() else { return };
    let registry = Registry::start(content().to_vec()).await;
    let first = host.filler(&[&registry], PATIENCE);
    host.read(0, 10).await.unwrap();
    let filled = first.filler.filled(host.layer).unwrap();
    drop(first);
    let second = host.filler(&[&registry], PATIENCE);
    let again = second.filler.filled(host.layer).unwrap();
    assert!(again.members() >= 1 && filled.contains(0) && again.contains(0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_keeper_changes_no_byte() {
    let Some(host) = Host::new() else { return };
    let registry = Registry::start(content().to_vec()).await;
    let work = host.filler(&[&registry], PATIENCE);
    for round in 0..6 {
        let reads = (0..8).map(|n| host.read(SPAN * (round * 5 + n % 5), 5000));
        let all = futures::future::join_all(reads);
        let kill = async {
            tokio::task::yield_now().await;
            tokio::task::block_in_place(|| host.kill_keeper());
        };
        let (reads, ()) = tokio::join!(all, kill);
        for read in reads {
            // Read by the keeper and not recorded when it was killed.
            assert!(read.is_ok() || read.unwrap_err().raw_os_error() == Some(libc::EIO));
        }
    }
    drop(work);
}

#[tokio::test]
async fn wrong_bytes_are_fetched_elsewhere() {
    let Some(host) = Host::new() else { return };
    let (liar, honest) = (
        Registry::start(content().to_vec()).await,
        Registry::start(content().to_vec()).await,
    );
    liar.with(|state| state.always = Some(Trouble::FlipBit));
    let work = host.filler(&[&liar, &honest], PATIENCE);
    host.read(SPAN * 9, SPAN).await.unwrap();
    assert!(!liar.seen().is_empty());
    drop(work);
}

#[tokio::test]
async fn wrong_bytes_from_everybody_are_an_error() {
    let Some(host) = Host::new() else { return };
    let liar = Registry::start(content().to_vec()).await;
    liar.with(|state| state.always = Some(Trouble::FlipBit));
    let work = host.filler(&[&liar], Duration::from_millis(300));
    let error = host.read(SPAN * 9, 10).await.unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EIO));
    let (event, work) = work.hears().await;
    failed_with(&event, "its bytes are wrong");
    // The error does not stay, once the source is asked again.
    liar.with(|state| state.always = None);
    let again = async { while host.read(SPAN * 9, 10).await.is_err() {} };
    tokio::time::timeout(PATIENCE, again).await.unwrap();
    drop(work);
}

#[tokio::test]
async fn a_registry_that_stumbles_delays_readers_only() {
    let Some(host) = Host::new() else { return };
    let registry = Registry::start(content().to_vec()).await;
    registry.with(|state| {
        state.faults.extend([
            Trouble::Status(500),
            Trouble::Truncate,
            Trouble::Hang,
            Trouble::FlipBit,
            Trouble::WrongContentRange,
        ]);
    });
    let work = host.filler(&[&registry], PATIENCE);
    host.read(SPAN * 30, 10).await.unwrap();
    drop(work);
}

#[tokio::test]
async fn a_full_disk_is_an_error() {
    let Some(host) = Host::new() else { return };
    let registry = Registry::start(content().to_vec()).await;
    let full = File::options().write(true).open("/dev/full").unwrap();
    let work = host.filler_into(full.into(), &[&registry], PATIENCE);
    let error = host.read(0, 10).await.unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EIO));
    let (event, _work) = work.hears().await;
    failed_with(&event, "No space left");
}

#[tokio::test]
async fn complete_layers_need_nobody() {
    let Some(host) = Host::new() else { return };
    let registry = Registry::start(content().to_vec()).await;
    let work = host.filler(&[&registry], PATIENCE);
    work.filler.complete(host.layer);
    let (event, work) = work.hears().await;
    assert!(
        matches!(event, FillerEvent::Sealed(layer) if layer == host.layer),
        "{event:?}"
    );
    assert!(host.is_sealed());
    let custodian = host.custodian.as_ref().unwrap();
    let status = custodian.controller().unwrap().status().unwrap();
    assert_eq!(status.watched, 0);
    drop((registry, work));
    host.read(0, SIZE).await.unwrap();
    let later = custodian.controller().unwrap().status().unwrap();
    assert_eq!(later.asked, status.asked);
}

#[tokio::test]
async fn a_layer_that_was_full_and_not_sealed_is_sealed() {
    let Some(host) = Host::new() else { return };
    let blob = File::from(host.blob.try_clone().unwrap());
    blob.write_all_at(content(), 0).unwrap();
    let folder = host.folder.path().join(layout::folder_name(host.layer));
    let spans = u32::try_from(SPANS).unwrap();
    let (record, mut set) =
        cache::FilledFile::open(&folder, BootId::from_bytes(BOOT), spans).unwrap();
    for span in 0..spans {
        set.insert(span);
        record.record(&set, span).unwrap();
    }
    let (event, _work) = host.filler(&[], PATIENCE).hears().await;
    assert!(matches!(event, FillerEvent::Sealed(_)), "{event:?}");
    assert!(host.is_sealed());
}

#[tokio::test]
async fn a_layer_read_from_end_to_end_is_completed() {
    let Some(host) = Host::new() else { return };
    let registry = Registry::start(content().to_vec()).await;
    let work = host.filler(&[&registry], PATIENCE);
    host.read(0, SIZE / 2).await.unwrap();
    let (event, _work) = work.hears().await;
    assert!(matches!(event, FillerEvent::Sealed(_)), "{event:?}");
}

#[tokio::test]
async fn a_registry_without_ranges_fills_the_layer() {
    let Some(host) = Host::new() else { return };
    let registry = Registry::start(content().to_vec()).await;
    registry.with(|state| state.always = Some(Trouble::IgnoreRange));
    let work = host.filler(&[&registry], PATIENCE);
    host.read(SPAN * 30, 10).await.unwrap();
    let (event, work) = work.hears().await;
    assert!(matches!(event, FillerEvent::Sealed(_)), "{event:?}");
    assert!(host.is_sealed());
    drop(work);
}

#[tokio::test]
async fn an_archive_that_is_not_what_it_should_be_is_not_sealed() {
    let Some(host) = Host::with_diff_id([1; 32]) else {
        return;
    };
    let registry = Registry::start(content().to_vec()).await;
    let work = host.filler(&[&registry], PATIENCE);
    work.filler.complete(host.layer);
    let (event, _work) = work.hears().await;
    assert!(matches!(event, FillerEvent::Corrupt(_)), "{event:?}");
    assert!(!host.is_sealed());
}

#[tokio::test]
async fn what_a_start_read_is_fetched_before_the_next() {
    let Some(cold) = Host::new() else { return };
    let Some(next) = Host::new() else { return };
    let registry = Registry::start(content().to_vec()).await;
    let work = cold.filler(&[&registry], PATIENCE);
    let recording = work.filler.record([cold.layer]);
    cold.read(SPAN * 30, 10).await.unwrap();
    cold.read(SPAN * 12, 10).await.unwrap();
    let trace = work.filler.recorded(recording);
    assert!(trace.spans().contains(&(cold.layer, 30)) && trace.spans().contains(&(cold.layer, 12)));

    let work = next.filler(&[&registry], PATIENCE);
    work.filler.replay(&trace);
    let there = |set: SpanSet| set.contains(30) && set.contains(12);
    until(|| work.filler.filled(next.layer).is_some_and(there)).await;
    let requests = registry.seen().len();
    next.read(SPAN * 12, 10).await.unwrap();
    assert_eq!(registry.seen().len(), requests);
}
