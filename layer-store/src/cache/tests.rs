use super::*;
use crate::digest::{DiffId, SpanDigest};
use crate::index::{Encoding, IndexWriter, LayerFacts};

const ALL: Limits = Limits {
    high_bytes: 0,
    low_bytes: 0,
    high_inodes: 0,
    low_inodes: 0,
};
/// An archive of one whole span and a byte.
const SPANS: u32 = 2;
const SIZE: u64 = (1 << 20) + 1;

fn boot(n: u8) -> BootId {
    BootId::from_bytes([n; 36])
}

fn digest(n: u8) -> LayerDigest {
    LayerDigest([n; 32])
}

fn content(n: u8) -> Vec<u8> {
    vec![n; SIZE.try_into().unwrap()]
}

/// A layer's folder as it is after its index came: an empty blob.
fn layer(root: &Path, n: u8) -> PathBuf {
    let folder = root.join(layout::folder_name(digest(n)));
    std::fs::create_dir_all(&folder).unwrap();
    let mut index = IndexWriter::new(Encoding::Plain);
    index.data(&content(n));
    let facts = LayerFacts {
        layer: digest(n),
        diff_id: DiffId([n; 32]),
        compressed_size: SIZE,
        tar_size: SIZE,
        meta_size: 0,
        meta_digest: SpanDigest::of(&[]),
        implicit_directories: 0,
        inodes: 1,
    };
    let mut file = File::create(folder.join(layout::INDEX)).unwrap();
    index.finish(&facts, &mut file).unwrap();
    std::fs::write(folder.join(layout::META), []).unwrap();
    File::create(folder.join(layout::BLOB))
        .unwrap()
        .set_len(SIZE)
        .unwrap();
    folder
}

fn fill(folder: &Path, boot: BootId, spans: std::ops::Range<u32>) {
    let (file, mut set) = FilledFile::open(folder, boot, SPANS).unwrap();
    for span in spans {
        set.insert(span);
        file.record(&set, span).unwrap();
    }
}

fn filled(folder: &Path, boot: BootId) -> u32 {
    FilledFile::open(folder, boot, SPANS).unwrap().1.members()
}

fn inode(folder: &Path) -> u64 {
    std::fs::metadata(folder.join(layout::BLOB)).unwrap().ino()
}

fn release_all(_: LayerDigest) -> io::Result<()> {
    Ok(())
}

#[test]
fn a_restart_keeps_what_is_filled() {
    let root = tempfile::tempdir().unwrap();
    let folder = layer(root.path(), 1);
    fill(&folder, boot(1), 0..2);
    let before = inode(&folder);
    Cache::open(root.path(), boot(1)).unwrap();
    assert_eq!((filled(&folder, boot(1)), inode(&folder)), (2, before));
}

#[test]
fn a_restart_keeps_a_blob_of_which_nothing_is_filled() {
    // It may be mounted, with its only descriptors at the keeper.
    let root = tempfile::tempdir().unwrap();
    let folder = layer(root.path(), 1);
    fill(&folder, boot(1), 0..0);
    let before = inode(&folder);
    Cache::open(root.path(), boot(1)).unwrap();
    assert_eq!(inode(&folder), before);
    std::fs::write(folder.join(layout::FILLED), b"damaged").unwrap();
    Cache::open(root.path(), boot(1)).unwrap();
    assert_eq!((filled(&folder, boot(1)), inode(&folder)), (0, before));
}

#[test]
fn a_reboot_keeps_sealed_blobs_only() {
    let root = tempfile::tempdir().unwrap();
    let (lazy, sealed) = (layer(root.path(), 1), layer(root.path(), 2));
    for folder in [&lazy, &sealed] {
        fill(folder, boot(1), 0..2);
        std::fs::write(folder.join(layout::BLOB), content(7)).unwrap();
    }
    seal(&sealed, DiffId([2; 32]), SIZE).unwrap();
    let cache = Cache::open(root.path(), boot(2)).unwrap();
    assert_eq!(std::fs::read(lazy.join(layout::BLOB)).unwrap(), content(0));
    assert_eq!(filled(&lazy, boot(2)), 0);
    assert_eq!(
        std::fs::read(sealed.join(layout::BLOB)).unwrap(),
        content(7)
    );
    assert!(cache.has(digest(1)), "the index stays");
    let sealed: Vec<_> = cache
        .list()
        .unwrap()
        .iter()
        .map(|entry| entry.sealed)
        .collect();
    assert_eq!(sealed, [false, true]);
}

