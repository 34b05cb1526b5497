//! File calls relative to an open directory, none of which follows a symbolic
//! link in its last component.

use std::ffi::CStr;
use std::fs::File;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

use super::check;

/// What a name in a directory is.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Found {
    /// It is a directory (not a link to one).
    pub(crate) is_dir: bool,
    /// Device and inode, which together name the file itself.
    pub(crate) identity: (u64, u64),
}

/// Opens the existing directory `name`; a symbolic link is refused with ENOTDIR.
/// With `readable` the descriptor also serves `fchmod`, `fchown` and `futimens`.
pub(crate) fn open_dir(dir: impl AsFd, name: &CStr, readable: bool) -> io::Result<OwnedFd> {
    let access = if readable {
        libc::O_RDONLY
    } else {
        libc::O_PATH
    };
    open(dir, name, access | libc::O_DIRECTORY, 0)
}

/// Makes the file `name`, which must not exist, open for writing, mode 0600.
pub(crate) fn create_file(dir: impl AsFd, name: &CStr) -> io::Result<File> {
    open(
        dir,
        name,
        libc::O_WRONLY | libc::O_CREAT | libc::O_EXCL,
        0o600,
    )
    .map(File::from)
}

fn open(dir: impl AsFd, name: &CStr, flags: i32, mode: libc::mode_t) -> io::Result<OwnedFd> {
    let flags = flags | libc::O_NOFOLLOW | libc::O_CLOEXEC;
    // SAFETY: `name` is a C string and `dir` is open.
    let fd = check(unsafe {
        libc::openat(
            dir.as_fd().as_raw_fd(),
            name.as_ptr(),
            flags,
            libc::c_uint::from(mode),
        )
    })?;
    // SAFETY: just made, no other owner.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Looks at `name` without following it; `None` if there is no such name.
pub(crate) fn look(dir: impl AsFd, name: &CStr) -> io::Result<Option<Found>> {
    let mut stat = MaybeUninit::<libc::stat>::uninit();
    // SAFETY: `name` is a C string, `dir` is open, `stat` has room.
    let result = check(unsafe {
        libc::fstatat(
            dir.as_fd().as_raw_fd(),
            name.as_ptr(),
            stat.as_mut_ptr(),
            libc::AT_SYMLINK_NOFOLLOW,
        )
    });
    match result {
        Ok(_) => {
            // SAFETY: filled by the successful call.
            let stat = unsafe { stat.assume_init() };
            Ok(Some(Found {
                is_dir: stat.st_mode & libc::S_IFMT == libc::S_IFDIR,
                identity: (stat.st_dev, stat.st_ino),
            }))
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Makes the directory `name`.
pub(crate) fn mkdir(dir: impl AsFd, name: &CStr, mode: libc::mode_t) -> io::Result<()> {
    // SAFETY: `name` is a C string and `dir` is open.
    check(unsafe { libc::mkdirat(dir.as_fd().as_raw_fd(), name.as_ptr(), mode) }).map(drop)
}

/// Removes `name`, which must not be a directory.
pub(crate) fn unlink(dir: impl AsFd, name: &CStr) -> io::Result<()> {
    // SAFETY: `name` is a C string and `dir` is open.
    check(unsafe { libc::unlinkat(dir.as_fd().as_raw_fd(), name.as_ptr(), 0) }).map(drop)
}

/// Makes `name` a symbolic link with the text `target`.
pub(crate) fn symlink(dir: impl AsFd, name: &CStr, target: &CStr) -> io::Result<()> {
    // SAFETY: both are C strings and `dir` is open.
    check(unsafe { libc::symlinkat(target.as_ptr(), dir.as_fd().as_raw_fd(), name.as_ptr()) })
        .map(drop)
}

/// Makes `name` in `dir` another name of `from_name` in `from`; a symbolic link
/// is linked itself.
pub(crate) fn link(
    from: impl AsFd,
    from_name: &CStr,
    dir: impl AsFd,
    name: &CStr,
) -> io::Result<()> {
    // SAFETY: both are C strings and both directories are open.
    check(unsafe {
        libc::linkat(
            from.as_fd().as_raw_fd(),
            from_name.as_ptr(),
            dir.as_fd().as_raw_fd(),
            name.as_ptr(),
            0,
        )
    })
    .map(drop)
}

/// Makes a device or FIFO; `mode` holds type and permission bits.
pub(crate) fn mknod(
    dir: impl AsFd,
    name: &CStr,
    mode: libc::mode_t,
    device: libc::dev_t,
) -> io::Result<()> {
    // SAFETY: `name` is a C string and `dir` is open.
    check(unsafe { libc::mknodat(dir.as_fd().as_raw_fd(), name.as_ptr(), mode, device) }).map(drop)
}

/// Sets the owner of `name` itself.
pub(crate) fn chown(dir: impl AsFd, name: &CStr, uid: u32, gid: u32) -> io::Result<()> {
    // SAFETY: `name` is a C string and `dir` is open.
    check(unsafe {
        libc::fchownat(
            dir.as_fd().as_raw_fd(),
            name.as_ptr(),
            uid,
            gid,
            libc::AT_SYMLINK_NOFOLLOW,
        )
    })
    .map(drop)
}

/// Sets the modification time of `name` itself, in seconds since the epoch; the
/// access time stays.
pub(crate) fn set_mtime(dir: impl AsFd, name: &CStr, seconds: i64) -> io::Result<()> {
    let times = [
        libc::timespec {
            tv_sec: 0,
            tv_nsec: libc::UTIME_OMIT,
        },
        libc::timespec {
            tv_sec: seconds,
            tv_nsec: 0,
        },
    ];
    // SAFETY: `name` is a C string, `dir` is open, `times` has two entries.
    check(unsafe {
        libc::utimensat(
            dir.as_fd().as_raw_fd(),
            name.as_ptr(),
            times.as_ptr(),
            libc::AT_SYMLINK_NOFOLLOW,
        )
    })
    .map(drop)
}

/// Whether the effective user may execute `path`.
pub(crate) fn may_execute(path: &CStr) -> io::Result<()> {
    // SAFETY: `path` is a C string.
    check(unsafe { libc::faccessat(libc::AT_FDCWD, path.as_ptr(), libc::X_OK, libc::AT_EACCESS) })
        .map(drop)
}

/// The file mode creation mask. Reading it means setting it, so the caller must
/// have one thread.
pub(crate) fn umask() -> u32 {
    // SAFETY: takes and returns numbers; cannot fail.
    unsafe {
        let mask = libc::umask(0o077);
        libc::umask(mask);
        mask
    }
}

/// The effective user id.
pub(crate) fn effective_uid() -> u32 {
    // SAFETY: takes nothing and cannot fail.
    unsafe { libc::geteuid() }
}

/// Whether `path` is a file system of the kernel's processes.
pub(crate) fn is_proc(path: &CStr) -> bool {
    let mut stat = std::mem::MaybeUninit::<libc::statfs>::uninit();
    // SAFETY: `path` is a C string and `stat` has room.
    let done = check(unsafe { libc::statfs(path.as_ptr(), stat.as_mut_ptr()) });
    // SAFETY: filled by the successful call.
    done.is_ok() && unsafe { stat.assume_init() }.f_type == libc::PROC_SUPER_MAGIC
}
