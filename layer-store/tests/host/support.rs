//! Layers to convert, and their trees to compare.

use std::{
    collections::BTreeMap,
    fs,
    io::{Cursor, Write},
    os::unix::fs::{FileTypeExt, MetadataExt},
    path::{Path, PathBuf},
};

use flate2::{Compression, write::GzEncoder};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use sandman_layer_store::{
    DiffId, LayerDigest,
    convert::{Conversion, ConvertError, Converted, Limits, Order},
    layout::{BLOB, META},
};
use sha2::{Digest, Sha256};
use tar::{Builder, EntryType, Header};

/// The converter as it is built.
pub(crate) fn helper() -> PathBuf {
    env!("CARGO_BIN_EXE_sandman-layer-filler").into()
}

pub(crate) fn sha256(bytes: &[u8]) -> [u8; 32] {
    Sha256::digest(bytes).into()
}

pub(crate) fn gzip(plain: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(plain).unwrap();
    encoder.finish().unwrap()
}

pub(crate) fn order(blob: &[u8], archive: &[u8]) -> Order {
    Order {
        layer: LayerDigest(sha256(blob)),
        diff_id: DiffId(sha256(archive)),
        size: blob.len() as u64,
        limits: Limits::default(),
    }
}

/// Converts as gzip, by the helper.
pub(crate) fn convert(archive: &[u8], staging: &Path) -> Result<Converted, ConvertError> {
    let blob = gzip(archive);
    let order = order(&blob, archive);
    Conversion::run(&helper(), order, staging.to_owned(), Cursor::new(blob))
}

/// A mounted layer, until dropped.
pub(crate) struct Mounted(PathBuf);

impl Mounted {
    pub(crate) fn new(layer: &Path, target: &Path) -> Self {
        assert!(nix::unistd::geteuid().is_root(), "this test needs root");
        fs::create_dir(target).unwrap();
        let options = format!("device={}", layer.join(BLOB).display());
        let flags = MsFlags::MS_RDONLY | MsFlags::MS_NODEV;
        mount(
            Some(&layer.join(META)),
            target,
            Some("erofs"),
            flags,
            Some(&*options),
        )
        .unwrap_or_else(|error| panic!("cannot mount {}: {error}", layer.display()));
        Self(target.to_owned())
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        umount2(&self.0, MntFlags::MNT_DETACH).unwrap();
    }
}

/// Everything that a tree is, a line for each path.
pub(crate) fn tree(root: &Path) -> BTreeMap<PathBuf, String> {
    let mut lines = BTreeMap::new();
    let mut first_names = BTreeMap::new();
    let mut folders = vec![root.to_owned()];
    while let Some(folder) = folders.pop() {
        let mut names: Vec<_> = fs::read_dir(&folder)
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .collect();
        names.sort();
        for path in names {
            let metadata = fs::symlink_metadata(&path).unwrap();
            let kind = metadata.file_type();
            let what = if kind.is_dir() {
                folders.push(path.clone());
                String::new()
            } else if kind.is_symlink() {
                format!("-> {:?}", fs::read_link(&path).unwrap())
            } else if kind.is_file() {
                format!(
                    "{} {:x?}",
                    metadata.len(),
                    &sha256(&fs::read(&path).unwrap())[..8]
                )
            } else if kind.is_fifo() {
                "fifo".to_owned()
            } else {
                format!("device {:x}", metadata.rdev())
            };
            let mut line = format!(
                "{:o} {}:{} {}.{:09} {what}",
                metadata.mode(),
                metadata.uid(),
                metadata.gid(),
                metadata.mtime(),
                metadata.mtime_nsec(),
            );
            let name = path.strip_prefix(root).unwrap().to_owned();
            if !kind.is_dir() {
                let first = first_names
                    .entry(metadata.ino())
                    .or_insert_with(|| name.clone());
                line += &format!(" x{} {first:?}", metadata.nlink());
            }
            let mut attributes: Vec<_> = xattr::list(&path).unwrap().collect();
            attributes.sort();
            for attribute in attributes {
                let value = xattr::get(&path, &attribute).unwrap();
                line += &format!(" {attribute:?}={value:x?}");
            }
            lines.insert(name, line);
        }
    }
    lines
}

