//! The layer store of this host, between the pulls that fill it and the root file systems that are
//! made of it.

mod config;
mod convert;
mod metrics;
mod set;
mod watch;

use std::collections::{HashMap, VecDeque};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use nix::sys::statvfs::statvfs;
use sandman_layer_store::cache::{BootId, Limits, Pruned};
use sandman_layer_store::chain::{self, Member, ProbeError};
use sandman_layer_store::keeper::{GroupId, KeeperError};
use sandman_layer_store::origin::Origin;
use sandman_layer_store::store::{Mounted, Store, StoreConfig, StoreError, StoreEvent};
use sandman_layer_store::{DiffId, LayerDigest, LayerIndex, layout};
use tokio::sync::{Semaphore, mpsc};

pub use self::config::{LayersConfig, Mode};
pub(crate) use self::convert::{Conversion, NotConverted};
pub(crate) use self::metrics::LayerMetrics;
pub use self::set::LayerSet;
pub(crate) use self::set::SetLayer;
pub(crate) use self::watch::watch;

/// File below `state_dir` that names the keeper's group under which layers are mounted.
const GROUP: &str = "group";
/// What folders of conversions that did not end are called.
const DRAFT: &str = "draft-";
/// Readers' spans that are fetched at once.
const WORKERS: usize = 24;
/// Spans that are fetched at once to complete layers.
const BACKGROUND_WORKERS: usize = 2;
/// Layers that stay mounted after their last sandbox, so that the next one finds them warm.
const WARM_LAYERS: usize = 256;
/// How long the start waits for the keeper.
const KEEPER_PATIENCE: Duration = Duration::from_secs(30);
const KEEPER_PAUSE: Duration = Duration::from_millis(100);
/// Facts of layers that are remembered; beyond it they are read anew.
const MAX_KNOWN: usize = 16_384;

/// Why the store cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum LayersError {
    /// The kernel or the file system lacks something.
    #[error("{0}; `layers.mode = \"containerd\"` does without")]
    Unfit(#[from] ProbeError),
    /// No way to the bytes of layers works.
    #[error(
        "this host's kernel cannot mount layers of the store (the log says why); \
         `layers.mode = \"containerd\"` does without"
    )]
    NoMember,
    /// The keeper or the folder.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A file or folder.
    #[error("{what}: {source}")]
    Io {
        /// What was to be done.
        what: String,
        /// Why it failed.
        source: io::Error,
    },
}

/// What must fit between an image and a layer of the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Facts {
    diff_id: DiffId,
    /// Directories of which the layer says nothing but that something is in them.
    implicit_directories: u32,
}

/// The store of this host.
#[derive(Debug)]
pub struct Layers {
    store: Store,
    member: Member,
    root: PathBuf,
    state: PathBuf,
    filler: PathBuf,
    limits: Limits,
    /// Conversions keep a processor busy each.
    conversions: Arc<Semaphore>,
    known: Mutex<HashMap<LayerDigest, Facts>>,
    warm: Mutex<VecDeque<Arc<Mounted>>>,
    first_sight_bytes: AtomicU64,
}

impl Layers {
    /// Opens the store, after a look whether this host can have one. Blocks, and waits a while for
    /// a keeper that starts at the same time. What happens in the store comes by the channel; a group that was lost
    /// while nobody looked is the first of it.
    ///
    /// # Errors
    /// Whatever keeps the store from being used, for the operator.
    pub fn open(
        config: &LayersConfig,
        state_dir: &Path,
        data_dir: &Path,
    ) -> Result<(Arc<Self>, mpsc::UnboundedReceiver<StoreEvent>), LayersError> {
        let root = config.folder(data_dir);
        let state = state_dir.join("layers");
        for folder in [&root, &state] {
            make_private(folder).map_err(|source| LayersError::Io {
                what: format!("cannot make {}", folder.display()),
                source,
            })?;
        }
        let io = |what: &str| {
            let what = what.to_owned();
            move |source| LayersError::Io { what, source }
        };
        remove_drafts(&root).map_err(io("cannot clean up the layer store"))?;
        let member = choose(config, &root)?;
        let filler = config
            .filler()
            .and_then(|path| std::fs::metadata(&path).map(|_| path))
            .map_err(io("layers.filler: sandman-layer-filler is not there"))?;
        let fs =
            statvfs(&root).map_err(|errno| io("cannot measure the layer store")(errno.into()))?;
        let limits = config.limits(fs.blocks().saturating_mul(fs.fragment_size()), fs.files());
        let boot = BootId::current().map_err(io("cannot read the kernel's boot id"))?;
        let expected = read_group(&state).map_err(io("cannot read the keeper's group"))?;
        let (send, events) = mpsc::unbounded_channel();
        let store = StoreConfig {
            root: root.clone(),
            socket: config.keeper_socket(state_dir),
            keeper: None,
            gate: member.gate(),
            deadline: config.read_deadline(),
            workers: WORKERS,
            background_workers: BACKGROUND_WORKERS,
        };
        let store = open_store(&store, boot, expected, &send)?;
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        let layers = Self {
            store,
            member,
            root,
            state,
            filler,
            limits,
            conversions: Arc::new(Semaphore::new(processors)),
            known: Mutex::default(),
            warm: Mutex::default(),
            first_sight_bytes: AtomicU64::new(0),
        };
        layers
            .record_group()
            .map_err(io("cannot record the keeper's group"))?;
        Ok((Arc::new(layers), events))
    }

