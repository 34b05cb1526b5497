//! The life of a port-forward session: handlers start as the client connects, and their
//! ends are told to it.

use std::{collections::HashMap, future::Future, sync::Arc};

use tokio::{
    io::{AsyncRead, AsyncWrite},
    sync::mpsc,
    task::{Id, JoinError, JoinSet},
    time::{Instant, timeout},
};
use tokio_util::sync::CancellationToken;
use tracing::error;

use super::{ForwardOutcome, ForwardedConnection, channels, inbound::Inbound, table::Table};
use crate::{
    activity::Activity,
    connection::{Connection, Sending, until},
    error::SessionError,
    limits::Limits,
    outbound::{self, Frame, Framing, Outbound},
    pipe::{Feed, Input, pipe},
    reader::{Departure, Reader},
    websocket::{ChannelFormat, close_code},
    wire::Wire,
};

/// Longest error text sent.
const MAX_MESSAGE: usize = 4096;

/// A connection for a handler, with the streams that tell its end.
pub(super) struct Accepted {
    streams: StreamPair,
    connection: ForwardedConnection,
}

#[derive(Clone, Copy)]
struct StreamPair {
    error: u32,
    data: u32,
}

/// Enters a new connection into the table.
pub(super) fn open(
    outbound: &Outbound,
    table: &Table,
    port: u16,
    error: u32,
    data: u32,
    feed: Arc<Feed>,
    input: Input,
) -> Accepted {
    let (output, control) = outbound.output(data);
    let closed = CancellationToken::new();
    table.insert(data, feed, control, closed.clone());
    Accepted {
        streams: StreamPair { error, data },
        connection: ForwardedConnection {
            port,
            input,
            output,
            closed,
        },
    }
}

pub(super) struct Session<IO> {
    connection: Connection<IO>,
    outbound: Outbound,
    table: Table,
    accepted: mpsc::UnboundedReceiver<Accepted>,
    /// Over channels, all connections exist from the start and the session ends with them.
    ends_with_handlers: bool,
    limits: Limits,
    activity: Activity,
    running: HashMap<Id, StreamPair>,
}

/// What ended a session.
enum End {
    Finished,
    Left(Departure),
    Idle,
    Shutdown,
}

