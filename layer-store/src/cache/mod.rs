//! The layers that a host has: what is kept, what is used, and what goes when space is short.
//!
//! The folder is the truth. What is added here lives as long as the process: who uses a layer now.
//! A layer in use, or pinned by an operator, is never removed.

mod evict;
mod state;

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

pub use self::{
    evict::{Limits, Usage},
    state::{BootId, FilledFile, is_sealed, seal},
};
use crate::index::{IndexError, LayerIndex};
use crate::{LayerDigest, layout};

/// A layer of the cache, as `ls` shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Which.
    pub layer: LayerDigest,
    /// Bytes on disk, holes not counted.
    pub bytes: u64,
    /// Those of them that are the archive; the rest is what finds a layer's bytes again.
    pub data: u64,
    /// Whether it is complete.
    pub sealed: bool,
    /// Whether an operator pinned it.
    pub pinned: bool,
    /// How many use it now.
    pub users: usize,
    /// When it was last taken into use or released, in seconds since the epoch.
    pub last_used: u64,
}

/// What a cache takes of its file system.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Taken {
    /// Bytes on disk, holes not counted.
    pub bytes: u64,
    /// Files and folders.
    pub inodes: u64,
}

/// What [`Cache::prune`] did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pruned {
    /// Layers that are gone.
    pub layers: Vec<LayerDigest>,
    /// Layers of which only the index is left, from which they are filled again as they are read.
    pub emptied: Vec<LayerDigest>,
    /// Bytes that they took.
    pub bytes: u64,
}

/// What is left of a layer whose data was to go.
enum Left {
    All,
    Index,
    Nothing,
}

/// The folder of a store.
#[derive(Clone, Debug)]
pub struct Cache {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    root: PathBuf,
    users: Mutex<HashMap<LayerDigest, usize>>,
}

/// A layer that stays for as long as this lives.
#[derive(Debug)]
pub struct InUse {
    inner: Arc<Inner>,
    layer: LayerDigest,
}

impl Cache {
    /// Opens the store at `root`, after removing what a crash or a reboot made worthless: folders
    /// that were being made or removed, and blobs that are neither sealed nor of this boot.
    /// Damaged layers are removed too; nothing of what is left keeps the store from opening.
    ///
    /// # Errors
    /// The folder cannot be made or listed.
    pub fn open(root: &Path, boot: BootId) -> io::Result<Self> {
        std::fs::create_dir_all(root)?;
        for found in std::fs::read_dir(root)? {
            let found = found?;
            let name = found.file_name();
            let name = name.to_string_lossy();
            match layout::layer_of(&name) {
                Some(layer) => recover(&found.path(), layer, boot)?,
                None if name.starts_with("gone-") => std::fs::remove_dir_all(found.path())?,
                // The lock, the socket, drafts of a conversion: not ours.
                None => {}
            }
        }
        Ok(Self {
            inner: Arc::new(Inner {
                root: root.to_owned(),
                users: Mutex::default(),
            }),
        })
    }

    /// Folder of a layer, whether it is there or not.
    #[must_use]
    pub fn folder(&self, layer: LayerDigest) -> PathBuf {
        self.inner.folder(layer)
    }

    /// Whether a layer's index and metadata are there.
    #[must_use]
    pub fn has(&self, layer: LayerDigest) -> bool {
        let folder = self.folder(layer);
        folder.join(layout::INDEX).exists() && folder.join(layout::META).exists()
    }

    /// Takes a layer into use. Its folder stays until the result is dropped.
    ///
    /// # Errors
    /// It is not there.
    pub fn use_layer(&self, layer: LayerDigest) -> io::Result<InUse> {
        let mut users = self.inner.lock();
        self.inner.touch(layer)?;
        *users.entry(layer).or_default() += 1;
        drop(users);
        Ok(InUse {
            inner: Arc::clone(&self.inner),
            layer,
        })
    }

    /// All layers.
    ///
    /// # Errors
    /// The folder cannot be listed.
    pub fn list(&self) -> io::Result<Vec<Entry>> {
        let all = self.entries()?;
        Ok(all.into_iter().map(|(entry, _)| entry).collect())
    }

    /// What all layers take together.
    ///
    /// # Errors
    /// The folder cannot be listed.
    pub fn taken(&self) -> io::Result<Taken> {
        let mut taken = Taken::default();
        for (entry, inodes) in self.entries()? {
            taken.bytes += entry.bytes;
            taken.inodes += inodes;
        }
        Ok(taken)
    }