    /// The store itself.
    #[must_use]
    pub fn store(&self) -> &Store {
        &self.store
    }

    /// How readers get at the bytes of layers.
    #[must_use]
    pub fn member(&self) -> Member {
        self.member
    }

    /// Writes down under which group layers are mounted from now on. To be called before anything
    /// is mounted, and after a group was lost.
    pub(crate) fn record_group(&self) -> io::Result<()> {
        let Some(group) = self.store.group() else {
            return Ok(());
        };
        let (path, draft) = (self.state.join(GROUP), self.state.join("group.new"));
        std::fs::write(&draft, hex::encode(group.0))?;
        std::fs::rename(draft, path)
    }

    /// Takes a layer into use that an image says has this diff ID; none if it is not in the store.
    ///
    /// # Errors
    /// The image's configuration says something else of the layer than is true, or the store's
    /// folder cannot be read.
    pub(crate) fn take(
        &self,
        layer: LayerDigest,
        diff_id: DiffId,
        size: u64,
    ) -> Result<Option<SetLayer>, NotConverted> {
        let host = |error: &dyn std::fmt::Display| NotConverted::Host(error.to_string());
        let in_use = match self.store.cache().use_layer(layer) {
            Ok(in_use) => in_use,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(host(&error)),
        };
        // Nobody removes it from here on.
        if !self.store.cache().has(layer) {
            return Ok(None);
        }
        if !self.member.is_lazy() && !self.is_sealed(layer) {
            // Another member began it, or its data was evicted: nobody here would fill it.
            drop(in_use);
            return match self.store.forget(layer).map_err(|error| host(&error))? {
                true => Ok(None),
                false => Err(host(&format!("layer {layer} is incomplete and in use"))),
            };
        }
        let known = lock(&self.known).get(&layer).copied();
        let facts = match known {
            Some(facts) => facts,
            None => {
                let path = self.store.cache().folder(layer).join(layout::INDEX);
                let index = LayerIndex::open(&path).map_err(|error| host(&error))?;
                let facts = Facts {
                    diff_id: index.diff_id(),
                    implicit_directories: index.implicit_directories(),
                };
                let mut known = lock(&self.known);
                if known.len() >= MAX_KNOWN {
                    known.clear();
                }
                known.insert(layer, facts);
                facts
            }
        };
        if facts.diff_id != diff_id {
            return Err(NotConverted::Image(format!(
                "layer {layer} unpacks to {}, the image's configuration says {diff_id}",
                facts.diff_id
            )));
        }
        Ok(Some(SetLayer {
            in_use,
            size,
            implicit_directories: facts.implicit_directories,
        }))
    }

    /// Mounts a layer, or finds it mounted. Blocks.
    pub(crate) fn mount(
        &self,
        layer: LayerDigest,
        origin: Origin,
    ) -> Result<Arc<Mounted>, StoreError> {
        let mounted = self.store.mount(layer, origin)?;
        let mut warm = lock(&self.warm);
        warm.retain(|other| other.layer() != layer);
        warm.push_back(Arc::clone(&mounted));
        let cooled = match warm.len() > WARM_LAYERS {
            true => warm.pop_front(),
            false => None,
        };
        drop(warm);
        // Unmounting takes a moment, without the lock.
        drop(cooled);
        Ok(mounted)
    }

    /// Whether a layer is complete and needs nobody any more.
    pub(crate) fn is_sealed(&self, layer: LayerDigest) -> bool {
        let sealed = self.store.cache().folder(layer).join(layout::SEALED);
        sealed.exists()
    }

