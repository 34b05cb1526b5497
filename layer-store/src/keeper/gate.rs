//! How the kernel asks, and which blobs it asks about.

use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};

use super::blobs::{Blobs, open_blob};
use super::protocol::Gate;
use crate::fuse::Service;
use crate::sys::fanotify::Group;
use crate::{LayerDigest, layout};

type Failure = (&'static str, io::Error);

/// A served gate.
#[derive(Debug)]
pub(super) enum Served {
    /// See [`Gate::Closed`].
    Closed,
    /// See [`Gate::Fanotify`].
    Fanotify { group: Group, blobs: Blobs },
    /// See [`Gate::Fuse`].
    Fuse(Box<Service>),
}

impl Served {
    /// A new one.
    ///
    /// # Errors
    /// What failed, with the system's error.
    pub(super) fn start(gate: Gate) -> Result<Self, Failure> {
        Ok(match gate {
            Gate::Closed => Self::Closed,
            Gate::Fanotify => Self::Fanotify {
                group: Group::new().map_err(|error| ("make a fanotify group", error))?,
                blobs: Blobs::default(),
            },
            Gate::Fuse => Self::Fuse(Box::new(Service::start()?)),
        })
    }

    /// Which one.
    pub(super) fn gate(&self) -> Gate {
        match self {
            Self::Closed => Gate::Closed,
            Self::Fanotify { .. } => Gate::Fanotify,
            Self::Fuse(_) => Gate::Fuse,
        }
    }

    /// What tells when there are questions, and lets the gate survive this process.
    pub(super) fn group(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Self::Closed => None,
            Self::Fanotify { group, .. } => Some(group.as_fd()),
            Self::Fuse(service) => Some(service.as_fd()),
        }
    }

    /// The folder of the FUSE file system.
    pub(super) fn tree(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Self::Fuse(service) => Some(service.tree()),
            _ => None,
        }
    }

    /// Begins to ask about a layer's blob.
    ///
    /// # Errors
    /// What failed, with the system's error.
    pub(super) fn watch(
        &mut self,
        root: BorrowedFd<'_>,
        layer: LayerDigest,
    ) -> Result<(), Failure> {
        match self {
            Self::Closed => Err((
                "watch a layer: this host mounts only complete ones",
                io::ErrorKind::Unsupported.into(),
            )),
            Self::Fanotify { group, blobs } => blobs.watch(group, root, layer),
            Self::Fuse(service) if service.files().is_watched(layer) => Ok(()),
            Self::Fuse(service) => {
                let blob =
                    open_blob(root, layer).map_err(|error| ("open the layer's blob", error))?;
                insert(service, layer, blob, 0)
            }
        }
    }

    /// Takes in a blob that the keeper before this one watched. Whether it is still needed.
    ///
    /// # Errors
    /// What failed, with the system's error.
    pub(super) fn restore(
        &mut self,
        root: BorrowedFd<'_>,
        layer: LayerDigest,
        blob: OwnedFd,
        mounted: bool,
    ) -> Result<bool, Failure> {
        match self {
            Self::Closed => Ok(false),
            Self::Fanotify { blobs, .. } => {
                let inserted = blobs.insert(layer, blob);
                inserted.map_err(|error| ("look at a kept blob", error))?;
                Ok(true)
            }
            Self::Fuse(service) => {
                insert(service, layer, blob, u32::from(mounted))?;
                let gone = is_sealed(root, layer) && service.files_mut().retire(layer, true);
                Ok(!gone)
            }
        }
    }

    /// Asks no more about a layer's blob. Whether it is let go: a complete one that is open as a
    /// file of FUSE is served until it is closed.
    ///
    /// # Errors
    /// What failed, with the system's error.
    pub(super) fn unwatch(
        &mut self,
        root: BorrowedFd<'_>,
        layer: LayerDigest,
    ) -> Result<bool, Failure> {
        match self {
            Self::Closed => Ok(true),
            Self::Fanotify { group, blobs } => {
                let done = blobs.unwatch(group, layer);
                done.map_err(|error| ("remove the mark of the blob", error))?;
                Ok(true)
            }
            Self::Fuse(service) => Ok(service.files_mut().retire(layer, is_sealed(root, layer))),
        }
    }

    /// Number of layers about which questions are asked.
    pub(super) fn watched(&self) -> usize {
        let layers = self.layers().into_iter();
        layers.filter(|layer| self.is_watched(*layer)).count()
    }

    /// Whether questions about a layer are asked.
    pub(super) fn is_watched(&self, layer: LayerDigest) -> bool {
        match self {
            Self::Closed => false,
            Self::Fanotify { blobs, .. } => blobs.get(layer).is_some(),
            Self::Fuse(service) => service.files().is_watched(layer),
        }
    }

    /// The descriptor through which a layer's blob is filled.
    pub(super) fn blob(&self, layer: LayerDigest) -> Option<BorrowedFd<'_>> {
        match self {
            Self::Closed => None,
            Self::Fanotify { blobs, .. } => blobs.get(layer),
            Self::Fuse(service) => service.files().get(layer),
        }
    }

    /// All layers whose blobs are held.
    pub(super) fn layers(&self) -> Vec<LayerDigest> {
        match self {
            Self::Closed => Vec::new(),
            Self::Fanotify { blobs, .. } => blobs.layers().collect(),
            Self::Fuse(service) => service.files().layers().collect(),
        }
    }
}

fn insert(
    service: &mut Service,
    layer: LayerDigest,
    blob: OwnedFd,
    opens: u32,
) -> Result<(), Failure> {
    let size = rustix::fs::fstat(&blob).map_err(|errno| ("look at the blob", errno.into()))?;
    let size = u64::try_from(size.st_size).unwrap_or(0);
    let inserted = service.files_mut().insert(layer, blob, size, opens);
    let clash = "name the layer's file: another layer's digest begins alike";
    inserted.map_err(|_| (clash, io::ErrorKind::AlreadyExists.into()))
}

/// Written by the filler once the blob is verified and on disk.
fn is_sealed(root: BorrowedFd<'_>, layer: LayerDigest) -> bool {
    let path = layout::folder_name(layer) + "/" + layout::SEALED;
    rustix::fs::statat(root, path, rustix::fs::AtFlags::SYMLINK_NOFOLLOW).is_ok()
}
