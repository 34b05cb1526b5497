//! Turns received bytes into SPDY frames, however the bytes were cut on the way.
//!
//! DATA payload is handed out as it arrives and never collected, so a 16 MiB frame
//! costs no more memory than a small one; only control frames are held until whole.

use bytes::{Buf, BytesMut};

use super::{
    Error, FLAG_FIN, FRAME_HEAD, HeaderBlock, MAX_CONTROL_PAYLOAD, VERSION, frame_type,
    headers::Inflater,
};

/// What a client's bytes meant.
#[derive(Debug, PartialEq, Eq)]
pub enum Frame {
    /// The client opened a stream.
    Open {
        /// Stream id as sent; whether it is odd and ascending is the receiver's check.
        stream: u32,
        /// Headers of the stream.
        headers: HeaderBlock,
    },
    /// A piece of a stream's data, in order.
    Data {
        /// Stream id, not necessarily of a stream that exists.
        stream: u32,
        /// Never empty.
        payload: BytesMut,
    },
    /// The client sends nothing more on a stream.
    Fin {
        /// Stream id, not necessarily of a stream that exists.
        stream: u32,
    },
    /// The client dropped both directions of a stream.
    Reset {
        /// Stream id, not necessarily of a stream that exists.
        stream: u32,
    },
    /// A ping; those with odd ids ask for an echo, the others answer one.
    Ping {
        /// Id to echo.
        id: u32,
    },
    /// The client opens no further streams.
    GoAway,
}

enum State {
    /// Waiting for a whole frame head (and the payload, if it is a control frame).
    Head,
    /// Inside the payload of a DATA frame.
    Data {
        stream: u32,
        remaining: usize,
        fin: bool,
    },
    /// Inside the payload of a control frame without meaning here.
    Skip { remaining: usize },
    /// A frame ended its stream: report that next.
    Ended { stream: u32 },
}

/// Decoder for the client's direction of one connection.
pub struct Decoder {
    state: State,
    /// None once no stream can be opened any more.
    inflater: Option<Inflater>,
}

impl Default for Decoder {
    fn default() -> Self {
        Self::new()
    }
}

impl Decoder {
    /// A decoder at the start of a connection.
    pub fn new() -> Self {
        Self {
            state: State::Head,
            inflater: Some(Inflater::new()),
        }
    }

    /// Frees the decompressor (tens of KiB). Header blocks that still come are an error.
    pub fn expect_no_more_headers(&mut self) {
        self.inflater = None;
    }

    /// Takes the next frame, or piece of a DATA frame, off the front of `input`.
    ///
    /// `Ok(None)` asks for more bytes. At most one control frame stays in `input`.
    pub fn decode(&mut self, input: &mut BytesMut) -> Result<Option<Frame>, Error> {
        loop {
            match self.state {
                State::Ended { stream } => {
                    self.state = State::Head;
                    return Ok(Some(Frame::Fin { stream }));
                }
                State::Data {
                    stream,
                    remaining,
                    fin,
                } => {
                    let taken = remaining.min(input.len());
                    if taken == 0 {
                        return Ok(None);
                    }
                    self.state = Self::after_data(stream, remaining - taken, fin);
                    return Ok(Some(Frame::Data {
                        stream,
                        payload: input.split_to(taken),
                    }));
                }
                State::Skip { remaining } => {
                    let taken = remaining.min(input.len());
                    input.advance(taken);
                    if taken < remaining {
                        self.state = State::Skip {
                            remaining: remaining - taken,
                        };
                        return Ok(None);
                    }
                    self.state = State::Head;
                }
                State::Head => match self.head(input)? {
                    Step::Frame(frame) => return Ok(Some(frame)),
                    Step::Again => {}
                    Step::NeedBytes => return Ok(None),
                },
            }
        }
    }

    fn after_data(stream: u32, remaining: usize, fin: bool) -> State {
        match (remaining, fin) {
            (0, true) => State::Ended { stream },
            (0, false) => State::Head,
            _ => State::Data {
                stream,
                remaining,
                fin,
            },
        }
    }

    fn head(&mut self, input: &mut BytesMut) -> Result<Step, Error> {
        let Some((head, payload)) = input.split_first_chunk::<FRAME_HEAD>() else {
            return Ok(Step::NeedBytes);
        };
        let [a, b, c, d, flags, l0, l1, l2] = *head;
        let length = u32::from_be_bytes([0, l0, l1, l2]);
        // A 24-bit number fits into usize on every target of this crate.
        let size = length as usize;
        if a & 0x80 == 0 {
            let stream = u32::from_be_bytes([a, b, c, d]);
            if stream == 0 {
                return Err(Error::StreamZero);
            }
            input.advance(FRAME_HEAD);
            self.state = Self::after_data(stream, size, flags & FLAG_FIN != 0);
            return Ok(Step::Again);
        }
        let version = u16::from_be_bytes([a & 0x7f, b]);
        if version != VERSION {
            return Err(Error::Version(version));
        }
        let frame_type = u16::from_be_bytes([c, d]);
        if !is_meaningful(frame_type) {
            input.advance(FRAME_HEAD);
            self.state = State::Skip { remaining: size };
            return Ok(Step::Again);
        }
        if size > MAX_CONTROL_PAYLOAD {
            return Err(Error::ControlFrameTooLong { frame_type, length });
        }
        let Some(payload) = payload.get(..size) else {
            return Ok(Step::NeedBytes);
        };
        let step = Self::control(
            &mut self.state,
            &mut self.inflater,
            frame_type,
            flags,
            payload,
        );
        input.advance(FRAME_HEAD + size);
        step
    }

