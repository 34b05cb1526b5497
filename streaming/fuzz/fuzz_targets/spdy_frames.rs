//! Whatever a client sends, cut anywhere: the SPDY decoder neither panics nor keeps more
//! than one control frame, and the cuts do not change what it reads.
//!
//! Run with `cargo +nightly fuzz run spdy_frames` in `streaming/`.

#![no_main]

use bytes::BytesMut;
use libfuzzer_sys::fuzz_target;
use sandman_streaming::spdy::{Decoder, Frame};

/// A control frame's head and largest payload.
const MOST_KEPT: usize = 8 + 64 * 1024;

fuzz_target!(|input: (u8, &[u8])| {
    let (piece, wire) = input;
    let whole = decode(wire, wire.len().max(1));
    let pieces = decode(wire, usize::from(piece).max(1));
    assert_eq!(whole, pieces);
});

/// The frames read, with the pieces of DATA joined, and whether the wire was valid.
fn decode(wire: &[u8], piece: usize) -> (Vec<Frame>, bool) {
    let mut decoder = Decoder::new();
    let mut input = BytesMut::new();
    let mut frames: Vec<Frame> = Vec::new();
    for part in wire.chunks(piece) {
        input.extend_from_slice(part);
        loop {
            match decoder.decode(&mut input) {
                Ok(Some(Frame::Data { stream, payload })) => match frames.last_mut() {
                    Some(Frame::Data {
                        stream: same,
                        payload: data,
                    }) if *same == stream => {
                        data.extend_from_slice(&payload);
                    }
                    _ => frames.push(Frame::Data { stream, payload }),
                },
                Ok(Some(frame)) => frames.push(frame),
                Ok(None) => break,
                Err(_) => return (frames, false),
            }
        }
        assert!(input.len() <= MOST_KEPT);
    }
    (frames, true)
}
