//! Root file systems of containers: made from an image's committed snapshot, one per attempt.
//!
//! The trait is the seam at which lazily filled layers replace containerd's snapshots.

mod accounts;
mod snapshot;
mod view;

use std::path::{Path, PathBuf};

use async_trait::async_trait;

pub use self::snapshot::Snapshots;
use crate::eviction::Disk;
use crate::runtime::{RootMount, RuntimeError};
use crate::spec::Accounts;

/// Makes and removes root file systems.
#[async_trait]
pub trait RootFs: Send + Sync + 'static {
    /// A fresh writable root over the image `chain_id`. What an interrupted attempt left behind
    /// under the same key is discarded, never reused.
    async fn prepare(&self, key: &str, chain_id: &str) -> Result<Vec<RootMount>, RuntimeError>;

    /// Removes a root. A missing one is no error.
    async fn remove(&self, key: &str) -> Result<(), RuntimeError>;

    /// Mounts the files of an image read-only at a folder; what is executed there does not run.
    /// `name` tells the volumes of a pod apart.
    async fn mount_image(
        &self,
        uid: &str,
        name: &str,
        chain_id: &str,
        point: &Path,
    ) -> Result<(), RuntimeError>;

    /// Forgets what [`Self::mount_image`] needed for a pod. Unmount first.
    async fn remove_images(&self, uid: &str) -> Result<(), RuntimeError>;

    /// Disk that a root takes beside its image. A missing one takes nothing.
    async fn usage(&self, key: &str) -> Result<Disk, RuntimeError>;

    /// The folder that holds all roots, once it is known.
    async fn folder(&self) -> Option<PathBuf>;

    /// The image's account files, read from a root that no container has used yet.
    async fn accounts(&self, chain_id: &str, root: &[RootMount]) -> Result<Accounts, RuntimeError>;
}
