//! Joins a client's remote-command session to the `Exec` or `Attach` stream of
//! the pod's host: input one way, output the other, each no faster than its
//! reader.

use std::future::pending;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use sandman_protocol::v1;
use sandman_protocol::v1::exec_request::Message as Request;
use sandman_protocol::v1::exec_response::Message as Response;
use sandman_protocol::v1::host_client::HostClient;
use sandman_streaming::{Input, Outcome, Output, RemoteCommand, ResizeEvents, TerminalSize};
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::transport::Channel;
use tonic::{Status, Streaming};

use super::metrics::{ApiMetrics, StreamMeter};

/// Longest piece of input in one message. Small enough that a resize or the end
/// of the session does not wait behind much, large enough to be cheap.
const MAX_INPUT: usize = 64 << 10;
/// Messages that may wait for the HTTP/2 window of the host connection.
const REQUESTS_IN_FLIGHT: usize = 4;
/// A terminal's first size is waited for this long, so that the process does not
/// start with a wrong one; clients without it must not wait noticeably.
const FIRST_SIZE_WAIT: Duration = Duration::from_millis(250);
/// How long a terminal's process may go on after its client has gone. There is
/// nobody left to type or read; the host hangs up like a closed terminal window.
const TERMINAL_GRACE: Duration = Duration::from_secs(1);
/// Time for the host to accept the command; a host that is busy starting many
/// processes is slow, one that is hung says nothing at all.
const START_WAIT: Duration = Duration::from_secs(60);
/// Time for the host to report the end of a process that it was told to end.
/// Afterwards the stream is dropped, which tells it once more.
const CANCEL_WAIT: Duration = Duration::from_secs(10);

/// What a session joins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Call {
    /// A process of its own.
    Exec,
    /// The container's own process.
    Attach,
}

/// One exec or attach on its way to the host.
pub(super) struct Bridge {
    pub(super) call: Call,
    pub(super) client: HostClient<Channel>,
    pub(super) start: v1::ExecStart,
    pub(super) metrics: ApiMetrics,
    pub(super) meter: StreamMeter,
    /// When the request arrived.
    pub(super) arrived: Instant,
    /// How long a process without a terminal may go on after its client has gone
    /// and has no input left for it. `None`: for ever, as under a kubelet.
    pub(super) client_loss_grace: Option<Duration>,
}

impl Bridge {
    /// Runs the session to its end.
    pub(super) async fn run(mut self, session: RemoteCommand) -> Outcome {
        let RemoteCommand {
            stdin,
            stdout,
            stderr,
            mut resize,
            client_gone,
        } = session;
        // An attached process runs already, with whatever size it has.
        if self.start.tty && self.call == Call::Exec {
            self.start.size = first_size(&mut resize).await.map(size);
        }
        let terminal = self.start.tty;
        let (requests, receiver) = mpsc::channel(REQUESTS_IN_FLIGHT);
        let start = v1::ExecRequest {
            message: Some(Request::Start(self.start.clone())),
        };
        // The channel is new and its receiver is in scope: there is room.
        let _ = requests.send(start).await;
        let requested = ReceiverStream::new(receiver);
        let opening = async {
            match self.call {
                Call::Exec => self.client.exec(requested).await,
                Call::Attach => self.client.attach(requested).await,
            }
        };
        let responses = match tokio::time::timeout(START_WAIT, opening).await {
            Ok(Ok(responses)) => responses.into_inner(),
            Ok(Err(status)) => return self.host_failed(&status),
            Err(_) => {
                return self.host_failed(&Status::deadline_exceeded(
                    "the host did not answer in time",
                ));
            }
        };

        let grace = match self.call {
            Call::Exec if !terminal => self.client_loss_grace,
            // A container does not mind who listens.
            Call::Exec | Call::Attach => Some(TERMINAL_GRACE),
        };
        let input = InputPump {
            requests,
            progress: AtomicU64::new(0),
            bytes: self.meter.bytes_in.clone(),
        };
        let input = input.run(stdin, resize, &client_gone, grace);
        let output = self.output(responses, stdout, stderr);
        tokio::select! {
            outcome = output => outcome,
            // The process did not end although it was told to.
            () = input => self.call.failed("the client has gone"),
        }
    }

