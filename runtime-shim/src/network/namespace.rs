//! Namespaces of a pod, pinned by bind mounts so that they outlive every
//! process: made on a thread of their own, which ends with the work.

use std::fs;
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::path::{Path, PathBuf};

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, setns, unshare};
use nix::sys::statfs::{NSFS_MAGIC, statfs};

use super::netlink::Socket;
use crate::users::{Holder, UserRange};

/// Namespace kinds and the names of their pins, as in `/proc/<pid>/ns`.
const PINS: [&str; 3] = ["net", "uts", "ipc"];
/// The pin of a pod that has users of its own.
pub(super) const USER: &str = "user";

/// The folder with the pins of one pod.
#[derive(Clone, Debug)]
pub(super) struct Pins {
    folder: PathBuf,
}

/// What the making thread hands to the configuration of the network.
pub(super) struct Inside<'a> {
    /// A socket in the namespace that the thread came from: the host's.
    pub(super) host: Socket,
    /// A socket in the new namespace.
    pub(super) pod: Socket,
    /// The new namespace itself.
    pub(super) namespace: BorrowedFd<'a>,
}

impl Pins {
    pub(super) fn new(root: &Path, uid: &str) -> Self {
        Self {
            folder: root.join(uid),
        }
    }

    pub(super) fn path(&self, kind: &str) -> PathBuf {
        self.folder.join(kind)
    }

    /// Whether every pin holds a namespace.
    pub(super) fn complete(&self, own_users: bool) -> bool {
        let mut pins = PINS.iter().chain(own_users.then_some(&USER));
        pins.all(|kind| statfs(&self.path(kind)).is_ok_and(|fs| fs.filesystem_type() == NSFS_MAGIC))
    }

    /// Makes new namespaces, lets `configure` work inside, then pins them. With `users` they
    /// belong to a user namespace of their own.
    pub(super) fn create(
        &self,
        hostname: &str,
        users: Option<UserRange>,
        configure: impl FnOnce(Inside<'_>) -> io::Result<()> + Send,
    ) -> io::Result<()> {
        self.files()?;
        on_own_thread(|| self.create_on_this_thread(hostname, users, configure))
    }

    /// Pins the host's own network and host name, and a new IPC namespace.
    pub(super) fn create_on_host(&self) -> io::Result<()> {
        self.files()?;
        on_own_thread(|| {
            unshare(CloneFlags::CLONE_NEWIPC)?;
            self.pin_this_thread()
        })
    }

    fn files(&self) -> io::Result<()> {
        fs::create_dir_all(&self.folder)?;
        for kind in PINS {
            fs::File::create(self.path(kind))?;
        }
        Ok(())
    }

    /// Lets `configure` work inside the network namespace that is pinned.
    pub(super) fn enter(
        &self,
        configure: impl FnOnce(Inside<'_>) -> io::Result<()> + Send,
    ) -> io::Result<()> {
        let namespace = fs::File::open(self.path("net"))?;
        on_own_thread(|| {
            let host = Socket::route()?;
            setns(&namespace, CloneFlags::CLONE_NEWNET)?;
            configure(Inside {
                host,
                pod: Socket::route()?,
                namespace: namespace.as_fd(),
            })
        })
    }

    /// Does `work` on a thread that is in the network namespace that is pinned.
    pub(super) fn inside<T: Send>(
        &self,
        work: impl FnOnce() -> io::Result<T> + Send,
    ) -> io::Result<T> {
        let namespace = fs::File::open(self.path("net"))?;
        on_own_thread(|| {
            setns(&namespace, CloneFlags::CLONE_NEWNET)?;
            work()
        })
    }

    fn create_on_this_thread(
        &self,
        hostname: &str,
        users: Option<UserRange>,
        configure: impl FnOnce(Inside<'_>) -> io::Result<()>,
    ) -> io::Result<()> {
        let host = Socket::route()?;
        let shared = CloneFlags::CLONE_NEWNET | CloneFlags::CLONE_NEWUTS | CloneFlags::CLONE_NEWIPC;
        match users {
            None => unshare(shared)?,
            Some(range) => {
                let holder = Holder::start(shared | CloneFlags::CLONE_NEWUSER, range)?;
                for kind in PINS {
                    let namespace = fs::File::open(holder.namespace(kind))?;
                    setns(&namespace, CloneFlags::empty())?;
                }
                fs::File::create(self.path(USER))?;
                bind(&holder.namespace(USER), &self.path(USER))?;
            }
        }
        nix::unistd::sethostname(hostname)?;
        sysctls()?;

        let mut pod = Socket::route()?;
        let loopback = pod
            .link("lo")?
            .ok_or_else(|| io::Error::other("no loopback link"))?;
        pod.set_up(loopback.index)?;
        let namespace = fs::File::open("/proc/thread-self/ns/net")?;
        configure(Inside {
            host,
            pod,
            namespace: namespace.as_fd(),
        })?;
        self.pin_this_thread()
    }

    fn pin_this_thread(&self) -> io::Result<()> {
        for kind in PINS {
            let source = format!("/proc/thread-self/ns/{kind}");
            bind(Path::new(&source), &self.path(kind))?;
        }
        Ok(())
    }

    /// Unpins; the kernel frees a namespace with its last process.
    pub(super) fn remove(&self) -> io::Result<()> {
        for kind in PINS.into_iter().chain([USER]) {
            let path = self.path(kind);
            loop {
                match umount2(&path, MntFlags::MNT_DETACH | MntFlags::UMOUNT_NOFOLLOW) {
                    // There may be one mount upon another after a crash.
                    Ok(()) => {}
                    // No mount, or no file.
                    Err(nix::errno::Errno::EINVAL | nix::errno::Errno::ENOENT) => break,
                    Err(error) => return Err(error.into()),
                }
            }
            ignore_missing(fs::remove_file(&path))?;
        }
        ignore_missing(fs::remove_dir(&self.folder))
    }
}

fn bind(source: &Path, target: &Path) -> io::Result<()> {
    let none: Option<&str> = None;
    mount(Some(source), target, none, MsFlags::MS_BIND, none)?;
    Ok(())
}

/// A thread that changed its namespaces is never used for anything else; its
/// last reference to them goes with it.
fn on_own_thread<T: Send>(work: impl FnOnce() -> io::Result<T> + Send) -> io::Result<T> {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("netns".to_owned());
        let thread = thread.spawn_scoped(scope, work)?;
        thread
            .join()
            .unwrap_or_else(|_| Err(io::Error::other("namespace thread panicked")))
    })
}

/// Settings of a pod's own network namespace, the current one.
fn sysctls() -> io::Result<()> {
    // As containerd's CRI does by default: a pod's own ports and pings need no privilege.
    fs::write("/proc/sys/net/ipv4/ip_unprivileged_port_start", "0")?;
    fs::write("/proc/sys/net/ipv4/ping_group_range", "0 2147483647")?;
    // No link-local IPv6 address; absent on a kernel without IPv6.
    ignore_missing(fs::write(
        "/proc/sys/net/ipv6/conf/default/addr_gen_mode",
        "1",
    ))
}

fn ignore_missing(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}
