//! Mounts as descriptors: made detached, changed, and put in place at the end.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr;

use super::{check, check_fd};

/// File system context of fsopen(2): takes parameters, becomes a mount.
#[derive(Debug)]
pub struct Context(OwnedFd);

impl Context {
    /// Starts a file system of this type.
    ///
    /// # Errors
    /// The kernel has no such file system.
    pub fn new(kind: &CStr) -> io::Result<Self> {
        // SAFETY: `kind` is a C string for the length of the call.
        check_fd(unsafe { libc::syscall(libc::SYS_fsopen, kind.as_ptr(), libc::FSOPEN_CLOEXEC) })
            .map(Self)
    }

    fn configure(&self, command: u32, key: Option<&CStr>, value: Option<&CStr>) -> io::Result<()> {
        let pointer = |text: Option<&CStr>| text.map_or(ptr::null(), CStr::as_ptr);
        // SAFETY: both texts are C strings or null for the length of the call.
        check(unsafe {
            libc::syscall(
                libc::SYS_fsconfig,
                self.0.as_raw_fd(),
                command,
                pointer(key),
                pointer(value),
                0,
            )
        })
        .map(drop)
        .map_err(|error| self.explain(error))
    }

    /// Adds what the kernel left in the context's log, which says more than errno.
    fn explain(&self, error: io::Error) -> io::Error {
        let mut buffer = [0_u8; 512];
        match nix::unistd::read(&self.0, &mut buffer) {
            Ok(length) if length > 2 => {
                // "e text": a class, then the text.
                let text = String::from_utf8_lossy(&buffer[2..length]);
                io::Error::new(error.kind(), format!("{error}: {}", text.trim_end()))
            }
            _ => error,
        }
    }

    /// Sets `key=value`.
    ///
    /// # Errors
    /// The file system does not take it; its own explanation is in the text.
    pub fn set(&self, key: &CStr, value: &CStr) -> io::Result<()> {
        self.configure(libc::FSCONFIG_SET_STRING, Some(key), Some(value))
    }

    /// Sets an option without a value.
    ///
    /// # Errors
    /// As [`Context::set`].
    pub fn flag(&self, key: &CStr) -> io::Result<()> {
        self.configure(libc::FSCONFIG_SET_FLAG, Some(key), None)
    }

    /// Makes the file system and a detached mount of it with these `MOUNT_ATTR_*`.
    ///
    /// # Errors
    /// The file system refuses; its own explanation is in the text.
    pub fn mount(self, attributes: u64) -> io::Result<OwnedFd> {
        self.configure(libc::FSCONFIG_CMD_CREATE, None, None)?;
        // SAFETY: takes a descriptor of ours and numbers.
        check_fd(unsafe {
            libc::syscall(
                libc::SYS_fsmount,
                self.0.as_raw_fd(),
                libc::FSMOUNT_CLOEXEC,
                attributes,
            )
        })
    }
}

/// A detached copy of the mount at `path`, with those below it if `recursive`.
///
/// # Errors
/// As open_tree(2).
pub fn copy_tree(path: &CStr, recursive: bool) -> io::Result<OwnedFd> {
    open_tree(libc::AT_FDCWD, path, recursive, 0)
}

/// The same of an open file or folder.
///
/// # Errors
/// As open_tree(2).
pub fn copy_tree_at(at: BorrowedFd<'_>, recursive: bool) -> io::Result<OwnedFd> {
    open_tree(
        at.as_raw_fd(),
        c"",
        recursive,
        libc::AT_EMPTY_PATH.cast_unsigned(),
    )
}

fn open_tree(at: i32, path: &CStr, recursive: bool, flags: u32) -> io::Result<OwnedFd> {
    let recursive = if recursive {
        libc::AT_RECURSIVE.cast_unsigned()
    } else {
        0
    };
    let flags = libc::OPEN_TREE_CLONE | libc::OPEN_TREE_CLOEXEC | recursive | flags;
    // SAFETY: `path` is a C string for the length of the call.
    check_fd(unsafe { libc::syscall(libc::SYS_open_tree, at, path.as_ptr(), flags) })
}

