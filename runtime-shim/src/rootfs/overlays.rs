//! [`RootFs`] over the layer store: an overlay of the layers' mounts with an upper folder for each
//! attempt. Images that the store cannot hold are left to containerd's snapshots.
//!
//! ```text
//! <data_dir>/roots/<key>/record   which layers, of which repository; durable before the mount
//! <data_dir>/roots/<key>/upper    what the container changes
//! <data_dir>/roots/<key>/work     the overlay's own
//! <state_dir>/roots/<key>         where the overlay is mounted until a task has it
//! ```
//!
//! An upper folder is volatile and is never mounted twice: whatever an attempt left goes before the
//! next one.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;
use sandman_layer_store::cache::BootId;
use sandman_layer_store::mount;
use sandman_layer_store::store::Mounted;

use super::accounts::AccountCache;
use super::record::{Layer, Record};
use super::{Root, RootFs, Snapshots, accounts};
use crate::eviction::{Disk, measure};
use crate::images::{Image, Origins};
use crate::layers::{LayerSet, Layers};
use crate::runtime::{RootMount, RuntimeError};
use crate::spec::Accounts;
use crate::volumes::remove_tree;

/// Between a pod's UID and the name of its volume; a dot is in no id of a container.
const VOLUME: &str = ".volume.";

/// Root file systems out of the layer store.
pub struct Overlays {
    inner: Arc<Inner>,
    snapshots: Snapshots,
    accounts: AccountCache,
}

struct Inner {
    layers: Arc<Layers>,
    origins: Arc<Origins>,
    folder: PathBuf,
    points: PathBuf,
    /// Overlays without an upper folder want a second layer.
    empty: OwnedFd,
    boot: BootId,
    /// The layers of each root, which stay mounted for as long as it may be in use.
    held: Mutex<HashMap<String, Held>>,
}

struct Held {
    record: Record,
    _mounts: Vec<Arc<Mounted>>,
}

impl Overlays {
    /// Takes over what an earlier process of this service made, and removes what is of an earlier
    /// boot. Blocks; needs the keeper and no registry.
    ///
    /// # Errors
    /// A folder cannot be made or listed.
    pub(crate) fn adopt(
        layers: Arc<Layers>,
        origins: Arc<Origins>,
        snapshots: Snapshots,
        state_dir: &Path,
        data_dir: &Path,
    ) -> io::Result<Self> {
        let (folder, points) = (data_dir.join("roots"), state_dir.join("roots"));
        let empty = state_dir.join("layers/empty");
        for path in [&folder, &points, &empty] {
            let mut builder = std::fs::DirBuilder::new();
            builder.recursive(true).mode(0o700).create(path)?;
        }
        let inner = Inner {
            boot: layers.store().boot(),
            layers,
            origins,
            folder,
            points,
            empty: File::open(empty)?.into(),
            held: Mutex::default(),
        };
        inner.adopt()?;
        if let Err(error) = inner.layers.store().drop_unused_mounts() {
            // They keep layers from being removed, and nothing else.
            tracing::warn!(%error, "cannot let go of layers that nothing uses");
        }
        Ok(Self {
            inner: Arc::new(inner),
            snapshots,
            accounts: AccountCache::default(),
        })
    }

    async fn blocking<T: Send + 'static>(
        &self,
        what: &'static str,
        work: impl FnOnce(&Inner) -> Result<T, Trouble> + Send + 'static,
    ) -> Result<T, RuntimeError> {
        let inner = Arc::clone(&self.inner);
        let done = tokio::task::spawn_blocking(move || work(&inner)).await;
        let failed =
            |error: &dyn std::fmt::Display| RuntimeError::Failed(format!("{what}: {error}"));
        done.map_err(|error| failed(&error))?
            .map_err(|error| failed(&error))
    }
}

/// Why there is no root.
type Trouble = Box<dyn std::error::Error + Send + Sync>;

#[async_trait]
impl RootFs for Overlays {
    async fn prepare(&self, key: &str, image: &Image) -> Result<Root, RuntimeError> {
        let Some(set) = image.layers.clone() else {
            return self.snapshots.prepare(key, image).await;
        };
        let key = key.to_owned();
        let what = "making the root file system";
        let mounts = self
            .blocking(what, move |inner| inner.prepare(&key, &set))
            .await?;
        Ok(Root {
            mounts,
            snapshot: None,
        })
    }

