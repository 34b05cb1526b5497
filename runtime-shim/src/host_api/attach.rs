//! The `Attach` stream: a client joins the streams of a container's own process.
//!
//! Output comes from the copying that also fills the log, so there may be any
//! number of clients. Input goes into the FIFO that the container's shim reads:
//! the shim holds its other end open too, so neither a client's departure nor
//! our own restart ends the process's input.
//!
//! Upstream: `internal/cri/io/container_io.go` of containerd.

use std::sync::Arc;

use futures::{Stream, StreamExt};
use sandman_protocol::v1;
use tokio::net::unix::pipe;
use tonic::Status;
use tracing::{debug, warn};
use v1::exec_failed::Kind;
use v1::exec_request::Message as In;
use v1::exec_response::Message as Out;

use super::exec::{Sender, failure, write};
use super::pump::send;
use crate::logs::{ListenError, Listener};
use crate::runtime::fifo::open_input;
use crate::sandbox::view::{Streams, View};
use crate::sandbox::{Host, Sandboxes};

/// The exec id that means a container's own process.
const MAIN: &str = "";

/// Serves one client from its first message to its last.
pub(super) async fn serve(
    sandboxes: Arc<Sandboxes>,
    mut requests: impl Stream<Item = Result<v1::ExecRequest, Status>> + Unpin + Send,
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
    let view = sandboxes.view(&start.uid);
    match begin(sandboxes.host(), view.as_deref(), &start) {
        Ok(attached) => attached.run(requests, &sender).await,
        Err(failure) => {
            send(&sender, Out::Failed(failure)).await;
        }
    }
}

/// A client that is attached.
struct Attached {
    host: Arc<Host>,
    container_id: String,
    streams: Streams,
    start: v1::ExecStart,
    listener: Listener,
    /// Absent also when the process's input has ended already.
    stdin: Option<pipe::Sender>,
}

fn begin(
    host: &Arc<Host>,
    view: Option<&View>,
    start: &v1::ExecStart,
) -> Result<Attached, v1::ExecFailed> {
    let name = &start.container;
    let container = view
        .and_then(|view| view.containers.get(name))
        .ok_or_else(|| {
            let text = format!("container not found ({name:?})");
            failure(Kind::ContainerNotFound, text)
        })?;
    let not_running = || {
        let text = format!("container {name:?} is not running");
        failure(Kind::ContainerNotRunning, text)
    };
    let attempt = container.running_attempt().ok_or_else(not_running)?;
    let listeners = container.listeners.as_ref().ok_or_else(not_running)?;
    let listener = listeners.listen().map_err(|error| match error {
        ListenError::Ended => not_running(),
        ListenError::Full => failure(Kind::Internal, error.to_string()),
    })?;
    let streams = container.streams;
    let path = host.container_stdio(&attempt.id, streams).stdin;
    let path = path.filter(|_| start.stdin);
    let stdin = open_input(path.as_deref()).map_err(|error| {
        let text = format!("cannot open the container's stdin: {error}");
        failure(Kind::Internal, text)
    })?;
    Ok(Attached {
        host: host.clone(),
        container_id: attempt.id.clone(),
        streams,
        start: start.clone(),
        listener,
        stdin,
    })
}

/// What ended a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// The container's output is over.
    Container,
    /// The client took no output for too long.
    Slow,
    /// The client's input is over, and so is its session.
    Input,
    /// The client is gone.
    Client,
}

