//! The `Exec` stream: a process in a container, its streams as messages.
//!
//! Ordering is what clients rely on: `started` before any output, `exited` after the last of it.
//! Back-pressure is nobody's buffer: a client that does not read stops the process's writes, and
//! a process that does not read stops the client's messages.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use futures::{Stream, StreamExt};
use oci_spec::runtime::{BoxBuilder, Process};
use sandman_protocol::v1;
use tokio::io::AsyncWriteExt;
use tokio::net::unix::pipe;
use tokio::sync::watch;
use tokio::time::timeout;
use tokio_util::task::AbortOnDropHandle;
use tonic::Status;
use tracing::{debug, warn};
use v1::exec_failed::Kind;
use v1::exec_request::Message as In;
use v1::exec_response::Message as Out;

pub(super) use super::pump::Sender;
use super::pump::{LATE, pump, send};
use crate::metrics::ExecResult;
use crate::runtime::fifo::{
    EXEC_PREFIX, Fifos, Output, StaleExec, Streams, open_input, open_output, stale,
};
use crate::runtime::process_group::ProcessGroup;
use crate::runtime::{Exit, RuntimeError};
use crate::sandbox::view::View;
use crate::sandbox::{Host, Sandboxes};
use crate::spec::AGENT_PATH;

/// Commands that the agent stands in for where an image lacks them.
const AGENT_COMMANDS: [&str; 2] = ["tar", "test"];
/// What a process gets to end by itself after its client vanished.
const HANGUP_GRACE: Duration = Duration::from_secs(5);
/// Most words of a command.
const MAX_WORDS: usize = 4096;
const SIGHUP: u32 = libc::SIGHUP as u32;
const SIGKILL: u32 = libc::SIGKILL as u32;
/// Added to the code of a process whose runtime vanished under it.
const LOST: i32 = 137;

/// Serves one exec from its first message to its last.
pub(super) async fn serve(
    sandboxes: Arc<Sandboxes>,
    mut requests: impl Stream<Item = Result<v1::ExecRequest, Status>> + Unpin + Send + 'static,
    sender: Sender,
) {
    let start = match requests.next().await {
        Some(Ok(v1::ExecRequest {
            message: Some(In::Start(start)),
        })) => start,
        Some(Ok(_)) => {
            let status = Status::invalid_argument("the first message must be `start`");
            let _ = sender.send(Err(status)).await;
            return;
        }
        Some(Err(_)) | None => return,
    };
    let host = sandboxes.host().clone();
    let gauge = host.metrics.open_execs().clone();
    gauge.inc();
    let view = sandboxes.view(&start.uid);
    let result = match begin(&host, view.as_deref(), &start).await {
        Ok((exec, exit)) => exec.run(exit, requests, &sender).await,
        Err(failure) => {
            send(&sender, Out::Failed(failure)).await;
            ExecResult::Failed
        }
    };
    gauge.dec();
    host.metrics.exec(result);
}

/// Ends the execs that an earlier process of ours served: their clients are gone, and with
/// nobody to read their output they would wait for ever. Call before new ones can begin.
pub fn end_stale(host: &Arc<Host>) {
    match stale(&host.fifo_dir) {
        Ok(execs) => {
            tokio::spawn(end_each(host.clone(), execs));
        }
        Err(error) => warn!(%error, "cannot look for execs of an earlier process"),
    }
}

