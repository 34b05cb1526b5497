//! Mounts of layers and of what is made of them, none of them in any mount namespace.
//!
//! A mount made here is a descriptor: nobody finds it by a path, host tools do not list it, and it
//! is gone with its last holder. The keeper keeps the layers' (see `keeper`), an overlay is handed
//! to whoever starts the container.

use std::io;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::fs::{AtFlags, CWD, Gid, Mode, OFlags, Timespec, Timestamps, Uid, XattrFlags};
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MoveMountFlags, OpenTreeFlags, UnmountFlags,
    fsconfig_create, fsconfig_set_fd, fsconfig_set_flag, fsconfig_set_string, fsmount, fsopen,
    move_mount, open_tree,
};

/// Longest list of names of extended attributes, and longest value (`XATTR_SIZE_MAX`).
const MAX_XATTRS: usize = 64 << 10;

/// Why there is no mount: what was tried, and the kernel's own words where it has any.
#[derive(Debug, thiserror::Error)]
#[error("cannot {what}: {source}{log}")]
pub struct MountError {
    what: &'static str,
    source: io::Error,
    log: String,
}

/// How a layer is mounted.
const LAYER: MountAttrFlags =
    MountAttrFlags::MOUNT_ATTR_RDONLY.union(MountAttrFlags::MOUNT_ATTR_NODEV);

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
    erofs(meta, blob)?.mount(LAYER)
}

/// Mounts a layer over a file of our FUSE file system. Reads go past that file's page cache: EROFS
/// has its own, and who waits for a read that is under way there can be killed.
///
/// # Errors
/// Those of [`layer`].
pub(crate) fn layer_over_fuse(meta: &Path, file: &Path) -> Result<OwnedFd, MountError> {
    let fs = erofs(meta, file)?;
    fs.flag("directio")?;
    fs.mount(LAYER)
}

fn erofs(meta: &Path, blob: &Path) -> Result<Config, MountError> {
    let fs = Config::open("erofs")?;
    fs.string("source", meta)?;
    fs.string("device", blob)?;
    fs.flag("ro")?;
    Ok(fs)
}

/// Makes the FUSE file system of a connection that nobody serves yet.
pub(crate) fn fuse(connection: BorrowedFd<'_>) -> Result<OwnedFd, MountError> {
    let fs = Config::open("fuse")?;
    fs.string("source", Path::new("sandman-layers"))?;
    // As a number: only newer kernels take it as a descriptor.
    let number = connection.as_raw_fd().to_string();
    fs.string("fd", Path::new(&number))?;
    fs.string("rootmode", Path::new("40000"))?;
    fs.string("user_id", Path::new("0"))?;
    fs.string("group_id", Path::new("0"))?;
    // Readers have all kinds of users; the folder's descriptor is what lets them in.
    fs.flag("allow_other")?;
    fs.mount(LAYER | MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NOEXEC)
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

/// Joins layers, the uppermost first, into a tree that nobody can change and from which nothing is
/// run. `empty` is a folder without anything in it: overlays want two layers at least.
///
/// # Errors
/// More than 499 layers.
pub fn view(layers: &[BorrowedFd<'_>], empty: BorrowedFd<'_>) -> Result<OwnedFd, MountError> {
    let fs = Config::open("overlay")?;
    for layer in layers.iter().chain([&empty]) {
        fs.descriptor("lowerdir+", *layer)?;
    }
    fs.string("source", Path::new("sandman"))?;
    fs.mount(
        MountAttrFlags::MOUNT_ATTR_RDONLY
            | MountAttrFlags::MOUNT_ATTR_NODEV
            | MountAttrFlags::MOUNT_ATTR_NOSUID
            | MountAttrFlags::MOUNT_ATTR_NOEXEC,
    )
}

/// Gives an empty folder the mode, owner, time and attributes of a layer's top directory: the top
/// of an overlay looks like its upper folder.
///
/// # Errors
/// Those of the file system.
pub fn look_like(top: BorrowedFd<'_>, folder: &Path) -> io::Result<()> {
    let found = rustix::fs::statat(top, "", AtFlags::EMPTY_PATH)?;
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let folder = rustix::fs::open(folder, flags, Mode::empty())?;
    let top = rustix::fs::openat(top, ".", flags, Mode::empty())?;
    let mut names = vec![0_u8; MAX_XATTRS];
    let length = rustix::fs::flistxattr(&top, &mut names)?;
    let mut value = vec![0_u8; MAX_XATTRS];
    for name in names
        .get(..length)
        .unwrap_or_default()
        .split(|byte| *byte == 0)
    {
        // What is the overlay's own says something of the layer, not of the tree.
        if name.is_empty() || name.starts_with(b"trusted.overlay.") {
            continue;
        }
        let length = rustix::fs::fgetxattr(&top, name, &mut value[..])?;
        let value = value.get(..length).unwrap_or_default();
        rustix::fs::fsetxattr(&folder, name, value, XattrFlags::empty())?;
    }
    rustix::fs::fchown(
        &folder,
        Some(Uid::from_raw(found.st_uid)),
        Some(Gid::from_raw(found.st_gid)),
    )?;
    rustix::fs::fchmod(&folder, Mode::from_raw_mode(found.st_mode & 0o7777))?;
    let modified = Timespec {
        tv_sec: found.st_mtime,
        tv_nsec: i64::try_from(found.st_mtime_nsec).unwrap_or(0),
    };
    let times = Timestamps {
        last_access: modified,
        last_modification: modified,
    };
    rustix::fs::futimens(&folder, &times)?;
    Ok(())
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
