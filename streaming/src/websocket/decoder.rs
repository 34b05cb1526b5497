//! Turns a client's bytes into pieces of messages and control frames.
//!
//! Text and binary are not told apart: Kubernetes clients send stdin as either, and
//! text of a terminal may be cut inside a character.

use bytes::{Buf, Bytes, BytesMut};

use super::Error;

/// Largest payload of a control frame.
const MAX_CONTROL: u64 = 125;

mod opcode {
    pub(super) const CONTINUATION: u8 = 0;
    pub(super) const TEXT: u8 = 1;
    pub(super) const BINARY: u8 = 2;
    pub(super) const CLOSE: u8 = 8;
    pub(super) const PING: u8 = 9;
    pub(super) const PONG: u8 = 10;
}

/// What a client's bytes meant.
#[derive(Debug, PartialEq, Eq)]
pub enum Frame {
    /// A piece of a message, in order and unmasked. Empty only where a frame is.
    Data {
        /// Whether the piece begins a message.
        first: bool,
        /// Whether the piece ends a message.
        last: bool,
        /// The unmasked bytes.
        payload: BytesMut,
    },
    /// A ping: its payload goes back in a pong.
    Ping(Bytes),
    /// A pong, asked for or not.
    Pong,
    /// The client closes, with its code if it gave one. Nothing follows.
    Close(Option<u16>),
}

enum State {
    Head,
    Payload {
        remaining: u64,
        mask: [u8; 4],
        first: bool,
        fin: bool,
    },
    Closed,
}

/// Decoder for the client's direction of one connection.
pub struct Decoder {
    state: State,
    /// A message has begun and its final frame has not been seen.
    in_message: bool,
}

impl Default for Decoder {
    fn default() -> Self {
        Self::new()
    }
}

impl Decoder {
    /// A decoder at the first byte after the handshake.
    pub fn new() -> Self {
        Self {
            state: State::Head,
            in_message: false,
        }
    }

    /// Takes the next piece off the front of `input`; `Ok(None)` asks for more bytes.
    ///
    /// At most one frame head or control frame stays in `input`; after a Close, all
    /// that follows is dropped.
    pub fn decode(&mut self, input: &mut BytesMut) -> Result<Option<Frame>, Error> {
        match self.state {
            State::Closed => {
                input.clear();
                Ok(None)
            }
            State::Payload {
                remaining,
                mask,
                first,
                fin,
            } => {
                let taken = usize::try_from(remaining)
                    .unwrap_or(usize::MAX)
                    .min(input.len());
                if taken == 0 {
                    return Ok(None);
                }
                let mut payload = input.split_to(taken);
                unmask(&mut payload, mask);
                let remaining = remaining - taken as u64;
                let last = fin && remaining == 0;
                if remaining == 0 {
                    self.finish_frame(fin);
                } else {
                    let mut mask = mask;
                    mask.rotate_left(taken % 4);
                    self.state = State::Payload {
                        remaining,
                        mask,
                        first: false,
                        fin,
                    };
                }
                Ok(Some(Frame::Data {
                    first,
                    last,
                    payload,
                }))
            }
            State::Head => self.head(input),
        }
    }

    fn finish_frame(&mut self, fin: bool) {
        self.in_message = !fin;
        self.state = State::Head;
    }

    fn head(&mut self, input: &mut BytesMut) -> Result<Option<Frame>, Error> {
        let Some(head) = Head::parse(input)? else {
            return Ok(None);
        };
        if head.is_control() {
            if !head.fin || head.length > MAX_CONTROL {
                return Err(Error::ControlFrame);
            }
            // At most 125, see above.
            let length = head.length as usize;
            if input.len() < head.size + length {
                return Ok(None);
            }
            input.advance(head.size);
            let mut payload = input.split_to(length);
            unmask(&mut payload, head.mask);
            return self.control(head.opcode, payload.freeze()).map(Some);
        }
        let first = head.opcode != opcode::CONTINUATION;
        if first == self.in_message {
            return Err(Error::Continuation);
        }
        input.advance(head.size);
        if head.length == 0 {
            self.finish_frame(head.fin);
            return Ok(Some(Frame::Data {
                first,
                last: head.fin,
                payload: BytesMut::new(),
            }));
        }
        self.in_message = true;
        self.state = State::Payload {
            remaining: head.length,
            mask: head.mask,
            first,
            fin: head.fin,
        };
        self.decode(input)
    }

