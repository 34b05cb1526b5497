//! The second process: starts the keeper, holds copies of what it must not lose, and gives them to
//! its successor.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::client::{Controller, Custody, HolderLink, KeeperError};
use super::protocol::{Gate, GroupId, Kept, Limits};
use crate::mount::{self, MountError};
use crate::{LayerDigest, layout};

/// Pause between attempts to reach a keeper, doubled up to the second.
const FIRST_PAUSE: Duration = Duration::from_millis(10);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);
/// How long a new keeper may take until it listens, and how long a copy may take to arrive.
const PATIENCE: Duration = Duration::from_secs(10);

/// How the keeper is run.
#[derive(Clone, Debug)]
pub struct KeeperConfig {
    /// Folder of the store.
    pub root: PathBuf,
    /// Where the keeper listens, in a folder that only we may enter.
    pub socket: PathBuf,
    /// The program to start when nobody listens. Without it something else starts the keeper, such
    /// as a service manager, and is waited for.
    pub program: Option<PathBuf>,
    /// How the group is served.
    pub limits: Limits,
}

/// What the user of the store must hear of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeeperEvent {
    /// A successor took the group over; nothing was lost.
    Resumed,
    /// Readers of incomplete layers that were mounted under this group may have seen zeros. Their
    /// sandboxes must be stopped before they go on.
    GroupLost(GroupId),
}

type Listener = Box<dyn Fn(KeeperEvent) + Send>;

#[derive(Debug, Default)]
struct Held {
    copies: BTreeMap<Kept, OwnedFd>,
    group: Option<GroupId>,
    /// Whether the copies are all that the keeper has.
    up_to_date: bool,
    closing: bool,
    closer: Option<OwnedFd>,
}

struct Shared {
    config: KeeperConfig,
    held: Mutex<Held>,
    changed: Condvar,
    child: Mutex<Option<Child>>,
}

/// What a layer is mounted over, for as long as that takes.
#[derive(Debug)]
pub struct Device {
    path: PathBuf,
    /// Keeps the path alive.
    tree: Option<OwnedFd>,
}

impl Device {
    /// Mounts a layer with this metadata. Blocks until the keeper has served the file.
    ///
    /// # Errors
    /// Those of [`mount::layer`].
    pub fn mount(&self, meta: &Path) -> Result<OwnedFd, MountError> {
        match &self.tree {
            Some(_) => mount::layer_over_fuse(meta, &self.path),
            None => mount::layer(meta, &self.path),
        }
    }
}

/// Holds the copies. Dropping it leaves the keeper running.
pub struct Custodian {
    shared: Arc<Shared>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl std::fmt::Debug for Custodian {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Custodian")
            .field("config", &self.shared.config)
            .finish_non_exhaustive()
    }
}

impl Custodian {
    /// Finds or starts the keeper and begins to hold copies. `expected` is the group under which
    /// this host's incomplete layers are mounted, when there are any; if the keeper serves another,
    /// `listener` hears that it was lost before this returns.
    ///
    /// # Errors
    /// There is no keeper and none can be started, or the kernel refuses a group.
    pub fn new(
        config: KeeperConfig,
        expected: Option<GroupId>,
        listener: impl Fn(KeeperEvent) + Send + 'static,
    ) -> Result<Self, KeeperError> {
        let shared = Arc::new(Shared {
            config,
            held: Mutex::default(),
            changed: Condvar::new(),
            child: Mutex::default(),
        });
        let link = shared.begin()?;
        let group = shared.lock().group;
        if let Some(expected) = expected
            && group != Some(expected)
        {
            listener(KeeperEvent::GroupLost(expected));
        }
        let thread = {
            let shared = Arc::clone(&shared);
            let listener: Listener = Box::new(listener);
            std::thread::Builder::new()
                .name("layer-custodian".to_owned())
                .spawn(move || shared.run(link, &listener))
                .map_err(KeeperError::Unreachable)?
        };
        let custodian = Self {
            shared,
            thread: Some(thread),
        };
        custodian.wait(|held| held.up_to_date)?;
        Ok(custodian)
    }

    /// The group that is served.
    #[must_use]
    pub fn group(&self) -> Option<GroupId> {
        self.shared.lock().group
    }

    /// Whether copies of all that the keeper has are held here, so that it may be killed.
    #[must_use]
    pub fn is_up_to_date(&self) -> bool {
        self.shared.lock().up_to_date
    }