impl<IO: AsyncRead + AsyncWrite + Send + 'static> Session<IO> {
    /// A session whose client opens SPDY streams, on whichever carrier.
    pub(super) fn spdy(io: IO, wire: Wire, framing: Framing, limits: Limits) -> Self {
        let activity = Activity::new();
        let (read_half, write_half) = tokio::io::split(io);
        let (outbound, queue) = outbound::queue(limits.output_buffer);
        let (accept, accepted) = mpsc::unbounded_channel();
        let table = Table::default();
        let reader = Reader::new(read_half, wire, activity.clone());
        let inbound = Inbound::new(
            reader,
            outbound.clone(),
            table.clone(),
            accept,
            limits.clone(),
        );
        let sending = Sending {
            io: write_half,
            framing,
            queue,
            outbound: outbound.clone(),
        };
        Self {
            connection: Connection::new(inbound.run(), sending, activity.clone(), &limits),
            outbound,
            table,
            accepted,
            ends_with_handlers: false,
            limits,
            activity,
            running: HashMap::new(),
        }
    }

    /// A session with one connection for each of `ports`.
    pub(super) fn channels(io: IO, format: ChannelFormat, ports: &[u16], limits: Limits) -> Self {
        let activity = Activity::new();
        let (read_half, write_half) = tokio::io::split(io);
        let (outbound, queue) = outbound::queue(limits.output_buffer);
        let (accept, accepted) = mpsc::unbounded_channel();
        let table = Table::default();
        for (port, data) in ports.iter().zip((0..).step_by(2)) {
            let error = data + 1;
            // The first message on each channel names its port.
            for channel in [data, error] {
                let name = port.to_le_bytes().to_vec();
                outbound.send(Frame::data(channel, name, false));
            }
            let (feed, input) = pipe(limits.input_buffer);
            let opened = open(&outbound, &table, *port, error, data, Arc::new(feed), input);
            // The receiver is right here.
            let _ = accept.send(opened);
        }
        let reader = Reader::new(read_half, Wire::channels(format), activity.clone());
        let inbound = channels::Inbound {
            reader,
            outbound: outbound.clone(),
            table: table.clone(),
            limits: limits.clone(),
        };
        let framing = Framing::channels(format.base64);
        let sending = Sending {
            io: write_half,
            framing,
            queue,
            outbound: outbound.clone(),
        };
        Self {
            connection: Connection::new(inbound.run(), sending, activity.clone(), &limits),
            outbound,
            table,
            accepted,
            ends_with_handlers: true,
            limits,
            activity,
            running: HashMap::new(),
        }
    }

    pub(super) async fn run<H, F>(
        mut self,
        shutdown: CancellationToken,
        handler: H,
    ) -> Result<(), SessionError>
    where
        H: FnMut(ForwardedConnection) -> F + Send,
        F: Future<Output = ForwardOutcome> + Send + 'static,
    {
        let mut handlers = JoinSet::new();
        let end = self.run_handlers(&shutdown, handler, &mut handlers).await;
        let code = match &end {
            End::Left(Departure::Protocol(error)) => error.close_code(),
            End::Shutdown => close_code::GOING_AWAY,
            _ => close_code::NORMAL,
        };
        self.table.close_all();
        let Self {
            connection, limits, ..
        } = self;
        connection
            .close(
                vec![Frame::Close(code)],
                Some(limits.linger),
                &limits,
                &shutdown,
            )
            .await;
        // What handlers still have to do is theirs, but not for long; the rest is aborted.
        if !matches!(end, End::Shutdown) {
            let rest = async { while handlers.join_next().await.is_some() {} };
            let _ = timeout(limits.close_barrier, rest).await;
        }
        match end {
            End::Finished | End::Left(Departure::Closed | Departure::Lost(None)) => Ok(()),
            End::Left(Departure::Lost(error)) => Err(SessionError::ClientGone(error)),
            End::Left(Departure::Protocol(error)) => Err(error.into()),
            End::Idle => Err(SessionError::Idle(limits.idle.unwrap_or_default())),
            End::Shutdown => Err(SessionError::Shutdown),
        }
    }

    async fn run_handlers<H, F>(
        &mut self,
        shutdown: &CancellationToken,
        mut handler: H,
        handlers: &mut JoinSet<ForwardOutcome>,
    ) -> End
    where
        H: FnMut(ForwardedConnection) -> F + Send,
        F: Future<Output = ForwardOutcome> + Send + 'static,
    {
        let mut left: Option<(Departure, Instant)> = None;
        loop {
            let nothing_runs = handlers.is_empty() && self.accepted.is_empty();
            if nothing_runs && (self.ends_with_handlers || left.is_some()) {
                return left.map_or(End::Finished, |(departure, _)| End::Left(departure));
            }
            let gone_at = left.as_ref().map(|(_, at)| *at);
            tokio::select! {
                biased;
                () = shutdown.cancelled() => return End::Shutdown,
                Some(ended) = handlers.join_next_with_id() => self.ended(ended),
                Some(Accepted { streams, connection }) = self.accepted.recv() => {
                    let task = handlers.spawn(handler(connection));
                    self.running.insert(task.id(), streams);
                }
                departure = self.connection.departed() => {
                    if let Departure::Protocol(_) = departure {
                        return End::Left(departure);
                    }
                    // What was received is still delivered to the ports.
                    left = Some((departure, Instant::now() + self.limits.close_barrier));
                }
                () = until(gone_at) => {
                    if let Some((departure, _)) = left.take() {
                        return End::Left(departure);
                    }
                }
                () = self.activity.idle_for(self.limits.idle) => return End::Idle,
            }
        }
    }

    fn ended(&mut self, ended: Result<(Id, ForwardOutcome), JoinError>) {
        let (id, outcome) = match ended {
            Ok(ended) => ended,
            Err(error) => {
                error!(%error, "port-forward handler failed");
                (error.id(), ForwardOutcome::Closed)
            }
        };
        let Some(StreamPair { error, data }) = self.running.remove(&id) else {
            return;
        };
        // Ends the data stream; the client waits for the end of the error stream after it.
        self.table.remove(data);
        self.outbound.send(match outcome {
            ForwardOutcome::Closed => Frame::fin(error),
            ForwardOutcome::Failed { message } => {
                let text = &message[..message.floor_char_boundary(MAX_MESSAGE)];
                Frame::data(error, text.to_owned(), true)
            }
        });
    }
}