    fn control(
        state: &mut State,
        inflater: &mut Option<Inflater>,
        frame_type: u16,
        flags: u8,
        payload: &[u8],
    ) -> Result<Step, Error> {
        let malformed = Error::MalformedControlFrame { frame_type };
        if frame_type == frame_type::GOAWAY {
            return Ok(Step::Frame(Frame::GoAway));
        }
        // All other types begin with a stream id, a ping with its own id.
        let Some((id, rest)) = payload.split_first_chunk() else {
            return Err(malformed);
        };
        if frame_type == frame_type::PING {
            return Ok(Step::Frame(Frame::Ping {
                id: u32::from_be_bytes(*id),
            }));
        }
        let stream = u32::from_be_bytes(*id) & 0x7fff_ffff;
        if stream == 0 {
            return Err(Error::StreamZero);
        }
        if frame_type == frame_type::RST_STREAM {
            return Ok(Step::Frame(Frame::Reset { stream }));
        }
        let block = if frame_type == frame_type::SYN_STREAM {
            // Associated stream, priority and credential slot mean nothing here.
            rest.get(6..).ok_or(malformed)?
        } else {
            rest
        };
        let inflater = inflater.as_mut().ok_or(Error::UnexpectedHeaders)?;
        let plain = inflater.inflate(block)?;
        if flags & FLAG_FIN != 0 {
            *state = State::Ended { stream };
        }
        if frame_type != frame_type::SYN_STREAM {
            // SYN_REPLY and HEADERS answer nothing that a server asked.
            return Ok(Step::Again);
        }
        let headers = HeaderBlock::parse(&plain)?;
        Ok(Step::Frame(Frame::Open { stream, headers }))
    }
}

enum Step {
    Frame(Frame),
    Again,
    NeedBytes,
}

