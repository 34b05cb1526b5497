//! The layers of one host: found, watched, filled, mounted, and let go.
//!
//! Ties the parts together in the one order that is safe. For a layer that is not complete: its
//! metadata is checked against the index, the keeper opens and marks the blob, a copy of both is
//! held here, the filler knows the layer, and only then is it mounted. A sealed layer is just
//! mounted. One mount serves all sandboxes of the host, and is in the keeper's hands as well, so
//! that the next process finds it.

use std::collections::{HashMap, HashSet};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use crate::cache::{self, BootId, Cache, InUse, Limits as CacheLimits, Pruned};
use crate::filler::{AddError, Filler, FillerConfig, FillerEvent, LayerSource};
use crate::index::{IndexError, LayerIndex};
use crate::keeper::{
    Controller, Custodian, Gate, GroupId, KeeperConfig, KeeperError, KeeperEvent, Limits,
};
use crate::mount::{self, MountError};
use crate::origin::Origin;
use crate::{LayerDigest, SpanDigest, layout};

/// The keeper's deadline is this much later than the filler's, which knows the reason.
const KEEPER_MARGIN: Duration = Duration::from_secs(5);

/// How a store is run.
#[derive(Clone, Debug)]
pub struct StoreConfig {
    /// Its folder, on ext4, xfs or btrfs.
    pub root: PathBuf,
    /// Where the keeper listens.
    pub socket: PathBuf,
    /// The keeper's program; see [`KeeperConfig::program`].
    pub keeper: Option<PathBuf>,
    /// How the kernel asks for bytes: that of the member in use, see `chain`.
    pub gate: Gate,
    /// How long a reader waits for bytes before it gets an error.
    pub deadline: Duration,
    /// Readers' spans that are fetched at once.
    pub workers: usize,
    /// Spans that are fetched at once to complete layers.
    pub background_workers: usize,
}

/// What the user of a store must hear of.
#[derive(Clone, Debug)]
pub enum StoreEvent {
    /// See [`KeeperEvent`].
    Keeper(KeeperEvent),
    /// See [`FillerEvent`].
    Filler(FillerEvent),
}

