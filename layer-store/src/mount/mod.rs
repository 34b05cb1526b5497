//! Mounts of layers and of what is made of them, none of them in any mount namespace.
//!
//! A mount made here is a descriptor: nobody finds it by a path, host tools do not list it, and it
//! is gone with its last holder. The keeper keeps the layers' (see `keeper`), an overlay is handed
//! to whoever starts the container.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::fs::{AtFlags, CWD};
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MoveMountFlags, OpenTreeFlags, UnmountFlags,
    fsconfig_create, fsconfig_set_fd, fsconfig_set_flag, fsconfig_set_string, fsmount, fsopen,
    move_mount, open_tree,
};

/// Why there is no mount: what was tried, and the kernel's own words where it has any.
#[derive(Debug, thiserror::Error)]
#[error("cannot {what}: {source}{log}")]
pub struct MountError {
    what: &'static str,
    source: io::Error,
    log: String,
}

/// The parts of a sandbox's root file system.
#[derive(Clone, Copy, Debug)]
pub struct Overlay<'a> {
    /// The image's layers, the uppermost first.
    pub layers: &'a [BorrowedFd<'a>],
    /// Where changes go.
    pub upper: &'a Path,
    /// An empty folder beside `upper`, for the kernel.
    pub work: &'a Path,
}

/// Mounts a layer: `meta` is its EROFS metadata, complete and unmarked; `blob` its tar archive,
/// which is marked already unless it is complete.
///
/// # Errors
/// The kernel has no EROFS on files, or does not like the image.
pub fn layer(meta: &Path, blob: &Path) -> Result<OwnedFd, MountError> {
    let fs = Config::open("erofs")?;
    fs.string("source", meta)?;
    fs.string("device", blob)?;
    fs.flag("ro")?;
    let attributes = MountAttrFlags::MOUNT_ATTR_RDONLY | MountAttrFlags::MOUNT_ATTR_NODEV;
    fs.mount(attributes)
}

/// Assembles a writable root file system.
///
/// Its upper directory is volatile: nothing of it is synced, and after a crash of the host it must
/// not be used again.
///
/// # Errors
/// More than 500 layers, or `upper` on a file system that overlays cannot use.
pub fn overlay(parts: &Overlay<'_>) -> Result<OwnedFd, MountError> {
    let fs = Config::open("overlay")?;
    for layer in parts.layers {
        fs.descriptor("lowerdir+", *layer)?;
    }
    fs.string("upperdir", parts.upper)?;
    fs.string("workdir", parts.work)?;
    fs.flag("volatile")?;
    fs.string("source", Path::new("sandman"))?;
    fs.mount(MountAttrFlags::MOUNT_ATTR_NODEV)
}

/// Puts a mount at a path of this process's mount namespace.
///
/// # Errors
/// Those of `move_mount(2)`.
pub fn attach(mount: BorrowedFd<'_>, at: &Path) -> Result<(), MountError> {
    move_mount(mount, "", CWD, at, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)
        .map_err(|errno| failed("attach a mount", errno.into()))
}

/// A second mount of the same tree, so that one can be attached and the other kept.
///
/// # Errors
/// Those of `open_tree(2)`.
pub fn duplicate(mount: BorrowedFd<'_>) -> Result<OwnedFd, MountError> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE
        | OpenTreeFlags::OPEN_TREE_CLOEXEC
        | OpenTreeFlags::AT_EMPTY_PATH;
    open_tree(mount, "", flags).map_err(|errno| failed("duplicate a mount", errno.into()))
}

/// Takes away what [`attach`] put there. Nothing there is no error.
///
/// # Errors
/// Those of `umount2(2)`.
pub fn detach(at: &Path) -> Result<(), MountError> {
    match rustix::mount::unmount(at, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW) {
        Ok(()) | Err(rustix::io::Errno::INVAL | rustix::io::Errno::NOENT) => Ok(()),
        Err(errno) => Err(failed("detach a mount", errno.into())),
    }
}

/// Identifies the file system behind a mount, to tell one mount of a layer from the next.
///
/// # Errors
/// Those of `fstat(2)`.
pub fn device(mount: BorrowedFd<'_>) -> io::Result<u64> {
    Ok(rustix::fs::statat(mount, "", AtFlags::EMPTY_PATH)?.st_dev)
}

/// A file system that is being configured.
struct Config {
    context: OwnedFd,
}

impl Config {
    fn open(kind: &str) -> Result<Self, MountError> {
        let context = fsopen(kind, FsOpenFlags::FSOPEN_CLOEXEC)
            .map_err(|errno| failed("use this kind of file system", errno.into()))?;
        Ok(Self { context })
    }

    fn string(&self, key: &'static str, value: &Path) -> Result<(), MountError> {
        let set = fsconfig_set_string(self.context.as_fd(), key, value);
        set.map_err(|errno| self.explain(key, errno))
    }

    fn descriptor(&self, key: &'static str, value: BorrowedFd<'_>) -> Result<(), MountError> {
        let set = fsconfig_set_fd(self.context.as_fd(), key, value);
        set.map_err(|errno| self.explain(key, errno))
    }

    fn flag(&self, key: &'static str) -> Result<(), MountError> {
        let set = fsconfig_set_flag(self.context.as_fd(), key);
        set.map_err(|errno| self.explain(key, errno))
    }

    fn mount(self, attributes: MountAttrFlags) -> Result<OwnedFd, MountError> {
        fsconfig_create(self.context.as_fd())
            .map_err(|errno| self.explain("make the file system", errno))?;
        fsmount(
            self.context.as_fd(),
            FsMountFlags::FSMOUNT_CLOEXEC,
            attributes,
        )
        .map_err(|errno| self.explain("mount it", errno))
    }

    /// The kernel leaves what it has to say in the context.
    fn explain(&self, what: &'static str, errno: rustix::io::Errno) -> MountError {
        let mut error = failed(what, errno.into());
        let mut line = [0_u8; 512];
        while let Ok(length @ 1..) = rustix::io::read(&self.context, &mut line) {
            let text = String::from_utf8_lossy(line.get(..length).unwrap_or_default());
            error.log += "; ";
            error.log += text.trim();
        }
        error
    }
}

fn failed(what: &'static str, source: io::Error) -> MountError {
    MountError {
        what,
        source,
        log: String::new(),
    }
}