#[test]
fn what_cannot_be_used_is_removed() {
    let root = tempfile::tempdir().unwrap();
    let damaged = layer(root.path(), 1);
    std::fs::write(damaged.join(layout::INDEX), b"damaged").unwrap();
    let other = layer(root.path(), 2);
    std::fs::copy(
        layer(root.path(), 3).join(layout::INDEX),
        other.join(layout::INDEX),
    )
    .unwrap();
    let half_removed = root.path().join("gone-x");
    std::fs::create_dir(&half_removed).unwrap();
    std::fs::write(root.path().join("socket"), []).unwrap();
    let cache = Cache::open(root.path(), boot(1)).unwrap();
    let left: Vec<_> = cache
        .list()
        .unwrap()
        .iter()
        .map(|entry| entry.layer)
        .collect();
    assert_eq!(left, [digest(3)]);
    assert!(!half_removed.exists() && root.path().join("socket").exists());
}

#[test]
fn a_false_seal_is_no_seal() {
    let root = tempfile::tempdir().unwrap();
    let folder = layer(root.path(), 1);
    seal(&folder, DiffId([9; 32]), SIZE).unwrap();
    let cache = Cache::open(root.path(), boot(1)).unwrap();
    assert!(!cache.list().unwrap()[0].sealed);
}

#[test]
fn used_and_pinned_layers_stay() {
    let root = tempfile::tempdir().unwrap();
    (1..=4).for_each(|n| drop(layer(root.path(), n)));
    let cache = Cache::open(root.path(), boot(1)).unwrap();
    let first = cache.use_layer(digest(1)).unwrap();
    let second = cache.use_layer(digest(1)).unwrap();
    cache.pin(digest(2), true).unwrap();
    let refuse = |layer| match layer == digest(3) {
        true => Err(io::ErrorKind::ResourceBusy.into()),
        false => Ok(()),
    };
    assert_eq!(cache.prune(&ALL, &refuse).unwrap().layers, [digest(4)]);
    drop(first);
    assert_eq!(cache.prune(&ALL, &release_all).unwrap().layers, [digest(3)]);
    drop(second);
    assert_eq!(cache.prune(&ALL, &release_all).unwrap().layers, [digest(1)]);
    cache.pin(digest(2), false).unwrap();
    cache.pin(digest(2), false).unwrap();
    assert_eq!(cache.prune(&ALL, &release_all).unwrap().layers, [digest(2)]);
    assert_eq!(cache.list().unwrap(), []);
    cache.use_layer(digest(1)).unwrap_err();
}

#[test]
fn layers_come_and_go_without_a_trace() {
    let root = tempfile::tempdir().unwrap();
    let cache = Cache::open(root.path(), boot(1)).unwrap();
    for n in 0..500 {
        let n = u8::try_from(n % 100).unwrap();
        layer(root.path(), n);
        drop(cache.use_layer(digest(n)).unwrap());
        let limits = Limits {
            high_inodes: 40,
            low_inodes: 20,
            high_bytes: u64::MAX,
            low_bytes: u64::MAX,
        };
        cache.prune(&limits, &release_all).unwrap();
        assert!(cache.list().unwrap().len() <= 10);
    }
    cache.prune(&ALL, &release_all).unwrap();
    assert_eq!(std::fs::read_dir(root.path()).unwrap().count(), 0);
    assert!(cache.inner.lock().is_empty());
}

#[test]
fn data_goes_before_indexes() {
    let root = tempfile::tempdir().unwrap();
    let folders: Vec<_> = (1..=3).map(|n| layer(root.path(), n)).collect();
    for (n, folder) in (1..).zip(&folders) {
        fill(folder, boot(1), 0..2);
        std::fs::write(folder.join(layout::BLOB), content(7)).unwrap();
        seal(folder, DiffId([n; 32]), SIZE).unwrap();
    }
    let cache = Cache::open(root.path(), boot(1)).unwrap();
    let used = cache.use_layer(digest(1)).unwrap();
    let taken = cache.taken().unwrap();
    let limits = Limits {
        high_bytes: taken.bytes - 1,
        low_bytes: taken.bytes - 2 * SIZE,
        high_inodes: u64::MAX,
        low_inodes: u64::MAX,
    };
    let pruned = cache.prune(&limits, &release_all).unwrap();
    assert_eq!(pruned.layers, []);
    assert_eq!(pruned.emptied, [digest(2), digest(3)]);
    assert!(pruned.bytes >= 2 * SIZE);
    // Nothing of it counts as filled, in this process or the next.
    for cache in [cache, Cache::open(root.path(), boot(1)).unwrap()] {
        let entries = cache.list().unwrap();
        let sealed: Vec<_> = entries.iter().map(|entry| entry.sealed).collect();
        assert_eq!(sealed, [true, false, false]);
        assert!(entries.iter().all(|entry| cache.has(entry.layer)));
        assert_eq!(filled(&folders[1], boot(1)), 0);
        let blob = std::fs::metadata(folders[1].join(layout::BLOB)).unwrap();
        assert_eq!((blob.len(), blob.blocks()), (SIZE, 0));
        // There is nothing more to be had of them.
        assert_eq!(
            cache.prune(&limits, &release_all).unwrap(),
            Pruned::default()
        );
    }
    drop(used);
}
