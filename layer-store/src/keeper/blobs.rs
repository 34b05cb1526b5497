//! Marked blobs by the file that an event names.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{FileType, Mode, OFlags, ResolveFlags};

use crate::LayerDigest;
use crate::layout;
use crate::sys::fanotify::Group;

/// Device and inode.
type FileId = (u64, u64);

/// Blobs that are marked in the group.
#[derive(Debug, Default)]
pub(super) struct Blobs {
    by_layer: HashMap<LayerDigest, OwnedFd>,
    by_file: HashMap<FileId, LayerDigest>,
}

impl Blobs {
    /// Opens and marks the blob of a layer, in this order: what is opened after the mark would wait
    /// for itself.
    ///
    /// A blob that we do not know may still be marked, when the keeper before this one died between
    /// marking it and telling anybody. Nobody mounts a blob before its answer has arrived, so the
    /// mark can be taken off and put on again.
    ///
    /// # Errors
    /// What failed, with the system's error.
    pub(super) fn watch(
        &mut self,
        group: &Group,
        root: BorrowedFd<'_>,
        layer: LayerDigest,
    ) -> Result<(), (&'static str, io::Error)> {
        if self.by_layer.contains_key(&layer) {
            return Ok(());
        }
        let open = || open_blob(root, layer).map_err(|error| ("open the layer's blob", error));
        let stale = open()?;
        group
            .unmark(stale.as_fd())
            .map_err(|error| ("remove an old mark of the blob", error))?;
        drop(stale);
        let blob = open()?;
        group
            .mark(blob.as_fd())
            .map_err(|error| ("mark the blob for pre-content events", error))?;
        self.insert(layer, blob)
            .map_err(|error| ("look at the blob", error))
    }

    /// Takes in a marked blob that was opened before its mark.
    ///
    /// # Errors
    /// Those of `fstat(2)`.
    pub(super) fn insert(&mut self, layer: LayerDigest, blob: OwnedFd) -> io::Result<()> {
        self.by_file.insert(file_id(blob.as_fd())?, layer);
        self.by_layer.insert(layer, blob);
        Ok(())
    }

    /// Removes the mark of a layer's blob. One that is not watched is no error.
    ///
    /// # Errors
    /// Those of `fanotify_mark(2)`; the blob stays watched.
    pub(super) fn unwatch(&mut self, group: &Group, layer: LayerDigest) -> io::Result<()> {
        if let Some(blob) = self.by_layer.get(&layer) {
            group.unmark(blob.as_fd())?;
            let file = file_id(blob.as_fd())?;
            self.by_layer.remove(&layer);
            self.by_file.remove(&file);
        }
        Ok(())
    }

    /// The descriptor through which a layer's blob is filled.
    #[must_use]
    pub(super) fn get(&self, layer: LayerDigest) -> Option<BorrowedFd<'_>> {
        self.by_layer.get(&layer).map(AsFd::as_fd)
    }

    /// Whose blob a descriptor is open on.
    ///
    /// # Errors
    /// Those of `fstat(2)`.
    pub(super) fn of_file(&self, file: BorrowedFd<'_>) -> io::Result<Option<LayerDigest>> {
        Ok(self.by_file.get(&file_id(file)?).copied())
    }

    /// All watched layers.
    pub(super) fn layers(&self) -> impl ExactSizeIterator<Item = LayerDigest> + '_ {
        self.by_layer.keys().copied()
    }
}

/// Opens `<root>/<digest>/blob` and nothing that a link or another mount puts there.
pub(super) fn open_blob(root: BorrowedFd<'_>, layer: LayerDigest) -> io::Result<OwnedFd> {
    let path = layout::folder_name(layer) + "/" + layout::BLOB;
    let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    let beneath = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_XDEV;
    let blob = rustix::fs::openat2(root, path, flags, Mode::empty(), beneath)?;
    let stat = rustix::fs::fstat(&blob)?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "it is no regular file",
        ));
    }
    Ok(blob)
}

fn file_id(file: BorrowedFd<'_>) -> io::Result<FileId> {
    let stat = rustix::fs::fstat(file)?;
    Ok((stat.st_dev, stat.st_ino))
}
