//! The store as a host uses it: layers mounted once, joined in overlays, kept over restarts.
//!
//! Needs what `keeper.rs` needs, and says so where it is not there.
#![allow(clippy::unwrap_used)]

mod registry;

use std::fs::File;
use std::io::{self, Read as _};
use std::os::fd::{AsFd as _, BorrowedFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver};
use std::time::Duration;

use registry::{Registry, client};
use rustix::fs::{Mode, OFlags};
use rustix::process::{Pid, Signal, kill_process};
use sandman_layer_store::cache::{BootId, Limits};
use sandman_layer_store::chain::{self, Member, image};
use sandman_layer_store::index::{Encoding, IndexWriter, LayerFacts};
use sandman_layer_store::keeper::{GroupId, KeeperEvent};
use sandman_layer_store::origin::{Anonymous, Origin, Patience, Source};
use sandman_layer_store::store::{Mounted, Store, StoreConfig, StoreError, StoreEvent};
use sandman_layer_store::{DiffId, LayerDigest, SpanDigest, layout, mount};
use sha2::{Digest as _, Sha256};

const SIZE: usize = 64 << 10;
const BOOT: [u8; 36] = [b'x'; 36];
const PATIENCE: Duration = Duration::from_secs(60);
const NOTHING: Limits = Limits {
    high_bytes: 0,
    low_bytes: 0,
    high_inodes: 0,
    low_inodes: 0,
};

/// The keeper outlives its store by design; not so here.
struct Keeper<'a>(&'a Path);

impl Drop for Keeper<'_> {
    fn drop(&mut self) {
        for process in std::fs::read_dir("/proc").unwrap().flatten() {
            let line = std::fs::read(process.path().join("cmdline")).unwrap_or_default();
            let line = String::from_utf8_lossy(&line);
            let pid = process
                .file_name()
                .to_string_lossy()
                .parse()
                .ok()
                .and_then(Pid::from_raw);
            if let Some(pid) = pid
                && line.contains("sandman-layer-keeper")
                && line.contains(self.0.to_str().unwrap())
            {
                let _ = kill_process(pid, Signal::KILL);
            }
        }
    }
}

/// The way of being asked that is tested: `SANDMAN_TEST_LAYERS=fuse` forces the second.
fn member() -> Member {
    let name = std::env::var("SANDMAN_TEST_LAYERS");
    name.map_or(Member::Fanotify, |name| name.parse().unwrap())
}

fn folder() -> Option<tempfile::TempDir> {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    match chain::probe(member(), folder.path()) {
        Ok(()) => Some(folder),
        Err(error) => {
            eprintln!("skipped: {error}");
            None
        }
    }
}

fn open(root: &Path, expected: Option<GroupId>) -> (Store, Receiver<StoreEvent>) {
    let config = StoreConfig {
        root: root.to_owned(),
        socket: root.join("socket"),
        keeper: Some(env!("CARGO_BIN_EXE_sandman-layer-keeper").into()),
        deadline: PATIENCE,
        workers: 4,
        background_workers: 1,
        gate: member().gate(),
    };
    let (send, events) = mpsc::channel();
    let store = Store::open(config, BootId::from_bytes(BOOT), expected, move |event| {
        let _ = send.send(event);
    });
    (store.unwrap(), events)
}

fn content(n: u8) -> Vec<u8> {
    vec![n; SIZE]
}

fn digest(n: u8) -> LayerDigest {
    LayerDigest(Sha256::digest(content(n)).into())
}

