//! exec: a command in a container, its output kept up to a limit.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use oci_spec::runtime::Process;
use tokio_util::task::AbortOnDropHandle;

use super::{Hooked, MAX_ANSWER, Target, Verdict};
use crate::runtime::fifo::{EXEC_PREFIX, Fifos, Output, Streams, open_output};
use crate::runtime::process_group::ProcessGroup;
use crate::runtime::{Exit, Runtime, RuntimeError};

/// What output gets after the end of its process, while children of it hold it open.
const LATE: Duration = Duration::from_secs(2);
/// Between two tries to ask a runtime that is not there.
const RETRY: Duration = Duration::from_millis(500);
const SIGKILL: u32 = libc::SIGKILL as u32;
/// Exit code of a command whose container vanished.
const LOST: i32 = 137;

/// Why a command did not end by itself.
#[derive(Debug, thiserror::Error)]
pub enum CommandError {
    /// It took too long and was killed.
    #[error("command timed out: {command:?} timed out after {}s", .after.as_secs())]
    TimedOut {
        /// The command, for people.
        command: String,
        /// The limit.
        after: Duration,
    },
    /// It was not started.
    #[error(transparent)]
    Runtime(#[from] RuntimeError),
    /// Its streams could not be made.
    #[error("cannot open the streams of the command: {0}")]
    Io(#[from] io::Error),
}

pub(super) async fn probe(target: &Target, command: &[String], timeout: Duration) -> Verdict {
    match run(target, command, Some(timeout)).await {
        Ok((0, _)) => Verdict::Success,
        Ok((_, output)) => Verdict::Failure(String::from_utf8_lossy(&output).into_owned()),
        Err(error @ CommandError::TimedOut { .. }) => Verdict::Failure(error.to_string()),
        // As the kubelet: a command that cannot be started says nothing about the container.
        Err(error) => Verdict::Unknown(error.to_string()),
    }
}

pub(super) async fn hook(target: &Target, command: &[String]) -> Result<Hooked, String> {
    match run(target, command, None).await {
        Ok((0, _)) => Ok(Hooked::Done),
        Ok((code, output)) => Err(format!(
            "command {:?} exited with {code}: {:?}",
            command.join(" "),
            String::from_utf8_lossy(&output)
        )),
        Err(error) => Err(error.to_string()),
    }
}

/// Runs a command to its end: exit code, and stdout followed by stderr.
async fn run(
    target: &Target,
    command: &[String],
    timeout: Option<Duration>,
) -> Result<(i32, Vec<u8>), CommandError> {
    let process = target
        .process
        .get_or_try_init(|| async {
            let spec = target.runtime.spec(&target.container_id).await?;
            Ok::<_, RuntimeError>(spec.process().clone().unwrap_or_default())
        })
        .await?;
    let Some(timeout) = timeout else {
        let mut running = start(target, process, command).await?;
        return Ok(running.finish().await);
    };
    // The start counts as well: a runtime that hangs must not stop the probe for ever.
    let deadline = tokio::time::Instant::now() + timeout;
    let timed_out = || CommandError::TimedOut {
        command: command.join(" "),
        after: timeout,
    };
    let mut running = match tokio::time::timeout_at(deadline, start(target, process, command)).await
    {
        Ok(running) => running?,
        Err(_) => return Err(timed_out()),
    };
    match tokio::time::timeout_at(deadline, running.finish()).await {
        Ok(ended) => Ok(ended),
        Err(_) => Err(timed_out()),
    }
}

/// A command that runs. Dropped before its end, it is killed; dropped after, it is forgotten.
struct Running {
    runtime: Arc<dyn Runtime>,
    container_id: String,
    exec: String,
    group: Option<ProcessGroup>,
    exit: Option<AbortOnDropHandle<Exit>>,
    stdout: Option<Output>,
    stderr: Option<Output>,
    /// Until the runtime has let go of them.
    fifos: Option<Fifos>,
}

async fn start(
    target: &Target,
    process: &Process,
    command: &[String],
) -> Result<Running, CommandError> {
    let exec = format!("{EXEC_PREFIX}{}", uuid::Uuid::new_v4().simple());
    let streams = Streams {
        stdin: false,
        stdout: true,
        stderr: true,
        tty: false,
    };
    let id = &target.container_id;
    let fifos = Fifos::make(&target.fifo_dir, &exec, id, streams)?;
    let stdio = fifos.stdio().clone();
    let stdout = open_output(stdio.stdout.as_deref())?;
    let stderr = open_output(stdio.stderr.as_deref())?;
    let mut process = process.clone();
    process
        .set_args(Some(command.to_vec()))
        .set_terminal(Some(false))
        .set_console_size(None);
    target.runtime.exec(id, &exec, &process, &stdio).await?;
    // From here on its end is somebody's business, whatever happens to this future.
    let mut running = Running {
        runtime: target.runtime.clone(),
        container_id: id.clone(),
        exec: exec.clone(),
        group: None,
        exit: None,
        stdout,
        stderr,
        fifos: Some(fifos),
    };
    // Waited for before it starts, so that the end of a short one is not missed.
    let (runtime, container_id) = (target.runtime.clone(), id.clone());
    let wait = tokio::spawn(async move { wait(&*runtime, &container_id, &exec).await });
    running.exit = Some(AbortOnDropHandle::new(wait));
    let pid = target.runtime.start_exec(id, &running.exec).await?;
    running.group = ProcessGroup::led_by(pid).ok();
    Ok(running)
}

impl Running {
    async fn finish(&mut self) -> (i32, Vec<u8>) {
        let (mut out, mut err) = (Vec::new(), Vec::new());
        let code = {
            let Self {
                exit,
                stdout,
                stderr,
                ..
            } = self;
            let output = async {
                tokio::join!(
                    keep(stdout.as_mut(), &mut out),
                    keep(stderr.as_mut(), &mut err)
                );
            };
            tokio::pin!(output);
            let mut drained = false;
            let ended = async {
                match exit.as_mut() {
                    Some(exit) => exit.await.map_or(LOST, |exit| exit.code),
                    None => LOST,
                }
            };
            tokio::pin!(ended);
            let code = loop {
                tokio::select! {
                    code = &mut ended => break code,
                    () = &mut output, if !drained => drained = true,
                }
            };
            if !drained {
                let _ = tokio::time::timeout(LATE, output).await;
            }
            code
        };
        self.exit = None;
        out.extend_from_slice(&err);
        out.truncate(MAX_ANSWER);
        (code, out)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let (runtime, id, exec) = (
            self.runtime.clone(),
            std::mem::take(&mut self.container_id),
            std::mem::take(&mut self.exec),
        );
        let (fifos, exit) = (self.fifos.take(), self.exit.take());
        if exit.is_some()
            && let Some(group) = &self.group
        {
            // A kernel that cannot do this still kills the process itself below.
            let _ = group.kill();
        }
        // Outside a runtime the whole service ends, and its successor clears up.
        let Ok(handle) = tokio::runtime::Handle::try_current() else {
            return;
        };
        handle.spawn(async move {
            if let Some(exit) = exit {
                // Gone already is as good.
                let _ = runtime.kill(&id, Some(&exec), SIGKILL).await;
                let _ = tokio::time::timeout(LATE, exit).await;
            }
            if let Err(error) = runtime.delete_exec(&id, &exec).await {
                tracing::debug!(exec, %error, "cannot delete an exec");
            }
            drop(fifos);
        });
    }
}

/// Reads an output to its end and keeps its beginning.
async fn keep(output: Option<&mut Output>, kept: &mut Vec<u8>) {
    let Some(output) = output else { return };
    while let Some(chunk) = output.next().await {
        let room = MAX_ANSWER - kept.len();
        kept.extend_from_slice(&chunk[..chunk.len().min(room)]);
    }
}

/// Waits for the end of an exec, across losses of the runtime.
async fn wait(runtime: &dyn Runtime, container_id: &str, exec: &str) -> Exit {
    loop {
        match runtime.wait_exec(container_id, exec).await {
            Ok(exit) => return exit,
            Err(error) if error.is_unavailable() => tokio::time::sleep(RETRY).await,
            // Its container is gone, and the process with it.
            Err(_) => {
                return Exit {
                    code: LOST,
                    at: std::time::SystemTime::now(),
                };
            }
        }
    }
}
