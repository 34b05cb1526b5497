//! A process that does nothing: namespaces can only be made with one inside, and a user namespace
//! not by a thread.
#![allow(unsafe_code)]

use std::fs;
use std::io;
use std::path::PathBuf;

use nix::sched::{CloneFlags, clone};
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::waitpid;
use nix::unistd::Pid;

use super::{LENGTH, UserRange};

/// It calls two functions.
const STACK: usize = 64 * 1024;

/// The process; it ends with this value, or with the thread that made it.
#[derive(Debug)]
pub(crate) struct Holder {
    pid: Pid,
}

impl Holder {
    /// Starts it in new namespaces. The others belong to the user namespace, in which `range` is
    /// what ids from 0 on are outside.
    pub(crate) fn start(flags: CloneFlags, range: UserRange) -> io::Result<Self> {
        let mut stack = vec![0_u8; STACK];
        let idle = Box::new(|| {
            // SAFETY: system calls with numbers only.
            unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL, 0, 0, 0) };
            loop {
                // SAFETY: waits for a signal, all of which end it.
                unsafe { libc::pause() };
            }
        });
        // SAFETY: without CLONE_VM the child has a copy of the memory, in which it uses its stack
        // and makes system calls: it takes no lock that another thread may have held.
        let pid = unsafe { clone(idle, &mut stack, flags, Some(libc::SIGCHLD)) }?;
        let holder = Self { pid };
        let map = format!("0 {} {LENGTH}\n", range.first);
        fs::write(format!("/proc/{pid}/uid_map"), &map)?;
        fs::write(format!("/proc/{pid}/gid_map"), &map)?;
        Ok(holder)
    }

    /// Path of one of its namespaces, for as long as it lives.
    pub(crate) fn namespace(&self, kind: &str) -> PathBuf {
        format!("/proc/{}/ns/{kind}", self.pid).into()
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        // Ours and not waited for yet, so the number is still its own.
        let _ = kill(self.pid, Signal::SIGKILL);
        let _ = waitpid(self.pid, None);
    }
}
