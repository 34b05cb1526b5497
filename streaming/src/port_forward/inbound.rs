//! Routes what a SPDY client sends: new forwarded connections, their input, their end.

use std::{collections::HashMap, sync::Arc, time::Duration};

use tokio::{
    io::AsyncRead,
    sync::mpsc,
    time::{Instant, sleep, sleep_until},
};

use super::{
    pairs::{Announced, Kind, Paired, Pairs},
    session::{Accepted, open},
    table::Table,
};
use crate::{
    connection::until,
    limits::Limits,
    outbound::{Frame, Outbound},
    pipe::{Feed, Input, pipe},
    reader::{Departure, Reader},
    spdy::{HeaderBlock, ResetStatus},
    wire::Event,
};

pub(super) struct Inbound<IO> {
    reader: Reader<IO>,
    outbound: Outbound,
    table: Table,
    accepted: mpsc::UnboundedSender<Accepted>,
    limits: Limits,
    pairs: Pairs,
    /// Data streams that came before their error stream.
    early: HashMap<u32, Early>,
    last_stream: u32,
}

struct Early {
    port: u16,
    feed: Arc<Feed>,
    input: Input,
}

impl<IO: AsyncRead> Inbound<IO> {
    pub(super) fn new(
        reader: Reader<IO>,
        outbound: Outbound,
        table: Table,
        accepted: mpsc::UnboundedSender<Accepted>,
        limits: Limits,
    ) -> Self {
        let pairs = Pairs::new(limits.stream_creation);
        let early = HashMap::new();
        Self {
            reader,
            outbound,
            table,
            accepted,
            limits,
            pairs,
            early,
            last_stream: 0,
        }
    }

    /// Reads until the client leaves.
    pub(super) async fn run(mut self) -> Departure {
        let departure = loop {
            tokio::select! {
                event = self.reader.next() => match event {
                    Ok(event) => self.handle(event).await,
                    Err(departure) => break departure,
                },
                () = until(self.pairs.next_deadline()) => self.expire().await,
            }
        };
        self.table.end_input();
        departure
    }

    async fn handle(&mut self, event: Event) {
        match event {
            Event::Opened { stream, headers } => self.open(stream, &headers).await,
            Event::Data { stream, payload } => self.feed(stream, &payload).await,
            Event::Finished { stream } => {
                if let Some(feed) = self.feed_of(stream) {
                    feed.end();
                }
            }
            Event::Reset { stream } => {
                self.table.reset(stream);
                self.pairs.forget(stream);
                self.early.remove(&stream);
            }
            Event::Ping(pong) => self.outbound.pong(pong),
            // Channels only, and the reader returns Closed as a departure.
            Event::Empty { .. } | Event::Closed => {}
        }
    }

    async fn open(&mut self, stream: u32, headers: &HeaderBlock) {
        let in_order = stream % 2 == 1 && stream > self.last_stream;
        let announced = Announced::parse(stream, headers);
        let (true, Some(announced)) = (in_order, announced) else {
            return self.reset(stream, ResetStatus::ProtocolError).await;
        };
        self.last_stream = stream;
        if self.table.len() + self.pairs.len() >= self.limits.forwarded_connections {
            return self.reset(stream, ResetStatus::RefusedStream).await;
        }
        let paired = self.pairs.add(stream, &announced);
        if paired == Paired::Duplicate {
            return self.reset(stream, ResetStatus::ProtocolError).await;
        }
        self.outbound.answer(Frame::Accept { stream }).await;
        if announced.kind == Kind::Data {
            let (feed, input) = pipe(self.limits.input_buffer);
            let early = Early {
                port: announced.port,
                feed: Arc::new(feed),
                input,
            };
            self.early.insert(stream, early);
        }
        if let Paired::Complete { error, data } = paired
            && let Some(Early { port, feed, input }) = self.early.remove(&data)
        {
            let accepted = open(&self.outbound, &self.table, port, error, data, feed, input);
            // The session has gone if nobody listens.
            let _ = self.accepted.send(accepted);
        }
    }

    fn feed_of(&self, stream: u32) -> Option<Arc<Feed>> {
        let early = || self.early.get(&stream).map(|early| Arc::clone(&early.feed));
        self.table.feed(stream).or_else(early)
    }

    async fn feed(&mut self, stream: u32, payload: &[u8]) {
        let Some(feed) = self.feed_of(stream) else {
            return;
        };
        if wait_for_room(&feed, &self.outbound, &self.limits).await {
            feed.push(payload);
        } else {
            // One process that reads nothing must not hold up all connections for ever.
            self.table.reset(stream);
            self.early.remove(&stream);
            self.reset(stream, ResetStatus::Cancel).await;
        }
    }

    async fn expire(&mut self) {
        for stream in self.pairs.expired(Instant::now()) {
            self.early.remove(&stream);
            self.reset(stream, ResetStatus::Cancel).await;
        }
    }

    async fn reset(&mut self, stream: u32, status: ResetStatus) {
        self.outbound.answer(Frame::Reset { stream, status }).await;
    }
}

/// Waits until a connection takes input; false if it did not for too long.
pub(super) async fn wait_for_room(feed: &Feed, outbound: &Outbound, limits: &Limits) -> bool {
    let give_up = Instant::now() + limits.forward_stall;
    loop {
        tokio::select! {
            biased;
            () = feed.ready() => return true,
            () = sleep_until(give_up) => return false,
            () = sleep(limits.keepalive.max(Duration::from_millis(1))) => outbound.keepalive(),
        }
    }
}
