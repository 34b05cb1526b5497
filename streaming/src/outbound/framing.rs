//! Turns frames into bytes for each of the three ways, without copying large payloads.

use std::{collections::VecDeque, io::IoSlice};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use bytes::{Buf, BufMut as _, Bytes, BytesMut};

use crate::{spdy, websocket};

/// Payloads below this are copied behind their head; larger ones are written in place.
const COPY_BELOW: usize = 2 * 1024;

/// A frame to send, whatever the transport; those that a transport lacks cost nothing.
#[derive(Debug)]
pub(crate) enum Frame {
    /// Data of a stream, perhaps its last.
    Data {
        stream: u32,
        payload: Vec<Bytes>,
        fin: bool,
    },
    /// A channel message without data (WebSocket channels only).
    Greeting { stream: u32 },
    /// Accepts a stream (SPDY only).
    Accept { stream: u32 },
    /// Drops a stream (SPDY only).
    Reset {
        stream: u32,
        status: spdy::ResetStatus,
    },
    /// Echo of a SPDY ping.
    SpdyPing { id: u32 },
    /// Answer to a WebSocket ping.
    Pong(Bytes),
    /// WebSocket ping; SPDY connections get none, as Go's server sends none.
    Ping,
    /// Unsolicited pong, or its like: proves life without asking for an answer.
    KeepAlive,
    /// WebSocket Close; SPDY connections just end.
    Close(u16),
}

impl Frame {
    pub(crate) fn data(stream: u32, payload: impl Into<Bytes>, fin: bool) -> Self {
        Self::Data {
            stream,
            payload: vec![payload.into()],
            fin,
        }
    }

    pub(crate) fn fin(stream: u32) -> Self {
        Self::Data {
            stream,
            payload: Vec::new(),
            fin: true,
        }
    }
}

/// Encoder of one connection.
pub(crate) enum Framing {
    Spdy(spdy::Encoder),
    Tunnel(spdy::Encoder),
    Channels { base64: bool },
}

impl Framing {
    pub(crate) fn spdy() -> Self {
        Self::Spdy(spdy::Encoder::new())
    }

    pub(crate) fn tunnel() -> Self {
        Self::Tunnel(spdy::Encoder::new())
    }

    pub(crate) fn channels(base64: bool) -> Self {
        Self::Channels { base64 }
    }

    pub(crate) fn encode(&mut self, frame: Frame, out: &mut Batch) {
        match self {
            Self::Spdy(encoder) => encode_spdy(encoder, frame, out),
            Self::Tunnel(encoder) => encode_tunnel(encoder, frame, out),
            Self::Channels { base64 } => {
                encode_channels(*base64, frame, out);
                out.end_message();
            }
        }
    }
}

fn encode_spdy(encoder: &mut spdy::Encoder, frame: Frame, out: &mut Batch) {
    match frame {
        Frame::Data {
            stream,
            payload,
            fin,
        } => {
            encoder.data(out.small(), stream, total(&payload), fin);
            payload.into_iter().for_each(|part| out.push(part));
        }
        Frame::KeepAlive => encoder.probe(out.small()),
        frame => encode_spdy_control(encoder, frame, out.small()),
    }
}

/// A SPDY frame is one message; only the head of a DATA frame needs to be known first.
fn encode_tunnel(encoder: &mut spdy::Encoder, frame: Frame, out: &mut Batch) {
    match frame {
        Frame::Data {
            stream,
            payload,
            fin,
        } => {
            let length = total(&payload);
            websocket::binary_head(out.small(), 8 + length);
            encoder.data(out.small(), stream, length, fin);
            payload.into_iter().for_each(|part| out.push(part));
        }
        Frame::Pong(payload) => websocket::pong(out.small(), &payload),
        Frame::KeepAlive => websocket::pong(out.small(), &[]),
        Frame::Ping => websocket::ping(out.small()),
        Frame::Close(code) => websocket::close(out.small(), code),
        frame => {
            let mut inner = BytesMut::new();
            encode_spdy_control(encoder, frame, &mut inner);
            if !inner.is_empty() {
                websocket::binary_head(out.small(), inner.len());
                out.small().put_slice(&inner);
            }
        }
    }
}