    async fn output(
        &mut self,
        mut responses: Streaming<v1::ExecResponse>,
        mut stdout: Option<Output>,
        mut stderr: Option<Output>,
    ) -> Outcome {
        loop {
            let message = match responses.message().await {
                Ok(Some(response)) => response.message,
                Ok(None) => {
                    self.meter.finish("host_lost");
                    let reason = "the host ended the stream before the command ended";
                    return self.call.failed(reason);
                }
                Err(status) => return self.host_failed(&status),
            };
            match message {
                Some(Response::Started(_)) if self.call == Call::Exec => self
                    .metrics
                    .exec_start_seconds
                    .observe(self.arrived.elapsed().as_secs_f64()),
                Some(Response::Started(_)) => {}
                Some(Response::Stdout(chunk)) => self.forward(&mut stdout, chunk).await,
                Some(Response::Stderr(chunk)) => self.forward(&mut stderr, chunk).await,
                Some(Response::Exited(exited)) => {
                    self.meter.finish("exited");
                    return Outcome::Exited(exit_code(exited.exit_code));
                }
                Some(Response::Failed(failure)) => {
                    self.meter.finish("not_started");
                    let text = failure_text(&failure, &self.start.container);
                    return self.call.failed(&text);
                }
                // A message of a newer host; what matters is understood.
                None => {}
            }
        }
    }

    /// Sends a chunk on. Once the client is gone, or did not ask for the stream,
    /// output is thrown away rather than left to block the process: it may be
    /// extracting an archive that was delivered in full.
    async fn forward(&mut self, output: &mut Option<Output>, chunk: Bytes) {
        let Some(open) = output else { return };
        let length = chunk.len() as u64;
        match open.write_chunk(chunk).await {
            Ok(()) => {
                self.meter.bytes_out.inc_by(length);
            }
            Err(_) => *output = None,
        }
    }

    fn host_failed(&mut self, status: &Status) -> Outcome {
        self.meter.finish("host_lost");
        tracing::warn!(
            pod_uid = %self.start.uid,
            container = %self.start.container,
            code = ?status.code(),
            error = status.message(),
            "stream to the host failed"
        );
        self.call
            .failed(&format!("the host failed: {}", status.message()))
    }
}

/// Client to host. Ends only when the host has been told to end the process and
/// still has not reported its end.
struct InputPump {
    requests: mpsc::Sender<v1::ExecRequest>,
    /// Counts what was delivered, to tell a slow process from one that reads no
    /// more.
    progress: AtomicU64,
    bytes: prometheus_client::metrics::counter::Counter,
}

impl InputPump {
    async fn run(
        self,
        stdin: Option<Input>,
        resize: ResizeEvents,
        client_gone: &CancellationToken,
        grace: Option<Duration>,
    ) {
        tokio::select! {
            () = self.stdin(stdin) => {}
            () = self.sizes(resize) => {}
            () = self.abandoned(client_gone, grace) => {}
        }
        // Behind input that the process does not read, this waits as well.
        let cancel = async {
            self.send(Request::Cancel(v1::Cancel {})).await;
            pending::<()>().await;
        };
        let _ = tokio::time::timeout(CANCEL_WAIT, cancel).await;
    }

    /// Delivers all input, then its end; never finishes, because a process goes
    /// on after the end of its input.
    async fn stdin(&self, stdin: Option<Input>) {
        if let Some(mut stdin) = stdin {
            while let Some(mut chunk) = stdin.read_chunk().await {
                while !chunk.is_empty() {
                    let piece = chunk.split_to(chunk.len().min(MAX_INPUT));
                    self.bytes.inc_by(piece.len() as u64);
                    self.send(Request::Stdin(piece)).await;
                }
            }
            self.send(Request::CloseStdin(v1::CloseStdin {})).await;
        }
        pending().await
    }