/// What first sight leaves: an index, metadata and a blob with nothing in it.
fn layer(root: &Path, n: u8) -> LayerDigest {
    let meta = image::one_file(SIZE.try_into().unwrap());
    let mut index = IndexWriter::new(Encoding::Plain);
    index.data(&content(n));
    let facts = LayerFacts {
        layer: digest(n),
        diff_id: DiffId(digest(n).0),
        compressed_size: SIZE as u64,
        tar_size: SIZE as u64,
        meta_size: meta.len() as u64,
        meta_digest: SpanDigest::of(&meta),
        implicit_directories: 0,
        inodes: 2,
    };
    let folder = root.join(layout::folder_name(digest(n)));
    std::fs::create_dir(&folder).unwrap();
    index
        .finish(
            &facts,
            &mut File::create(folder.join(layout::INDEX)).unwrap(),
        )
        .unwrap();
    std::fs::write(folder.join(layout::META), meta).unwrap();
    File::create(folder.join(layout::BLOB))
        .unwrap()
        .set_len(SIZE as u64)
        .unwrap();
    digest(n)
}

fn origin(registry: &Registry) -> Origin {
    let (url, anonymous) = (registry.blob_url(), Arc::new(Anonymous));
    let source = Source::new(client(), url, SIZE as u64, anonymous, Patience::default());
    Origin::new(vec![Arc::new(source)])
}

async fn read(mount: BorrowedFd<'_>, name: &'static str) -> io::Result<Vec<u8>> {
    let mount = mount.try_clone_to_owned().unwrap();
    let read = tokio::task::spawn_blocking(move || {
        let file = rustix::fs::openat(mount, name, OFlags::CLOEXEC, Mode::empty())?;
        let mut bytes = Vec::new();
        File::from(file).read_to_end(&mut bytes)?;
        Ok(bytes)
    });
    read.await.unwrap()
}

fn device(mounted: &Mounted) -> u64 {
    mount::device(mounted.as_fd()).unwrap()
}

#[tokio::test]
async fn a_layer_is_mounted_once_and_joined_in_overlays() {
    let Some(folder) = folder() else { return };
    let _keeper = Keeper(folder.path());
    let (store, _events) = open(folder.path(), None);
    let (below, above) = (layer(folder.path(), 1), layer(folder.path(), 2));
    let (first, second) = (
        Registry::start(content(1)).await,
        Registry::start(content(2)).await,
    );
    let below = store.mount(below, origin(&first)).unwrap();
    let above = store.mount(above, origin(&second)).unwrap();
    let again = store.mount(below.layer(), origin(&first)).unwrap();
    assert!(Arc::ptr_eq(&below, &again));
    let (upper, work) = (folder.path().join("upper"), folder.path().join("work"));
    std::fs::create_dir(&upper).unwrap();
    std::fs::create_dir(&work).unwrap();
    let overlay = mount::overlay(&mount::Overlay {
        layers: &[above.as_fd(), below.as_fd()],
        upper: &upper,
        work: &work,
    });
    let overlay = overlay.unwrap();
    assert_eq!(
        read(overlay.as_fd(), image::FILE).await.unwrap(),
        content(2)
    );
    assert_eq!(read(below.as_fd(), image::FILE).await.unwrap(), content(1));
    // What is written goes to the upper folder, and the layer stays what it was.
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::CLOEXEC;
    let file = rustix::fs::openat(&overlay, image::FILE, flags, Mode::from_raw_mode(0o644));
    rustix::io::write(file.unwrap(), b"new").unwrap();
    assert_eq!(
        &read(overlay.as_fd(), image::FILE).await.unwrap()[..3],
        b"new"
    );
    assert_eq!(read(above.as_fd(), image::FILE).await.unwrap(), content(2));
}

#[tokio::test]
async fn layers_in_use_stay_and_others_go() {
    let Some(folder) = folder() else { return };
    let _keeper = Keeper(folder.path());
    let (store, _events) = open(folder.path(), None);
    let digest = layer(folder.path(), 1);
    let registry = Registry::start(content(1)).await;
    let mounted = store.mount(digest, origin(&registry)).unwrap();
    assert_eq!(store.prune(&NOTHING).unwrap().layers, []);
    assert_eq!(
        read(mounted.as_fd(), image::FILE).await.unwrap(),
        content(1)
    );
    drop(mounted);
    assert_eq!(store.prune(&NOTHING).unwrap().layers, [digest]);
    let error = store.mount(digest, origin(&registry)).unwrap_err();
    assert!(matches!(error, StoreError::Unknown(_)), "{error}");
    // The same layer may come again.
    layer(folder.path(), 1);
    let mounted = store.mount(digest, origin(&registry)).unwrap();
    assert_eq!(
        read(mounted.as_fd(), image::FILE).await.unwrap(),
        content(1)
    );
}