fn encode_spdy_control(encoder: &mut spdy::Encoder, frame: Frame, out: &mut BytesMut) {
    match frame {
        Frame::Accept { stream } => encoder.accept(out, stream),
        Frame::Reset { stream, status } => encoder.reset(out, stream, status),
        Frame::SpdyPing { id } => encoder.ping(out, id),
        _ => {}
    }
}

fn encode_channels(base64: bool, frame: Frame, out: &mut Batch) {
    match frame {
        Frame::Data {
            stream, payload, ..
        } if total(&payload) > 0 => {
            channel_message(base64, stream, payload, out);
        }
        Frame::Greeting { stream } => channel_message(base64, stream, Vec::new(), out),
        Frame::Pong(payload) => websocket::pong(out.small(), &payload),
        Frame::KeepAlive => websocket::pong(out.small(), &[]),
        Frame::Ping => websocket::ping(out.small()),
        Frame::Close(code) => websocket::close(out.small(), code),
        // Channels have no end of their own, and no streams to accept or drop.
        Frame::Data { .. }
        | Frame::Accept { .. }
        | Frame::Reset { .. }
        | Frame::SpdyPing { .. } => {}
    }
}

fn channel_message(base64: bool, stream: u32, payload: Vec<Bytes>, out: &mut Batch) {
    // Channel numbers are below 256: the session makes them.
    let channel = stream as u8;
    if base64 {
        let text = STANDARD.encode(payload.concat());
        websocket::text_head(out.small(), 1 + text.len());
        out.small().put_u8(b'0'.wrapping_add(channel));
        out.push(text.into());
    } else {
        websocket::binary_head(out.small(), 1 + total(&payload));
        out.small().put_u8(channel);
        payload.into_iter().for_each(|part| out.push(part));
    }
}

fn total(payload: &[Bytes]) -> usize {
    payload.iter().map(Bytes::len).sum()
}

/// Bytes ready to be written: heads and small payloads side by side, large payloads
/// as they are.
#[derive(Default)]
pub(crate) struct Batch {
    parts: VecDeque<Bytes>,
    /// The part being filled; it stands behind all of `parts`.
    small: BytesMut,
    /// Numbers of parts that go out in writes of their own, the first ones of `parts`.
    messages: VecDeque<usize>,
}

impl Batch {
    /// What one write takes: a message, or everything where messages do not matter.
    ///
    /// With TLS each write is a record, and clients that poll the socket see a record, not
    /// what is left in one: Python's reads a message at a time and then waits for the
    /// socket, so that a status behind the last output is found when its time is up.
    pub(crate) fn next_write(&mut self) -> Option<Batch> {
        let write = match self.messages.pop_front() {
            Some(count) => Self {
                parts: self.parts.drain(..count).collect(),
                ..Self::default()
            },
            None => std::mem::take(self),
        };
        write.has_remaining().then_some(write)
    }

    fn end_message(&mut self) {
        self.end_part();
        let before: usize = self.messages.iter().sum();
        if self.parts.len() > before {
            self.messages.push_back(self.parts.len() - before);
        }
    }

    fn end_part(&mut self) {
        if !self.small.is_empty() {
            self.parts.push_back(self.small.split().freeze());
        }
    }

    fn small(&mut self) -> &mut BytesMut {
        &mut self.small
    }

    fn push(&mut self, payload: Bytes) {
        if payload.len() < COPY_BELOW {
            self.small.put_slice(&payload);
            return;
        }
        self.end_part();
        self.parts.push_back(payload);
    }
}

impl Buf for Batch {
    fn remaining(&self) -> usize {
        total_of(&self.parts) + self.small.len()
    }

    fn chunk(&self) -> &[u8] {
        self.parts.front().map_or(&self.small[..], |part| &part[..])
    }

