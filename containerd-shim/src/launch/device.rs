//! What a sandbox sees as `/dev`, made once or from the host's own nodes.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use nix::sys::stat::{Mode, SFlag, makedev, mkdirat, mknodat};
use nix::unistd::symlinkat;

use crate::sys::mount::{Attributes, Context, change, copy_tree, copy_tree_at};

/// Nodes of every container, with their numbers.
pub(super) const NODES: [(&CStr, &str, u64, u64); 6] = [
    (c"null", "/dev/null", 1, 3),
    (c"zero", "/dev/zero", 1, 5),
    (c"full", "/dev/full", 1, 7),
    (c"random", "/dev/random", 1, 8),
    (c"urandom", "/dev/urandom", 1, 9),
    (c"tty", "/dev/tty", 5, 0),
];

const LINKS: [(&CStr, &CStr); 5] = [
    (c"/proc/self/fd", c"fd"),
    (c"/proc/self/fd/0", c"stdin"),
    (c"/proc/self/fd/1", c"stdout"),
    (c"/proc/self/fd/2", c"stderr"),
    (c"pts/ptmx", c"ptmx"),
];

const FOLDERS: [(&CStr, u32); 4] = [
    (c"pts", 0o755),
    (c"shm", 0o1777),
    (c"mqueue", 0o1777),
    (c"sandman", 0o755),
];

/// Mount points of files that others put below a `/dev` that takes no new ones.
const FILES: [&CStr; 3] = [c"console", c"termination-log", c"sandman/daemon"];

/// Makes what every `/dev` holds besides its nodes.
pub(super) fn furnish(dev: BorrowedFd<'_>) -> io::Result<()> {
    for (target, name) in LINKS {
        symlinkat(target, dev, name)?;
    }
    Ok(())
}

/// A detached copy of the host's node, to be mounted over a file. Read-only: that is no matter for
/// what is written to the device, but owner, mode and times are those of the host's own file.
pub(super) fn host_node(path: &str, major: u64, minor: u64) -> io::Result<OwnedFd> {
    let meta = nix::sys::stat::stat(path)?;
    if meta.st_mode & libc::S_IFMT != libc::S_IFCHR || meta.st_rdev != makedev(major, minor) {
        return Err(io::Error::other(format!(
            "{path} is not the device {major}:{minor}"
        )));
    }
    let path = std::ffi::CString::new(path)?;
    let node = copy_tree(&path, false)?;
    let readonly = Attributes {
        set: libc::MOUNT_ATTR_RDONLY,
        ..Attributes::default()
    };
    change(node.as_fd(), readonly, false)?;
    Ok(node)
}

/// Whether `path` is one of the nodes that every container may use, under whatever name.
pub(super) fn is_default_node(path: &std::path::Path) -> io::Result<bool> {
    let meta = nix::sys::stat::stat(path)?;
    let device = meta.st_mode & libc::S_IFMT == libc::S_IFCHR;
    Ok(device
        && NODES
            .iter()
            .any(|(_, _, major, minor)| meta.st_rdev == makedev(*major, *minor)))
}

/// What sandboxes share: a complete read-only `/dev`, and an empty folder to hide others under.
#[derive(Debug)]
pub(super) struct Shared {
    dev: OwnedFd,
    empty: OwnedFd,
}

impl Shared {
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self {
            dev: complete_dev()?,
            empty: empty()?,
        })
    }

    /// A mount of the shared `/dev`.
    pub(super) fn dev(&self) -> io::Result<OwnedFd> {
        // Before Linux 6.15 a mount that is attached nowhere cannot be copied.
        copy_tree_at(self.dev.as_fd(), false).or_else(|_| complete_dev())
    }

    /// A mount of the empty folder.
    pub(super) fn empty(&self) -> io::Result<OwnedFd> {
        copy_tree_at(self.empty.as_fd(), false).or_else(|_| empty())
    }
}

fn empty() -> io::Result<OwnedFd> {
    let context = Context::new(c"tmpfs")?;
    context.set(c"mode", c"0555")?;
    context.set(c"nr_inodes", c"2")?;
    context.mount(
        libc::MOUNT_ATTR_RDONLY
            | libc::MOUNT_ATTR_NOSUID
            | libc::MOUNT_ATTR_NODEV
            | libc::MOUNT_ATTR_NOEXEC,
    )
}

fn complete_dev() -> io::Result<OwnedFd> {
    let context = Context::new(c"tmpfs")?;
    context.set(c"mode", c"0755")?;
    context.set(c"size", c"64k")?;
    let dev = context.mount(libc::MOUNT_ATTR_NOSUID | libc::MOUNT_ATTR_NOEXEC)?;
    let at = dev.as_fd();
    for (name, _, major, minor) in NODES {
        let mode = Mode::from_bits_truncate(0o666);
        mknodat(at, name, SFlag::S_IFCHR, mode, makedev(major, minor))?;
        chmod(at, name, 0o666)?;
    }
    for (name, mode) in FOLDERS {
        mkdirat(at, name, Mode::from_bits_truncate(mode))?;
        chmod(at, name, mode)?;
    }
    for name in FILES {
        mknodat(at, name, SFlag::S_IFREG, Mode::from_bits_truncate(0o644), 0)?;
    }
    furnish(at)?;
    let readonly = Attributes {
        set: libc::MOUNT_ATTR_RDONLY,
        ..Attributes::default()
    };
    change(at, readonly, false)?;
    Ok(dev)
}

/// Modes are given in full, whatever this process's umask is.
fn chmod(at: BorrowedFd<'_>, name: &CStr, mode: u32) -> io::Result<()> {
    let flags = nix::sys::stat::FchmodatFlags::FollowSymlink;
    Ok(nix::sys::stat::fchmodat(
        at,
        name,
        Mode::from_bits_truncate(mode),
        flags,
    )?)
}

/// Whether `target`, below `/dev`, has a mount point in the shared one.
pub(super) fn shared_has(target: &[u8]) -> bool {
    let Some(rest) = target.strip_prefix(b"/dev/") else {
        return true;
    };
    FOLDERS
        .iter()
        .map(|(name, _)| *name)
        .chain(FILES)
        .any(|name| name.to_bytes() == rest)
}
