//! SPDY frames of a client, cut anywhere.

use bytes::BytesMut;
use sandman_streaming::spdy::{Decoder, Error, Frame};

use crate::{pieces, way};

pub(crate) const WORDS: &[&[u8]] = &[
    &[0x80, 0x03, 0x00, 0x01],
    &[0x80, 0x03, 0x00, 0x03, 0, 0, 0, 8],
    &[0x80, 0x03, 0x00, 0x06, 0, 0, 0, 4],
    &[0x80, 0x03, 0x00, 0x07, 0, 0, 0, 8],
    &[0x80, 0x03, 0x00, 0x04],
    &[0x80, 0x03, 0x00, 0x09],
    &[0, 0, 0, 1, 1, 0, 0, 4],
    &[0xff, 0xff, 0xff],
    &[0x78, 0xbb, 0xe3, 0xc6],
];

pub(crate) fn run(input: &[u8]) -> u64 {
    let (input, size) = pieces(input);
    let whole = read([input].into_iter());
    let cut = read(input.chunks(size));
    same(&whole, &cut);
    way(&whole.1.iter().map(|step| step.0).collect::<Vec<_>>())
}

/// What a step was, and its bytes.
type Step = (u8, u32, Vec<u8>);

/// The frames, with data joined however it came, and how it ended.
fn read<'a>(parts: impl Iterator<Item = &'a [u8]>) -> (Option<String>, Vec<Step>) {
    let mut decoder = Decoder::new();
    let mut buffer = BytesMut::new();
    let mut steps: Vec<Step> = Vec::new();
    for part in parts {
        buffer.extend_from_slice(part);
        loop {
            let frame = match decoder.decode(&mut buffer) {
                Ok(Some(frame)) => frame,
                Ok(None) => break,
                Err(error) => return (Some(error_text(&error)), steps),
            };
            let step = match frame {
                Frame::Open { stream, headers } => {
                    (0, stream, format!("{:?}", headers.fields()).into_bytes())
                }
                Frame::Data { stream, payload } => {
                    assert!(!payload.is_empty(), "a piece of data without data");
                    match steps.last_mut() {
                        Some((1, last, bytes)) if *last == stream => {
                            bytes.extend_from_slice(&payload);
                            continue;
                        }
                        _ => (1, stream, payload.to_vec()),
                    }
                }
                Frame::Fin { stream } => (2, stream, vec![]),
                Frame::Reset { stream } => (3, stream, vec![]),
                Frame::Ping { id } => (4, id, vec![]),
                Frame::GoAway => (5, 0, vec![]),
            };
            steps.push(step);
        }
    }
    (None, steps)
}

fn error_text(error: &Error) -> String {
    error.to_string()
}

/// How it ends does not depend on the cuts of the network, nor does what came of it, but for what
/// was read together with a mistake.
fn same(whole: &(Option<String>, Vec<Step>), cut: &(Option<String>, Vec<Step>)) {
    assert_eq!(whole.0, cut.0, "the cuts of the network make a difference");
    if whole.0.is_none() {
        assert_eq!(whole.1, cut.1, "the cuts of the network make a difference");
    }
}
