//! Removal of a tree that an enemy may have made: links are never followed,
//! other file systems never entered, and neither depth nor width costs more
//! than a fixed number of descriptors.

use std::ffi::{CStr, CString, OsStr};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

use nix::dir::Dir;
use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag, OpenHow, ResolveFlag, open, openat2, renameat};
use nix::sys::stat::{FileStat, Mode, SFlag, fstatat};
use nix::unistd::{UnlinkatFlags, unlinkat};

use super::attributes;

/// Directories open at a time. Deeper ones are first moved up to the root.
const MAX_DEPTH: usize = 32;
/// Entries in memory at a time.
const BATCH: usize = 4096;
/// Passes over one directory: nobody should be filling it any more.
const MAX_PASSES: usize = 16;

/// Removes `path` and all below it; succeeds if there is nothing.
pub(crate) fn tree(path: &Path) -> io::Result<()> {
    let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "not the path of a tree",
        ));
    };
    let flags = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
    let parent = match open(parent, flags, Mode::empty()) {
        Err(Errno::ENOENT) => return Ok(()),
        other => other?,
    };
    let name = c_string(name)?;
    match unlink(&parent, &name, UnlinkatFlags::NoRemoveDir) {
        Ok(()) | Err(Errno::ENOENT) => return Ok(()),
        Err(Errno::EISDIR) => {}
        Err(error) => return Err(error.into()),
    }
    let mut hoist = Hoist {
        root: open_directory(&parent, &name)?,
        count: 0,
    };
    // Each pass moves what lies too deep up to the root, where the next finds it.
    loop {
        let before = hoist.count;
        let root = hoist.root.try_clone()?;
        empty(&root, &mut hoist, 0)?;
        match unlink(&parent, &name, UnlinkatFlags::RemoveDir) {
            Ok(()) | Err(Errno::ENOENT) => return Ok(()),
            Err(Errno::ENOTEMPTY | Errno::EEXIST) if hoist.count > before => {}
            Err(error) => return Err(error.into()),
        }
    }
}

struct Hoist {
    root: OwnedFd,
    count: u64,
}

/// Empties a directory, or moves what is too deep in it to the root.
fn empty(directory: &OwnedFd, hoist: &mut Hoist, depth: usize) -> io::Result<()> {
    loop {
        let names = names(directory)?;
        for name in &names {
            match unlink(directory, name, UnlinkatFlags::NoRemoveDir) {
                Ok(()) | Err(Errno::ENOENT) => continue,
                Err(Errno::EISDIR) => {}
                Err(error) => return Err(error.into()),
            }
            if depth + 1 >= MAX_DEPTH {
                hoist_up(directory, name, hoist)?;
            } else {
                remove_directory(directory, name, hoist, depth + 1)?;
            }
        }
        if names.len() < BATCH {
            return Ok(());
        }
    }
}

fn remove_directory(
    parent: &OwnedFd,
    name: &CStr,
    hoist: &mut Hoist,
    depth: usize,
) -> io::Result<()> {
    for _ in 0..MAX_PASSES {
        match unlink(parent, name, UnlinkatFlags::RemoveDir) {
            Ok(()) | Err(Errno::ENOENT) => return Ok(()),
            Err(Errno::ENOTEMPTY | Errno::EEXIST) => {
                empty(&open_directory(parent, name)?, hoist, depth)?;
            }
            Err(error) => return Err(error.into()),
        }
    }
    Err(io::Error::other(
        "directory keeps being filled; is a process of the pod alive?",
    ))
}

fn hoist_up(parent: &OwnedFd, name: &CStr, hoist: &mut Hoist) -> io::Result<()> {
    match unlink(parent, name, UnlinkatFlags::RemoveDir) {
        Ok(()) | Err(Errno::ENOENT) => return Ok(()),
        Err(Errno::ENOTEMPTY | Errno::EEXIST) => {}
        Err(error) => return Err(error.into()),
    }
    loop {
        hoist.count += 1;
        let new = c_string(OsStr::new(&format!(".removing-{}", hoist.count)))?;
        let renamed = match renameat(parent, name, &hoist.root, new.as_c_str()) {
            Err(Errno::EPERM) if unprotect(parent, name)? => {
                renameat(parent, name, &hoist.root, new.as_c_str())
            }
            other => other,
        };
        match renamed {
            // The name is the container's own; the next number is not.
            Err(Errno::ENOTEMPTY | Errno::EEXIST | Errno::ENOTDIR) => {}
            other => return other.map_err(io::Error::from),
        }
    }
}

