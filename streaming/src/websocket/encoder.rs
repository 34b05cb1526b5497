//! Writes the heads and control frames that a server sends: never masked, never
//! fragmented.

use bytes::BufMut;

/// Head of a whole binary message of `length` bytes.
pub fn binary_head(out: &mut impl BufMut, length: usize) {
    head(out, 0x82, length);
}

/// Head of a whole text message of `length` bytes.
pub fn text_head(out: &mut impl BufMut, length: usize) {
    head(out, 0x81, length);
}

/// A ping without payload.
pub fn ping(out: &mut impl BufMut) {
    head(out, 0x89, 0);
}

/// A pong; `payload` is at most 125 bytes, as a decoded ping's is.
pub fn pong(out: &mut impl BufMut, payload: &[u8]) {
    debug_assert!(payload.len() <= 125);
    head(out, 0x8a, payload.len());
    out.put_slice(payload);
}

/// A close frame.
pub fn close(out: &mut impl BufMut, code: u16) {
    head(out, 0x88, 2);
    out.put_u16(code);
}

fn head(out: &mut impl BufMut, first: u8, length: usize) {
    out.put_u8(first);
    // The casts are guarded by their arms.
    match length {
        0..=125 => out.put_u8(length as u8),
        126..=0xffff => {
            out.put_u8(126);
            out.put_u16(length as u16);
        }
        _ => {
            out.put_u8(127);
            out.put_u64(length as u64);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_take_the_shortest_form() {
        let cases: [(usize, &[u8]); 5] = [
            (0, &[0x82, 0]),
            (125, &[0x82, 125]),
            (126, &[0x82, 126, 0, 126]),
            (65_535, &[0x82, 126, 0xff, 0xff]),
            (65_536, &[0x82, 127, 0, 0, 0, 0, 0, 1, 0, 0]),
        ];
        for (length, wire) in cases {
            let mut out = Vec::new();
            binary_head(&mut out, length);
            assert_eq!(out, wire);
        }
    }

    #[test]
    fn control_frames() {
        let mut out = Vec::new();
        pong(&mut out, b"hi");
        close(&mut out, 1000);
        ping(&mut out);
        assert_eq!(out, [0x8a, 2, b'h', b'i', 0x88, 2, 3, 0xe8, 0x89, 0]);
    }
}
