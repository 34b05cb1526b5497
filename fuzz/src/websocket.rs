//! WebSocket frames of a client and the channels in them, cut anywhere.

use bytes::BytesMut;
use sandman_streaming::websocket::{ChannelDecoder, ChannelEvent, ChannelFormat, Decoder, Frame};

use crate::{pieces, way};

pub(crate) const WORDS: &[&[u8]] = &[
    &[0x82, 0x81, 0, 0, 0, 0, 0],
    &[0x02, 0x81, 0, 0, 0, 0, 0],
    &[0x80, 0x81, 0, 0, 0, 0, 0],
    &[0x81, 0x85, 0, 0, 0, 0, b'0', b'Y', b'Q', b'=', b'='],
    &[0x82, 0x82, 0, 0, 0, 0, 255, 0],
    &[0x88, 0x82, 0, 0, 0, 0, 3, 0xe8],
    &[0x89, 0x80, 0, 0, 0, 0],
    &[0x8a, 0x80, 0, 0, 0, 0],
    &[0xfe, 0x00, 0x80],
    &[0xff, 0x00, 0x00, 0x00, 0x00, 0x00, 0x01, 0x00, 0x00],
];

const FORMATS: [ChannelFormat; 3] = [
    ChannelFormat {
        base64: false,
        close_signal: false,
    },
    ChannelFormat {
        base64: true,
        close_signal: false,
    },
    ChannelFormat {
        base64: false,
        close_signal: true,
    },
];

pub(crate) fn run(input: &[u8]) -> u64 {
    let (input, size) = pieces(input);
    let ways = FORMATS.map(|format| {
        let whole = read([input].into_iter(), format);
        let cut = read(input.chunks(size), format);
        same(&whole, &cut);
        let kinds: Vec<_> = whole.1.iter().map(|step| (step.0, step.1)).collect();
        (whole.0.is_some(), kinds)
    });
    way(&ways)
}

type Step = (u8, u8, Vec<u8>);

fn read<'a>(
    parts: impl Iterator<Item = &'a [u8]>,
    format: ChannelFormat,
) -> (Option<String>, Vec<Step>) {
    let mut decoder = Decoder::new();
    let mut channels = ChannelDecoder::new(format);
    let mut buffer = BytesMut::new();
    let mut steps: Vec<Step> = Vec::new();
    for part in parts {
        buffer.extend_from_slice(part);
        loop {
            let frame = match decoder.decode(&mut buffer) {
                Ok(Some(frame)) => frame,
                Ok(None) => break,
                Err(error) => return (Some(error.to_string()), steps),
            };
            let step = match frame {
                Frame::Data { last, payload, .. } => match channels.decode(last, payload) {
                    Ok(None) => continue,
                    Err(error) => return (Some(error.to_string()), steps),
                    Ok(Some(ChannelEvent::Empty { channel })) => (1, channel, vec![]),
                    Ok(Some(ChannelEvent::Closed { channel })) => (2, channel, vec![]),
                    Ok(Some(ChannelEvent::Data { channel, payload })) => {
                        assert!(!payload.is_empty(), "a piece of data without data");
                        match steps.last_mut() {
                            Some((0, last, bytes)) if *last == channel => {
                                bytes.extend_from_slice(&payload);
                                continue;
                            }
                            _ => (0, channel, payload.to_vec()),
                        }
                    }
                },
                Frame::Ping(payload) => (3, 0, payload.to_vec()),
                Frame::Pong => (4, 0, vec![]),
                Frame::Close(code) => (5, 0, format!("{code:?}").into_bytes()),
            };
            steps.push(step);
        }
    }
    (None, steps)
}

/// How it ends does not depend on the cuts of the network, nor does what came of it, but for what
/// was read together with a mistake.
fn same(whole: &(Option<String>, Vec<Step>), cut: &(Option<String>, Vec<Step>)) {
    assert_eq!(whole.0, cut.0, "the cuts of the network make a difference");
    if whole.0.is_none() {
        assert_eq!(whole.1, cut.1, "the cuts of the network make a difference");
    }
}
