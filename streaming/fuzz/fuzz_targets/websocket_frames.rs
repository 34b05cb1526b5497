//! Whatever a client sends, cut anywhere: the WebSocket and channel decoders neither
//! panic nor keep more than one control frame, and the cuts do not change what they read.
//!
//! Run with `cargo +nightly fuzz run websocket_frames` in `streaming/`.

#![no_main]

use bytes::BytesMut;
use libfuzzer_sys::fuzz_target;
use sandman_streaming::websocket::{ChannelDecoder, ChannelEvent, ChannelFormat, Decoder, Frame};

/// A control frame's head and largest payload, which is also more than any other head.
const MOST_KEPT: usize = 6 + 125;

fuzz_target!(|input: (u8, bool, bool, &[u8])| {
    let (piece, base64, close_signal, wire) = input;
    let format = ChannelFormat {
        base64,
        close_signal,
    };
    let whole = decode(format, wire, wire.len().max(1));
    let pieces = decode(format, wire, usize::from(piece).max(1));
    assert_eq!(whole.valid, pieces.valid);
    // Cut into pieces, the good part of a message may come out before its bad part.
    if whole.valid {
        assert_eq!(whole.events, pieces.events);
    }
});

struct Decoded {
    events: Vec<ChannelEvent>,
    valid: bool,
}

/// The events read, with the pieces of data joined, and whether the wire was valid.
fn decode(format: ChannelFormat, wire: &[u8], piece: usize) -> Decoded {
    let mut decoder = Decoder::new();
    let mut channels = ChannelDecoder::new(format);
    let mut input = BytesMut::new();
    let mut events: Vec<ChannelEvent> = Vec::new();
    for part in wire.chunks(piece) {
        input.extend_from_slice(part);
        loop {
            let event = match decoder.decode(&mut input) {
                Ok(Some(Frame::Data { last, payload, .. })) => channels.decode(last, payload),
                Ok(Some(_)) => continue,
                Ok(None) => break,
                Err(_) => {
                    return Decoded {
                        events,
                        valid: false,
                    };
                }
            };
            match event {
                Ok(Some(ChannelEvent::Data { channel, payload })) => match events.last_mut() {
                    Some(ChannelEvent::Data {
                        channel: same,
                        payload: data,
                    }) if *same == channel => {
                        data.extend_from_slice(&payload);
                    }
                    _ => events.push(ChannelEvent::Data { channel, payload }),
                },
                Ok(event) => events.extend(event),
                Err(_) => {
                    return Decoded {
                        events,
                        valid: false,
                    };
                }
            }
        }
        assert!(input.len() <= MOST_KEPT);
    }
    Decoded {
        events,
        valid: true,
    }
}
