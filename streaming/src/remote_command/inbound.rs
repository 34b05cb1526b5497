//! Routes what the client sends to the parts of the session.

use std::sync::Arc;

use tokio::{
    io::AsyncRead,
    sync::Notify,
    time::{Duration, sleep},
};

use super::streams::{Role, Streams};
use crate::{
    options::StreamOptions,
    outbound::{Frame, Outbound},
    pipe::Feed,
    reader::{Departure, Reader},
    spdy::{HeaderBlock, ResetStatus},
    terminal::ResizeFeed,
    wire::{Event, ProtocolError},
};

/// Most SPDY streams a client may open: the five known ones and some it made up.
const MAX_STREAMS: usize = 16;

pub(super) struct Inbound<IO> {
    pub(super) reader: Reader<IO>,
    pub(super) outbound: Outbound,
    pub(super) streams: Streams,
    pub(super) options: StreamOptions,
    /// None once ended, or if not asked for.
    pub(super) stdin: Option<Feed>,
    pub(super) resize: ResizeFeed,
    /// Told once when all streams exist.
    pub(super) complete: Arc<Notify>,
    pub(super) announced: bool,
    pub(super) keepalive: Duration,
    pub(super) empty_message_ends_stdin: bool,
    pub(super) opened: usize,
    pub(super) last_stream: u32,
}

impl<IO: AsyncRead> Inbound<IO> {
    /// Reads until the client leaves. Input of the process ends with it.
    pub(super) async fn run(mut self) -> Departure {
        self.check_complete();
        loop {
            let event = match self.reader.next().await {
                Ok(event) => event,
                Err(departure) => return departure,
            };
            if let Err(error) = self.handle(event).await {
                return Departure::Protocol(error);
            }
        }
    }

    async fn handle(&mut self, event: Event) -> Result<(), ProtocolError> {
        match event {
            Event::Opened { stream, headers } => self.open(stream, &headers).await?,
            Event::Data { stream, payload } => match self.streams.role(stream) {
                Some(Role::Stdin) => self.feed_stdin(&payload).await,
                Some(Role::Resize) if self.options.tty => self.resize.push(&payload),
                // Heartbeats of clients without terminal, channels that do not exist,
                // streams that are gone: nothing to tell them.
                _ => {}
            },
            Event::Empty { stream } => {
                if self.empty_message_ends_stdin && self.streams.role(stream) == Some(Role::Stdin) {
                    self.stdin = None;
                }
            }
            Event::Finished { stream } | Event::Reset { stream } => {
                match self.streams.role(stream) {
                    Some(Role::Stdin) => self.stdin = None,
                    Some(Role::Resize) => self.resize.end(),
                    // A reset of an output is a Go client's way to leave; the end of
                    // the connection follows and is what counts.
                    _ => {}
                }
            }
            Event::Ping(pong) => self.outbound.pong(pong),
            // The reader returns this one as a departure.
            Event::Closed => {}
        }
        Ok(())
    }

    async fn open(&mut self, stream: u32, headers: &HeaderBlock) -> Result<(), ProtocolError> {
        self.opened += 1;
        if self.opened > MAX_STREAMS {
            return Err(ProtocolError::TooManyStreams(MAX_STREAMS));
        }
        let in_order = stream % 2 == 1 && stream > self.last_stream;
        let role = headers.get("streamtype").and_then(Role::from_stream_type);
        if !in_order || role.is_some_and(|role| !self.streams.assign(role, stream)) {
            let status = ResetStatus::ProtocolError;
            self.outbound.answer(Frame::Reset { stream, status }).await;
            return Ok(());
        }
        self.last_stream = stream;
        // Clients open one stream at a time and wait for each answer.
        self.outbound.answer(Frame::Accept { stream }).await;
        self.check_complete();
        let all_possible = !self.options.tty || self.streams.get(Role::Resize).is_some();
        if self.announced && all_possible {
            self.reader.expect_no_more_streams();
        }
        Ok(())
    }

    fn check_complete(&mut self) {
        if !self.announced && self.streams.complete(self.options) {
            self.announced = true;
            self.complete.notify_one();
        }
    }

    /// Hands input on; while the process reads none, neither does this.
    async fn feed_stdin(&mut self, payload: &[u8]) {
        let Some(stdin) = &self.stdin else { return };
        loop {
            tokio::select! {
                biased;
                () = stdin.ready() => break,
                () = sleep(self.keepalive) => self.outbound.keepalive(),
            }
        }
        stdin.push(payload);
    }
}
