//! Reads `/etc/passwd` and `/etc/group` out of an untrusted root file system.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Mutex, PoisonError};

use nix::errno::Errno;
use nix::fcntl::{OFlag, OpenHow, ResolveFlag, openat2};

use crate::spec::Accounts;

/// Largest account file that is read.
const MAX_BYTES: u64 = 1024 * 1024;
/// Images remembered; account files are small and images on a host few.
const MAX_IMAGES: usize = 1024;

/// Account files by image, so that only the first container of an image reads them.
#[derive(Debug, Default)]
pub(super) struct AccountCache(Mutex<HashMap<String, Accounts>>);

impl AccountCache {
    pub(super) fn get(&self, chain_id: &str) -> Option<Accounts> {
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .get(chain_id)
            .cloned()
    }

    pub(super) fn put(&self, chain_id: &str, accounts: &Accounts) {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if known.len() >= MAX_IMAGES {
            known.clear();
        }
        known.insert(chain_id.to_owned(), accounts.clone());
    }
}

/// Reads both files below `root`; a missing one is empty.
pub(super) fn read(root: &OwnedFd) -> io::Result<Accounts> {
    Ok(Accounts {
        passwd: read_file(root, "etc/passwd")?,
        group: read_file(root, "etc/group")?,
    })
}

fn read_file(root: &OwnedFd, path: &str) -> io::Result<String> {
    // The image may make either path a link to anywhere, a device or a FIFO: links resolve
    // inside the root, and nothing but a regular file is read.
    let how = OpenHow::new()
        .flags(OFlag::O_RDONLY | OFlag::O_NONBLOCK | OFlag::O_NOCTTY | OFlag::O_CLOEXEC)
        .resolve(ResolveFlag::RESOLVE_IN_ROOT | ResolveFlag::RESOLVE_NO_MAGICLINKS);
    let fd = match openat2(root.as_fd(), path, how) {
        Ok(fd) => fd,
        Err(Errno::ENOENT | Errno::ENOTDIR | Errno::ELOOP | Errno::ENXIO) => {
            return Ok(String::new());
        }
        Err(errno) => return Err(errno.into()),
    };
    let file = File::from(fd);
    if !file.metadata()?.is_file() {
        return Ok(String::new());
    }
    let mut bytes = vec![];
    file.take(MAX_BYTES).read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;
    use std::path::Path;

    fn open(dir: &Path) -> OwnedFd {
        File::open(dir).unwrap().into()
    }

    #[test]
    fn links_stay_inside_the_root() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("etc")).unwrap();
        std::fs::write(dir.path().join("secret"), "inside").unwrap();
        symlink("/secret", dir.path().join("etc/passwd")).unwrap();
        symlink("/proc/self/environ", dir.path().join("etc/group")).unwrap();
        let accounts = read(&open(dir.path())).unwrap();
        assert_eq!(
            (accounts.passwd.as_str(), accounts.group.as_str()),
            ("inside", "")
        );
    }

    #[test]
    fn odd_files_are_no_accounts() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(read(&open(dir.path())).unwrap().passwd, "");
        std::fs::create_dir_all(dir.path().join("etc/passwd")).unwrap();
        nix::unistd::mkfifo(&dir.path().join("etc/group"), nix::sys::stat::Mode::S_IRWXU).unwrap();
        let accounts = read(&open(dir.path())).unwrap();
        assert_eq!(
            (accounts.passwd.as_str(), accounts.group.as_str()),
            ("", "")
        );
    }
}