    async fn handed_over(&self, key: &str) {
        let point = self.inner.points.join(key);
        // The task has a mount of its own; one in this namespace slows every process that is made.
        let detached = tokio::task::spawn_blocking(move || take_point(&point)).await;
        if let Ok(Err(error)) = detached {
            tracing::debug!(key, %error, "the mount stays until its container goes");
        }
    }

    async fn remove(&self, key: &str) -> Result<(), RuntimeError> {
        let own = key.to_owned();
        let what = "removing the root file system";
        match self
            .blocking(what, move |inner| Ok(inner.discard(&own)?))
            .await?
        {
            true => Ok(()),
            false => self.snapshots.remove(key).await,
        }
    }

    async fn mount_image(
        &self,
        uid: &str,
        name: &str,
        image: &Image,
        point: &Path,
    ) -> Result<(), RuntimeError> {
        let Some(set) = image.layers.clone() else {
            return self.snapshots.mount_image(uid, name, image, point).await;
        };
        let (key, point) = (format!("{uid}{VOLUME}{name}"), point.to_owned());
        let mount = move |inner: &Inner| inner.mount_image(&key, &set, &point);
        self.blocking("mounting the image", mount).await
    }

    async fn remove_images(&self, uid: &str) -> Result<(), RuntimeError> {
        let prefix = format!("{uid}{VOLUME}");
        let remove = move |inner: &Inner| {
            for key in inner.keys()?.iter().filter(|key| key.starts_with(&prefix)) {
                inner.discard(key)?;
            }
            Ok(())
        };
        self.blocking("removing the image volumes", remove).await?;
        self.snapshots.remove_images(uid).await
    }

    async fn usage(&self, key: &str) -> Result<Disk, RuntimeError> {
        let own = self.inner.folder.join(key);
        let measured = tokio::task::spawn_blocking(move || match own.exists() {
            true => measure::tree(&own.join("upper")).map(Some),
            false => Ok(None),
        });
        let failed = |error: &dyn std::fmt::Display| {
            RuntimeError::Failed(format!("measuring the root file system: {error}"))
        };
        match measured.await.map_err(|error| failed(&error))? {
            Ok(Some(disk)) => Ok(disk),
            Ok(None) => self.snapshots.usage(key).await,
            Err(error) => Err(failed(&error)),
        }
    }

    async fn folder(&self) -> Option<PathBuf> {
        Some(self.inner.folder.clone())
    }

    async fn accounts(&self, image: &Image, root: &Root) -> Result<Accounts, RuntimeError> {
        let Some(set) = image.layers.clone() else {
            return self.snapshots.accounts(image, root).await;
        };
        if let Some(known) = self.accounts.get(&image.chain_id) {
            return Ok(known);
        }
        let read = move |inner: &Inner| {
            let (mounts, _) = inner.mounts(&set)?;
            Ok(accounts::read(&inner.view(&mounts)?)?)
        };
        let found = self.blocking("reading the image's accounts", read).await?;
        self.accounts.put(&image.chain_id, &found);
        Ok(found)
    }

    fn on_unsealed_layers(&self) -> Vec<String> {
        let held = self.inner.held();
        let unsealed = |held: &Held| {
            let mut layers = held.record.layers.iter();
            layers.any(|layer| !self.inner.layers.is_sealed(layer.digest))
        };
        held.iter()
            .filter(|(_, held)| unsealed(held))
            .map(|(key, _)| key.clone())
            .collect()
    }
}

