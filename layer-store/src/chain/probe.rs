//! The self-test: a member of the chain does its work once, in the small, where the store will be.

use std::fs::File;
use std::io::{self, Read as _};
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags};

use super::{Member, fuse, image};
use crate::mount::{self, MountError};
use crate::sys::fanotify::{EVENT_BYTES, Group, Verdict};

/// How long the kernel may take to ask.
pub(super) const PATIENCE: Duration = Duration::from_secs(10);
/// Two pages, so that an event has a range to name.
pub(super) const BLOB_BYTES: u32 = 8192;
const PATTERN: u8 = 0xA5;

/// Why a member does not work on this host.
#[derive(Debug, thiserror::Error)]
pub enum ProbeError {
    /// A call failed.
    #[error("{what}: {source}")]
    Io {
        /// What was tried.
        what: &'static str,
        /// Why it failed.
        source: io::Error,
    },
    /// The kernel does not mount such layers.
    #[error(transparent)]
    Mount(#[from] MountError),
    /// A read went through before it was asked about. Layers would show zeros.
    #[error("the kernel does not ask before a layer's bytes are read")]
    NotAsked,
    /// What was taken by a process that ended is not asked again.
    #[error("the kernel's FUSE does not send requests again (Linux 6.9 and later do)")]
    NotResent,
    /// The reader saw something else than what was written for it.
    #[error("a layer's bytes were not seen as they were filled in")]
    WrongBytes,
    /// Two layers cannot be joined without being attached somewhere.
    #[error("the kernel does not overlay detached mounts: {0}")]
    Overlay(#[source] MountError),
}

/// Tries a member in folder `root`, which is left as it was.
///
/// # Errors
/// Why it does not work.
pub fn probe(member: Member, root: &Path) -> Result<(), ProbeError> {
    if member == Member::Containerd {
        return Ok(());
    }
    let folder = Folder::new(root).map_err(io("make a folder in the store"))?;
    let files = Files::new(&folder.0)?;
    match member {
        Member::Fanotify => fanotify(&files)?,
        Member::Fuse => fuse::probe(&files)?,
        Member::Convert | Member::Containerd => {
            files.fill().map_err(io("write a blob"))?;
            files.expect(&files.mount()?)?;
        }
    }
    let mount = files.mount()?;
    overlay(&folder.0, mount.as_fd())
}

fn fanotify(files: &Files) -> Result<(), ProbeError> {
    let group = Group::new().map_err(io("make a fanotify group"))?;
    group
        .mark(files.writer.as_fd())
        .map_err(io("mark a blob for pre-content events"))?;
    let mount = files.mount()?;
    // The reader waits for the answer, so it needs a thread. Should anything go wrong, the end of
    // the group lets it go.
    let read = std::thread::scope(|scope| {
        let reader = scope.spawn(|| read(mount.as_fd()));
        let answered = answer_one(&group, files);
        drop(group);
        answered?;
        reader.join().map_err(|_| ProbeError::WrongBytes)?
    })?;
    judge(&read)
}

/// Fills the blob at the first question and answers all.
fn answer_one(group: &Group, files: &Files) -> Result<(), ProbeError> {
    let patience = Timespec::try_from(PATIENCE).map_err(|_| ProbeError::NotAsked)?;
    let mut wanted = [PollFd::new(group, PollFlags::IN)];
    let ready = poll(&mut wanted, Some(&patience)).map_err(|errno| io("wait")(errno.into()))?;
    if ready == 0 {
        return Err(ProbeError::NotAsked);
    }
    let mut buffer = [0; EVENT_BYTES * 4];
    let events: Vec<_> = group
        .read(&mut buffer)
        .map_err(io("read an event"))?
        .collect();
    let named = events.iter().all(|event| event.range.is_some());
    files.fill().map_err(io("write a blob"))?;
    for event in &events {
        if let Some(fd) = &event.fd {
            group
                .answer(fd.as_raw_fd(), Verdict::Allow)
                .map_err(io("answer an event"))?;
        }
    }
    match named && !events.is_empty() {
        true => Ok(()),
        false => Err(ProbeError::NotAsked),
    }
}

fn overlay(folder: &Path, layer: BorrowedFd<'_>) -> Result<(), ProbeError> {
    let (upper, work) = (folder.join("upper"), folder.join("work"));
    for path in [&upper, &work] {
        std::fs::create_dir(path).map_err(io("make an upper folder"))?;
    }
    let parts = mount::Overlay {
        layers: &[layer],
        upper: &upper,
        work: &work,
    };
    let root = mount::overlay(&parts).map_err(ProbeError::Overlay)?;
    judge(&read(root.as_fd())?)
}

/// A blob without a byte in it and the metadata of one file.
pub(super) struct Files {
    pub(super) meta: PathBuf,
    blob: PathBuf,
    /// Opened before any mark.
    pub(super) writer: File,
}

impl Files {
    fn new(folder: &Path) -> Result<Self, ProbeError> {
        let (meta, blob) = (folder.join("meta"), folder.join("blob"));
        std::fs::write(&meta, image::one_file(BLOB_BYTES)).map_err(io("write metadata"))?;
        let writer = File::options()
            .read(true)
            .write(true)
            .create_new(true)
            .open(&blob);
        let writer = writer.map_err(io("make a blob"))?;
        writer
            .set_len(BLOB_BYTES.into())
            .map_err(io("size a blob"))?;
        Ok(Self { meta, blob, writer })
    }

    pub(super) fn fill(&self) -> io::Result<()> {
        self.writer.write_all_at(&[PATTERN; BLOB_BYTES as usize], 0)
    }

    fn mount(&self) -> Result<OwnedFd, ProbeError> {
        Ok(mount::layer(&self.meta, &self.blob)?)
    }

    fn expect(&self, mount: &OwnedFd) -> Result<(), ProbeError> {
        judge(&read(mount.as_fd())?)
    }
}

pub(super) fn read(mount: BorrowedFd<'_>) -> Result<Vec<u8>, ProbeError> {
    let file = rustix::fs::openat(mount, image::FILE, OFlags::CLOEXEC, Mode::empty())
        .map_err(|errno| io("open a file of a layer")(errno.into()))?;
    let mut bytes = Vec::new();
    File::from(file)
        .read_to_end(&mut bytes)
        .map_err(io("read a file of a layer"))?;
    Ok(bytes)
}

pub(super) fn judge(bytes: &[u8]) -> Result<(), ProbeError> {
    match bytes.len() == BLOB_BYTES as usize && bytes.iter().all(|byte| *byte == PATTERN) {
        true => Ok(()),
        false => Err(ProbeError::WrongBytes),
    }
}

pub(super) fn io(what: &'static str) -> impl Fn(io::Error) -> ProbeError {
    move |source| ProbeError::Io { what, source }
}

/// A folder for as long as the test runs.
struct Folder(PathBuf);

impl Folder {
    fn new(root: &Path) -> io::Result<Self> {
        let path = root.join(format!("probe-{}", std::process::id()));
        // Left by a process of the same number that was killed.
        match std::fs::remove_dir_all(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        std::fs::create_dir(&path)?;
        Ok(Self(path))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // What is left is removed by the next probe of the same number, or by hand.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
