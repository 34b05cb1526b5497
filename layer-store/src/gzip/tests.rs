use std::io::Write;

use flate2::{Compress, Compression, FlushCompress, write::GzEncoder};
use proptest::prelude::*;

use super::*;

/// Keeps everything.
#[derive(Default)]
struct Seen {
    plain: Vec<u8>,
    places: Vec<(u64, u64, u8, Vec<u8>)>,
}

impl ScanSink for Seen {
    type Error = GzipError;

    fn data(&mut self, plain: &[u8]) -> Result<(), GzipError> {
        self.plain.extend(plain);
        Ok(())
    }

    fn place(&mut self, place: Place<'_>) {
        let at = self.plain.len() as u64;
        self.places
            .push((place.compressed, at, place.bits, place.window.to_vec()));
    }
}

fn scan(blob: &[u8], piece: usize) -> Result<Seen, GzipError> {
    let mut seen = Seen::default();
    let mut scanner = Scanner::new();
    for piece in blob.chunks(piece) {
        scanner.push(piece, &mut seen)?;
    }
    scanner.finish()?;
    assert_eq!(scanner.consumed(), blob.len() as u64);
    Ok(seen)
}

/// Bytes that compress, but not to nothing.
fn text(length: usize, seed: u64) -> Vec<u8> {
    let mut state = seed | 1;
    let mut out = Vec::with_capacity(length + 16);
    while out.len() < length {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        if state >> 62 == 0 && out.len() > 40_000 {
            // From up to a window ago, so that windows matter.
            let back = 1 + (state >> 33) as usize % 32_768;
            let from = out.len() - back;
            out.extend_from_within(from..out.len().min(from + 60));
        } else {
            out.extend((state >> 20).to_le_bytes().map(|byte| byte & 0x3f));
        }
    }
    out.truncate(length);
    out
}

fn member(plain: &[u8], level: u32) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::new(level));
    encoder.write_all(plain).unwrap();
    encoder.finish().unwrap()
}

/// One member whose blocks are flushed in between, as pigz does it for its threads.
fn flushed(plain: &[u8], every: usize, flush: FlushCompress) -> Vec<u8> {
    let mut out = vec![0x1f, 0x8b, 8, 0x08, 0, 0, 0, 0, 0, 3];
    out.extend(b"name of the file\0");
    let mut compress = Compress::new(Compression::new(6), false);
    for piece in plain.chunks(every) {
        let mut packed = Vec::with_capacity(piece.len() * 2 + 100);
        compress.compress_vec(piece, &mut packed, flush).unwrap();
        out.extend(packed);
    }
    let mut packed = Vec::with_capacity(100);
    compress
        .compress_vec(&[], &mut packed, FlushCompress::Finish)
        .unwrap();
    out.extend(packed);
    let mut crc = flate2::Crc::new();
    crc.update(plain);
    out.extend(crc.sum().to_le_bytes());
    out.extend(crc.amount().to_le_bytes());
    out
}

/// The same archive as different tools would pack it.
fn blobs(plain: &[u8]) -> Vec<(&'static str, Vec<u8>)> {
    let middle = plain.len() / 3;
    let members = |piece: usize| -> Vec<u8> {
        plain
            .chunks(piece.max(1))
            .flat_map(|piece| member(piece, 6))
            .collect()
    };
    let mut padded = member(plain, 6);
    padded.extend([0; 700]);
    vec![
        ("stored", member(plain, 0)),
        ("fast", member(plain, 1)),
        ("usual", member(plain, 6)),
        ("best", member(plain, 9)),
        (
            "two members",
            [member(&plain[..middle], 9), member(&plain[middle..], 1)].concat(),
        ),
        ("many members", members(20_000)),
        (
            "an empty member",
            [member(b"", 6), member(plain, 6), member(b"", 6)].concat(),
        ),
        ("sync flushes", flushed(plain, 30_000, FlushCompress::Sync)),
        ("full flushes", flushed(plain, 30_000, FlushCompress::Full)),
        ("zero padding", padded),
    ]
}

