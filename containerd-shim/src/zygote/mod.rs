//! The zygote: clones sandboxes from an almost empty process.
//!
//! What a clone copies costs time for each sandbox: mounts (333 ms at ten thousand of them in
//! runc), memory, descriptors. So this process has one thread, a mount namespace that holds one
//! empty read-only tmpfs, no descriptor of any sandbox, and touches nothing of a plan itself: the
//! clone reads it. Children are made with `CLONE_PARENT`: they are the holder's.

mod child;
pub mod gate;
mod identity;
mod lookup;
mod mounts;
pub mod plan;

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, unshare};

use crate::holder::protocol::CloneHeader;
use crate::sys::mount::{Context, attach, enter_root};
use crate::sys::process::{self, Side};
use crate::sys::{message, privileges};
use crate::wire::Reader;

/// Descriptor of the socket to the holder.
const SOCKET: i32 = crate::holder::ZYGOTE_SOCKET;
/// A header is a few numbers; everything else is in the plan.
const MAX_HEADER: usize = 64;

/// Serves the holder until it closes the socket.
///
/// # Errors
/// What kept the zygote from starting.
pub fn run() -> io::Result<()> {
    // SAFETY: the holder starts this program with the socket in that place; nobody else asks.
    #[expect(unsafe_code, reason = "see above")]
    let socket = unsafe { process::inherited(SOCKET) };
    privileges::set_undumpable()?;
    process::close_on_exec_from(SOCKET)?;
    let own = OwnedFd::from(std::fs::File::open("/proc/self/ns/pid")?);
    leave_mounts_behind()?;
    loop {
        let mut buffer = [0; MAX_HEADER];
        let received = match message::receive(socket.as_fd(), &mut buffer) {
            Ok(received) if received.length > 0 => received,
            // The holder is gone, and the anchor with it.
            Ok(_) => return Ok(()),
            Err(error) => return Err(error),
        };
        let header = CloneHeader::read(&mut Reader::new(&buffer[..received.length]))
            .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
        let (errno, pid) = match launch(&header, received.fds, &own) {
            Ok(pid) => (0, Some(pid)),
            Err(error) => (error.raw_os_error().unwrap_or(libc::EINVAL), None),
        };
        message::send(socket.as_fd(), &errno.to_le_bytes(), &[], pid)?;
    }
}

/// Clones a child that follows the plan among `fds`; `own` is the zygote's PID namespace.
fn launch(header: &CloneHeader, fds: Vec<OwnedFd>, own: &OwnedFd) -> io::Result<i32> {
    let flags = header.flags | libc::CLONE_PARENT as u64;
    let cgroup = header
        .cgroup
        .map(|index| child::pick(&fds, index))
        .transpose()?;
    if let Some(index) = header.pid_namespace {
        process::join(child::pick(&fds, index)?, libc::CLONE_NEWPID)?;
    }
    // SAFETY: one thread.
    #[expect(unsafe_code, reason = "see above")]
    let side = unsafe { process::clone(flags, cgroup) };
    if let Ok(Side::Child) = side {
        child::run(fds);
    }
    if header.pid_namespace.is_some() && process::join(own.as_fd(), libc::CLONE_NEWPID).is_err() {
        // The next sandbox would be born in this one's namespace. Another zygote will not.
        process::exit(1);
    }
    match side? {
        Side::Parent(pid) => Ok(pid),
        Side::Child => child::run(Vec::new()),
    }
}

/// Exchanges the host's mounts for one empty, read-only tmpfs.
fn leave_mounts_behind() -> io::Result<()> {
    unshare(CloneFlags::CLONE_NEWNS)?;
    let private = MsFlags::MS_REC | MsFlags::MS_PRIVATE;
    mount(None::<&str>, "/", None::<&str>, private, None::<&str>)?;
    let root = Context::new(c"tmpfs")?;
    root.set(c"mode", c"0555")?;
    root.set(c"nr_inodes", c"2")?;
    let attributes = libc::MOUNT_ATTR_RDONLY
        | libc::MOUNT_ATTR_NOSUID
        | libc::MOUNT_ATTR_NODEV
        | libc::MOUNT_ATTR_NOEXEC;
    let root = root.mount(attributes)?;
    // pivot_root wants the new root to be a mount point; any folder that is everywhere will do.
    attach(root.as_fd(), std::fs::File::open("/proc")?.as_fd())?;
    nix::unistd::fchdir(&root)?;
    nix::unistd::pivot_root(".", ".")?;
    umount2(".", MntFlags::MNT_DETACH)?;
    enter_root(&root)
}