    fn chunks_vectored<'a>(&'a self, slices: &mut [IoSlice<'a>]) -> usize {
        let parts = self.parts.iter().map(|part| &part[..]);
        let all = parts
            .chain([&self.small[..]])
            .filter(|part| !part.is_empty());
        let mut filled = 0;
        for (slot, part) in slices.iter_mut().zip(all) {
            *slot = IoSlice::new(part);
            filled += 1;
        }
        filled
    }

    fn advance(&mut self, mut count: usize) {
        while let Some(front) = self.parts.front_mut() {
            if count < front.len() {
                front.advance(count);
                return;
            }
            count -= front.len();
            self.parts.pop_front();
        }
        self.small.advance(count);
    }
}

fn total_of(parts: &VecDeque<Bytes>) -> usize {
    parts.iter().map(Bytes::len).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wire(mut framing: Framing, frames: impl IntoIterator<Item = Frame>) -> Vec<u8> {
        let mut batch = Batch::default();
        for frame in frames {
            framing.encode(frame, &mut batch);
        }
        let mut out = vec![0; batch.remaining()];
        batch.copy_to_slice(&mut out);
        out
    }

    #[test]
    fn channels_carry_only_messages() {
        let frames = || {
            [
                Frame::Accept { stream: 1 },
                Frame::Greeting { stream: 1 },
                Frame::data(1, "hi", true),
                Frame::fin(1),
                Frame::Close(1000),
            ]
        };
        let binary = wire(Framing::channels(false), frames());
        assert_eq!(binary, b"\x82\x01\x01\x82\x03\x01hi\x88\x02\x03\xe8");
        let base64 = wire(Framing::channels(true), frames());
        assert_eq!(base64, b"\x81\x011\x81\x051aGk=\x88\x02\x03\xe8");
    }

    #[test]
    fn channel_messages_are_written_apart_and_spdy_frames_together() {
        let frames = || {
            let large = vec![7; COPY_BELOW];
            [
                Frame::data(1, "hi", true),
                Frame::fin(1),
                Frame::data(1, large, false),
                Frame::Close(1000),
            ]
        };
        for (mut framing, lengths) in [
            (Framing::channels(false), vec![5, COPY_BELOW + 5, 4]),
            (Framing::spdy(), vec![8 + 2 + 8 + 8 + COPY_BELOW]),
        ] {
            let mut batch = Batch::default();
            for frame in frames() {
                framing.encode(frame, &mut batch);
            }
            let writes = std::iter::from_fn(|| batch.next_write());
            let found: Vec<_> = writes.map(|write| write.remaining()).collect();
            assert_eq!(found, lengths);
            assert_eq!(batch.remaining(), 0);
        }
    }

    #[test]
    fn a_tunnelled_frame_is_the_plain_frame_in_a_message() {
        let frames = || [Frame::Accept { stream: 1 }, Frame::data(1, "hi", true)];
        let plain = wire(Framing::spdy(), frames());
        let tunnel = wire(Framing::tunnel(), frames());
        let (reply, data) = plain.split_at(plain.len() - 10);
        let mut expected = vec![0x82, u8::try_from(reply.len()).unwrap()];
        expected.extend(reply);
        expected.extend([0x82, 10]);
        expected.extend(data);
        assert_eq!(tunnel, expected);
    }

    #[test]
    fn large_payloads_keep_their_place_between_small_ones() {
        let large = vec![7; COPY_BELOW];
        let payload = vec![Bytes::from_static(b"a"), large.clone().into(), "z".into()];
        let out = wire(
            Framing::spdy(),
            [Frame::Data {
                stream: 1,
                payload,
                fin: false,
            }],
        );
        assert_eq!(out[8..], [b"a", &large[..], b"z"].concat());
    }

    #[test]
    fn advance_crosses_parts() {
        let mut batch = Batch::default();
        batch.push(vec![1; COPY_BELOW].into());
        batch.push(vec![2; COPY_BELOW].into());
        batch.push("end".into());
        batch.advance(COPY_BELOW + 1);
        assert_eq!(batch.remaining(), COPY_BELOW + 2);
        assert_eq!(batch.chunk()[0], 2);
        batch.advance(COPY_BELOW);
        assert_eq!(batch.chunk(), b"nd");
    }
}