    fn control(&mut self, opcode: u8, payload: Bytes) -> Result<Frame, Error> {
        match opcode {
            opcode::PING => Ok(Frame::Ping(payload)),
            opcode::PONG => Ok(Frame::Pong),
            _ => {
                let code = match payload.split_first_chunk() {
                    Some((code, _)) => Some(u16::from_be_bytes(*code)),
                    None if payload.is_empty() => None,
                    None => return Err(Error::ControlFrame),
                };
                self.state = State::Closed;
                Ok(Frame::Close(code))
            }
        }
    }
}

struct Head {
    fin: bool,
    opcode: u8,
    length: u64,
    mask: [u8; 4],
    /// Bytes of the head itself.
    size: usize,
}

impl Head {
    fn is_control(&self) -> bool {
        self.opcode & 0x08 != 0
    }

    fn parse(input: &[u8]) -> Result<Option<Self>, Error> {
        let Some((&[first, second], rest)) = input.split_first_chunk() else {
            return Ok(None);
        };
        if first & 0x70 != 0 {
            return Err(Error::ReservedBits);
        }
        let opcode = first & 0x0f;
        if !matches!(
            opcode,
            opcode::CONTINUATION
                | opcode::TEXT
                | opcode::BINARY
                | opcode::CLOSE
                | opcode::PING
                | opcode::PONG
        ) {
            return Err(Error::Opcode(opcode));
        }
        if second & 0x80 == 0 {
            return Err(Error::Unmasked);
        }
        let (length, rest, extended) = match second & 0x7f {
            126 => {
                let Some((length, rest)) = rest.split_first_chunk() else {
                    return Ok(None);
                };
                (u64::from(u16::from_be_bytes(*length)), rest, 2)
            }
            127 => {
                let Some((length, rest)) = rest.split_first_chunk() else {
                    return Ok(None);
                };
                (u64::from_be_bytes(*length), rest, 8)
            }
            short => (u64::from(short), rest, 0),
        };
        if length >> 63 != 0 {
            return Err(Error::Length);
        }
        let Some((mask, _)) = rest.split_first_chunk() else {
            return Ok(None);
        };
        Ok(Some(Self {
            fin: first & 0x80 != 0,
            opcode,
            length,
            mask: *mask,
            size: 6 + extended,
        }))
    }
}

