//! Reads events off a connection.
//!
//! The receive buffer starts small and grows only while the client fills it: an idle
//! session, of which a node has thousands, holds a page and not a large buffer.

use std::io;

use bytes::BytesMut;
use tokio::io::{AsyncRead, AsyncReadExt as _, ReadHalf};

use crate::{
    activity::Activity,
    wire::{Event, ProtocolError, Wire},
};

const SMALLEST_READ: usize = 4 * 1024;
const LARGEST_READ: usize = 64 * 1024;

/// Why no further event comes.
#[derive(Debug)]
pub(crate) enum Departure {
    /// The client sent a WebSocket Close.
    Closed,
    /// The connection ended, with or without an error of the transport.
    Lost(Option<io::Error>),
    /// The client broke the protocol.
    Protocol(ProtocolError),
}

pub(crate) struct Reader<IO> {
    io: ReadHalf<IO>,
    wire: Wire,
    buffer: BytesMut,
    read_size: usize,
    activity: Activity,
}

impl<IO: AsyncRead> Reader<IO> {
    pub(crate) fn new(io: ReadHalf<IO>, wire: Wire, activity: Activity) -> Self {
        Self {
            io,
            wire,
            buffer: BytesMut::new(),
            read_size: SMALLEST_READ,
            activity,
        }
    }

    pub(crate) fn expect_no_more_streams(&mut self) {
        self.wire.expect_no_more_streams();
    }

    /// The next event. Cancel safe.
    pub(crate) async fn next(&mut self) -> Result<Event, Departure> {
        loop {
            match self.wire.next(&mut self.buffer) {
                Ok(Some(Event::Closed)) => return Err(Departure::Closed),
                Ok(Some(event)) => {
                    if matches!(event, Event::Data { .. } | Event::Empty { .. }) {
                        self.activity.touch();
                    }
                    return Ok(event);
                }
                Ok(None) => {}
                Err(error) => return Err(Departure::Protocol(error)),
            }
            self.fill().await?;
        }
    }

    async fn fill(&mut self) -> Result<(), Departure> {
        self.buffer.reserve(self.read_size);
        match self.io.read_buf(&mut self.buffer).await {
            Ok(0) => Err(Departure::Lost(None)),
            Ok(read) => {
                if read >= self.read_size {
                    self.read_size = (self.read_size * 4).min(LARGEST_READ);
                } else if read < self.read_size / 8 {
                    self.read_size = (self.read_size / 2).max(SMALLEST_READ);
                }
                Ok(())
            }
            Err(error) => Err(Departure::Lost(Some(error))),
        }
    }
}