/// Compares two trees and names the first few differences.
pub(crate) fn assert_same(ours: &Path, theirs: &Path) -> usize {
    let (ours, theirs) = (tree(ours), tree(theirs));
    let paths: std::collections::BTreeSet<_> = ours.keys().chain(theirs.keys()).collect();
    let mut different = paths
        .iter()
        .filter(|path| ours.get(**path) != theirs.get(**path));
    if let Some(path) = different.next() {
        panic!(
            "{path:?} and {} more differ\n  ours   {:?}\n  theirs {:?}",
            different.count(),
            ours.get(*path),
            theirs.get(*path)
        );
    }
    paths.len()
}

/// Random numbers that are the same in each run.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn below(&mut self, end: usize) -> usize {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % end
    }
}

/// An archive of everything that GNU tar unpacks, made by another implementation.
pub(crate) fn archive(seed: u64, entries: usize) -> Vec<u8> {
    let mut random = Random(seed);
    let mut builder = Builder::new(Vec::new());
    let mut folders = vec![PathBuf::from(".")];
    let mut files: Vec<PathBuf> = Vec::new();
    for number in 0..entries {
        let folder = folders[random.below(folders.len())].clone();
        let stem = "name-".repeat(1 + random.below(45));
        let path = folder.join(format!("{number}-{stem}"));
        // ext4 cannot say more than the year 2446.
        let mtime = random.below(10_000_000_000) as u64;
        let mut header = Header::new_gnu();
        header.set_mtime(mtime);
        header.set_uid(random.below(70_000) as u64);
        header.set_gid(random.below(70_000) as u64);
        header.set_mode([0o644, 0o755, 0o4755, 0o2711, 0o600, 0o1777][random.below(6)]);
        header.set_size(0);
        if random.below(4) == 0 {
            let nanos = format!("{mtime}.{:09}", random.below(1_000_000_000));
            builder
                .append_pax_extensions([("mtime", nanos.as_bytes())])
                .unwrap();
        }
        match random.below(12) {
            0 | 1 => {
                header.set_entry_type(EntryType::Directory);
                builder
                    .append_data(&mut header, &path, std::io::empty())
                    .unwrap();
                folders.push(path);
            }
            2 => {
                header.set_entry_type(EntryType::Symlink);
                let target = "../x".repeat(1 + random.below(200));
                builder.append_link(&mut header, &path, target).unwrap();
            }
            3 if !files.is_empty() => {
                header.set_entry_type(EntryType::Link);
                let target = &files[random.below(files.len())];
                builder.append_link(&mut header, &path, target).unwrap();
            }
            4 => {
                header.set_entry_type(EntryType::Fifo);
                builder
                    .append_data(&mut header, &path, std::io::empty())
                    .unwrap();
            }
            5 => {
                let kind = [EntryType::Char, EntryType::Block][random.below(2)];
                header.set_entry_type(kind);
                header.set_device_major(random.below(4096) as u32).unwrap();
                header
                    .set_device_minor(random.below(1 << 20) as u32)
                    .unwrap();
                builder
                    .append_data(&mut header, &path, std::io::empty())
                    .unwrap();
            }
            6 => {
                // A capability in the kernel's form: version 2, cap_net_raw.
                let capability = [1, 0, 0, 2, 0, 32, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
                let value = vec![b'v'; random.below(2000)];
                let extensions = [
                    ("SCHILY.xattr.security.capability", &capability[..]),
                    ("SCHILY.xattr.user.some", &value[..]),
                ];
                builder.append_pax_extensions(extensions).unwrap();
                header.set_mode(0o755);
                header.set_size(5);
                builder
                    .append_data(&mut header, &path, &b"hello"[..])
                    .unwrap();
                files.push(path);
            }
            _ => {
                let path = match random.below(10) {
                    // Once more, with other content.
                    0 if !files.is_empty() => files[random.below(files.len())].clone(),
                    _ => path,
                };
                let size = [0, 1, 511, 512, 513, 4096, 100_000][random.below(7)];
                let data: Vec<u8> = (0..size).map(|_| random.below(256) as u8).collect();
                header.set_size(size as u64);
                builder
                    .append_data(&mut header, &path, data.as_slice())
                    .unwrap();
                files.push(path);
            }
        }
    }
    builder.into_inner().unwrap()
}
