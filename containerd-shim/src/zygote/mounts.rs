//! A sandbox's tree, from detached mounts.
//!
//! The image's tree is hostile: its links may lead anywhere. From the moment that it is `/`, the
//! kernel resolves every path below it; magic links, which could lead to descriptors of the host
//! that this process still holds, are refused.

use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use nix::sys::stat::{FileStat, Mode, fstat, mkdirat};

use super::child::{Context as _, Step, pick, write_once};
use super::plan::{Mount, Root, Source};
use crate::sys::mount::{
    Attributes, Context, attach, attach_root, change, copy_tree_at, enter_root, open_inside,
};

const FOLDER_MODE: u32 = 0o755;
const FILE_MODE: u32 = 0o644;

/// A tree that is not sealed yet.
#[derive(Debug)]
pub(super) struct Made<'a> {
    root: OwnedFd,
    plan: &'a Root,
    empty: BorrowedFd<'a>,
    late: Vec<(OwnedFd, Attributes)>,
}

fn text(path: &[u8]) -> String {
    format!("{:?}", String::from_utf8_lossy(path))
}

/// Makes `plan`'s tree this process's root.
pub(super) fn assemble<'a>(plan: &'a Root, fds: &'a [OwnedFd]) -> Step<Made<'a>> {
    let enter = || {
        let root = pick(fds, plan.mount)?;
        attach_root(root)?;
        enter_root(&root)?;
        root.try_clone_to_owned()
    };
    let root = enter().step(|| "enter the root file system".into())?;
    let mut late = Vec::new();
    for mount in &plan.mounts {
        let placed =
            place(root.as_fd(), mount, fds).step(|| format!("mount {}", text(&mount.target)))?;
        if mount.late != Attributes::default() {
            late.push((placed, mount.late));
        }
    }
    let empty = pick(fds, plan.empty).step(|| "find the empty folder".into())?;
    Ok(Made {
        root,
        plan,
        empty,
        late,
    })
}

fn place(root: BorrowedFd<'_>, mount: &Mount, fds: &[OwnedFd]) -> io::Result<OwnedFd> {
    let detached = match &mount.source {
        Source::Detached(index) => pick(fds, *index)?.try_clone_to_owned()?,
        Source::New {
            kind,
            attributes,
            options,
        } => {
            let context = Context::new(&CString::new(kind.as_slice())?)?;
            for (key, value) in options {
                let key = CString::new(key.as_slice())?;
                match value {
                    Some(value) => context.set(&key, &CString::new(value.as_slice())?)?,
                    None => context.flag(&key)?,
                }
            }
            context.mount(*attributes)?
        }
    };
    let target = if kernels_own(&mount.source) {
        // Paths below are trusted to be the kernel's: /proc may not be a link to elsewhere.
        ensure(root, &mount.target, true, false)?
    } else {
        ensure(root, &mount.target, is_folder(&fstat(&detached)?), true)?
    };
    attach(detached.as_fd(), target.as_fd())?;
    Ok(detached)
}

fn kernels_own(source: &Source) -> bool {
    matches!(source, Source::New { kind, .. } if kind == b"proc" || kind == b"sysfs")
}

fn is_folder(meta: &FileStat) -> bool {
    meta.st_mode & libc::S_IFMT == libc::S_IFDIR
}

/// Opens `path` below `root`, making folders on the way, and at its end a folder or an empty file,
/// if there is nothing.
fn ensure(root: BorrowedFd<'_>, path: &[u8], folder: bool, follow: bool) -> io::Result<OwnedFd> {
    let full = CString::new(path)?;
    let open = || open_inside(root, &full, libc::O_PATH, 0, follow);
    match open() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        other => return other,
    }
    let end = path
        .iter()
        .rposition(|byte| *byte == b'/')
        .unwrap_or_default();
    let name = CString::new(path.get(end + 1..).unwrap_or_default())?;
    let parent = match end {
        0 => root.try_clone_to_owned()?,
        _ => ensure(root, &path[..end], true, follow)?,
    };
    let made = if folder {
        mkdirat(
            &parent,
            name.as_c_str(),
            Mode::from_bits_truncate(FOLDER_MODE),
        )
        .map_err(io::Error::from)
    } else {
        let flags = libc::O_CREAT | libc::O_EXCL | libc::O_WRONLY | libc::O_NOFOLLOW;
        open_inside(parent.as_fd(), &name, flags, FILE_MODE, false).map(drop)
    };
    match made {
        // A dangling link is there; or, in a volume that others share, somebody was faster.
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
        _ => open(),
    }
}