    /// A connection for requests.
    ///
    /// # Errors
    /// [`KeeperError::Unreachable`] while there is no keeper.
    pub fn controller(&self) -> Result<Controller, KeeperError> {
        Controller::connect(&self.shared.config.socket)
    }

    /// Marks a layer's blob, and returns once a copy is held here: from then on the mark survives
    /// the keeper, and the layer may be mounted.
    ///
    /// # Errors
    /// Any.
    pub fn watch(&self, layer: LayerDigest) -> Result<OwnedFd, KeeperError> {
        let blob = self.controller()?.watch(layer)?;
        self.wait(|held| held.copies.contains_key(&Kept::Blob(layer)))?;
        Ok(blob)
    }

    /// Removes the mark of a blob, and returns once no copy is held here, so that a later
    /// [`Self::watch`] waits for its own.
    ///
    /// # Errors
    /// Any.
    pub fn unwatch(&self, layer: LayerDigest) -> Result<(), KeeperError> {
        self.controller()?.unwatch(layer)?;
        self.wait(|held| !held.copies.contains_key(&Kept::Blob(layer)))
    }

    /// Gives a layer's mount into custody, and returns once a copy is held here: from then on it
    /// survives the keeper.
    ///
    /// # Errors
    /// Any.
    pub fn keep_mount(&self, layer: LayerDigest, mount: BorrowedFd<'_>) -> Result<(), KeeperError> {
        self.controller()?.keep_mount(layer, mount)?;
        self.wait(|held| held.copies.contains_key(&Kept::Mount(layer)))
    }

    /// Where the kernel reads a watched layer's bytes when it is mounted: the blob itself, or the
    /// file that stands for it.
    ///
    /// # Errors
    /// Any.
    pub fn device(&self, layer: LayerDigest, blob: &Path) -> Result<Device, KeeperError> {
        let tree = match self.shared.config.limits.gate {
            Gate::Fuse => Some(self.controller()?.tree()?),
            Gate::Closed | Gate::Fanotify => None,
        };
        let path = match &tree {
            Some(tree) => {
                let folder = format!("/proc/self/fd/{}", tree.as_raw_fd());
                Path::new(&folder).join(layout::folder_name(layer))
            }
            None => blob.to_owned(),
        };
        Ok(Device { path, tree })
    }

    fn wait(&self, done: impl Fn(&Held) -> bool) -> Result<(), KeeperError> {
        let held = self.shared.lock();
        let (held, _) = self
            .shared
            .changed
            .wait_timeout_while(held, PATIENCE, |held| !done(held))
            .unwrap_or_else(PoisonError::into_inner);
        match done(&held) {
            true => Ok(()),
            false => Err(KeeperError::Unreachable(
                std::io::ErrorKind::TimedOut.into(),
            )),
        }
    }

    /// Process id of the keeper, when this process started it.
    #[must_use]
    pub fn keeper_pid(&self) -> Option<u32> {
        let child = self
            .shared
            .child
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        child.as_ref().map(Child::id)
    }
}

