//! Mounts that show files with other owners than they have.
#![allow(unsafe_code)]

use std::ffi::CString;
use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

/// Mounts `source`, a file or folder, over `target` of the same kind, with ids mapped as in the
/// user namespace. Mounts below `source` do not come along.
pub(crate) fn bind(source: &Path, target: &Path, namespace: BorrowedFd<'_>) -> io::Result<()> {
    let tree = copy(source, namespace)?;
    let target = c_path(target)?;
    // SAFETY: the descriptor is open, both texts are C strings.
    check(unsafe {
        libc::syscall(
            libc::SYS_move_mount,
            tree.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_FDCWD,
            target.as_ptr(),
            libc::MOVE_MOUNT_F_EMPTY_PATH,
        )
    })
    .map(drop)
}

/// The same mount, nowhere yet.
pub(super) fn copy(source: &Path, namespace: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let source = c_path(source)?;
    let flags = libc::OPEN_TREE_CLONE | libc::OPEN_TREE_CLOEXEC;
    // SAFETY: `source` is a C string for the length of the call.
    let fd = check(unsafe {
        libc::syscall(libc::SYS_open_tree, libc::AT_FDCWD, source.as_ptr(), flags)
    })?;
    let fd = i32::try_from(fd).map_err(io::Error::other)?;
    // SAFETY: the kernel has just made it, and nobody else knows it.
    let tree = unsafe { OwnedFd::from_raw_fd(fd) };
    let attributes = libc::mount_attr {
        attr_set: libc::MOUNT_ATTR_IDMAP,
        // In the pod's namespaces these could not be taken back any more, and old runtimes try to.
        // The container's own mount has those that it is to have.
        attr_clr: libc::MOUNT_ATTR_NOSUID | libc::MOUNT_ATTR_NODEV | libc::MOUNT_ATTR_NOEXEC,
        propagation: libc::MS_PRIVATE,
        userns_fd: u64::try_from(namespace.as_raw_fd()).map_err(io::Error::other)?,
    };
    // SAFETY: `attributes` is initialised and lives for the call, its size goes along.
    check(unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            tree.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH,
            &raw const attributes,
            size_of::<libc::mount_attr>(),
        )
    })?;
    Ok(tree)
}

fn c_path(path: &Path) -> io::Result<CString> {
    CString::new(path.as_os_str().as_bytes()).map_err(io::Error::other)
}

fn check(result: libc::c_long) -> io::Result<libc::c_long> {
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(result)
    }
}
