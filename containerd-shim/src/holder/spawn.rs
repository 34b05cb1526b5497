//! Host programs as children of the holder: runc, and loggers of `binary://`.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

use crate::sys::process;

/// Starts `argv` and returns its process id. Whoever reaps the holder's children sees its end.
pub(super) fn start(
    argv: Vec<Vec<u8>>,
    env: Vec<Vec<u8>>,
    cwd: Vec<u8>,
    fds: Vec<OwnedFd>,
    nofile: (u64, u64),
) -> io::Result<i32> {
    let mut words = argv.into_iter().map(OsString::from_vec);
    let program = words
        .next()
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "no program"))?;
    let mut command = Command::new(program);
    command
        .args(words)
        .current_dir(OsString::from_vec(cwd))
        .env_clear();
    for variable in &env {
        let mut parts = variable.splitn(2, |byte| *byte == b'=');
        let name = parts.next().unwrap_or_default();
        command.env(
            OsStr::from_bytes(name),
            OsStr::from_bytes(parts.next().unwrap_or_default()),
        );
    }
    let numbers = plan(&fds)?;
    if fds.is_empty() {
        command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
    }
    let prepare = move || {
        nix::unistd::setsid()?;
        let (soft, hard) = nofile;
        nix::sys::resource::setrlimit(nix::sys::resource::Resource::RLIMIT_NOFILE, soft, hard)?;
        // All are above the numbers they go to, so none is overwritten before its turn.
        for (number, fd) in (0..).zip(&numbers) {
            // SAFETY: the child runs nothing of ours after this but exec.
            #[expect(unsafe_code, reason = "see above")]
            unsafe {
                process::place(fd.as_fd(), number)?;
            }
        }
        Ok(())
    };
    // SAFETY: only system calls, no allocation and no lock.
    #[expect(unsafe_code, reason = "see above")]
    unsafe {
        command.pre_exec(prepare);
    }
    let child = command.spawn()?;
    i32::try_from(child.id()).map_err(|_| io::Error::other("a process id out of range"))
}

/// Copies of the descriptors with numbers above all that they are to become.
fn plan(fds: &[OwnedFd]) -> io::Result<Vec<OwnedFd>> {
    let above = RawFd::try_from(fds.len()).unwrap_or(RawFd::MAX);
    fds.iter()
        .map(|fd| {
            let number = nix::fcntl::fcntl(
                fd.as_fd(),
                nix::fcntl::FcntlArg::F_DUPFD_CLOEXEC(above.max(3)),
            )?;
            // SAFETY: just made for us.
            #[expect(unsafe_code, reason = "see above")]
            let copy = unsafe { process::inherited(number) };
            debug_assert!(copy.as_raw_fd() >= above);
            Ok(copy)
        })
        .collect()
}
