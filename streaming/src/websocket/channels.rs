//! The Kubernetes channel format: the first byte of every message names a channel.
//!
//! Upstream: `k8s.io/streaming/pkg/httpstream/wsstream` (v1 to v4, base64) and the
//! stream close signal `[255, channel]` that v5 added.

use bytes::{Buf, BytesMut};

use super::{Error, base64::Base64Decoder};

/// First byte of a v5 message that ends a channel.
const CLOSE_SIGNAL: u8 = 255;

/// Which of the subprotocols' encodings is spoken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChannelFormat {
    /// Channel as an ASCII digit and payload as base64, in text messages.
    pub base64: bool,
    /// `[255, channel]` ends a channel (v5).
    pub close_signal: bool,
}

/// What a client's message meant.
#[derive(Debug, PartialEq, Eq)]
pub enum ChannelEvent {
    /// A piece of a channel's data, never empty.
    Data {
        /// Channel as sent, not necessarily one that exists.
        channel: u8,
        /// The bytes, decoded.
        payload: BytesMut,
    },
    /// A whole message with a channel and nothing else.
    Empty {
        /// Channel as sent.
        channel: u8,
    },
    /// The client sends nothing more on a channel.
    Closed {
        /// Channel as sent.
        channel: u8,
    },
}

enum State {
    /// The next byte names the channel.
    Start,
    Channel {
        channel: u8,
        empty: bool,
    },
    /// After 255; holds the channel once it has come.
    CloseSignal(Option<u8>),
}

/// Reads channels from the pieces of messages.
pub struct ChannelDecoder {
    format: ChannelFormat,
    state: State,
    base64: Base64Decoder,
}

impl ChannelDecoder {
    /// A decoder between two messages.
    pub fn new(format: ChannelFormat) -> Self {
        Self {
            format,
            state: State::Start,
            base64: Base64Decoder::default(),
        }
    }

    /// Takes one piece of a message, in the order of [`super::Frame::Data`].
    pub fn decode(
        &mut self,
        last: bool,
        mut payload: BytesMut,
    ) -> Result<Option<ChannelEvent>, Error> {
        if matches!(self.state, State::Start) && !payload.is_empty() {
            let byte = payload.get_u8();
            self.state = match byte {
                CLOSE_SIGNAL if self.format.close_signal => State::CloseSignal(None),
                byte if self.format.base64 => State::Channel {
                    channel: byte.wrapping_sub(b'0'),
                    empty: true,
                },
                channel => State::Channel {
                    channel,
                    empty: true,
                },
            };
        }
        match self.state {
            // An empty message, or an empty piece at the start of one: no meaning.
            State::Start => Ok(None),
            State::CloseSignal(seen) => self.close_signal(seen, last, &payload),
            State::Channel { channel, empty } => self.data(channel, empty, last, payload),
        }
    }

    fn close_signal(
        &mut self,
        seen: Option<u8>,
        last: bool,
        payload: &[u8],
    ) -> Result<Option<ChannelEvent>, Error> {
        let target = match (seen, payload) {
            (Some(channel), []) => Some(channel),
            (None, []) => None,
            (None, [channel]) => Some(*channel),
            _ => return Err(Error::CloseSignal),
        };
        if !last {
            self.state = State::CloseSignal(target);
            return Ok(None);
        }
        self.state = State::Start;
        match target {
            Some(channel) => Ok(Some(ChannelEvent::Closed { channel })),
            None => Err(Error::CloseSignal),
        }
    }

    fn data(
        &mut self,
        channel: u8,
        empty: bool,
        last: bool,
        payload: BytesMut,
    ) -> Result<Option<ChannelEvent>, Error> {
        let empty = empty && payload.is_empty();
        self.state = if last {
            State::Start
        } else {
            State::Channel { channel, empty }
        };
        let payload = if self.format.base64 {
            let plain = self.base64.decode(&payload)?;
            if last {
                self.base64.finish()?;
            }
            plain
        } else {
            payload
        };
        Ok(match (payload.is_empty(), empty && last) {
            (false, _) => Some(ChannelEvent::Data { channel, payload }),
            (true, true) => Some(ChannelEvent::Empty { channel }),
            (true, false) => None,
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const V4: ChannelFormat = ChannelFormat {
        base64: false,
        close_signal: false,
    };
    const V5: ChannelFormat = ChannelFormat {
        base64: false,
        close_signal: true,
    };
    const BASE64: ChannelFormat = ChannelFormat {
        base64: true,
        close_signal: false,
    };

    /// Decodes one message cut into two pieces.
    fn decode(
        format: ChannelFormat,
        message: &[u8],
        cut: usize,
    ) -> Result<Vec<ChannelEvent>, Error> {
        let (head, tail) = message.split_at(cut.min(message.len()));
        let mut decoder = ChannelDecoder::new(format);
        let mut events = Vec::new();
        events.extend(decoder.decode(false, BytesMut::from(head))?);
        events.extend(decoder.decode(true, BytesMut::from(tail))?);
        Ok(events)
    }

    fn joined(events: Vec<ChannelEvent>) -> Vec<(u8, Vec<u8>)> {
        let mut all: Vec<(u8, Vec<u8>)> = Vec::new();
        for event in events {
            let ChannelEvent::Data { channel, payload } = event else {
                panic!("{event:?}")
            };
            match all.last_mut() {
                Some((same, data)) if *same == channel => data.extend(&payload),
                _ => all.push((channel, payload.to_vec())),
            }
        }
        all
    }

    #[test]
    fn data_empty_messages_and_close() {
        for cut in 0..4 {
            assert_eq!(
                joined(decode(V5, b"\0abc", cut).unwrap()),
                [(0, b"abc".to_vec())]
            );
            assert_eq!(
                joined(decode(BASE64, b"4Zm9v", cut).unwrap()),
                [(4, b"foo".to_vec())]
            );
            assert_eq!(
                decode(V5, b"\0", cut).unwrap(),
                [ChannelEvent::Empty { channel: 0 }]
            );
            assert_eq!(decode(V5, b"", cut).unwrap(), []);
            let closed = decode(V5, &[255, 0], cut).unwrap();
            assert_eq!(closed, [ChannelEvent::Closed { channel: 0 }]);
            for bad in [&[255][..], &[255, 0, 0]] {
                assert_eq!(decode(V5, bad, cut), Err(Error::CloseSignal));
            }
            // Before v5, 255 is one more channel that does not exist.
            assert_eq!(
                joined(decode(V4, &[255, 0], cut).unwrap()),
                [(255, vec![0])]
            );
        }
    }

    proptest! {
        #[test]
        fn garbage_never_panics(
            base64: bool,
            close_signal: bool,
            pieces in prop::collection::vec((any::<bool>(), prop::collection::vec(any::<u8>(), 0..20)), 0..20),
        ) {
            let mut decoder = ChannelDecoder::new(ChannelFormat { base64, close_signal });
            for (last, piece) in pieces {
                if decoder.decode(last, BytesMut::from(&piece[..])).is_err() {
                    break;
                }
            }
        }
    }
}