#[tokio::test]
async fn a_restarted_process_finds_its_mounts() {
    let Some(folder) = folder() else { return };
    let _keeper = Keeper(folder.path());
    let (store, _events) = open(folder.path(), None);
    let (used, unused) = (layer(folder.path(), 1), layer(folder.path(), 2));
    let registry = Registry::start(content(1)).await;
    let first = store.mount(used, origin(&registry)).unwrap();
    let other = store.mount(unused, origin(&registry)).unwrap();
    let (before, group) = (device(&first), store.group());
    // A killed process runs no destructors.
    let (first, other) = (Box::leak(Box::new(first)), Box::leak(Box::new(other)));
    drop(store);
    let (store, events) = open(folder.path(), group);
    let again = store.mount(used, origin(&registry)).unwrap();
    assert_eq!(device(&again), before, "the same mount");
    assert_eq!(read(again.as_fd(), image::FILE).await.unwrap(), content(1));
    store.drop_unused_mounts().unwrap();
    assert_eq!(store.prune(&NOTHING).unwrap().layers, [unused]);
    assert!(
        !events
            .try_iter()
            .any(|event| matches!(event, StoreEvent::Keeper(_)))
    );
    assert_eq!((first.layer(), other.layer()), (used, unused));
}

#[tokio::test]
async fn complete_layers_start_without_their_registry() {
    let Some(folder) = folder() else { return };
    let _keeper = Keeper(folder.path());
    let (store, events) = open(folder.path(), None);
    let digest = layer(folder.path(), 1);
    let registry = Registry::start(content(1)).await;
    let mounted = store.mount(digest, origin(&registry)).unwrap();
    store.filler().complete(digest);
    let events = tokio::task::spawn_blocking(move || {
        events.recv_timeout(PATIENCE).unwrap();
        events
    });
    events.await.unwrap();
    drop((mounted, registry));
    let group = store.group();
    drop(store);
    let (store, _events) = open(folder.path(), group);
    let mounted = store.mount(digest, Origin::new(Vec::new())).unwrap();
    assert_eq!(
        read(mounted.as_fd(), image::FILE).await.unwrap(),
        content(1)
    );
    let entries = store.cache().list().unwrap();
    assert!(entries[0].sealed && entries[0].users == 1);
}

#[tokio::test]
async fn a_lost_group_is_told_before_anything_is_mounted() {
    let Some(folder) = folder() else { return };
    let _keeper = Keeper(folder.path());
    let lost = GroupId([7; 16]);
    let (store, events) = open(folder.path(), Some(lost));
    let event = events.try_recv().unwrap();
    assert!(
        matches!(event, StoreEvent::Keeper(KeeperEvent::GroupLost(group)) if group == lost),
        "{event:?}"
    );
    let digest = layer(folder.path(), 1);
    let registry = Registry::start(content(1)).await;
    let mounted = store.mount(digest, origin(&registry)).unwrap();
    assert_eq!(
        read(mounted.as_fd(), image::FILE).await.unwrap(),
        content(1)
    );
}

#[tokio::test]
async fn damaged_metadata_never_reaches_the_kernel() {
    let Some(folder) = folder() else { return };
    let _keeper = Keeper(folder.path());
    let (store, _events) = open(folder.path(), None);
    let digest = layer(folder.path(), 1);
    let meta = folder
        .path()
        .join(layout::folder_name(digest))
        .join(layout::META);
    let mut bytes = std::fs::read(&meta).unwrap();
    bytes[1600] ^= 1;
    std::fs::write(&meta, bytes).unwrap();
    let registry = Registry::start(content(1)).await;
    let error = store.mount(digest, origin(&registry)).unwrap_err();
    assert!(matches!(error, StoreError::Metadata(_)), "{error}");
}
