//! The life of one session: streams exist, the handler runs, the outcome is delivered.

use std::{future::Future, sync::Arc, time::Duration};

use bytes::Bytes;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    sync::Notify,
    task::JoinError,
    time::{Instant, sleep_until},
};
use tokio_util::{sync::CancellationToken, task::AbortOnDropHandle};
use tracing::{debug, error};

use super::{
    RemoteCommand,
    inbound::Inbound,
    streams::{Role, Streams},
};
use crate::{
    activity::Activity,
    connection::{Connection, Sending, until},
    error::SessionError,
    limits::Limits,
    negotiate::{CommandTransport, RemoteCommandUpgrade},
    options::StreamOptions,
    outbound::{self, Frame, Framing, Outbound, OutputControl},
    pipe::{Input, pipe},
    reader::{Departure, Reader},
    status::{Outcome, StatusFormat},
    terminal::{ResizeEvents, resize_queue},
    websocket::close_code,
    wire::{ProtocolError, Wire},
};

/// Longest attempt to answer the Close of a client whose process is still running.
const CLOSE_REPLY: Duration = Duration::from_secs(1);

pub(super) struct Session<IO> {
    connection: Connection<IO>,
    outbound: Outbound,
    streams: Streams,
    options: StreamOptions,
    limits: Limits,
    activity: Activity,
    status_format: StatusFormat,
    complete: Arc<Notify>,
    stdin: Option<Input>,
    resize: Option<ResizeEvents>,
    outputs: Vec<OutputControl>,
    client_gone: CancellationToken,
}

/// What ended the running phase.
enum End {
    Outcome(Result<Outcome, JoinError>),
    /// The client left and the barrier has passed.
    Left(Departure),
    Protocol(ProtocolError),
    StreamCreation,
    Idle(Duration),
    Shutdown,
}