/// XORs the mask over a payload whose first byte is masked with `mask[0]`.
fn unmask(payload: &mut [u8], mask: [u8; 4]) {
    let [a, b, c, d] = mask;
    let wide = u64::from_ne_bytes([a, b, c, d, a, b, c, d]);
    let (chunks, rest) = payload.as_chunks_mut::<8>();
    for chunk in chunks {
        *chunk = (u64::from_ne_bytes(*chunk) ^ wide).to_ne_bytes();
    }
    for (byte, mask) in rest.iter_mut().zip(mask.into_iter().cycle()) {
        *byte ^= mask;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A client frame with the given head byte, masked.
    pub(crate) fn frame(first: u8, payload: &[u8]) -> Vec<u8> {
        let mask = [0x11, 0x22, 0x83, 0xf4];
        let mut wire = vec![first];
        match payload.len() {
            0..126 => wire.push(0x80 | u8::try_from(payload.len()).unwrap()),
            126..0x1_0000 => {
                wire.push(0x80 | 126);
                wire.extend(u16::try_from(payload.len()).unwrap().to_be_bytes());
            }
            _ => {
                wire.push(0x80 | 127);
                wire.extend(u64::try_from(payload.len()).unwrap().to_be_bytes());
            }
        }
        wire.extend(mask);
        wire.extend(
            payload
                .iter()
                .zip(mask.into_iter().cycle())
                .map(|(byte, mask)| byte ^ mask),
        );
        wire
    }

    fn decode(wire: &[u8], cuts: &[usize]) -> Result<Vec<Frame>, Error> {
        let mut decoder = Decoder::new();
        let mut input = BytesMut::new();
        let mut frames: Vec<Frame> = Vec::new();
        let mut fed = 0;
        for end in cuts.iter().copied().chain([wire.len()]) {
            let end = end.clamp(fed, wire.len());
            input.extend_from_slice(&wire[fed..end]);
            fed = end;
            while let Some(frame) = decoder.decode(&mut input)? {
                match (frames.last_mut(), frame) {
                    (
                        Some(Frame::Data { last, payload, .. }),
                        Frame::Data {
                            first: false,
                            last: ends,
                            payload: more,
                        },
                    ) if !*last => {
                        payload.extend_from_slice(&more);
                        *last = ends;
                    }
                    (_, frame) => frames.push(frame),
                }
            }
        }
        Ok(frames)
    }

    fn message(payload: &[u8]) -> Frame {
        Frame::Data {
            first: true,
            last: true,
            payload: BytesMut::from(payload),
        }
    }

    fn session(big: &[u8]) -> Vec<u8> {
        [
            frame(0x82, b"\0hello"),
            frame(0x01, b"\0in "),
            frame(0x00, b""),
            frame(0x80, b"parts"),
            frame(0x89, b"are you there"),
            frame(0x82, b""),
            frame(0x82, big),
            frame(0x8a, b""),
            frame(0x88, &[3, 0xe8, b'o', b'k']),
            frame(0x82, b"after the end"),
        ]
        .concat()
    }

    fn expected(big: &[u8]) -> Vec<Frame> {
        vec![
            message(b"\0hello"),
            message(b"\0in parts"),
            Frame::Ping(Bytes::from_static(b"are you there")),
            message(b""),
            message(big),
            Frame::Pong,
            Frame::Close(Some(1000)),
        ]
    }

    #[test]
    fn decodes_every_length_form() {
        for size in [1, 125, 126, 65_535, 65_536, 300_000] {
            let big: Vec<u8> = (0..size).map(|i: u32| i.to_le_bytes()[0]).collect();
            assert_eq!(
                decode(&session(&big), &[]).unwrap(),
                expected(&big),
                "{size}"
            );
        }
    }

    #[test]
    fn pings_inside_a_message_are_seen() {
        let wire = [frame(0x02, b"\0a"), frame(0x89, b"p"), frame(0x80, b"b")].concat();
        let frames = decode(&wire, &[]).unwrap();
        assert_eq!(frames.len(), 3);
        assert_eq!(frames[1], Frame::Ping(Bytes::from_static(b"p")));
    }

    #[test]
    fn a_huge_frame_is_not_collected() {
        let mut decoder = Decoder::new();
        let mut input = BytesMut::from(&[0x82, 0xff, 0, 0, 0, 0, 0x10, 0, 0, 0, 1, 2, 3, 4][..]);
        input.extend_from_slice(&[0; 1000]);
        let Some(Frame::Data {
            first: true,
            last: false,
            payload,
        }) = decoder.decode(&mut input).unwrap()
        else {
            panic!("the part that arrived is handed out");
        };
        assert_eq!(payload.len(), 1000);
        assert!(input.is_empty());
    }

    #[test]
    fn refuses_what_is_no_websocket() {
        let cases: [(&[u8], Error); 8] = [
            (b"\xc2\x80", Error::ReservedBits),
            (b"\x82\x05hello", Error::Unmasked),
            (b"\x83\x80", Error::Opcode(3)),
            (b"\x09\x80\0\0\0\0", Error::ControlFrame),
            (b"\x89\xfe\0\x80\0\0\0\0", Error::ControlFrame),
            (b"\x88\x81\0\0\0\0\0", Error::ControlFrame),
            (b"\x80\x81\0\0\0\0x", Error::Continuation),
            (b"\x82\xff\x80\0\0\0\0\0\0\0\0\0\0\0", Error::Length),
        ];
        for (wire, error) in cases {
            assert_eq!(decode(wire, &[]), Err(error), "{wire:?}");
        }
        let nested = [frame(0x02, b"a"), frame(0x82, b"b")].concat();
        assert_eq!(decode(&nested, &[]), Err(Error::Continuation));
    }

    proptest! {
        #[test]
        fn chunking_never_changes_the_meaning(
            mut cuts in prop::collection::vec(0usize..700, 0..40),
            big in prop::collection::vec(any::<u8>(), 1..500),
        ) {
            cuts.sort_unstable();
            prop_assert_eq!(decode(&session(&big), &cuts).unwrap(), expected(&big));
        }

        #[test]
        fn garbage_never_panics(wire in prop::collection::vec(any::<u8>(), 0..2000), cut in 0usize..2000) {
            let _ = decode(&wire, &[cut]);
        }

        #[test]
        fn damaged_sessions_never_panic(at in 0usize..120, byte in any::<u8>()) {
            let mut wire = session(b"big");
            let length = wire.len();
            wire[at % length] = byte;
            let _ = decode(&wire, &[at]);
        }
    }
}
