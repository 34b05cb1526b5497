//! Named network namespaces, pinned where `ip netns` looks for them. A thread that enters one is
//! never used for anything else: the namespace belongs to the thread and would leak.

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow};
use nix::errno::Errno;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, setns, unshare};
use nix::sys::statfs::{NSFS_MAGIC, statfs};

/// Where iproute2 pins named network namespaces.
pub(crate) const PIN_DIR: &str = "/run/netns";

/// A network namespace known by name.
#[derive(Clone, Debug)]
pub(crate) struct NetNs {
    path: PathBuf,
}

impl NetNs {
    /// The namespace of this name, whether or not it exists yet.
    pub(crate) fn named(name: &str) -> Self {
        Self {
            path: Path::new(PIN_DIR).join(name),
        }
    }

    /// The file that pins the namespace.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Whether the file pins a namespace; a crash may leave the bare file.
    pub(crate) fn exists(&self) -> bool {
        statfs(&self.path).is_ok_and(|fs| fs.filesystem_type() == NSFS_MAGIC)
    }

    /// Number of the namespace, as `/proc/PID/ns/net` shows it.
    pub(crate) fn inode(&self) -> Option<u64> {
        if !self.exists() {
            return None;
        }
        fs::metadata(&self.path).ok().map(|meta| meta.ino())
    }

    /// Opens the namespace, for a move or an entry.
    pub(crate) fn open(&self) -> anyhow::Result<File> {
        if !self.exists() {
            return Err(anyhow!(
                "network namespace {} is not there",
                self.path.display()
            ));
        }
        Ok(File::open(&self.path)?)
    }

    /// Creates and pins the namespace unless it exists.
    pub(crate) fn ensure(&self) -> anyhow::Result<()> {
        if self.exists() {
            return Ok(());
        }
        fs::create_dir_all(PIN_DIR)?;
        File::create(&self.path)?;
        std::thread::scope(|scope| scope.spawn(|| self.pin_new()).join())
            .map_err(|_| anyhow!("the thread that makes {} panicked", self.path.display()))?
            .with_context(|| format!("cannot make network namespace {}", self.path.display()))
    }

    fn pin_new(&self) -> anyhow::Result<()> {
        unshare(CloneFlags::CLONE_NEWNET)?;
        let own = "/proc/thread-self/ns/net";
        mount(
            Some(own),
            &self.path,
            None::<&str>,
            MsFlags::MS_BIND,
            None::<&str>,
        )?;
        Ok(())
    }

    /// Unpins the namespace; the kernel frees it, and every link in it, with its last process.
    pub(crate) fn remove(&self) -> anyhow::Result<()> {
        // The pin appears once more for each time that iproute2 bound the folder onto itself.
        loop {
            match umount2(&self.path, MntFlags::MNT_DETACH) {
                Ok(()) => {}
                Err(Errno::EINVAL | Errno::ENOENT) => break,
                Err(error) => {
                    return Err(error)
                        .with_context(|| format!("cannot unmount {}", self.path.display()));
                }
            }
        }
        match fs::remove_file(&self.path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error.into()),
            _ => Ok(()),
        }
    }

    /// Runs `work` on a thread inside the namespace.
    pub(crate) fn run<T: Send>(
        &self,
        work: impl FnOnce() -> anyhow::Result<T> + Send,
    ) -> anyhow::Result<T> {
        let namespace = self.open()?;
        let thread = move || {
            enter(&namespace)?;
            work()
        };
        std::thread::scope(|scope| scope.spawn(thread).join())
            .map_err(|_| anyhow!("a thread in {} panicked", self.path.display()))?
    }
}

/// Moves the calling thread into a network namespace, for good.
pub(crate) fn enter(namespace: &File) -> anyhow::Result<()> {
    setns(namespace, CloneFlags::CLONE_NEWNET).context("cannot enter the network namespace")
}
