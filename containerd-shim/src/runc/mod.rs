//! Containers by the `runc` binary: everything that our own launcher leaves out.
//!
//! Dispatch only. What a runc container is made of (FIFOs, state, events) is the task's; here a
//! verb becomes a command line, and a failure becomes the last error of runc's JSON log.
//!
//! The verbs that make processes are run by the holder, so that these fall to it when runc ends;
//! the others are children of whoever asks.

mod container;
mod log;

use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

pub(crate) use container::{Container, SpecView, Started};

use serde::{Deserialize, Serialize};

use crate::task::error::{Result, TaskError};
use crate::task::processes::{Name, Processes};

/// Standard streams of a process that is about to start; `None` is `/dev/null`.
#[derive(Debug, Default)]
pub(crate) struct Streams {
    /// Its input.
    pub(crate) stdin: Option<OwnedFd>,
    /// Its output.
    pub(crate) stdout: Option<OwnedFd>,
    /// Its diagnostics.
    pub(crate) stderr: Option<OwnedFd>,
}

/// What a task's options say of runc; part of the durable record.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Settings {
    /// The program, looked up in PATH if it has no slash.
    pub(crate) binary: PathBuf,
    /// Folder of runc's own state.
    pub(crate) root: PathBuf,
    /// Cgroups by systemd.
    pub(crate) systemd_cgroup: bool,
    /// `--no-pivot`.
    pub(crate) no_pivot_root: bool,
    /// `--no-new-keyring`.
    pub(crate) no_new_keyring: bool,
}

/// Runs runc for one container.
pub(crate) struct Runc {
    settings: Settings,
    /// Folder of the container in the shim's state.
    dir: PathBuf,
    /// None where nothing is started: in a cleanup without a shim.
    processes: Option<Arc<Processes>>,
}

/// Most that is read of what runc prints; a container's process list is the longest.
const MAX_OUTPUT: u64 = 4 << 20;

impl Runc {
    pub(crate) fn new(settings: Settings, dir: PathBuf, processes: Option<Arc<Processes>>) -> Self {
        Self {
            settings,
            dir,
            processes,
        }
    }

    pub(crate) fn settings(&self) -> &Settings {
        &self.settings
    }

    pub(crate) fn dir(&self) -> &Path {
        &self.dir
    }

    pub(crate) fn processes(&self) -> Result<&Arc<Processes>> {
        self.processes
            .as_ref()
            .ok_or_else(|| TaskError::Failed("nothing can be started here".into()))
    }

    /// Runs `runc ARGS...` for the container `id` by the holder, with the streams of the process
    /// that it makes. `words` begin the error.
    pub(crate) async fn start(
        &self,
        words: &str,
        id: &str,
        args: Vec<OsString>,
        streams: Streams,
    ) -> Result<()> {
        let processes = self.processes()?;
        let call = next_call();
        let log = self.log_file(call);
        let name = Name::Tool(id, call);
        let null = |fd: Option<OwnedFd>| fd.map_or_else(null, Ok);
        let fds = [streams.stdin, streams.stdout, streams.stderr]
            .into_iter()
            .map(null)
            .collect::<io::Result<Vec<_>>>()
            .map_err(TaskError::io(words))?;
        let (_, end) = processes
            .spawn(
                &name,
                &self.settings.binary,
                &self.arguments(&log, args),
                std::env::vars_os().collect(),
                &fds,
            )
            .await
            .map_err(|error| TaskError::failed(words, error))?;
        drop(fds);
        let exit = end
            .await
            .map_err(|_| TaskError::failed(words, "the holder is gone"))?;
        processes.forget(&name).await;
        self.judge(words, &log, exit.status == 0, exit.status)
    }

    /// Runs `runc ARGS...`, which makes no process, with `input` on its stdin; returns what it
    /// printed.
    pub(crate) async fn call(
        &self,
        words: &str,
        args: Vec<OsString>,
        input: Option<&[u8]>,
    ) -> Result<Vec<u8>> {
        // Files rather than pipes: nothing has to be pumped while it runs.
        let stdin = input
            .map(scratch)
            .transpose()
            .map_err(TaskError::io(words))?;
        let stdout = scratch(&[]).map_err(TaskError::io(words))?;
        let log = self.log_file(next_call());
        let status = tokio::process::Command::new(&self.settings.binary)
            .args(self.arguments(&log, args))
            .stdin(stdin.map_or_else(Stdio::null, Stdio::from))
            .stdout(stdout.try_clone().map_err(TaskError::io(words))?)
            .stderr(Stdio::null())
            .status()
            .await
            .map_err(|error| {
                let program = self.settings.binary.display();
                TaskError::failed(words, format_args!("{program}: {error}"))
            })?;
        let code = status.code().unwrap_or(255).cast_unsigned();
        self.judge(words, &log, status.success(), code)?;
        read_back(&stdout).map_err(TaskError::io(words))
    }

    /// A log for one call, in the container's folder.
    fn log_file(&self, call: u64) -> PathBuf {
        self.dir
            .join(format!("runc-{}-{call}.log", std::process::id()))
    }

    fn arguments(&self, log: &Path, args: Vec<OsString>) -> Vec<OsString> {
        let mut all: Vec<OsString> = vec!["--root".into(), (&self.settings.root).into()];
        all.extend([
            "--log".into(),
            log.into(),
            "--log-format".into(),
            "json".into(),
        ]);
        if self.settings.systemd_cgroup {
            all.push("--systemd-cgroup".into());
        }
        all.extend(args);
        all
    }

    fn judge(&self, words: &str, log: &Path, success: bool, status: u32) -> Result<()> {
        let reason = (!success).then(|| log::last_error(log));
        drop(std::fs::remove_file(log));
        let Some(reason) = reason else {
            return Ok(());
        };
        let reason = reason.unwrap_or_else(|| {
            format!(
                "{} did not terminate successfully: exit status {status}",
                self.settings.binary.display()
            )
        });
        Err(TaskError::failed(words, reason))
    }
}

/// A number that no other call of this process has.
pub(crate) fn next_call() -> u64 {
    static CALLS: AtomicU64 = AtomicU64::new(0);
    CALLS.fetch_add(1, Ordering::Relaxed)
}

/// `/dev/null`, for both directions.
pub(crate) fn null() -> io::Result<OwnedFd> {
    let null = File::options().read(true).write(true).open("/dev/null")?;
    Ok(null.into())
}

/// An unnamed file with `content`, at its beginning.
fn scratch(content: &[u8]) -> io::Result<File> {
    use std::io::{Seek, Write};
    let fd = rustix::fs::memfd_create("sandman-shim", rustix::fs::MemfdFlags::CLOEXEC)?;
    let mut file = File::from(fd);
    file.write_all(content)?;
    file.rewind()?;
    Ok(file)
}

fn read_back(mut file: &File) -> io::Result<Vec<u8>> {
    use std::io::{Read, Seek};
    let mut content = Vec::new();
    file.rewind()?;
    file.take(MAX_OUTPUT).read_to_end(&mut content)?;
    Ok(content)
}