    /// Lets go of mounts that no sandbox uses. After a lost group they may show zeros.
    pub(crate) fn cool(&self) {
        let warm = std::mem::take(&mut *lock(&self.warm));
        drop(warm);
    }

    /// What the operator wants gone: what is filled of layers that nobody uses, and with `all`
    /// their indexes too. Blocks.
    pub(crate) fn clear(&self, all: bool) -> io::Result<Pruned> {
        self.cool();
        let nothing = Limits {
            high_bytes: 0,
            low_bytes: 0,
            high_inodes: 0,
            low_inodes: 0,
        };
        match all {
            true => self.store.prune(&nothing),
            false => self.store.prune_data(&nothing),
        }
    }

    /// Bytes above which layers go.
    pub(crate) fn max_bytes(&self) -> u64 {
        self.limits.high_bytes
    }

    /// Bytes of blobs that were seen for the first time.
    pub(crate) fn first_sight_bytes(&self) -> u64 {
        self.first_sight_bytes.load(Ordering::Relaxed)
    }

    /// Removes layers that nobody uses, when there are more than the store may hold. Blocks.
    pub(crate) fn keep_limits(&self) -> io::Result<Pruned> {
        self.prune(&self.limits)
    }

    /// Removes layers that nobody uses until this much less is taken. Blocks.
    pub(crate) fn free(&self, bytes: u64, inodes: u64) -> io::Result<Pruned> {
        let taken = self.store.cache().taken()?;
        let less = |taken: u64, wanted: u64| match wanted {
            0 => u64::MAX,
            wanted => taken.saturating_sub(wanted),
        };
        let (bytes, inodes) = (less(taken.bytes, bytes), less(taken.inodes, inodes));
        self.prune(&Limits {
            high_bytes: bytes,
            low_bytes: bytes,
            high_inodes: inodes,
            low_inodes: inodes,
        })
    }

    fn prune(&self, limits: &Limits) -> io::Result<Pruned> {
        let taken = self.store.cache().taken()?;
        if taken.bytes <= limits.high_bytes && taken.inodes <= limits.high_inodes {
            return Ok(Pruned::default());
        }
        self.cool();
        let pruned = self.store.prune(limits)?;
        if !pruned.layers.is_empty() {
            tracing::info!(
                layers = pruned.layers.len(),
                bytes = pruned.bytes,
                "removed layers from the store"
            );
        }
        Ok(pruned)
    }
}

/// The keeper may be starting too, or be between two lives.
fn open_store(
    config: &StoreConfig,
    boot: BootId,
    expected: Option<GroupId>,
    events: &mpsc::UnboundedSender<StoreEvent>,
) -> Result<Store, StoreError> {
    let deadline = Instant::now() + KEEPER_PATIENCE;
    loop {
        let events = events.clone();
        let opened = Store::open(config.clone(), boot, expected, move |event| {
            // Nobody listens any more when the service ends.
            let _ = events.send(event);
        });
        match opened {
            Err(StoreError::Keeper(KeeperError::Unreachable(error)))
                if Instant::now() < deadline =>
            {
                tracing::debug!(%error, "waiting for the layer keeper");
                std::thread::sleep(KEEPER_PAUSE);
            }
            other => return other,
        }
    }
}

/// The best member of the chain that works here. Containerd's is none of the store's.
fn choose(config: &LayersConfig, root: &Path) -> Result<Member, LayersError> {
    let choice = chain::choose(root, config.member)?;
    for (member, why) in &choice.passed_over {
        tracing::warn!(member = member.name(), %why, "layers: this way to their bytes does not work here");
    }
    if choice.member == Member::Containerd {
        return Err(LayersError::NoMember);
    }
    tracing::info!(member = choice.member.name(), "layers: chosen");
    Ok(choice.member)
}

fn make_private(folder: &Path) -> io::Result<()> {
    use std::os::unix::fs::DirBuilderExt as _;
    std::fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(folder)
}

fn read_group(state: &Path) -> io::Result<Option<GroupId>> {
    let text = match std::fs::read_to_string(state.join(GROUP)) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    let mut group = [0; 16];
    // One that cannot be read names a group that nobody serves: what is mounted is then not trusted.
    let _ = hex::decode_to_slice(text.trim(), &mut group);
    Ok(Some(GroupId(group)))
}

/// What a killed process was converting.
fn remove_drafts(root: &Path) -> io::Result<()> {
    for entry in std::fs::read_dir(root)? {
        let entry = entry?;
        if entry.file_name().to_string_lossy().starts_with(DRAFT) {
            std::fs::remove_dir_all(entry.path())?;
        }
    }
    Ok(())
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