/// Seals the tree: hidden and read-only paths, and what was to be read-only in the end.
pub(super) fn finish(made: Made<'_>) -> Step<()> {
    let root = made.root.as_fd();
    for path in &made.plan.readonly_paths {
        make_readonly(root, path).step(|| format!("make {} read-only", text(path)))?;
    }
    let mut cover = Cover {
        empty: made.empty,
        placed: None,
    };
    for path in &made.plan.masked {
        cover
            .hide(root, path)
            .step(|| format!("mask {}", text(path)))?;
    }
    for (mount, attributes) in &made.late {
        change(mount.as_fd(), *attributes, false).step(|| "seal a mount".into())?;
    }
    if made.plan.readonly {
        let readonly = Attributes {
            set: libc::MOUNT_ATTR_RDONLY,
            ..Attributes::default()
        };
        change(root, readonly, false).step(|| "make the root read-only".into())?;
    }
    Ok(())
}

/// The path if it exists: what this kernel does not have needs no cover.
fn existing(root: BorrowedFd<'_>, path: &[u8]) -> io::Result<Option<OwnedFd>> {
    match open_inside(root, &CString::new(path)?, libc::O_PATH, 0, true) {
        Ok(target) => Ok(Some(target)),
        Err(error) => match error.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => Ok(None),
            _ => Err(error),
        },
    }
}

fn make_readonly(root: BorrowedFd<'_>, path: &[u8]) -> io::Result<()> {
    let Some(target) = existing(root, path)? else {
        return Ok(());
    };
    let copy = copy_tree_at(target.as_fd(), true)?;
    let readonly = Attributes {
        set: libc::MOUNT_ATTR_RDONLY,
        ..Attributes::default()
    };
    change(copy.as_fd(), readonly, false)?;
    attach(copy.as_fd(), target.as_fd())
}

/// Hides paths: folders under one empty folder that all sandboxes share, files under `/dev/null`.
struct Cover<'a> {
    empty: BorrowedFd<'a>,
    /// Where the empty folder is mounted already: a detached mount can be attached once, and
    /// before Linux 6.15 only a mount that is attached can be copied.
    placed: Option<OwnedFd>,
}

impl Cover<'_> {
    fn hide(&mut self, root: BorrowedFd<'_>, path: &[u8]) -> io::Result<()> {
        let Some(target) = existing(root, path)? else {
            return Ok(());
        };
        if !is_folder(&fstat(&target)?) {
            let null = open_inside(root, c"/dev/null", libc::O_PATH, 0, true)?;
            let meta = fstat(&null)?;
            if meta.st_mode & libc::S_IFMT != libc::S_IFCHR || meta.st_rdev != libc::makedev(1, 3) {
                return Err(io::Error::other("/dev/null is not the null device"));
            }
            return attach(copy_tree_at(null.as_fd(), false)?.as_fd(), target.as_fd());
        }
        match &self.placed {
            Some(placed) => attach(copy_tree_at(placed.as_fd(), false)?.as_fd(), target.as_fd()),
            None => {
                attach(self.empty, target.as_fd())?;
                self.placed = Some(self.empty.try_clone_to_owned()?);
                Ok(())
            }
        }
    }
}

/// Makes the folder `path` and those above it; they belong to root.
pub(super) fn make_folder(path: &[u8]) -> io::Result<()> {
    let root = File::open("/")?;
    ensure(root.as_fd(), path, true, true).map(drop)
}

/// Writes a file of the sandbox's own `/proc`.
pub(super) fn write_proc(path: &[u8], value: &[u8]) -> io::Result<()> {
    let root = File::open("/")?;
    let proc = open_inside(root.as_fd(), c"/proc", libc::O_PATH, 0, false)?;
    if nix::sys::statfs::fstatfs(&proc)?.filesystem_type() != nix::sys::statfs::PROC_SUPER_MAGIC {
        return Err(io::Error::other("/proc is not mounted"));
    }
    let file = open_inside(proc.as_fd(), &CString::new(path)?, libc::O_WRONLY, 0, false)?;
    write_once(File::from(file), value)
}

/// Opens a new terminal of the sandbox's own devpts; the master.
pub(super) fn open_terminal() -> io::Result<OwnedFd> {
    let root = File::open("/")?;
    let flags = libc::O_RDWR | libc::O_NOCTTY;
    open_inside(root.as_fd(), c"/dev/pts/ptmx", flags, 0, false)
}

/// Shows a terminal as `/dev/console`.
pub(super) fn show_console(terminal: BorrowedFd<'_>) -> io::Result<()> {
    let root = File::open("/")?;
    let target = ensure(root.as_fd(), b"/dev/console", false, false)?;
    attach(copy_tree_at(terminal, false)?.as_fd(), target.as_fd())
}
