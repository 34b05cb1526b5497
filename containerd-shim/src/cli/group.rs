//! The folder, socket and lock of the one shim that serves a namespace of a containerd.
//!
//! A task is announced before containerd learns the shim's address, and the announcement goes when
//! the task is made, or when containerd has `delete` clean it up. So a shim without tasks can tell
//! that one is on its way, and does not end in that moment.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

/// See the module.
pub(super) struct Group {
    dir: PathBuf,
}

impl Group {
    /// Of `namespace` at the containerd that listens at `address`.
    pub(super) fn new(state_dir: &Path, namespace: &str, address: &str) -> Self {
        let address = address.strip_prefix("unix://").unwrap_or(address);
        let mut hash = Sha256::new();
        hash.update(namespace);
        hash.update([0]);
        hash.update(address);
        // Short, because a socket's path is limited to 107 bytes.
        let name = hex::encode(&hash.finalize()[..8]);
        Self {
            dir: state_dir.join(name),
        }
    }

    /// Makes the folder: for root only, it has environments and sockets in it.
    pub(super) fn make(&self) -> io::Result<()> {
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(self.announced_dir())
    }

    pub(super) fn dir(&self) -> &Path {
        &self.dir
    }

    pub(super) fn socket(&self) -> PathBuf {
        self.dir.join("s")
    }

    pub(super) fn log(&self) -> PathBuf {
        self.dir.join("log")
    }

    /// Takes the lock, for as long as the file is open.
    pub(super) fn lock(&self) -> io::Result<File> {
        let file = OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .mode(0o600)
            .open(self.dir.join("lock"))?;
        file.lock()?;
        Ok(file)
    }

    fn announced_dir(&self) -> PathBuf {
        self.dir.join("announced")
    }

    /// A task `id` is going to be asked for.
    pub(super) fn announce(&self, id: &str) -> io::Result<()> {
        fs::write(self.announced_dir().join(id), "")
    }

    /// It was, or never will be.
    pub(super) fn settle(&self, id: &str) {
        drop(fs::remove_file(self.announced_dir().join(id)));
    }

    /// Whether one is on its way. If that cannot be seen, it may be.
    pub(super) fn expects(&self) -> bool {
        fs::read_dir(self.announced_dir()).map_or(true, |mut entries| entries.next().is_some())
    }
}

#[cfg(test)]
mod tests {
    use super::Group;

    #[test]
    fn one_group_a_namespace_and_containerd() {
        let dir = tempfile::tempdir().unwrap();
        let group =
            |namespace, address| Group::new(dir.path(), namespace, address).dir().to_owned();
        assert_eq!(group("a", "/run/c"), group("a", "unix:///run/c"));
        assert_ne!(group("a", "/run/c"), group("b", "/run/c"));
        assert_ne!(group("a", "/run/c"), group("a", "/run/d"));
        assert_ne!(group("a", "b"), group("ab", ""));
    }

    #[test]
    fn announcements() {
        let dir = tempfile::tempdir().unwrap();
        let group = Group::new(dir.path(), "a", "b");
        assert!(group.expects(), "unknown is yes");
        group.make().unwrap();
        assert!(!group.expects());
        group.announce("x").unwrap();
        assert!(group.expects());
        group.settle("x");
        group.settle("y");
        assert!(!group.expects());
    }
}