impl Inner {
    fn held(&self) -> MutexGuard<'_, HashMap<String, Held>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn adopt(&self) -> io::Result<()> {
        for key in self.keys()? {
            let folder = self.folder.join(&key);
            // A task that is being made at this moment fails and is made again.
            take_point(&self.points.join(&key))?;
            let record = match Record::read(&folder) {
                Ok(record) if record.is_of(self.boot) => record,
                // Of an earlier boot, or of a root that was not finished.
                _ => {
                    remove_tree(&folder)?;
                    continue;
                }
            };
            match self.mount_recorded(&record) {
                Ok(mounts) => self.hold(&key, record, mounts),
                // It goes on with what it has; what it has not read yet will be an error to it.
                Err(error) => tracing::warn!(key, %error, "cannot hold the layers of a container"),
            }
        }
        Ok(())
    }

    fn keys(&self) -> io::Result<Vec<String>> {
        let entries = std::fs::read_dir(&self.folder)?;
        let name = |entry: io::Result<std::fs::DirEntry>| {
            Ok(entry?.file_name().to_string_lossy().into_owned())
        };
        entries.map(name).collect()
    }

    fn hold(&self, key: &str, record: Record, mounts: Vec<Arc<Mounted>>) {
        let held = Held {
            record,
            _mounts: mounts,
        };
        let before = self.held().insert(key.to_owned(), held);
        // Not under the lock: its last mount goes with it.
        drop(before);
    }

    fn mount_recorded(&self, record: &Record) -> Result<Vec<Arc<Mounted>>, Trouble> {
        let mut mounts = Vec::with_capacity(record.layers.len());
        for layer in &record.layers {
            let origin = self
                .origins
                .of(&record.repository, layer.digest, layer.size);
            mounts.push(self.layers.mount(layer.digest, origin)?);
        }
        Ok(mounts)
    }

    fn mounts(&self, set: &LayerSet) -> Result<(Vec<Arc<Mounted>>, Record), Trouble> {
        let layer = |layer: &crate::layers::SetLayer| Layer {
            digest: layer.digest(),
            size: layer.size,
        };
        let layers = set.layers.iter().map(layer).collect();
        let record = Record::new(self.boot, &set.repository, layers);
        Ok((self.mount_recorded(&record)?, record))
    }

    fn view(&self, mounts: &[Arc<Mounted>]) -> Result<OwnedFd, mount::MountError> {
        mount::view(&uppermost_first(mounts), self.empty.as_fd())
    }

    /// Makes the folder of a root, with its record.
    fn begin(&self, key: &str, record: &Record) -> io::Result<PathBuf> {
        self.discard(key)?;
        let folder = self.folder.join(key);
        std::fs::DirBuilder::new().mode(0o700).create(&folder)?;
        record.write(&folder)?;
        Ok(folder)
    }

    fn prepare(&self, key: &str, set: &LayerSet) -> Result<Vec<RootMount>, Trouble> {
        let (mounts, record) = self.mounts(set)?;
        let folder = self.begin(key, &record)?;
        let (upper, work) = (folder.join("upper"), folder.join("work"));
        std::fs::create_dir(&upper)?;
        std::fs::create_dir(&work)?;
        let layers = uppermost_first(&mounts);
        if let Some(top) = layers.first() {
            mount::look_like(*top, &upper)?;
        }
        let overlay = mount::overlay(&mount::Overlay {
            layers: &layers,
            upper: &upper,
            work: &work,
        })?;
        let point = self.points.join(key);
        match std::fs::create_dir(&point) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error.into()),
            _ => {}
        }
        mount::attach(overlay.as_fd(), &point)?;
        self.hold(key, record, mounts);
        // The one form that every runtime takes.
        Ok(vec![RootMount {
            r#type: "bind".to_owned(),
            source: point.to_string_lossy().into_owned(),
            target: String::new(),
            options: vec!["rbind".to_owned(), "rw".to_owned()],
        }])
    }

    fn mount_image(&self, key: &str, set: &LayerSet, point: &Path) -> Result<(), Trouble> {
        let (mounts, record) = self.mounts(set)?;
        self.begin(key, &record)?;
        let view = self.view(&mounts)?;
        mount::attach(view.as_fd(), point)?;
        self.hold(key, record, mounts);
        Ok(())
    }

    /// Removes a root; whether there was one.
    fn discard(&self, key: &str) -> io::Result<bool> {
        take_point(&self.points.join(key))?;
        let folder = self.folder.join(key);
        if !folder.exists() {
            return Ok(false);
        }
        remove_tree(&folder)?;
        let held = self.held().remove(key);
        drop(held);
        Ok(true)
    }
}

fn uppermost_first(mounts: &[Arc<Mounted>]) -> Vec<BorrowedFd<'_>> {
    mounts.iter().rev().map(|mounted| mounted.as_fd()).collect()
}

/// Unmounts and removes a mount point. A missing one is no error.
fn take_point(point: &Path) -> io::Result<()> {
    mount::detach(point).map_err(io::Error::other)?;
    match std::fs::remove_dir(point) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}
