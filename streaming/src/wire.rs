//! One view of the three ways streams travel: SPDY on the connection itself, SPDY
//! tunnelled in WebSocket messages, and WebSocket channels.
//!
//! Sessions above see numbered streams (SPDY stream ids or channel numbers) and do
//! not know which of the three they are on.

use bytes::{Bytes, BytesMut};

use crate::{spdy, websocket};

/// What a client's bytes meant to a session.
#[derive(Debug)]
pub(crate) enum Event {
    /// The client opened a stream (SPDY only: channels exist from the start).
    Opened {
        stream: u32,
        headers: spdy::HeaderBlock,
    },
    /// A piece of a stream's data, never empty.
    Data { stream: u32, payload: BytesMut },
    /// A channel message without data. SPDY has no such thing.
    Empty { stream: u32 },
    /// The client sends nothing more on a stream.
    Finished { stream: u32 },
    /// The client dropped both directions of a stream (SPDY only).
    Reset { stream: u32 },
    /// A ping, and the frame that answers it.
    Ping(Pong),
    /// The client closed the connection with a WebSocket Close. Nothing follows.
    Closed,
}

/// Answer to a ping.
#[derive(Debug)]
pub(crate) enum Pong {
    Spdy { id: u32 },
    WebSocket(Bytes),
}

/// A byte stream that breaks the protocol; the connection cannot go on.
#[derive(Debug, thiserror::Error)]
pub enum ProtocolError {
    /// As SPDY.
    #[error(transparent)]
    Spdy(#[from] spdy::Error),
    /// As WebSocket or in the channel format.
    #[error(transparent)]
    WebSocket(#[from] websocket::Error),
    /// More streams than a session may have.
    #[error("client opened more than {0} streams")]
    TooManyStreams(usize),
}

impl ProtocolError {
    /// Code for the WebSocket Close frame that answers this error.
    pub(crate) fn close_code(&self) -> u16 {
        match self {
            Self::WebSocket(error) => error.close_code(),
            _ => websocket::close_code::PROTOCOL_ERROR,
        }
    }
}

/// Decoder of one connection.
pub(crate) enum Wire {
    Spdy(spdy::Decoder),
    Tunnel {
        websocket: websocket::Decoder,
        /// Message payload that holds no whole SPDY frame yet.
        inner: BytesMut,
        spdy: spdy::Decoder,
    },
    Channels {
        websocket: websocket::Decoder,
        channels: websocket::ChannelDecoder,
    },
}

impl Wire {
    pub(crate) fn spdy() -> Self {
        Self::Spdy(spdy::Decoder::new())
    }

    pub(crate) fn tunnel() -> Self {
        Self::Tunnel {
            websocket: websocket::Decoder::new(),
            inner: BytesMut::new(),
            spdy: spdy::Decoder::new(),
        }
    }

    pub(crate) fn channels(format: websocket::ChannelFormat) -> Self {
        Self::Channels {
            websocket: websocket::Decoder::new(),
            channels: websocket::ChannelDecoder::new(format),
        }
    }

    /// Frees what only the opening of streams needs.
    pub(crate) fn expect_no_more_streams(&mut self) {
        match self {
            Self::Spdy(spdy) | Self::Tunnel { spdy, .. } => spdy.expect_no_more_headers(),
            Self::Channels { .. } => {}
        }
    }

    /// Takes the next event off the front of `input`; `Ok(None)` asks for more bytes.
    pub(crate) fn next(&mut self, input: &mut BytesMut) -> Result<Option<Event>, ProtocolError> {
        loop {
            let frame = match self {
                Self::Spdy(spdy) => match spdy.decode(input)? {
                    Some(frame) => spdy_event(frame),
                    None => return Ok(None),
                },
                Self::Tunnel {
                    websocket,
                    inner,
                    spdy,
                } => {
                    if let Some(frame) = spdy.decode(inner)? {
                        spdy_event(frame)
                    } else {
                        match websocket.decode(input)? {
                            Some(websocket::Frame::Data { payload, .. }) => {
                                // One SPDY frame spans several messages of a few bytes each.
                                inner.extend_from_slice(&payload);
                                None
                            }
                            Some(other) => websocket_event(other),
                            None => return Ok(None),
                        }
                    }
                }
                Self::Channels {
                    websocket,
                    channels,
                } => match websocket.decode(input)? {
                    Some(websocket::Frame::Data { last, payload, .. }) => {
                        channels.decode(last, payload)?.map(channel_event)
                    }
                    Some(other) => websocket_event(other),
                    None => return Ok(None),
                },
            };
            if frame.is_some() {
                return Ok(frame);
            }
        }
    }
}

fn spdy_event(frame: spdy::Frame) -> Option<Event> {
    Some(match frame {
        spdy::Frame::Open { stream, headers } => Event::Opened { stream, headers },
        spdy::Frame::Data { stream, payload } => Event::Data { stream, payload },
        spdy::Frame::Fin { stream } => Event::Finished { stream },
        spdy::Frame::Reset { stream } => Event::Reset { stream },
        // Even ids would answer pings of this server, which sends none.
        spdy::Frame::Ping { id } if id % 2 == 1 => Event::Ping(Pong::Spdy { id }),
        // After GOAWAY the client still reads its streams; the end of the connection ends them.
        spdy::Frame::Ping { .. } | spdy::Frame::GoAway => return None,
    })
}

fn websocket_event(frame: websocket::Frame) -> Option<Event> {
    match frame {
        websocket::Frame::Ping(payload) => Some(Event::Ping(Pong::WebSocket(payload))),
        websocket::Frame::Close(_) => Some(Event::Closed),
        websocket::Frame::Pong | websocket::Frame::Data { .. } => None,
    }
}

fn channel_event(event: websocket::ChannelEvent) -> Event {
    match event {
        websocket::ChannelEvent::Data { channel, payload } => Event::Data {
            stream: channel.into(),
            payload,
        },
        websocket::ChannelEvent::Empty { channel } => Event::Empty {
            stream: channel.into(),
        },
        websocket::ChannelEvent::Closed { channel } => Event::Finished {
            stream: channel.into(),
        },
    }
}