    /// All layers, with their files and folders.
    fn entries(&self) -> io::Result<Vec<(Entry, u64)>> {
        let mut entries = Vec::new();
        for found in std::fs::read_dir(&self.inner.root)? {
            let found = found?;
            let Some(layer) = layout::layer_of(&found.file_name().to_string_lossy()) else {
                continue;
            };
            match self.entry(layer, &found.path()) {
                Ok(entry) => entries.push(entry),
                // Removed in the meantime.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
        }
        entries.sort_by_key(|(entry, _)| entry.layer);
        Ok(entries)
    }

    fn entry(&self, layer: LayerDigest, folder: &Path) -> io::Result<(Entry, u64)> {
        let (mut bytes, mut data, mut inodes) = (0, 0, 1);
        for file in std::fs::read_dir(folder)? {
            let file = file?;
            // Blocks of 512 bytes, whatever the file system's are.
            let taken = file.metadata()?.blocks() * 512;
            bytes += taken;
            if file.file_name() == layout::BLOB {
                data = taken;
            }
            inodes += 1;
        }
        let entry = Entry {
            layer,
            bytes,
            data,
            sealed: folder.join(layout::SEALED).exists(),
            pinned: folder.join(layout::PINNED).exists(),
            users: self.inner.lock().get(&layer).copied().unwrap_or(0),
            last_used: u64::try_from(std::fs::metadata(folder)?.mtime()).unwrap_or(0),
        };
        Ok((entry, inodes))
    }

    /// Pins a layer, or takes the pin away.
    ///
    /// # Errors
    /// It is not there.
    pub fn pin(&self, layer: LayerDigest, pinned: bool) -> io::Result<()> {
        let path = self.folder(layer).join(layout::PINNED);
        match pinned {
            true => File::create(path).map(drop),
            false => remove_file(&path),
        }
    }

    /// Makes room until the store is within its limits, the least recently used first. What is
    /// filled of layers goes before their indexes, which are small and save a later start from
    /// fetching a layer whole. `release` is called for each before anything of it is removed, to
    /// take it from the keeper and the filler; a layer that cannot be released stays.
    ///
    /// # Errors
    /// The folder cannot be listed or changed.
    pub fn prune(
        &self,
        limits: &Limits,
        release: &dyn Fn(LayerDigest) -> io::Result<()>,
    ) -> io::Result<Pruned> {
        let taken = self.taken()?;
        let mut pruned = self.prune_data(limits, release)?;
        let all = usage(self.entries()?, |entry, inodes| (entry.bytes, inodes));
        for layer in evict::choose(limits, self.taken()?, &all) {
            if self.remove(layer, release)? {
                pruned.layers.push(layer);
            }
        }
        let gone = &pruned.layers;
        pruned.emptied.retain(|layer| !gone.contains(layer));
        pruned.bytes = taken.bytes.saturating_sub(self.taken()?.bytes);
        Ok(pruned)
    }

    /// Does as much of [`Self::prune`] as leaves the indexes.
    ///
    /// # Errors
    /// The folder cannot be listed or changed.
    pub fn prune_data(
        &self,
        limits: &Limits,
        release: &dyn Fn(LayerDigest) -> io::Result<()>,
    ) -> io::Result<Pruned> {
        let mut pruned = Pruned::default();
        let taken = self.taken()?;
        let data = usage(self.entries()?, |entry, _| (entry.data, 0));
        let files = Taken { inodes: 0, ..taken };
        for layer in evict::choose(limits, files, &data) {
            match self.empty(layer, release)? {
                Left::All => {}
                Left::Index => pruned.emptied.push(layer),
                Left::Nothing => pruned.layers.push(layer),
            }
        }
        pruned.bytes = taken.bytes.saturating_sub(self.taken()?.bytes);
        Ok(pruned)
    }

    /// Removes what is filled of a layer, unless somebody uses it.
    fn empty(
        &self,
        layer: LayerDigest,
        release: &dyn Fn(LayerDigest) -> io::Result<()>,
    ) -> io::Result<Left> {
        let folder = self.folder(layer);
        let size = match LayerIndex::open(&folder.join(layout::INDEX)) {
            Ok(index) if index.random_access() => index.tar_size(),
            // It can only come whole again, if at all.
            _ => {
                return Ok(match self.remove(layer, release)? {
                    true => Left::Nothing,
                    false => Left::All,
                });
            }
        };
        let users = self.inner.lock();
        if users.get(&layer).is_some_and(|users| *users > 0) || release(layer).is_err() {
            return Ok(Left::All);
        }
        remove_file(&folder.join(layout::SEALED))?;
        // A seal that came back after a crash would make holes pass for zeros.
        File::open(&folder)?.sync_all()?;
        remove_file(&folder.join(layout::FILLED))?;
        let draft = folder.join("blob.new");
        File::create(&draft)?.set_len(size)?;
        std::fs::rename(draft, folder.join(layout::BLOB))?;
        Ok(Left::Index)
    }

    /// Removes one layer, unless somebody uses it. Whether it is gone. `release` as for
    /// [`Self::prune`].
    ///
    /// # Errors
    /// The folder.
    pub fn remove(
        &self,
        layer: LayerDigest,
        release: &dyn Fn(LayerDigest) -> io::Result<()>,
    ) -> io::Result<bool> {
        let gone = self
            .inner
            .root
            .join(format!("gone-{}", layout::folder_name(layer)));
        {
            // Held until the folder has another name: nobody takes it into use meanwhile.
            let users = self.inner.lock();
            if users.get(&layer).is_some_and(|users| *users > 0) || release(layer).is_err() {
                return Ok(false);
            }
            std::fs::rename(self.folder(layer), &gone)?;
        }
        std::fs::remove_dir_all(gone)?;
        Ok(true)
    }
}

impl Inner {
    fn lock(&self) -> MutexGuard<'_, HashMap<LayerDigest, usize>> {
        self.users.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn folder(&self, layer: LayerDigest) -> PathBuf {
        self.root.join(layout::folder_name(layer))
    }