impl<IO: AsyncRead + AsyncWrite + Send + 'static> Session<IO> {
    pub(super) fn new(
        io: IO,
        upgrade: &RemoteCommandUpgrade,
        options: StreamOptions,
        limits: Limits,
    ) -> Self {
        let (wire, framing, streams) = match upgrade.transport() {
            CommandTransport::Spdy => (Wire::spdy(), Framing::spdy(), Streams::default()),
            CommandTransport::Channels(format) => (
                Wire::channels(format),
                Framing::channels(format.base64),
                Streams::channels(options),
            ),
        };
        let activity = Activity::new();
        let (read_half, write_half) = tokio::io::split(io);
        let (outbound, queue) = outbound::queue(limits.output_buffer);
        if matches!(upgrade.transport(), CommandTransport::Channels(_)) {
            greet(&outbound, &streams);
        }
        let (stdin_feed, stdin) = options.stdin.then(|| pipe(limits.input_buffer)).unzip();
        let (resize_feed, resize) = resize_queue();
        let complete = Arc::new(Notify::new());
        let inbound = Inbound {
            reader: Reader::new(read_half, wire, activity.clone()),
            outbound: outbound.clone(),
            streams: streams.clone(),
            options,
            stdin: stdin_feed,
            resize: resize_feed,
            complete: Arc::clone(&complete),
            announced: false,
            keepalive: limits.keepalive,
            empty_message_ends_stdin: limits.empty_message_ends_stdin,
            opened: 0,
            last_stream: 0,
        };
        let sending = Sending {
            io: write_half,
            framing,
            queue,
            outbound: outbound.clone(),
        };
        Self {
            connection: Connection::new(inbound.run(), sending, activity.clone(), &limits),
            outbound,
            streams,
            options,
            limits,
            activity,
            status_format: upgrade.status_format(),
            complete,
            stdin,
            resize: Some(resize),
            outputs: Vec::new(),
            client_gone: CancellationToken::new(),
        }
    }

    pub(super) async fn run<H, F>(
        mut self,
        shutdown: CancellationToken,
        handler: H,
    ) -> Result<(), SessionError>
    where
        H: FnOnce(RemoteCommand) -> F + Send,
        F: Future<Output = Outcome> + Send + 'static,
    {
        let mut running = None;
        let end = self.run_handler(&shutdown, handler, &mut running).await;
        let (status, patience) = self.last_words(&end);
        // A WebSocket is closed in any case, a SPDY connection has no frame for that.
        let code = match &end {
            End::Protocol(error) => error.close_code(),
            _ => close_code::NORMAL,
        };
        if running.is_some() {
            self.client_gone.cancel();
        }
        let frames = self.last_frames(status, code);
        let Self {
            connection, limits, ..
        } = self;
        let delivered = connection.close(frames, patience, &limits, &shutdown).await;
        if let (Some(handler), false) = (running, matches!(end, End::Shutdown)) {
            tokio::select! {
                () = shutdown.cancelled() => {}
                _ = handler => {}
            }
        }
        match end {
            End::Outcome(Ok(_)) if delivered => Ok(()),
            End::Outcome(Ok(_)) => Err(SessionError::ClientGone(None)),
            End::Outcome(Err(error)) => Err(SessionError::Handler(error)),
            End::Left(Departure::Lost(error)) => Err(SessionError::ClientGone(error)),
            End::Left(_) => Err(SessionError::ClientGone(None)),
            End::Protocol(error) => Err(error.into()),
            End::StreamCreation => Err(SessionError::StreamCreation(limits.stream_creation)),
            End::Idle(limit) => Err(SessionError::Idle(limit)),
            End::Shutdown => Err(SessionError::Shutdown),
        }
    }

    /// Starts the handler once the streams exist and waits for whatever ends the session.
    /// `running` holds the handler afterwards if it has not returned.
    async fn run_handler<H, F>(
        &mut self,
        shutdown: &CancellationToken,
        handler: H,
        running: &mut Option<AbortOnDropHandle<Outcome>>,
    ) -> End
    where
        H: FnOnce(RemoteCommand) -> F + Send,
        F: Future<Output = Outcome> + Send + 'static,
    {
        let mut handler = Some(handler);
        let opening_ends = Instant::now() + self.limits.stream_creation;
        let mut left: Option<(Departure, Instant)> = None;
        loop {
            let gone_at = left.as_ref().map(|(_, at)| *at);
            tokio::select! {
                biased;
                () = shutdown.cancelled() => return End::Shutdown,
                outcome = join(running) => {
                    *running = None;
                    return End::Outcome(outcome);
                }
                () = self.complete.notified() => {
                    self.start(&mut handler, running);
                }
                departure = self.connection.departed() => {
                    debug!(?departure, "client left");
                    if let Departure::Protocol(error) = departure {
                        return End::Protocol(error);
                    }
                    // Streams, input and a Close may have come all at once.
                    if handler.is_some() && self.streams.complete(self.options) {
                        self.start(&mut handler, running);
                    }
                    if running.is_none() {
                        return End::Left(departure);
                    }
                    left = Some((departure, Instant::now() + self.limits.close_barrier));
                }
                () = until(gone_at) => {
                    if let Some((departure, _)) = left.take() {
                        return End::Left(departure);
                    }
                }
                () = sleep_until(opening_ends), if handler.is_some() => return End::StreamCreation,
                () = self.activity.idle_for(self.limits.idle) => {
                    return End::Idle(self.limits.idle.unwrap_or_default());
                }
            }
        }
    }

    /// Starts the handler, once.
    fn start<H, F>(
        &mut self,
        handler: &mut Option<H>,
        running: &mut Option<AbortOnDropHandle<Outcome>>,
    ) where
        H: FnOnce(RemoteCommand) -> F + Send,
        F: Future<Output = Outcome> + Send + 'static,
    {
        if let Some(handler) = handler.take() {
            let task = tokio::spawn(handler(self.command()));
            *running = Some(AbortOnDropHandle::new(task));
        }
    }

    fn command(&mut self) -> RemoteCommand {
        let mut output = |wanted: bool, role: Role| {
            let stream = self.streams.get(role).filter(|_| wanted)?;
            let (output, control) = self.outbound.output(stream);
            self.outputs.push(control);
            Some(output)
        };
        let stdout = output(self.options.stdout, Role::Stdout);
        let stderr = output(self.options.stderr, Role::Stderr);
        RemoteCommand {
            stdin: self.stdin.take(),
            stdout,
            stderr,
            // Taken once: the handler is started once.
            resize: self.resize.take().unwrap_or_else(|| resize_queue().1),
            client_gone: self.client_gone.clone(),
        }
    }

    /// The status to send, and how long a slow client may take to read up to it.
    fn last_words(&self, end: &End) -> (Option<Bytes>, Option<Duration>) {
        let failure = |message: String| Outcome::Failed { message };
        let outcome = match end {
            End::Outcome(Ok(outcome)) => outcome.clone(),
            End::Outcome(Err(error)) => {
                error!(%error, "session handler failed");
                failure("session handler failed".to_owned())
            }
            End::Left(_) => return (None, Some(CLOSE_REPLY)),
            End::Protocol(error) => failure(format!("client broke the protocol: {error}")),
            End::StreamCreation => {
                failure("timed out waiting for client to create streams".to_owned())
            }
            End::Idle(limit) => failure(format!("session was idle for {} s", limit.as_secs())),
            End::Shutdown => failure("node agent is shutting down".to_owned()),
        };
        let patience = match end {
            End::Outcome(_) => None,
            _ => Some(self.limits.linger),
        };
        (Some(outcome.encode(self.status_format).into()), patience)
    }

    /// Ends all streams, the one with the status last.
    fn last_frames(&self, status: Option<Bytes>, code: u16) -> Vec<Frame> {
        for output in &self.outputs {
            output.end();
        }
        let mut frames = Vec::new();
        // Go clients wait for the server's end of stdin as well.
        frames.extend(self.streams.get(Role::Stdin).map(Frame::fin));
        if let (Some(status), Some(stream)) = (status, self.streams.get(Role::Error)) {
            frames.push(Frame::data(stream, status, true));
        }
        frames.push(Frame::Close(code));
        frames
    }
}

/// Go's server sends an empty message on the lowest channel that it writes to.
fn greet(outbound: &Outbound, streams: &Streams) {
    let lowest = [Role::Stdout, Role::Stderr, Role::Error].into_iter();
    if let Some(stream) = lowest.filter_map(|role| streams.get(role)).next() {
        outbound.greet(stream);
    }
}

async fn join(handler: &mut Option<AbortOnDropHandle<Outcome>>) -> Result<Outcome, JoinError> {
    match handler {
        Some(handler) => handler.await,
        None => std::future::pending().await,
    }
}