/// SETTINGS, WINDOW_UPDATE and types unknown to the draft are skipped: spdystream
/// ignores the first two as well, flow control is left to TCP.
fn is_meaningful(frame_type: u16) -> bool {
    matches!(
        frame_type,
        frame_type::SYN_STREAM
            | frame_type::SYN_REPLY
            | frame_type::RST_STREAM
            | frame_type::PING
            | frame_type::GOAWAY
            | frame_type::HEADERS
    )
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::spdy::dictionary::DICTIONARY;

    struct Client {
        zlib: flate2::Compress,
        wire: Vec<u8>,
    }

    impl Client {
        fn new() -> Self {
            let mut zlib = flate2::Compress::new(flate2::Compression::best(), true);
            zlib.set_dictionary(DICTIONARY).unwrap();
            Self {
                zlib,
                wire: Vec::new(),
            }
        }

        fn control(&mut self, frame_type: u16, flags: u8, payload: &[u8]) {
            self.wire.extend([0x80, 3]);
            self.wire.extend(frame_type.to_be_bytes());
            let length = u32::try_from(payload.len()).unwrap();
            self.wire
                .extend(((u32::from(flags) << 24) | length).to_be_bytes());
            self.wire.extend(payload);
        }

        fn headers(&mut self, frame_type: u16, flags: u8, stream: u32, fields: &[(&str, &str)]) {
            let mut plain = u32::try_from(fields.len()).unwrap().to_be_bytes().to_vec();
            for text in fields.iter().flat_map(|(name, value)| [name, value]) {
                plain.extend(u32::try_from(text.len()).unwrap().to_be_bytes());
                plain.extend(text.as_bytes());
            }
            let mut block = Vec::with_capacity(plain.len() + 128);
            self.zlib
                .compress_vec(&plain, &mut block, flate2::FlushCompress::Sync)
                .unwrap();
            let mut payload = stream.to_be_bytes().to_vec();
            if frame_type == frame_type::SYN_STREAM {
                payload.extend([0; 6]);
            }
            payload.extend(block);
            self.control(frame_type, flags, &payload);
        }

        fn data(&mut self, stream: u32, fin: bool, payload: &[u8]) {
            self.wire.extend(stream.to_be_bytes());
            let length = u32::try_from(payload.len()).unwrap();
            self.wire
                .extend(((u32::from(fin) << 24) | length).to_be_bytes());
            self.wire.extend(payload);
        }
    }

    /// Decodes `wire` fed in pieces that end at `cuts`; DATA pieces are joined again.
    fn decode(wire: &[u8], cuts: &[usize]) -> Result<Vec<Frame>, Error> {
        let mut decoder = Decoder::new();
        let mut input = BytesMut::new();
        let mut frames = Vec::new();
        let mut fed = 0;
        for end in cuts.iter().copied().chain([wire.len()]) {
            let end = end.clamp(fed, wire.len());
            input.extend_from_slice(&wire[fed..end]);
            fed = end;
            while let Some(frame) = decoder.decode(&mut input)? {
                match (frames.last_mut(), frame) {
                    (
                        Some(Frame::Data { stream, payload }),
                        Frame::Data {
                            stream: next,
                            payload: more,
                        },
                    ) if *stream == next => payload.extend_from_slice(&more),
                    (_, frame) => frames.push(frame),
                }
            }
        }
        Ok(frames)
    }

    fn session() -> Vec<u8> {
        let mut client = Client::new();
        client.headers(frame_type::SYN_STREAM, 0, 1, &[("streamtype", "error")]);
        client.control(frame_type::SETTINGS, 0, &[0; 4]);
        client.headers(frame_type::HEADERS, 0, 1, &[("ignored", "yes")]);
        client.headers(frame_type::SYN_STREAM, 0, 3, &[("streamtype", "stdin")]);
        client.control(frame_type::PING, 0, &7u32.to_be_bytes());
        client.data(3, false, b"some input");
        client.control(99, 0, b"a type of the future");
        client.data(3, true, b"");
        client.control(frame_type::RST_STREAM, 0, &[0, 0, 0, 1, 0, 0, 0, 5]);
        client.control(frame_type::GOAWAY, 0, &[0; 8]);
        client.wire
    }

    fn meaning(frames: &[Frame]) -> Vec<String> {
        frames
            .iter()
            .map(|frame| match frame {
                Frame::Open { stream, headers } => {
                    format!("open {stream} {}", headers.get("streamType").unwrap_or("-"))
                }
                Frame::Data { stream, payload } => {
                    format!("data {stream} {}", String::from_utf8_lossy(payload))
                }
                Frame::Fin { stream } => format!("fin {stream}"),
                Frame::Reset { stream } => format!("reset {stream}"),
                Frame::Ping { id } => format!("ping {id}"),
                Frame::GoAway => "goaway".to_owned(),
            })
            .collect()
    }

    #[test]
    fn decodes_a_session() {
        let frames = decode(&session(), &[]).unwrap();
        assert_eq!(
            meaning(&frames),
            [
                "open 1 error",
                "open 3 stdin",
                "ping 7",
                "data 3 some input",
                "fin 3",
                "reset 1",
                "goaway"
            ]
        );
    }

    #[test]
    fn refuses_what_is_no_spdy() {
        let too_long = [0x80, 3, 0, 1, 0, 2, 0, 0];
        let cases: [(&[u8], Error); 5] = [
            (b"\x80\x02\0\x06\0\0\0\x04\0\0\0\x01", Error::Version(2)),
            (b"\0\0\0\0\0\0\0\x01x", Error::StreamZero),
            (
                b"\x80\x03\0\x06\0\0\0\x02\0\0",
                Error::MalformedControlFrame {
                    frame_type: frame_type::PING,
                },
            ),
            (
                b"\x80\x03\0\x01\0\0\0\x0c\0\0\0\x01\0\0\0\0\0\0no",
                Error::Compression,
            ),
            (
                &too_long,
                Error::ControlFrameTooLong {
                    frame_type: 1,
                    length: 0x0002_0000,
                },
            ),
        ];
        for (wire, error) in cases {
            assert_eq!(decode(wire, &[]), Err(error), "{wire:?}");
        }
    }

    #[test]
    fn headers_after_the_last_stream_are_refused() {
        let mut decoder = Decoder::new();
        decoder.expect_no_more_headers();
        let mut input = BytesMut::from(&session()[..]);
        assert_eq!(decoder.decode(&mut input), Err(Error::UnexpectedHeaders));
    }

    #[test]
    fn a_huge_frame_is_not_collected() {
        let mut decoder = Decoder::new();
        let mut input = BytesMut::from(&[0, 0, 0, 3, 1, 0xff, 0xff, 0xff][..]);
        input.extend_from_slice(&[0; 1000]);
        let Some(Frame::Data { stream: 3, payload }) = decoder.decode(&mut input).unwrap() else {
            panic!("the part that arrived is handed out");
        };
        assert_eq!(payload.len(), 1000);
        assert!(input.is_empty());
    }

    proptest! {
        #[test]
        fn chunking_never_changes_the_meaning(mut cuts in prop::collection::vec(0usize..400, 0..40)) {
            let wire = session();
            cuts.sort_unstable();
            let whole = decode(&wire, &[]).unwrap();
            prop_assert_eq!(meaning(&decode(&wire, &cuts).unwrap()), meaning(&whole));
        }

        #[test]
        fn garbage_never_panics(wire in prop::collection::vec(any::<u8>(), 0..2000), cut in 0usize..2000) {
            let _ = decode(&wire, &[cut]);
        }

        #[test]
        fn damaged_sessions_never_panic(at in 0usize..300, byte in any::<u8>()) {
            let mut wire = session();
            let length = wire.len();
            wire[at % length] = byte;
            let _ = decode(&wire, &[at]);
        }
    }
}