impl Attached {
    async fn run(
        self,
        requests: impl Stream<Item = Result<v1::ExecRequest, Status>> + Unpin,
        sender: &Sender,
    ) {
        if !send(sender, Out::Started(v1::ExecStarted {})).await {
            return;
        }
        let Self {
            host,
            container_id,
            streams,
            start,
            listener,
            stdin,
        } = self;
        let had_stdin = stdin.is_some();
        let once = streams.stdin_once && !streams.tty;
        let input = Input {
            host: &host,
            container_id: &container_id,
            streams,
            // A container whose input ends with this client's is listened to until it ends.
            detaches: had_stdin && !(once && (start.stdout || start.stderr)),
            closes: had_stdin && once,
        };
        let end = tokio::select! {
            end = output(listener, &start, streams.tty, sender) => end,
            end = input.run(requests, stdin, start.size) => end,
            () = sender.closed() => End::Client,
        };
        if input.closes && end != End::Container {
            input.close().await;
        }
        let last = match end {
            End::Container | End::Input => Out::Exited(v1::ExecExited { exit_code: 0 }),
            End::Slow => Out::Failed(failure(
                Kind::Internal,
                "the client did not read for too long and output was lost; attach again, or read \
                 the container's log",
            )),
            End::Client => return,
        };
        send(sender, last).await;
    }
}

/// Carries output as the client asked for it.
async fn output(mut listener: Listener, start: &v1::ExecStart, tty: bool, sender: &Sender) -> End {
    while let Some(piece) = listener.next().await {
        let stderr = piece.stderr && !tty;
        let message = match (stderr, start.stdout, start.stderr) {
            (false, true, _) => Out::Stdout(piece.data),
            (true, _, true) => Out::Stderr(piece.data),
            _ => continue,
        };
        if !send(sender, message).await {
            return End::Client;
        }
    }
    if listener.was_dropped() {
        End::Slow
    } else {
        End::Container
    }
}

/// The way from the client to the process.
struct Input<'a> {
    host: &'a Host,
    container_id: &'a str,
    streams: Streams,
    /// The session ends with the client's input.
    detaches: bool,
    /// The process's input ends with the client's.
    closes: bool,
}

impl Input<'_> {
    async fn run(
        &self,
        mut requests: impl Stream<Item = Result<v1::ExecRequest, Status>> + Unpin,
        mut stdin: Option<pipe::Sender>,
        size: Option<v1::TerminalSize>,
    ) -> End {
        if let Some(size) = size {
            self.resize(size).await;
        }
        loop {
            let message = match requests.next().await {
                Some(Ok(request)) => request.message,
                Some(Err(_)) => return End::Client,
                // Nothing more to say, but it may still listen.
                None => Some(In::CloseStdin(v1::CloseStdin {})),
            };
            match message {
                Some(In::Stdin(data)) => write(&mut stdin, &data).await,
                Some(In::CloseStdin(_)) => {
                    drop(stdin.take());
                    if self.detaches {
                        return End::Input;
                    }
                    if self.closes {
                        self.close().await;
                    }
                    return self.sizes(requests).await;
                }
                Some(In::Resize(size)) => self.resize(size).await,
                Some(In::Cancel(_)) => return End::Input,
                Some(In::Start(_)) | None => {}
            }
        }
    }

    /// What a client may still say after the end of its input.
    async fn sizes(
        &self,
        mut requests: impl Stream<Item = Result<v1::ExecRequest, Status>> + Unpin,
    ) -> End {
        while let Some(request) = requests.next().await {
            match request.map(|request| request.message) {
                Ok(Some(In::Resize(size))) => self.resize(size).await,
                Ok(Some(In::Cancel(_))) => return End::Input,
                Ok(_) => {}
                Err(_) => return End::Client,
            }
        }
        std::future::pending().await
    }

    /// Ends the process's input, which the shim keeps open otherwise. A second time changes
    /// nothing.
    async fn close(&self) {
        let runtime = &self.host.runtime;
        if let Err(error) = runtime.close_stdin(self.container_id, MAIN).await {
            warn!(container_id = self.container_id, %error, "cannot close a container's stdin");
        }
    }

    async fn resize(&self, size: v1::TerminalSize) {
        if !self.streams.tty || size.width == 0 || size.height == 0 {
            return;
        }
        let runtime = &self.host.runtime;
        let id = self.container_id;
        if let Err(error) = runtime.resize(id, MAIN, size.width, size.height).await {
            debug!(container_id = id, %error, "cannot resize a container's terminal");
        }
    }
}
