//! Replays what Go's SPDY library sent (see `main.go` beside this file) into the decoder,
//! cut into pieces of several sizes.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use bytes::BytesMut;
use sandman_streaming::spdy::{Decoder, Frame};

fn decode(wire: &[u8], piece: usize) -> Vec<String> {
    let mut decoder = Decoder::new();
    let mut input = BytesMut::new();
    let mut meaning = Vec::new();
    let mut data: Option<(u32, Vec<u8>)> = None;
    for part in wire.chunks(piece) {
        input.extend_from_slice(part);
        while let Some(frame) = decoder.decode(&mut input).unwrap() {
            if let Frame::Data { stream, payload } = frame {
                if data.as_ref().is_some_and(|(current, _)| *current != stream) {
                    meaning.extend(data.take().map(describe_data));
                }
                data.get_or_insert((stream, Vec::new())).1.extend(&payload);
                continue;
            }
            meaning.extend(data.take().map(describe_data));
            meaning.push(match frame {
                Frame::Open { stream, headers } => {
                    let mut fields: Vec<_> = headers
                        .fields()
                        .iter()
                        .map(|(name, value)| format!("{name}={value}"))
                        .collect();
                    fields.sort();
                    format!("open {stream} {}", fields.join(" "))
                }
                Frame::Fin { stream } => format!("fin {stream}"),
                Frame::Reset { stream } => format!("reset {stream}"),
                Frame::Ping { id } => format!("ping {id}"),
                Frame::GoAway => "goaway".to_owned(),
                Frame::Data { .. } => unreachable!("taken above"),
            });
        }
    }
    meaning.extend(data.take().map(describe_data));
    assert!(input.is_empty(), "{} bytes left over", input.len());
    meaning
}

fn describe_data((stream, data): (u32, Vec<u8>)) -> String {
    match String::from_utf8(data) {
        Ok(text) if text.len() < 64 => format!("data {stream} {}", text.trim_end()),
        Ok(text) => format!("data {stream} {} bytes", text.len()),
        Err(_) => format!("data {stream} no text"),
    }
}

fn expect(wire: &[u8], meaning: &[&str]) {
    for piece in [1, 2, 3, 7, 8, 9, 64, 1000, wire.len()] {
        assert_eq!(decode(wire, piece), meaning, "in pieces of {piece}");
    }
}

#[test]
fn exec_session() {
    expect(
        include_bytes!("exec.bin"),
        &[
            "open 1 streamtype=error",
            "open 3 streamtype=stdin",
            "ping 1",
            "open 5 streamtype=stdout",
            "open 7 streamtype=resize",
            "data 7 {\"Width\":80,\"Height\":24}",
            "data 3 8192 bytes",
            "fin 3",
            "reset 1",
            "reset 5",
            "goaway",
        ],
    );
}

#[test]
fn port_forward_session() {
    expect(
        include_bytes!("forward.bin"),
        &[
            "open 1 port=8080 requestid=0 streamtype=error",
            "fin 1",
            "open 3 port=8080 requestid=0 streamtype=data",
            "data 3 request 0",
            "open 5 port=8080 requestid=1 streamtype=error",
            "fin 5",
            "open 7 port=8080 requestid=1 streamtype=data",
            "data 7 request 1",
            "open 9 port=8080 requestid=2 streamtype=error",
            "fin 9",
            "open 11 port=8080 requestid=2 streamtype=data",
            "data 11 request 2",
        ],
    );
}

#[test]
fn every_frame_type() {
    expect(
        include_bytes!("all-types.bin"),
        &[
            "open 1 streamtype=error",
            "open 3 streamtype=stdin",
            "ping 2",
            "ping 3",
        ],
    );
}