    /// The folder's own time says when the layer was used.
    fn touch(&self, layer: LayerDigest) -> io::Result<()> {
        File::open(self.folder(layer))?.set_modified(SystemTime::now())
    }
}

impl InUse {
    /// Which layer.
    #[must_use]
    pub fn layer(&self) -> LayerDigest {
        self.layer
    }
}

impl Drop for InUse {
    fn drop(&mut self) {
        let mut users = self.inner.lock();
        // A time that is not written makes the layer look older, no more.
        let _ = self.inner.touch(self.layer);
        if let Some(count) = users.get_mut(&self.layer) {
            *count -= 1;
            if *count == 0 {
                users.remove(&self.layer);
            }
        }
    }
}

/// What the choice of victims needs to know of layers that give this many bytes and inodes.
fn usage(
    entries: Vec<(Entry, u64)>,
    gives: impl Fn(&Entry, u64) -> (u64, u64),
) -> Vec<Usage<LayerDigest>> {
    let usage = |(entry, inodes): (Entry, u64)| {
        let (bytes, inodes) = gives(&entry, inodes);
        Usage {
            layer: entry.layer,
            bytes,
            inodes,
            last_used: entry.last_used,
            stays: entry.pinned || entry.users > 0 || (bytes == 0 && inodes == 0),
        }
    };
    entries.into_iter().map(usage).collect()
}

/// Brings one layer's folder back to something that is true.
fn recover(folder: &Path, layer: LayerDigest, boot: BootId) -> io::Result<()> {
    let index = match LayerIndex::open(&folder.join(layout::INDEX)) {
        Ok(index) if index.layer() == layer => index,
        Err(IndexError::Io(error)) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        // No index, a damaged one, or one of another builder: it is made again.
        Ok(_) | Err(_) => return std::fs::remove_dir_all(folder),
    };
    let size = index.tar_size();
    if is_sealed(folder, index.diff_id(), size)? {
        return Ok(());
    }
    remove_file(&folder.join(layout::SEALED))?;
    if !index.random_access() {
        // Only a conversion makes its blob, and this one did not come to its end.
        return std::fs::remove_dir_all(folder);
    }
    let blob = folder.join(layout::BLOB);
    // Within one boot the blob may be mounted and in the keeper's hands, so it stays the same file.
    // Whatever it holds counts only as far as the record says so.
    if state::is_of_another_boot(folder, boot)? {
        remove_file(&blob)?;
        remove_file(&folder.join(layout::FILLED))?;
    }
    match std::fs::metadata(&blob) {
        Ok(found) if found.len() == size => Ok(()),
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => {
            remove_file(&blob)?;
            remove_file(&folder.join(layout::FILLED))?;
            File::create(blob)?.set_len(size)
        }
    }
}

fn remove_file(path: &Path) -> io::Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

#[cfg(test)]
mod tests;