    /// Delivers sizes; never finishes.
    async fn sizes(&self, mut resize: ResizeEvents) {
        while let Some(next) = resize.next().await {
            self.send(Request::Resize(size(next))).await;
        }
        pending().await
    }

    /// Returns once the client has gone and the process has taken none of its
    /// input for the whole grace period.
    async fn abandoned(&self, client_gone: &CancellationToken, grace: Option<Duration>) {
        let Some(grace) = grace else {
            return pending().await;
        };
        client_gone.cancelled().await;
        loop {
            let before = self.progress.load(Ordering::Relaxed);
            tokio::time::sleep(grace).await;
            if self.progress.load(Ordering::Relaxed) == before {
                return;
            }
        }
    }

    /// Waits for room. When the host's end is gone the output side knows why, so
    /// there is nothing to say here.
    async fn send(&self, message: Request) {
        let request = v1::ExecRequest {
            message: Some(message),
        };
        if self.requests.send(request).await.is_ok() {
            self.progress.fetch_add(1, Ordering::Relaxed);
        }
    }
}

async fn first_size(resize: &mut ResizeEvents) -> Option<TerminalSize> {
    tokio::time::timeout(FIRST_SIZE_WAIT, resize.next())
        .await
        .ok()
        .flatten()
}

fn size(size: TerminalSize) -> v1::TerminalSize {
    v1::TerminalSize {
        width: size.width.into(),
        height: size.height.into(),
    }
}

impl Call {
    /// Its name in metrics and logs.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Exec => "exec",
            Self::Attach => "attach",
        }
    }

    /// Upstream's words for a session that failed.
    fn failed(self, reason: &str) -> Outcome {
        let what = match self {
            Self::Exec => "error executing command in container",
            Self::Attach => "error attaching to container",
        };
        Outcome::Failed {
            message: format!("{what}: {reason}"),
        }
    }
}

/// Clients parse the code as one byte and take an unreadable status for success.
fn exit_code(code: i32) -> u8 {
    u8::try_from(code).unwrap_or(u8::MAX)
}

/// What the user reads when the command could not be started. Tools look for
/// both phrases of a missing executable: older runtimes wrote the first, runc
/// writes the second.
pub(super) fn failure_text(failure: &v1::ExecFailed, container: &str) -> String {
    const FINDING: &str = "error finding executable";
    let message = &failure.message;
    match failure.kind() {
        v1::exec_failed::Kind::ContainerNotFound => {
            format!("container not found ({container:?})")
        }
        v1::exec_failed::Kind::CommandNotStarted
            if message.contains("executable file not found in $PATH")
                && !message.contains(FINDING) =>
        {
            format!("{FINDING}: {message}")
        }
        _ => message.clone(),
    }
}

#[cfg(test)]
mod tests {
    use v1::exec_failed::Kind;

    use super::*;

    #[test]
    fn exit_codes_fit_a_byte_and_never_become_success() {
        for (code, want) in [
            (0, 0),
            (1, 1),
            (137, 137),
            (255, 255),
            (256, 255),
            (-1, 255),
        ] {
            assert_eq!(exit_code(code), want, "{code}");
        }
    }

    #[test]
    fn failure_texts() {
        let missing = r#"exec: "foo": executable file not found in $PATH"#;
        for (kind, message, want) in [
            (
                Kind::CommandNotStarted,
                missing,
                format!("error finding executable: {missing}"),
            ),
            (
                Kind::CommandNotStarted,
                "exec: \"/x\": permission denied",
                "exec: \"/x\": permission denied".into(),
            ),
            (
                Kind::ContainerNotFound,
                "gone",
                r#"container not found ("c")"#.into(),
            ),
            (Kind::Internal, "no memory", "no memory".into()),
        ] {
            let failure = v1::ExecFailed {
                kind: kind.into(),
                message: message.into(),
            };
            assert_eq!(failure_text(&failure, "c"), want);
        }
    }
}