async fn end_each(host: Arc<Host>, execs: Vec<StaleExec>) {
    for StaleExec {
        exec,
        container_id,
        dir,
    } in execs
    {
        let runtime = &host.runtime;
        while let Err(error) = runtime.kill(&container_id, Some(&exec), SIGKILL).await {
            if !error.is_unavailable() {
                break;
            }
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
        // Either may be gone with its container, which is as good.
        let _ = runtime.delete_exec(&container_id, &exec).await;
        let _ = std::fs::remove_dir_all(dir);
    }
}

pub(super) fn failure(kind: Kind, message: impl Into<String>) -> v1::ExecFailed {
    v1::ExecFailed {
        kind: kind as i32,
        message: message.into(),
    }
}

/// A process that runs.
struct Exec {
    host: Arc<Host>,
    container_id: String,
    id: String,
    tty: bool,
    /// Size of the terminal that the client began with.
    size: Option<v1::TerminalSize>,
    group: Option<ProcessGroup>,
    stdin: Option<pipe::Sender>,
    stdout: Option<Output>,
    stderr: Option<Output>,
    /// Kept until the end: the shim may still open them.
    _fifos: Fifos,
}

/// The end of an exec's process, waited for since before its start.
type ExitWait = AbortOnDropHandle<Exit>;

/// Finds the container and starts the process.
async fn begin(
    host: &Arc<Host>,
    view: Option<&View>,
    start: &v1::ExecStart,
) -> Result<(Exec, ExitWait), v1::ExecFailed> {
    if start.command.is_empty() || start.command.len() > MAX_WORDS {
        return Err(failure(
            Kind::CommandNotStarted,
            format!("a command has 1 to {MAX_WORDS} words"),
        ));
    }
    let container = view.and_then(|view| view.containers.get(&start.container));
    let Some(container) = container else {
        let text = format!("container not found ({:?})", start.container);
        return Err(failure(Kind::ContainerNotFound, text));
    };
    let Some(attempt) = container.running_attempt() else {
        let text = format!("container {:?} is not running", start.container);
        return Err(failure(Kind::ContainerNotRunning, text));
    };
    // It never changes: asked for once an attempt.
    let process = container
        .process
        .get_or_try_init(|| async {
            let spec = host.runtime.spec(&attempt.id).await?;
            Ok(spec.process().clone().unwrap_or_default())
        })
        .await
        .map_err(|error: RuntimeError| runtime_failure(&error, start))?;
    match spawn(host, &attempt.id, process, &start.command, start).await {
        Ok(exec) => Ok(exec),
        // Images without tar or test: the agent has what `kubectl cp` needs of them.
        Err(SpawnError::Runtime(error))
            if is_missing(&error) && AGENT_COMMANDS.contains(&start.command[0].as_str()) =>
        {
            let mut command = vec![AGENT_PATH.to_owned()];
            command.extend(start.command.iter().cloned());
            match spawn(host, &attempt.id, process, &command, start).await {
                Ok(exec) => Ok(exec),
                // A container without the agent: the first error is the true one.
                Err(_) => Err(runtime_failure(&error, start)),
            }
        }
        Err(SpawnError::Runtime(error)) => Err(runtime_failure(&error, start)),
        Err(SpawnError::Io(error)) => Err(failure(
            Kind::Internal,
            format!("cannot open the exec's streams: {error}"),
        )),
    }
}

enum SpawnError {
    Runtime(RuntimeError),
    Io(io::Error),
}

async fn spawn(
    host: &Arc<Host>,
    container_id: &str,
    process: &Process,
    command: &[String],
    start: &v1::ExecStart,
) -> Result<(Exec, ExitWait), SpawnError> {
    let id = format!("{EXEC_PREFIX}{}", uuid::Uuid::new_v4().simple());
    let streams = Streams {
        stdin: start.stdin,
        stdout: start.stdout,
        stderr: start.stderr,
        tty: start.tty,
    };
    let fifos = Fifos::make(&host.fifo_dir, &id, container_id, streams).map_err(SpawnError::Io)?;
    let stdio = fifos.stdio().clone();
    let stdout = open_output(stdio.stdout.as_deref()).map_err(SpawnError::Io)?;
    let stderr = open_output(stdio.stderr.as_deref()).map_err(SpawnError::Io)?;
    let process = exec_process(process, command, start);
    host.runtime
        .exec(container_id, &id, &process, &stdio)
        .await
        .map_err(SpawnError::Runtime)?;
    // Waited for before it starts, as containerd's own clients do: a process that ends at once is
    // reported at once.
    let exit = {
        let (host, container_id, id) = (host.clone(), container_id.to_owned(), id.clone());
        tokio::spawn(async move { wait(&host, &container_id, &id).await })
    };
    let exit = AbortOnDropHandle::new(exit);
    let pid = host
        .runtime
        .start_exec(container_id, &id)
        .await
        .map_err(SpawnError::Runtime)?;
    // One that has ended already leads nothing.
    let group = ProcessGroup::led_by(pid).ok();
    let stdin = open_input(stdio.stdin.as_deref()).map_err(SpawnError::Io)?;
    let exec = Exec {
        host: host.clone(),
        container_id: container_id.to_owned(),
        id,
        tty: start.tty,
        size: start.size,
        group,
        stdin,
        stdout,
        stderr,
        _fifos: fifos,
    };
    Ok((exec, exit))
}

/// The container's own process with another command: same user, groups, capabilities, limits and
/// environment.
fn exec_process(process: &Process, command: &[String], start: &v1::ExecStart) -> Process {
    let mut process = process.clone();
    process
        .set_args(Some(command.to_vec()))
        .set_terminal(Some(start.tty))
        .set_console_size(None);
    if start.tty {
        if let Some(size) = start.size.filter(|size| size.width > 0 && size.height > 0) {
            let (height, width) = (u64::from(size.height), u64::from(size.width));
            let console = BoxBuilder::default().height(height).width(width).build();
            process.set_console_size(console.ok());
        }
        let env = process.env_mut().get_or_insert_default();
        if !env.iter().any(|variable| variable.starts_with("TERM=")) {
            env.push("TERM=xterm".to_owned());
        }
    }
    process
}

/// Whether the runtime says that the command does not exist.
fn is_missing(error: &RuntimeError) -> bool {
    let text = error.to_string();
    matches!(error, RuntimeError::Failed(_) | RuntimeError::NotFound(_))
        && (text.contains("executable file not found in $PATH")
            || (text.contains("exec: ") && text.contains("no such file or directory")))
}

fn runtime_failure(error: &RuntimeError, start: &v1::ExecStart) -> v1::ExecFailed {
    let text = error.to_string();
    if is_missing(error) {
        // Tools look for either phrase; runtimes differ in which they write.
        let hint = if text.contains("executable file not found in $PATH") {
            String::new()
        } else {
            ": executable file not found in $PATH".to_owned()
        };
        let name = start
            .command
            .first()
            .map(String::as_str)
            .unwrap_or_default();
        return failure(
            Kind::CommandNotStarted,
            format!("error finding executable {name:?}: {text}{hint}"),
        );
    }
    let kind = match error {
        RuntimeError::NotFound(_) | RuntimeError::Precondition(_) => Kind::ContainerNotRunning,
        RuntimeError::Failed(_) if text.contains("unable to start container process") => {
            Kind::CommandNotStarted
        }
        RuntimeError::Failed(_) if text.contains("cannot exec in a stopped") => {
            Kind::ContainerNotRunning
        }
        RuntimeError::Failed(_) | RuntimeError::AlreadyExists(_) | RuntimeError::Unavailable(_) => {
            Kind::Internal
        }
    };
    failure(kind, text)
}

/// How the client's side ended before the process did.
enum Client {
    Gone,
}

impl Exec {
    async fn run(
        mut self,
        mut exit: ExitWait,
        requests: impl Stream<Item = Result<v1::ExecRequest, Status>> + Unpin + Send + 'static,
        sender: &Sender,
    ) -> ExecResult {
        if !send(sender, Out::Started(v1::ExecStarted {})).await {
            let ended = self.hang_up(&mut exit).await;
            debug!(
                exec = self.id,
                code = ended.code,
                "client left before the start"
            );
            self.release();
            return ExecResult::Cancelled;
        }
        let (stdout, stderr) = (self.stdout.take(), self.stderr.take());
        let over = watch::Sender::new(false);
        let mut output = Box::pin(async {
            tokio::join!(
                pump(stdout, sender, Out::Stdout, over.subscribe(), LATE),
                pump(stderr, sender, Out::Stderr, over.subscribe(), LATE)
            );
        });
        let stdin = self.stdin.take();
        let (mut drained, mut exit_code) = (false, None);
        let gone = {
            let input = self.input(requests, stdin);
            tokio::pin!(input);
            loop {
                if drained && exit_code.is_some() {
                    break false;
                }
                tokio::select! {
                    ended = end_of(&mut exit), if exit_code.is_none() => {
                        exit_code = Some(ended.code);
                        over.send_replace(true);
                    }
                    () = &mut output, if !drained => drained = true,
                    Client::Gone = &mut input => break true,
                    () = sender.closed() => break true,
                }
            }
        };
        let result = match exit_code {
            Some(exit_code) => {
                if !gone {
                    send(sender, Out::Exited(v1::ExecExited { exit_code })).await;
                }
                ExecResult::Exited
            }
            None => {
                let ended = self.hang_up(&mut exit).await;
                debug!(exec = self.id, code = ended.code, "client left an exec");
                ExecResult::Cancelled
            }
        };
        drop(output);
        self.release();
        result
    }

    /// Carries the client's messages; returns only when the client is gone.
    async fn input(
        &self,
        mut requests: impl Stream<Item = Result<v1::ExecRequest, Status>> + Unpin,
        mut stdin: Option<pipe::Sender>,
    ) -> Client {
        // Not every runtime honours the size in the process's spec.
        if let Some(size) = self.size {
            self.resize(size).await;
        }
        loop {
            let message = match requests.next().await {
                Some(Ok(request)) => request.message,
                Some(Err(_)) => return Client::Gone,
                None => {
                    // The client has nothing more to say, but may still listen.
                    self.close_stdin(stdin.take()).await;
                    return std::future::pending().await;
                }
            };
            match message {
                Some(In::Stdin(data)) => write(&mut stdin, &data).await,
                Some(In::CloseStdin(_)) => self.close_stdin(stdin.take()).await,
                Some(In::Resize(size)) => self.resize(size).await,
                Some(In::Cancel(_)) => return Client::Gone,
                Some(In::Start(_)) | None => {}
            }
        }
    }

    async fn close_stdin(&self, stdin: Option<pipe::Sender>) {
        let had_stdin = stdin.is_some();
        drop(stdin);
        // A terminal has no end of input; the user types it.
        if !had_stdin || self.tty {
            return;
        }
        if let Err(error) = self
            .host
            .runtime
            .close_stdin(&self.container_id, &self.id)
            .await
        {
            warn!(exec = self.id, %error, "cannot close the stdin of an exec");
        }
    }

    async fn resize(&self, size: v1::TerminalSize) {
        if !self.tty || size.width == 0 || size.height == 0 {
            return;
        }
        let (id, exec) = (&self.container_id, &self.id);
        if let Err(error) = self
            .host
            .runtime
            .resize(id, exec, size.width, size.height)
            .await
        {
            debug!(exec = self.id, %error, "cannot resize the terminal of an exec");
        }
    }

    /// Ends a process whose client is gone: its input ends, its terminal hangs up, and after a
    /// while it is killed.
    async fn hang_up(&self, exit: &mut ExitWait) -> Exit {
        let (runtime, id) = (&self.host.runtime, &self.container_id);
        // Either may fail because the process just ended, which is what is wanted.
        let _ = runtime.close_stdin(id, &self.id).await;
        if self.tty {
            let _ = runtime.kill(id, Some(&self.id), SIGHUP).await;
        }
        if let Ok(ended) = timeout(HANGUP_GRACE, end_of(exit)).await {
            return ended;
        }
        // With what it started in its own group; the runtime's kill reaches only the process.
        if let Some(Err(error)) = self.group.as_ref().map(ProcessGroup::kill) {
            debug!(exec = self.id, %error, "cannot kill the process group of an exec");
        }
        if let Err(error) = runtime.kill(id, Some(&self.id), SIGKILL).await {
            warn!(exec = self.id, %error, "cannot kill an exec whose client is gone");
        }
        end_of(exit).await
    }

    /// Lets the runtime forget the exec. Not waited for: with streams that children hold open
    /// the shim takes its time.
    fn release(self) {
        tokio::spawn(async move {
            let id = &self.container_id;
            if let Err(error) = self.host.runtime.delete_exec(id, &self.id).await {
                debug!(exec = self.id, %error, "cannot delete an exec");
            }
        });
    }
}

/// Waits for the end of an exec, across losses of the runtime.
async fn wait(host: &Host, container_id: &str, exec: &str) -> Exit {
    loop {
        match host.runtime.wait_exec(container_id, exec).await {
            Ok(exit) => return exit,
            Err(error) if error.is_unavailable() => {
                host.metrics.runtime_error();
                tokio::time::sleep(Duration::from_millis(500)).await;
            }
            // Its container is gone, and the process with it.
            Err(_) => return lost(),
        }
    }
}

async fn end_of(exit: &mut ExitWait) -> Exit {
    // The task that waits is neither aborted while this handle is, nor does it panic.
    exit.await.unwrap_or_else(|_| lost())
}

fn lost() -> Exit {
    Exit {
        code: LOST,
        at: std::time::SystemTime::now(),
    }
}

/// Writes to the process, as fast as it reads. Once it has stopped reading, what the client sends
/// is dropped, as the write end of a closed pipe would.
pub(super) async fn write(stdin: &mut Option<pipe::Sender>, data: &[u8]) {
    if let Some(pipe) = stdin
        && let Err(error) = pipe.write_all(data).await
    {
        debug!(%error, "a process does not read its stdin");
        *stdin = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn start(command: &[&str], tty: bool) -> v1::ExecStart {
        v1::ExecStart {
            command: command.iter().map(ToString::to_string).collect(),
            tty,
            size: Some(v1::TerminalSize {
                width: 80,
                height: 24,
            }),
            ..Default::default()
        }
    }

    #[test]
    fn missing_commands_carry_both_phrases() {
        for text in [
            "OCI runtime exec failed: exec failed: unable to start container process: exec: \
             \"nope\": executable file not found in $PATH: unknown",
            "OCI runtime exec failed: exec failed: unable to start container process: exec: \
             \"/nope\": stat /nope: no such file or directory: unknown",
        ] {
            let failed =
                runtime_failure(&RuntimeError::Failed(text.into()), &start(&["nope"], false));
            assert_eq!(failed.kind(), Kind::CommandNotStarted);
            assert!(
                failed.message.contains("error finding executable"),
                "{}",
                failed.message
            );
            assert!(
                failed
                    .message
                    .contains("executable file not found in $PATH")
            );
            assert!(failed.message.contains(text));
        }
    }

    #[test]
    fn other_failures_keep_their_kind() {
        let kind = |error: RuntimeError| runtime_failure(&error, &start(&["x"], false)).kind();
        let denied = "unable to start container process: exec: \"/etc\": permission denied";
        assert_eq!(
            kind(RuntimeError::Failed(denied.into())),
            Kind::CommandNotStarted
        );
        assert_eq!(
            kind(RuntimeError::NotFound("task".into())),
            Kind::ContainerNotRunning
        );
        assert_eq!(
            kind(RuntimeError::Unavailable("gone".into())),
            Kind::Internal
        );
    }

    #[test]
    fn an_exec_is_the_containers_process_with_another_command() {
        let mut process = Process::default();
        process
            .set_env(Some(vec!["A=1".into()]))
            .set_no_new_privileges(Some(true));
        let plain = exec_process(&process, &["ls".into()], &start(&["ls"], false));
        assert_eq!(plain.args().as_deref(), Some(&["ls".to_owned()][..]));
        assert_eq!(plain.env().as_deref(), Some(&["A=1".to_owned()][..]));
        assert_eq!(plain.no_new_privileges(), Some(true));
        assert_eq!(plain.terminal(), Some(false));
        let terminal = exec_process(&process, &["sh".into()], &start(&["sh"], true));
        assert!(
            terminal
                .env()
                .as_ref()
                .unwrap()
                .contains(&"TERM=xterm".to_owned())
        );
        assert_eq!(terminal.console_size().unwrap().width(), 80);
    }
}