/// Puts a detached mount over `target`, an open file or folder.
///
/// # Errors
/// As move_mount(2).
pub fn attach(mount: BorrowedFd<'_>, target: BorrowedFd<'_>) -> io::Result<()> {
    let flags = libc::MOVE_MOUNT_F_EMPTY_PATH | libc::MOVE_MOUNT_T_EMPTY_PATH;
    // SAFETY: both descriptors are open, both texts are C strings.
    check(unsafe {
        libc::syscall(
            libc::SYS_move_mount,
            mount.as_raw_fd(),
            c"".as_ptr(),
            target.as_raw_fd(),
            c"".as_ptr(),
            flags,
        )
    })
    .map(drop)
}

/// Puts a detached mount over `/`, whatever is there.
///
/// # Errors
/// As move_mount(2).
pub fn attach_root(mount: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: the descriptor is open, both texts are C strings.
    check(unsafe {
        libc::syscall(
            libc::SYS_move_mount,
            mount.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_FDCWD,
            c"/".as_ptr(),
            libc::MOVE_MOUNT_F_EMPTY_PATH,
        )
    })
    .map(drop)
}

/// Change of a mount's attributes and propagation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Attributes {
    /// `MOUNT_ATTR_*` to set.
    pub set: u64,
    /// `MOUNT_ATTR_*` to clear first.
    pub clear: u64,
    /// `MS_PRIVATE`, `MS_SLAVE`, ...; 0 leaves it.
    pub propagation: u64,
}

/// Applies `attributes` to a mount, and to all below it if `recursive`.
///
/// # Errors
/// As mount_setattr(2).
pub fn change(mount: BorrowedFd<'_>, attributes: Attributes, recursive: bool) -> io::Result<()> {
    if attributes == Attributes::default() {
        return Ok(());
    }
    let attr = libc::mount_attr {
        attr_set: attributes.set,
        attr_clr: attributes.clear,
        propagation: attributes.propagation,
        userns_fd: 0,
    };
    let flags = libc::AT_EMPTY_PATH | if recursive { libc::AT_RECURSIVE } else { 0 };
    // SAFETY: `attr` is initialised and lives for the call, its size goes along.
    check(unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            mount.as_raw_fd(),
            c"".as_ptr(),
            flags,
            &raw const attr,
            size_of::<libc::mount_attr>(),
        )
    })
    .map(drop)
}

/// Opens `path` below `root` as if `root` were `/`: links cannot lead out, and magic links (those
/// of `/proc/<pid>/fd`) lead nowhere.
///
/// # Errors
/// As openat2(2).
pub fn open_inside(
    root: BorrowedFd<'_>,
    path: &CStr,
    flags: i32,
    mode: u32,
    follow_links: bool,
) -> io::Result<OwnedFd> {
    let no_links = if follow_links {
        0
    } else {
        libc::RESOLVE_NO_SYMLINKS
    };
    // SAFETY: the structure is plain numbers, for which zero is valid.
    let mut how: libc::open_how = unsafe { std::mem::zeroed() };
    how.flags = u64::from((flags | libc::O_CLOEXEC).cast_unsigned());
    how.mode = u64::from(mode);
    how.resolve = libc::RESOLVE_IN_ROOT | libc::RESOLVE_NO_MAGICLINKS | no_links;
    loop {
        // SAFETY: `path` and `how` live for the call, the size goes along.
        let result = check_fd(unsafe {
            libc::syscall(
                libc::SYS_openat2,
                root.as_raw_fd(),
                path.as_ptr(),
                &raw const how,
                size_of::<libc::open_how>(),
            )
        });
        match result {
            // A rename somewhere raced with the walk; the kernel asks to try again.
            Err(error) if error.raw_os_error() == Some(libc::EAGAIN) => {}
            other => return other,
        }
    }
}

/// Makes `root`, an open folder, this process's `/` and working directory.
///
/// # Errors
/// As chroot(2).
pub fn enter_root(root: &impl AsFd) -> io::Result<()> {
    nix::unistd::fchdir(root)?;
    nix::unistd::chroot(c".")?;
    Ok(())
}