#[test]
fn every_place_is_a_start() {
    let plain = text(700_000, 7);
    for (name, blob) in blobs(&plain) {
        let seen = scan(&blob, 4096).unwrap();
        assert!(seen.plain == plain, "{name}: decoded to something else");
        assert!(seen.places.len() > 1, "{name}: no places");
        for (compressed, at, bits, window) in &seen.places {
            let end = plain.len().min(*at as usize + 150_000);
            let mut out = vec![0; end - *at as usize];
            decode_from(&blob[*compressed as usize..], *bits, window, &mut out)
                .unwrap_or_else(|error| panic!("{name} from {at}: {error}"));
            assert!(
                out == plain[*at as usize..end],
                "{name} from {at}: something else"
            );
        }
    }
}

#[test]
fn windows_are_needed_and_sufficient() {
    let plain = text(400_000, 3);
    let blob = member(&plain, 6);
    let seen = scan(&blob, blob.len()).unwrap();
    let (compressed, at, bits, window) = seen.places.last().unwrap();
    assert_eq!(window.len(), WINDOW);
    let mut out = vec![0; plain.len() - *at as usize];
    let wrong = vec![0; WINDOW];
    let decoded = decode_from(&blob[*compressed as usize..], *bits, &wrong, &mut out);
    assert!(decoded.is_err() || out != plain[*at as usize..]);
}

#[test]
fn input_may_come_in_any_pieces() {
    let plain = text(90_000, 5);
    for (name, blob) in blobs(&plain) {
        let whole = scan(&blob, blob.len()).unwrap();
        for piece in [1, 7, 1000] {
            let seen = scan(&blob, piece).unwrap();
            assert!(seen.plain == whole.plain, "{name} in pieces of {piece}");
            assert_eq!(
                seen.places.len(),
                whole.places.len(),
                "{name} in pieces of {piece}"
            );
        }
    }
}

#[test]
fn a_blob_that_is_cut_short_is_refused() {
    let blob = [member(&text(50_000, 1), 6), member(&text(50_000, 2), 6)].concat();
    let first = member(&text(50_000, 1), 6).len();
    for end in (0..blob.len()).step_by(97) {
        match scan(&blob[..end], 4096) {
            // Not cut: the first member alone is a stream.
            Ok(_) => assert_eq!(end, first),
            Err(error) => assert_eq!(error, GzipError::Truncated { at: end as u64 }),
        }
    }
}

#[test]
fn garbage_after_the_end_is_refused() {
    let blob = member(b"archive", 6);
    let end = blob.len() as u64;
    for (garbage, at) in [
        (b"x".to_vec(), end),
        (b"\0\0x".to_vec(), end + 2),
        (b"\0\x1f\x8b\x08".to_vec(), end + 1),
    ] {
        let error = scan(&[blob.clone(), garbage].concat(), 5).err();
        assert_eq!(error, Some(GzipError::TrailingGarbage { at }));
    }
    let error = scan(&[blob, b"\x1fx".to_vec()].concat(), 5).err();
    assert!(
        matches!(error, Some(GzipError::Corrupt { .. })),
        "{error:?}"
    );
}

#[test]
fn checksums_are_verified() {
    let blob = member(&text(50_000, 9), 6);
    for back in [1, 5] {
        let mut wrong = blob.clone();
        let at = wrong.len() - back;
        wrong[at] ^= 1;
        let error = scan(&wrong, 4096).err();
        assert!(
            matches!(error, Some(GzipError::Corrupt { .. })),
            "{error:?}"
        );
    }
}

#[test]
fn windows_unpack_to_what_was_packed() {
    for window in [Vec::new(), vec![7; 5], vec![0; WINDOW], text(WINDOW, 4)] {
        let packed = pack_window(&window);
        assert!(packed.len() <= window.len());
        assert_eq!(unpack_window(&packed, window.len() as u16), Ok(window));
    }
    assert!(unpack_window(&[1, 2, 3], 2).is_err());
    assert!(unpack_window(&pack_window(&[0; 100]), 99).is_err());
    assert!(unpack_window(&pack_window(&[0; 100]), 101).is_err());
    assert!(unpack_window(&[0; 3], u16::MAX).is_err());
}

proptest! {
    /// Neither the scanner nor the decoder does anything but refuse or decode.
    #[test]
    fn any_bytes(blob in prop::collection::vec(any::<u8>(), 0..2000), bits in any::<u8>()) {
        let framed = [&[0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 3], blob.as_slice()].concat();
        let _ = scan(&blob, 100);
        let _ = scan(&framed, 100);
        let _ = decode_from(&blob, bits, &blob[..blob.len() / 2], &mut [0; 5000]);
        let _ = unpack_window(&blob, 3000);
    }
}
