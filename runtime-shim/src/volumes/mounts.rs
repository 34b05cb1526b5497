//! The mounts that volumes need: one tmpfs for all secrets, one for each
//! emptyDir in memory, and their end.

use std::fs;
use std::io;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use nix::errno::Errno;
use nix::fcntl::{OFlag, open};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sys::stat::Mode;

/// Containers run what is in their volumes, but gain nothing by it.
fn flags() -> MsFlags {
    MsFlags::MS_NODEV | MsFlags::MS_NOSUID
}

/// Mounts the tmpfs of all secrets, unless it is there.
pub(super) fn secret_tmpfs(path: &Path) -> io::Result<()> {
    if is_mount_point(path)? {
        return Ok(());
    }
    // Kernels before 6.3 do not know `noswap`.
    match mount_tmpfs(path, "mode=0700,noswap") {
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => mount_tmpfs(path, "mode=0700"),
        other => other,
    }
}

/// Mounts an emptyDir in memory, unless it is there; 0 bytes means the
/// kernel's limit of half the memory.
pub(super) fn volume_tmpfs(
    path: &Path,
    mode: u32,
    group: Option<u32>,
    size_bytes: u64,
) -> io::Result<()> {
    if is_mount_point(path)? {
        return Ok(());
    }
    let mut options = format!("mode={mode:04o}");
    if let Some(group) = group {
        options.push_str(&format!(",gid={group}"));
    }
    if size_bytes > 0 {
        options.push_str(&format!(",size={size_bytes}"));
    }
    mount_tmpfs(path, &options)
}

fn mount_tmpfs(path: &Path, options: &str) -> io::Result<()> {
    mount(Some("tmpfs"), path, Some("tmpfs"), flags(), Some(options)).map_err(io::Error::from)
}

/// Whether a file system is mounted here. Sound for tmpfs, which always has a
/// device number of its own; a bind of the same file system is not seen.
fn is_mount_point(path: &Path) -> io::Result<bool> {
    let Some(parent) = path.parent() else {
        return Ok(true);
    };
    Ok(fs::symlink_metadata(path)?.dev() != fs::symlink_metadata(parent)?.dev())
}

/// Whether the path is the top of a mount. Unlike a comparison of device numbers this also sees
/// a bind mount of the same file system.
pub(super) fn is_mounted(path: &Path) -> io::Result<bool> {
    let mount_id = |path: &Path| -> io::Result<Option<String>> {
        let flags = OFlag::O_PATH | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        let file = open(path, flags, Mode::empty())?;
        let info = fs::read_to_string(format!("/proc/self/fdinfo/{}", file.as_raw_fd()))?;
        let line = info.lines().find_map(|line| line.strip_prefix("mnt_id:"));
        Ok(line.map(|id| id.trim().to_owned()))
    };
    let Some(parent) = path.parent() else {
        return Ok(true);
    };
    match mount_id(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        own => Ok(own? != mount_id(parent)?),
    }
}

/// Unmounts whatever is mounted on the entries `depth` levels below a folder
/// of our own; those levels hold nothing that a container could have made.
pub(super) fn unmount_below(folder: &Path, depth: u32) -> io::Result<()> {
    let entries = match fs::read_dir(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        other => other?,
    };
    for entry in entries {
        let path = entry?.path();
        if depth > 1 {
            unmount_below(&path, depth - 1)?;
        } else {
            unmount(&path)?;
        }
    }
    Ok(())
}

/// Unmounts all layers of a mount point; what is none is left alone.
pub(super) fn unmount(path: &Path) -> io::Result<()> {
    loop {
        match umount2(path, MntFlags::MNT_DETACH | MntFlags::UMOUNT_NOFOLLOW) {
            Ok(()) => {}
            Err(Errno::EINVAL | Errno::ENOENT) => return Ok(()),
            Err(error) => return Err(error.into()),
        }
    }
}
