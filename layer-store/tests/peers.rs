//! Several hosts in one process that start the same layer, and one registry.
#![allow(clippy::unwrap_used)]

mod registry;

use std::os::unix::fs::FileExt as _;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use registry::{Registry, client};
use sandman_layer_store::cache::BootId;
use sandman_layer_store::filler::{Filler, FillerConfig, LayerSource};
use sandman_layer_store::index::{Encoding, IndexWriter, LayerFacts, LayerIndex};
use sandman_layer_store::origin::{Anonymous, Origin, Patience as OriginPatience, Source};
use sandman_layer_store::peers::{Fault, Offer, Patience, Peer, Peers};
use sandman_layer_store::{DiffId, LayerDigest, SpanDigest, layout};
use sha2::{Digest as _, Sha256};

const SPAN: usize = 1 << 20;
const SPANS: usize = 24;
const SIZE: usize = SPAN * SPANS;
/// Nothing here takes this long; it only ends a test that hangs.
const PATIENCE: Duration = Duration::from_secs(60);

fn content() -> &'static [u8] {
    static CONTENT: OnceLock<Vec<u8>> = OnceLock::new();
    CONTENT.get_or_init(|| {
        let byte = |n: u64| (n.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56) as u8 | 1;
        (0..SIZE as u64).map(byte).collect()
    })
}

fn index() -> LayerIndex {
    static INDEX: OnceLock<Vec<u8>> = OnceLock::new();
    let bytes = INDEX.get_or_init(|| {
        let mut writer = IndexWriter::new(Encoding::Plain);
        writer.data(content());
        let digest = Sha256::digest(content()).into();
        let facts = LayerFacts {
            layer: LayerDigest(digest),
            diff_id: DiffId(digest),
            compressed_size: SIZE as u64,
            tar_size: SIZE as u64,
            meta_size: 0,
            meta_digest: SpanDigest::of(&[]),
            implicit_directories: 0,
            inodes: 2,
        };
        let mut bytes = Vec::new();
        writer.finish(&facts, &mut bytes).unwrap();
        bytes
    });
    LayerIndex::from_bytes(bytes.clone()).unwrap()
}

/// What a peer does when it is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Manner {
    Honest,
    Lying,
    Dead,
    /// Says nothing.
    Silent,
    /// Promises and does not keep it.
    Late,
    /// Promises and breaks it.
    Breaking,
}

/// A host as others see it.
struct Door {
    filler: Arc<Filler>,
    manner: Mutex<Manner>,
    asked: AtomicU64,
    /// Ends of promises that are not kept.
    held: Mutex<Vec<tokio::sync::oneshot::Sender<Bytes>>>,
}

#[async_trait]
impl Peer for Door {
    async fn span(&self, layer: LayerDigest, span: u32) -> Result<Offer, String> {
        self.asked.fetch_add(1, Ordering::Relaxed);
        let manner = *self.manner.lock().unwrap();
        let promise = || {
            let (send, receive) = tokio::sync::oneshot::channel();
            (send, Offer::Coming(receive))
        };
        match manner {
            Manner::Honest => {
                let filler = Arc::clone(&self.filler);
                let offer = tokio::task::spawn_blocking(move || filler.offer(layer, span));
                Ok(offer.await.unwrap())
            }
            Manner::Lying => Ok(Offer::Here(vec![0; SPAN].into())),
            Manner::Dead => Err("no route".to_owned()),
            Manner::Silent => std::future::pending().await,
            Manner::Late => {
                let (send, offer) = promise();
                self.held.lock().unwrap().push(send);
                Ok(offer)
            }
            Manner::Breaking => Ok(promise().1),
        }
    }
}

struct Host {
    folder: tempfile::TempDir,
    filler: Arc<Filler>,
    peers: Arc<Peers>,
    door: Arc<Door>,
}

impl Host {
    /// A host whose layer is empty. It has no keeper: nobody reads, all is expected.
    fn new(name: &str, registry: &Registry, patience: Patience) -> Self {
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let layer = folder.path().join(layout::folder_name(index().layer()));
        std::fs::create_dir(&layer).unwrap();
        let blob = std::fs::File::options()
            .read(true)
            .write(true)
            .create_new(true)
            .open(layer.join(layout::BLOB))
            .unwrap();
        blob.set_len(SIZE as u64).unwrap();
        let config = FillerConfig {
            socket: folder.path().join("socket"),
            root: folder.path().to_owned(),
            workers: 4,
            background_workers: 1,
            give_up: PATIENCE,
        };
        let filler = Filler::start(config, BootId::from_bytes([b'x'; 36]), |_| {}).unwrap();
        let (url, size) = (registry.blob_url(), SIZE as u64);
        let patient = OriginPatience::default();
        let source = Source::new(client(), url, size, Arc::new(Anonymous), patient);
        let peers = Arc::new(Peers::new(name, patience));
        filler.use_peers(Arc::clone(&peers));
        filler
            .add(LayerSource {
                index: index(),
                blob: blob.into(),
                origin: Origin::new(vec![Arc::new(source)]),
            })
            .unwrap();
        let filler = Arc::new(filler);
        let door = Arc::new(Door {
            filler: Arc::clone(&filler),
            manner: Mutex::new(Manner::Honest),
            asked: AtomicU64::new(0),
            held: Mutex::default(),
        });
        Self {
            folder,
            filler,
            peers,
            door,
        }
    }