/// Unlinks, after clearing what forbids it.
fn unlink(parent: &OwnedFd, name: &CStr, flag: UnlinkatFlags) -> Result<(), Errno> {
    match unlinkat(parent, name, flag) {
        Err(Errno::EPERM | Errno::EACCES) => {
            // The flag may be on the entry or on the directory it is in.
            let unprotected = |result: io::Result<bool>| result.unwrap_or(false);
            let entry = unprotected(unprotect(parent, name));
            let own = unprotected(reopen(parent).and_then(|folder| attributes::unprotect(&folder)));
            if entry || own {
                unlinkat(parent, name, flag)
            } else {
                Err(Errno::EPERM)
            }
        }
        other => other,
    }
}

/// Clears protecting flags of a file or directory; other kinds have none, and
/// opening a device or FIFO would wake whoever is behind it.
fn unprotect(parent: &OwnedFd, name: &CStr) -> io::Result<bool> {
    let stat: FileStat = fstatat(parent, name, AtFlags::AT_SYMLINK_NOFOLLOW)?;
    let kind = SFlag::from_bits_truncate(stat.st_mode) & SFlag::S_IFMT;
    if kind != SFlag::S_IFREG && kind != SFlag::S_IFDIR {
        return Ok(false);
    }
    let file = open_within(parent, name, OFlag::O_RDONLY | OFlag::O_NONBLOCK)?;
    attributes::unprotect(&File::from(file))
}

fn reopen(directory: &OwnedFd) -> io::Result<File> {
    Ok(File::from(open_within(
        directory,
        c".",
        OFlag::O_RDONLY | OFlag::O_DIRECTORY,
    )?))
}

fn open_directory(parent: &OwnedFd, name: &CStr) -> io::Result<OwnedFd> {
    open_within(parent, name, OFlag::O_RDONLY | OFlag::O_DIRECTORY)
}

fn open_within(parent: &OwnedFd, name: &CStr, flags: OFlag) -> io::Result<OwnedFd> {
    let how = OpenHow::new()
        .flags(flags | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC)
        .resolve(
            ResolveFlag::RESOLVE_BENEATH
                | ResolveFlag::RESOLVE_NO_SYMLINKS
                | ResolveFlag::RESOLVE_NO_XDEV,
        );
    openat2(parent.as_fd(), name, how).map_err(io::Error::from)
}

/// The entries of a directory, but no more than [`BATCH`].
fn names(directory: &OwnedFd) -> io::Result<Vec<CString>> {
    let folder = open_within(directory, c".", OFlag::O_RDONLY | OFlag::O_DIRECTORY)?;
    let mut names = Vec::new();
    for entry in Dir::from_fd(folder)?.iter() {
        let entry = entry?;
        let name = entry.file_name();
        if name != c"." && name != c".." {
            names.push(name.to_owned());
        }
        if names.len() >= BATCH {
            break;
        }
    }
    Ok(names)
}

fn c_string(name: &OsStr) -> io::Result<CString> {
    CString::new(name.as_bytes()).map_err(io::Error::from)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{PermissionsExt as _, symlink};

    use nix::sys::stat::mkdirat;

    use super::*;

    #[test]
    fn removes_files_trees_and_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().join("tree");
        tree(&root).unwrap();
        tree(&folder.path().join("no/such")).unwrap();
        fs::write(&root, "file").unwrap();
        tree(&root).unwrap();
        fs::create_dir_all(root.join("a/b/c")).unwrap();
        fs::write(root.join("a/b/file"), "x").unwrap();
        fs::set_permissions(root.join("a"), fs::Permissions::from_mode(0o000)).unwrap();
        tree(&root).unwrap();
        assert!(!root.exists());
    }

    #[test]
    fn links_are_removed_and_not_followed() {
        let folder = tempfile::tempdir().unwrap();
        let precious = folder.path().join("precious");
        fs::create_dir(&precious).unwrap();
        fs::write(precious.join("file"), "x").unwrap();
        let root = folder.path().join("tree");
        fs::create_dir(&root).unwrap();
        symlink(&precious, root.join("link")).unwrap();
        symlink("../precious", root.join("relative")).unwrap();
        symlink(&precious, folder.path().join("top")).unwrap();
        tree(&root).unwrap();
        tree(&folder.path().join("top")).unwrap();
        assert!(precious.join("file").exists());
    }

    #[test]
    fn depth_and_width_are_no_obstacle() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().join("tree");
        fs::create_dir(&root).unwrap();
        for number in 0..5000 {
            fs::write(root.join(number.to_string()), "").unwrap();
        }
        // Deeper than any path can be long; a decoy stands where it is moved to.
        fs::create_dir_all(root.join(".removing-1/decoy")).unwrap();
        let flags = OFlag::O_PATH | OFlag::O_DIRECTORY;
        let mut deepest = open(&root, flags, Mode::empty()).unwrap();
        for _ in 0..3000 {
            mkdirat(&deepest, "d", Mode::S_IRWXU).unwrap();
            deepest = nix::fcntl::openat(&deepest, "d", flags, Mode::empty()).unwrap();
        }
        drop(deepest);
        tree(&root).unwrap();
        assert!(!root.exists());
    }
}
