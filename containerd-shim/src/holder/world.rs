//! The two processes every sandbox needs: the anchor of their PID namespace, and the zygote.

use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use nix::sys::resource::{Resource, setrlimit};

use crate::sys::process::{self, Side};
use crate::sys::{message, privileges};

/// Argument by which this program knows that it is the zygote.
pub const ZYGOTE: &str = "zygote";
/// Descriptor of the zygote's end of its socket.
pub(crate) const ZYGOTE_SOCKET: i32 = 3;

/// What children need to know of the holder's own start.
#[derive(Debug)]
pub(super) struct Origin {
    /// This program, for the zygote.
    pub(super) program: File,
    /// Soft and hard limit of open files before the holder raised its own.
    pub(super) nofile: (u64, u64),
}

/// Init of the sandboxes' PID namespace.
#[derive(Debug)]
pub(super) struct Anchor {
    pub(super) pid: i32,
    /// Its end is the anchor's end.
    _lifeline: OwnedFd,
    namespace: File,
}

impl Anchor {
    /// Makes a PID namespace and the process that keeps it.
    pub(super) fn start() -> io::Result<Self> {
        let (waits, lifeline) = nix::unistd::pipe2(nix::fcntl::OFlag::O_CLOEXEC)?;
        // SAFETY: the holder has one thread.
        #[expect(unsafe_code, reason = "clone and closing what the child does not own")]
        let side = unsafe { process::clone(libc::CLONE_NEWPID as u64, None) }?;
        match side {
            Side::Child => hold_namespace(&waits),
            Side::Parent(pid) => {
                // The child waits for the lifeline, so its id stays its own until we have this.
                let namespace = File::open(format!("/proc/{pid}/ns/pid"))?;
                Ok(Self {
                    pid,
                    _lifeline: lifeline,
                    namespace,
                })
            }
        }
    }
}

/// The anchor's whole life.
fn hold_namespace(waits: &OwnedFd) -> ! {
    use std::os::fd::AsRawFd;
    // It may not keep anything alive but itself, least of all the other end of its pipe.
    let end = || -> io::Result<()> {
        // SAFETY: number 0 is the inherited stdin; what owned the others never runs here.
        #[expect(unsafe_code, reason = "see above")]
        unsafe {
            process::place(waits.as_fd(), 0)?;
            process::close_from(1)?;
        }
        // SAFETY: handing 0 to a borrow that lives as long as the process.
        #[expect(unsafe_code, reason = "see above")]
        let waits = unsafe { BorrowedFd::borrow_raw(0) };
        loop {
            match nix::unistd::read(waits.as_fd(), &mut [0]) {
                Err(nix::errno::Errno::EINTR) | Ok(1..) => {}
                Ok(0) | Err(_) => return Ok(()),
            }
        }
    };
    let _ = waits.as_raw_fd();
    let _ = end();
    process::exit(0)
}

/// A running zygote.
#[derive(Debug)]
pub(super) struct Zygote {
    pub(super) pid: i32,
    pub(super) socket: OwnedFd,
}

impl Zygote {
    /// Starts one in the anchor's PID namespace.
    pub(super) fn start(origin: &Origin, anchor: &Anchor) -> io::Result<Self> {
        let (ours, theirs) = message::pair()?;
        // Its answers name processes by its own namespace's numbers.
        message::name_processes(&ours)?;
        let own = File::open("/proc/self/ns/pid")?;
        process::join(anchor.namespace.as_fd(), libc::CLONE_NEWPID)?;
        // SAFETY: the holder has one thread.
        #[expect(unsafe_code, reason = "fork")]
        let side = unsafe { process::clone(0, None) };
        // Both sides run on here; only the parent has to be put back.
        match side {
            Ok(Side::Child) => become_zygote(origin, &theirs),
            Ok(Side::Parent(pid)) => {
                process::join(own.as_fd(), libc::CLONE_NEWPID)?;
                nix::fcntl::fcntl(
                    &ours,
                    nix::fcntl::FcntlArg::F_SETFL(nix::fcntl::OFlag::O_NONBLOCK),
                )?;
                Ok(Self { pid, socket: ours })
            }
            Err(error) => {
                process::join(own.as_fd(), libc::CLONE_NEWPID)?;
                Err(error)
            }
        }
    }
}

/// The child's half: a fresh program, so that nothing of the holder's memory is copied a second
/// time into each sandbox.
fn become_zygote(origin: &Origin, socket: &OwnedFd) -> ! {
    let run = || -> io::Result<()> {
        let (soft, hard) = origin.nofile;
        setrlimit(Resource::RLIMIT_NOFILE, soft, hard)?;
        process::reset_signals()?;
        let args = [c"sandman-holder".to_owned(), CString::new(ZYGOTE)?];
        // The program's descriptor may sit where the socket goes.
        let program = origin.program.try_clone()?;
        // SAFETY: this copy of the holder is about to be replaced; nobody uses number 3 in it.
        #[expect(unsafe_code, reason = "see above")]
        unsafe {
            process::place(socket.as_fd(), ZYGOTE_SOCKET)?;
        }
        process::exec_file(program.as_fd(), &args, &[])?;
        Ok(())
    };
    let _ = privileges::set_undumpable();
    let _ = run();
    process::exit(127)
}