    fn start(&self) {
        let all = 0..u32::try_from(SPANS).unwrap();
        self.filler.expect(index().layer(), all);
    }

    async fn full(&self) {
        let full = || {
            let filled = self.filler.filled(index().layer());
            filled.unwrap().is_full()
        };
        let waits = async {
            while !full() {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(PATIENCE, waits).await.unwrap();
        let blob = self
            .folder
            .path()
            .join(layout::folder_name(index().layer()))
            .join(layout::BLOB);
        let mut bytes = vec![0; SIZE];
        let blob = std::fs::File::open(blob).unwrap();
        blob.read_exact_at(&mut bytes, 0).unwrap();
        assert!(bytes == content(), "wrong bytes");
    }
}

/// Hosts that all know each other.
fn fleet(count: usize, registry: &Registry, patience: Patience) -> Vec<Host> {
    let name = |n: usize| format!("host-{n}");
    let hosts: Vec<_> = (0..count)
        .map(|n| Host::new(&name(n), registry, patience))
        .collect();
    for host in &hosts {
        let all = hosts.iter().enumerate();
        host.peers
            .set(all.map(|(n, other)| (name(n), Arc::clone(&other.door) as Arc<dyn Peer>)));
    }
    hosts
}

/// Nobody is ever late on a busy machine.
fn unhurried() -> Patience {
    Patience {
        answer: PATIENCE,
        hedge: PATIENCE,
        arrival: PATIENCE,
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_crowd_fetches_each_byte_once() {
    let registry = Registry::start(content().to_vec()).await;
    let hosts = fleet(4, &registry, unhurried());
    hosts.iter().for_each(Host::start);
    for host in &hosts {
        host.full().await;
    }
    assert_eq!(registry.seen().len(), SPANS, "of the registry");
    let sent: u64 = hosts.iter().map(|host| host.peers.counters().spans()).sum();
    assert_eq!(sent, 3 * SPANS as u64, "by peers");
}

/// One healthy host beside one that behaves like this.
async fn beside(manner: Manner, patience: Patience) -> (Vec<Host>, Registry) {
    let registry = Registry::start(content().to_vec()).await;
    let hosts = fleet(2, &registry, patience);
    *hosts[1].door.manner.lock().unwrap() = manner;
    hosts[0].start();
    hosts[0].full().await;
    assert_eq!(registry.seen().len(), SPANS, "{manner:?}");
    assert_eq!(hosts[0].peers.counters().spans(), 0);
    (hosts, registry)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_liar_is_found_out_and_left_alone() {
    let (hosts, _registry) = beside(Manner::Lying, unhurried()).await;
    let lies = hosts[0].peers.counters().faults(Fault::Lie);
    // Those that were asked at the same time, and no more.
    assert!((1..=8).contains(&lies), "{lies}");
    assert_eq!(hosts[1].door.asked.load(Ordering::Relaxed), lies);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dead_peer_harms_nobody() {
    let (hosts, _registry) = beside(Manner::Dead, unhurried()).await;
    assert!(hosts[0].peers.counters().faults(Fault::Dead) >= 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_silent_peer_is_not_waited_for() {
    let patience = Patience {
        answer: Duration::from_millis(20),
        ..unhurried()
    };
    let (hosts, _registry) = beside(Manner::Silent, patience).await;
    assert!(hosts[0].peers.counters().faults(Fault::Slow) >= 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_promise_that_is_not_kept_is_hedged() {
    let patience = Patience {
        hedge: Duration::from_millis(20),
        ..unhurried()
    };
    let (hosts, _registry) = beside(Manner::Late, patience).await;
    assert!(hosts[0].peers.counters().faults(Fault::Slow) >= 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_broken_promise_is_no_fault_of_the_peer() {
    let (hosts, _registry) = beside(Manner::Breaking, unhurried()).await;
    let counters = hosts[0].peers.counters();
    assert!(counters.absent() >= 1);
    let faults: u64 = Fault::ALL.map(|fault| counters.faults(fault)).iter().sum();
    assert_eq!(faults, 0);
}

#[tokio::test]
async fn who_stays_keeps_its_standing_and_nobody_asks_itself() {
    let registry = Registry::start(content().to_vec()).await;
    let hosts = fleet(2, &registry, unhurried());
    let door = |n: usize| Arc::clone(&hosts[n].door) as Arc<dyn Peer>;
    *hosts[1].door.manner.lock().unwrap() = Manner::Lying;
    let peers = &hosts[0].peers;
    let ask_all = async || {
        for span in 0..u32::try_from(SPANS).unwrap() {
            assert!(peers.span(&index(), span).await.is_none());
        }
    };
    ask_all().await;
    assert_eq!(peers.counters().faults(Fault::Lie), 1);
    // The list comes again, as it does with each change of the fleet.
    peers.set([
        ("host-0".to_owned(), door(0)),
        ("host-1".to_owned(), door(1)),
    ]);
    ask_all().await;
    assert_eq!(peers.counters().faults(Fault::Lie), 1);
    assert_eq!(hosts[0].door.asked.load(Ordering::Relaxed), 0, "itself");
    // Who left and came back starts anew.
    peers.set([]);
    peers.set([("host-1".to_owned(), door(1))]);
    ask_all().await;
    assert_eq!(peers.counters().faults(Fault::Lie), 2);
}