/// Why a layer is not there.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The store's folder.
    #[error("layer store: {0}")]
    Io(#[from] io::Error),
    /// The layer has to be seen first.
    #[error("layer {0} is not in the store")]
    Unknown(LayerDigest),
    /// The index.
    #[error(transparent)]
    Index(#[from] IndexError),
    /// The metadata is not what the index says. The kernel must not see it.
    #[error("the metadata of layer {0} is damaged; remove the layer from the cache")]
    Metadata(LayerDigest),
    /// The keeper.
    #[error(transparent)]
    Keeper(#[from] KeeperError),
    /// The filler.
    #[error(transparent)]
    Filler(#[from] AddError),
    /// The kernel.
    #[error(transparent)]
    Mount(#[from] MountError),
}

/// A running store.
#[derive(Debug)]
pub struct Store {
    cache: Cache,
    boot: BootId,
    custodian: Custodian,
    filler: Filler,
    mounted: Arc<Mutex<HashMap<LayerDigest, Slot>>>,
    socket: PathBuf,
}

/// One lock a layer, so that a slow mount holds up nobody else.
type Slot = Arc<Mutex<Weak<Mounted>>>;

/// A layer's mount, for as long as anybody wants it.
#[derive(Debug)]
pub struct Mounted {
    fd: OwnedFd,
    layer: LayerDigest,
    socket: PathBuf,
    slot: Slot,
    _in_use: InUse,
}

impl Store {
    /// Opens a store. `expected` is the group under which incomplete layers were mounted before,
    /// if there are such; `listener` hears at once if it is lost.
    ///
    /// # Errors
    /// The folder or the keeper.
    pub fn open(
        config: StoreConfig,
        boot: BootId,
        expected: Option<GroupId>,
        listener: impl Fn(StoreEvent) + Send + Sync + 'static,
    ) -> Result<Self, StoreError> {
        let cache = Cache::open(&config.root, boot)?;
        let listener = Arc::new(listener);
        let mounted: Arc<Mutex<HashMap<LayerDigest, Slot>>> = Arc::default();
        let deadline = config.deadline + KEEPER_MARGIN;
        let keeper = KeeperConfig {
            root: config.root.clone(),
            socket: config.socket.clone(),
            program: config.keeper,
            limits: Limits {
                deadline_ms: u32::try_from(deadline.as_millis()).unwrap_or(u32::MAX),
                slots: 8192,
                gate: config.gate,
            },
        };
        let custodian = {
            let (listener, mounted) = (Arc::clone(&listener), Arc::clone(&mounted));
            Custodian::new(keeper, expected, move |event| {
                if let KeeperEvent::GroupLost(_) = event {
                    // What is mounted now may show zeros; nobody gets it from here any more.
                    lock(&mounted).clear();
                }
                listener(StoreEvent::Keeper(event));
            })?
        };
        let filler = FillerConfig {
            socket: config.socket.clone(),
            root: config.root,
            workers: config.workers,
            background_workers: config.background_workers,
            give_up: config.deadline,
        };
        let filler = Filler::start(filler, boot, move |event| {
            listener(StoreEvent::Filler(event));
        })?;
        Ok(Self {
            cache,
            boot,
            custodian,
            filler,
            mounted,
            socket: config.socket,
        })
    }

    /// The folder's content, for `ls`, pins and quotas.
    #[must_use]
    pub fn cache(&self) -> &Cache {
        &self.cache
    }

    /// Counters, traces and completion.
    #[must_use]
    pub fn filler(&self) -> &Filler {
        &self.filler
    }

    /// The group under which layers are mounted. The user records it durably before it starts
    /// anything over a mount, and hands it to [`Store::open`] the next time.
    #[must_use]
    pub fn group(&self) -> Option<GroupId> {
        self.custodian.group()
    }

    /// Whether the keeper serves and a copy of all that it has is held here: either of the two
    /// processes may then be lost.
    #[must_use]
    pub fn is_doubly_held(&self) -> bool {
        self.custodian.is_up_to_date()
    }

    /// This run of the kernel.
    #[must_use]
    pub fn boot(&self) -> BootId {
        self.boot
    }

    /// Mounts a layer whose index and metadata are in the store, or finds it mounted. Blocks for
    /// the time of a mount; needs no network.
    ///
    /// # Errors
    /// Any.
    pub fn mount(&self, layer: LayerDigest, origin: Origin) -> Result<Arc<Mounted>, StoreError> {
        let slot = Arc::clone(lock(&self.mounted).entry(layer).or_default());
        let mut known = lock(&slot);
        if let Some(mounted) = known.upgrade() {
            return Ok(mounted);
        }
        let in_use = self
            .cache
            .use_layer(layer)
            .map_err(|error| match error.kind() {
                io::ErrorKind::NotFound => StoreError::Unknown(layer),
                _ => error.into(),
            })?;
        let folder = self.cache.folder(layer);
        let index = LayerIndex::open(&folder.join(layout::INDEX))?;
        let sealed = cache::is_sealed(&folder, index.diff_id(), index.tar_size())?;
        if !sealed {
            let blob = self.custodian.watch(layer)?;
            let source = LayerSource {
                index,
                blob,
                origin,
            };
            check_metadata(&folder, &source.index)?;
            self.filler.add(source)?;
        } else {
            check_metadata(&folder, &index)?;
        }
        let controller = self.custodian.controller()?;
        let fd = match controller.mount(layer) {
            Ok(fd) => fd,
            Err(KeeperError::Refused {
                errno: libc::ENOENT,
                ..
            }) => {
                let (meta, blob) = (folder.join(layout::META), folder.join(layout::BLOB));
                let fd = match sealed {
                    true => mount::layer(&meta, &blob)?,
                    false => self.custodian.device(layer, &blob)?.mount(&meta)?,
                };
                self.custodian.keep_mount(layer, fd.as_fd())?;
                fd
            }
            Err(error) => return Err(error.into()),
        };
        let mounted = Arc::new(Mounted {
            fd,
            layer,
            socket: self.socket.clone(),
            slot: Arc::clone(&slot),
            _in_use: in_use,
        });
        *known = Arc::downgrade(&mounted);
        Ok(mounted)
    }

    /// Lets go of mounts that were kept for a process before this one and that nobody has asked for
    /// since. To be called once everything that runs has been adopted.
    ///
    /// # Errors
    /// The keeper or the folder.
    pub fn drop_unused_mounts(&self) -> Result<(), StoreError> {
        let used: HashSet<_> = lock(&self.mounted)
            .iter()
            .filter(|(_, slot)| lock(slot).strong_count() > 0)
            .map(|(layer, _)| *layer)
            .collect();
        let controller = self.custodian.controller()?;
        for entry in self.cache.list()? {
            if !used.contains(&entry.layer) {
                controller.drop_mount(entry.layer)?;
            }
        }
        Ok(())
    }

    /// Removes layers that nobody uses until the store is within its limits.
    ///
    /// # Errors
    /// The folder.
    pub fn prune(&self, limits: &CacheLimits) -> io::Result<Pruned> {
        self.cache.prune(limits, &|layer| self.release(layer))
    }

    /// Does as much of [`Self::prune`] as leaves the indexes.
    ///
    /// # Errors
    /// The folder.
    pub fn prune_data(&self, limits: &CacheLimits) -> io::Result<Pruned> {
        self.cache.prune_data(limits, &|layer| self.release(layer))
    }

    /// Removes a layer that nobody uses, so that it is converted anew. Whether it is gone.
    ///
    /// # Errors
    /// The folder or the keeper.
    pub fn forget(&self, layer: LayerDigest) -> io::Result<bool> {
        self.cache.remove(layer, &|layer| self.release(layer))
    }

    /// Nobody watches, fills or keeps a layer any more.
    fn release(&self, layer: LayerDigest) -> io::Result<()> {
        self.filler.remove(layer);
        let released = self
            .custodian
            .controller()
            .and_then(|controller| controller.drop_mount(layer))
            .and_then(|()| self.custodian.unwatch(layer));
        released.map_err(io::Error::other)
    }
}

impl Mounted {
    /// Which layer.
    #[must_use]
    pub fn layer(&self) -> LayerDigest {
        self.layer
    }
}

impl AsFd for Mounted {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let known = lock(&self.slot);
        // Somebody may have mounted it again between our last user and this line.
        if known.strong_count() == 0 {
            // Without a keeper its successor keeps one mount more, until it is dropped as unused.
            let _ = Controller::connect(&self.socket)
                .and_then(|controller| controller.drop_mount(self.layer));
        }
    }
}

/// The kernel parses metadata as root: it sees only what our writer wrote.
fn check_metadata(folder: &Path, index: &LayerIndex) -> Result<(), StoreError> {
    let meta = std::fs::read(folder.join(layout::META))?;
    let same =
        meta.len() as u64 == index.meta_size() && SpanDigest::of(&meta) == index.meta_digest();
    same.then_some(())
        .ok_or(StoreError::Metadata(index.layer()))
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
