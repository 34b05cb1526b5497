//! Routes what a WebSocket channel client sends: input by channel number.
//!
//! Port `i` of the request has the channels `2i` for data and `2i + 1` for errors. There
//! is one connection a port, and no way to close one of them alone.

use tokio::io::AsyncRead;

use super::{inbound::wait_for_room, table::Table};
use crate::{
    limits::Limits,
    outbound::Outbound,
    reader::{Departure, Reader},
    wire::Event,
};

pub(super) struct Inbound<IO> {
    pub(super) reader: Reader<IO>,
    pub(super) outbound: Outbound,
    pub(super) table: Table,
    pub(super) limits: Limits,
}

impl<IO: AsyncRead> Inbound<IO> {
    /// Reads until the client leaves.
    pub(super) async fn run(mut self) -> Departure {
        let departure = loop {
            match self.reader.next().await {
                Ok(Event::Data { stream, payload }) => self.feed(stream, &payload).await,
                Ok(Event::Ping(pong)) => self.outbound.pong(pong),
                // Empty messages mean nothing here, and the rest is SPDY's.
                Ok(_) => {}
                Err(departure) => break departure,
            }
        };
        self.table.end_input();
        departure
    }

    async fn feed(&mut self, channel: u32, payload: &[u8]) {
        let Some(feed) = self.table.feed(channel) else {
            return;
        };
        if wait_for_room(&feed, &self.outbound, &self.limits).await {
            feed.push(payload);
        } else {
            self.table.reset(channel);
        }
    }
}