impl Drop for Custodian {
    fn drop(&mut self) {
        let closer = {
            let mut held = self.shared.lock();
            held.closing = true;
            held.closer.take()
        };
        if let Some(closer) = closer {
            // Fails only when the keeper has ended the connection.
            let _ = rustix::net::shutdown(&closer, rustix::net::Shutdown::Both);
        }
        self.shared.changed.notify_all();
        if let Some(thread) = self.thread.take() {
            // It panics nowhere, and there is nobody to tell.
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Held> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Follows the keeper, and its successors, until closed.
    fn run(&self, mut link: HolderLink, listener: &Listener) {
        loop {
            self.follow(&link);
            let mut pause = FIRST_PAUSE;
            link = loop {
                if self.lock().closing {
                    return;
                }
                let before = self.lock().group;
                match self.begin() {
                    Ok(link) => {
                        let now = self.lock().group;
                        match before {
                            Some(lost) if now != before => listener(KeeperEvent::GroupLost(lost)),
                            _ => listener(KeeperEvent::Resumed),
                        }
                        break link;
                    }
                    // The group lives as long as its copy here; readers wait.
                    Err(_) => self.pause(&mut pause),
                }
            };
        }
    }

    fn pause(&self, pause: &mut Duration) {
        let held = self.lock();
        let closing = |held: &mut Held| !held.closing;
        drop(self.changed.wait_timeout_while(held, *pause, closing));
        *pause = (*pause * 2).min(LONGEST_PAUSE);
    }

    /// Takes copies in until the connection ends.
    fn follow(&self, link: &HolderLink) {
        let mut sent = BTreeSet::new();
        while let Ok(custody) = link.next() {
            let mut held = self.lock();
            match custody {
                Custody::Keep(kept, fd) => {
                    if !held.up_to_date {
                        sent.insert(kept);
                    }
                    held.copies.insert(kept, fd);
                }
                Custody::Drop(kept) => {
                    sent.remove(&kept);
                    held.copies.remove(&kept);
                }
                Custody::UpToDate => {
                    // What a successor did not want back is of no use.
                    held.copies.retain(|kept, _| sent.contains(kept));
                    sent = BTreeSet::new();
                    held.up_to_date = true;
                }
            }
            drop(held);
            self.changed.notify_all();
        }
        self.lock().up_to_date = false;
    }

    /// One attempt to have a keeper that serves a group, and to follow it.
    fn begin(&self) -> Result<HolderLink, KeeperError> {
        let controller = self.reach()?;
        let status = controller.status()?;
        let group = match status.group {
            Some(group) => group,
            None => {
                self.give_back(&controller)?;
                controller.status()?.group.ok_or(KeeperError::Protocol)?
            }
        };
        let (gate, wanted) = (controller.status()?.gate, self.config.limits.gate);
        if gate != wanted {
            return Err(KeeperError::Refused {
                errno: libc::EBUSY,
                what: format!(
                    "serve by {wanted:?}: it serves by {gate:?}; stop the sandboxes and the keeper first"
                ),
            });
        }
        let link = HolderLink::connect(&self.config.socket)?;
        let closer = link.closer().map_err(KeeperError::Unreachable)?;
        let mut held = self.lock();
        if held.group != Some(group) {
            // Copies of another group are of no use, and keep mounts alive.
            held.copies.clear();
        }
        held.group = Some(group);
        held.closer = Some(closer);
        Ok(link)
    }

    /// Hands the copies to a keeper without a group, or has it make a new one.
    fn give_back(&self, controller: &Controller) -> Result<(), KeeperError> {
        let held = self.lock();
        // The journal comes after what belongs to it.
        if !held.copies.contains_key(&Kept::Journal) {
            return controller.start(self.config.limits);
        }
        for (kept, fd) in &held.copies {
            controller.restore(*kept, fd.as_fd())?;
        }
        controller.restored(self.config.limits)
    }

    /// Connects to the keeper, after starting one where that is our task.
    fn reach(&self) -> Result<Controller, KeeperError> {
        match Controller::connect(&self.config.socket) {
            Err(KeeperError::Unreachable(error)) => match &self.config.program {
                Some(program) => self.start_keeper(program.clone()),
                None => Err(KeeperError::Unreachable(error)),
            },
            other => other,
        }
    }

    fn start_keeper(&self, program: PathBuf) -> Result<Controller, KeeperError> {
        let mut child = self.child.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(mut dead) = child.take() {
            // It does not listen any more. A hung one must not hold the lock against its successor.
            let _ = dead.kill();
            let _ = dead.wait();
        }
        let mut started = Command::new(program)
            .arg("--root")
            .arg(&self.config.root)
            .arg("--socket")
            .arg(&self.config.socket)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(KeeperError::Unreachable)?;
        let ready = started.stdout.take();
        *child = Some(started);
        wait_until_ready(ready.as_ref()).map_err(KeeperError::Unreachable)?;
        Controller::connect(&self.config.socket)
    }
}

/// The keeper says a word on its standard output once it listens; its end without one is a failure.
fn wait_until_ready(output: Option<&std::process::ChildStdout>) -> std::io::Result<()> {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let Some(output) = output else {
        return Err(std::io::ErrorKind::BrokenPipe.into());
    };
    let patience = Timespec::try_from(PATIENCE).map_err(std::io::Error::other)?;
    let mut wanted = [PollFd::new(output, PollFlags::IN)];
    if poll(&mut wanted, Some(&patience))? == 0 {
        return Err(std::io::ErrorKind::TimedOut.into());
    }
    match rustix::io::read(output, &mut [0_u8; 16])? {
        0 => Err(std::io::Error::other(
            "the keeper ended; see its standard error",
        )),
        _ => Ok(()),
    }
}
