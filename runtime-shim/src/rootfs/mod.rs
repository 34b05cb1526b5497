//! Root file systems of containers, one per attempt: out of the layer store, or out of containerd's
//! snapshots.

mod accounts;
mod overlays;
mod record;
mod snapshot;
mod view;

use std::path::{Path, PathBuf};

use async_trait::async_trait;

pub use self::overlays::Overlays;
pub use self::snapshot::Snapshots;
use crate::eviction::Disk;
use crate::images::Image;
use crate::runtime::{RootMount, RuntimeError};
use crate::spec::Accounts;

/// A root file system that is ready for a task.
#[derive(Clone, Debug)]
pub struct Root {
    /// What the task is given.
    pub mounts: Vec<RootMount>,
    /// containerd's snapshot behind it, if it is one.
    pub snapshot: Option<String>,
}

/// Makes and removes root file systems.
#[async_trait]
pub trait RootFs: Send + Sync + 'static {
    /// A fresh writable root over an image. What an interrupted attempt left behind under the same
    /// key is discarded, never reused.
    async fn prepare(&self, key: &str, image: &Image) -> Result<Root, RuntimeError>;

    /// A task has the root now: what only served to hand it over may go.
    async fn handed_over(&self, key: &str);

    /// Removes a root. A missing one is no error.
    async fn remove(&self, key: &str) -> Result<(), RuntimeError>;

    /// Mounts the files of an image read-only at a folder; what is executed there does not run.
    /// `name` tells the volumes of a pod apart.
    async fn mount_image(
        &self,
        uid: &str,
        name: &str,
        image: &Image,
        point: &Path,
    ) -> Result<(), RuntimeError>;

    /// Forgets what [`Self::mount_image`] needed for a pod. Unmount first.
    async fn remove_images(&self, uid: &str) -> Result<(), RuntimeError>;

    /// Disk that a root takes beside its image. A missing one takes nothing.
    async fn usage(&self, key: &str) -> Result<Disk, RuntimeError>;

    /// The folder that holds all roots, once it is known.
    async fn folder(&self) -> Option<PathBuf>;

    /// The image's account files, read from a root that no container has used yet.
    async fn accounts(&self, image: &Image, root: &Root) -> Result<Accounts, RuntimeError>;

    /// Keys of roots over layers that are not complete. If whoever fills them is lost, what they
    /// show is not to be trusted.
    fn on_unsealed_layers(&self) -> Vec<String>;
}
