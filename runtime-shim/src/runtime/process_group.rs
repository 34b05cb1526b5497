//! The processes of an exec that share its process group, addressed without a race.
//!
//! A process id may be another's by the time it is used; a descriptor of the process never is.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

/// `PIDFD_SIGNAL_PROCESS_GROUP` of linux/pidfd.h, from Linux 6.9 on.
const WHOLE_GROUP: libc::c_uint = 1 << 2;

/// The group that a process leads.
pub(crate) struct ProcessGroup(OwnedFd);

impl ProcessGroup {
    /// The group of a process that was started just now.
    pub(crate) fn led_by(pid: u32) -> io::Result<Self> {
        let pid = libc::pid_t::try_from(pid).map_err(io::Error::other)?;
        // SAFETY: the call takes two numbers and returns a new descriptor or an error.
        let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        let fd = i32::try_from(fd).map_err(io::Error::other)?;
        // SAFETY: the kernel just made this descriptor for us alone.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    /// Kills every process of the group. Older kernels refuse.
    pub(crate) fn kill(&self) -> io::Result<()> {
        // SAFETY: the descriptor is open, no siginfo is passed.
        let result = unsafe {
            libc::syscall(
                libc::SYS_pidfd_send_signal,
                self.0.as_raw_fd(),
                libc::SIGKILL,
                std::ptr::null::<libc::siginfo_t>(),
                WHOLE_GROUP,
            )
        };
        if result == 0 {
            Ok(())
        } else {
            Err(io::Error::last_os_error())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::os::unix::process::CommandExt;
    use std::process::{Command, Stdio};

    #[test]
    fn children_die_with_their_leader() {
        let mut leader = Command::new("sh")
            .args(["-c", "sleep 600 & sleep 600"])
            .process_group(0)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let group = ProcessGroup::led_by(leader.id()).unwrap();
        match group.kill() {
            Ok(()) => {
                // Ends only when every holder of the pipe is gone.
                let mut rest = String::new();
                leader
                    .stdout
                    .take()
                    .unwrap()
                    .read_to_string(&mut rest)
                    .unwrap();
            }
            // A kernel before 6.9.
            Err(error) => assert_eq!(error.raw_os_error(), Some(libc::EINVAL)),
        }
        let _ = leader.kill();
        leader.wait().unwrap();
    }
}
