use std::{io::Write, sync::LazyLock};

use flate2::{Compression, write::GzEncoder};
use proptest::prelude::*;

use super::*;
use crate::gzip::{GzipError, Place, ScanSink, Scanner};

impl ScanSink for IndexWriter {
    type Error = GzipError;

    fn data(&mut self, plain: &[u8]) -> Result<(), GzipError> {
        self.data(plain);
        Ok(())
    }

    fn place(&mut self, place: Place<'_>) {
        self.offer(place);
    }
}

fn facts(blob: &[u8], plain: &[u8]) -> LayerFacts {
    LayerFacts {
        layer: LayerDigest([1; 32]),
        diff_id: DiffId([2; 32]),
        compressed_size: blob.len() as u64,
        tar_size: plain.len() as u64,
        meta_size: 512,
        meta_digest: SpanDigest([3; 32]),
        implicit_directories: 4,
        inodes: 5,
    }
}

fn index_file(encoding: Encoding, blob: &[u8], plain: &[u8]) -> Vec<u8> {
    let mut writer = IndexWriter::new(encoding);
    if encoding == Encoding::Gzip {
        let mut scanner = Scanner::new();
        scanner.push(blob, &mut writer).unwrap();
        scanner.finish().unwrap();
    } else {
        writer.data(plain);
    }
    let mut file = Vec::new();
    writer.finish(&facts(blob, plain), &mut file).unwrap();
    file
}

fn index(encoding: Encoding, blob: &[u8], plain: &[u8]) -> LayerIndex {
    LayerIndex::from_bytes(index_file(encoding, blob, plain)).unwrap()
}

fn text(length: usize) -> Vec<u8> {
    let mut state = 1_u64;
    let mut out = Vec::with_capacity(length + 64);
    while out.len() < length {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        let from = out.len().saturating_sub((state >> 50) as usize);
        out.extend((state >> 8).to_le_bytes());
        out.extend_from_within(from..from + 8);
    }
    out.truncate(length);
    out
}

fn gzip(plain: &[u8], level: u32) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::new(level));
    encoder.write_all(plain).unwrap();
    encoder.finish().unwrap()
}

fn slice(blob: &[u8], range: Range<u64>) -> &[u8] {
    &blob[range.start as usize..range.end as usize]
}

/// Reads a range of the archive the way a filler does.
fn read(index: &LayerIndex, blob: &[u8], range: Range<u64>) -> Vec<u8> {
    let mut out = Vec::new();
    for n in index.spans_covering(range.clone()) {
        let span = index.span(n).unwrap();
        let plain = index.decode_span(n, slice(blob, span.compressed)).unwrap();
        index.verify_span(n, &plain).unwrap();
        let start = range.start.max(span.uncompressed.start) - span.uncompressed.start;
        let end = range.end.min(span.uncompressed.end) - span.uncompressed.start;
        out.extend(slice(&plain, start..end));
    }
    out
}

#[test]
fn spans_cover_the_archive() {
    let plain = text(5_300_000);
    for (encoding, blob) in [
        (Encoding::Gzip, gzip(&plain, 6)),
        (Encoding::Plain, plain.clone()),
    ] {
        let index = index(encoding, &blob, &plain);
        assert!(index.random_access());
        assert!(
            (4..=6).contains(&index.span_count()),
            "{} spans",
            index.span_count()
        );
        let mut at = 0;
        for span in index.spans() {
            assert_eq!(span.uncompressed.start, at);
            at = span.uncompressed.end;
        }
        assert_eq!(at, plain.len() as u64);
        assert_eq!(index.span(index.span_count()), None);
        assert_eq!(index.implicit_directories(), 4);
        assert_eq!(index.inodes(), 5);
    }
}

#[test]
fn a_layer_without_bytes_has_no_spans() {
    let index = index(Encoding::Gzip, &gzip(b"", 6), b"");
    assert_eq!(index.span_count(), 0);
    assert_eq!(index.spans_covering(0..100), 0..0);
}

#[test]
fn zstd_has_digests_but_no_access() {
    let plain = text(2_500_000);
    let index = index(Encoding::Zstd, b"packed", &plain);
    assert!(!index.random_access());
    assert_eq!(index.span_count(), 3);
    assert_eq!(index.decode_span(0, b""), Err(SpanError::NoRandomAccess));
    assert_eq!(index.verify_span(1, &plain[1 << 20..2 << 20]), Ok(()));
    assert_eq!(
        index.verify_span(1, &plain[..1 << 20]),
        Err(SpanError::WrongDigest)
    );
}

#[test]
fn a_block_too_long_to_fill_gives_random_access_up() {
    // Zeros pack into blocks of some eight megabytes each; one of 40 needs a writer that offers none.
    let plain = vec![0; 40 << 20];
    let mut writer = IndexWriter::new(Encoding::Gzip);
    writer.offer(Place {
        compressed: 10,
        bits: 0,
        window: &[],
    });
    writer.data(&plain);
    let mut file = Vec::new();
    writer
        .finish(&facts(&[0; 50_000], &plain), &mut file)
        .unwrap();
    let index = LayerIndex::from_bytes(file).unwrap();
    assert!(!index.random_access());
    assert!(
        index
            .spans()
            .all(|span| span.uncompressed.end - span.uncompressed.start <= MAX_SPAN)
    );
    assert_eq!(index.verify_span(0, &plain[..MAX_SPAN as usize]), Ok(()));
    assert_eq!(index.span(1).unwrap().uncompressed.end - MAX_SPAN, SPAN);
}

#[test]
fn wrong_bytes_are_refused() {
    let plain = text(3_000_000);
    let blob = gzip(&plain, 6);
    let index = index(Encoding::Gzip, &blob, &plain);
    let range = index.span(1).unwrap().compressed;
    let right = slice(&blob, range.clone());
    let wanted = range.end - range.start;
    assert_eq!(
        index.decode_span(1, &right[1..]),
        Err(SpanError::WrongLength {
            wanted,
            given: wanted - 1
        })
    );
    // Not the first byte: some of its bits belong to the span before.
    for at in (1..right.len() - 1).step_by(5003) {
        let mut wrong = right.to_vec();
        wrong[at] ^= 0x10;
        let error = index.decode_span(1, &wrong).unwrap_err();
        assert!(
            matches!(error, SpanError::Corrupt(_) | SpanError::WrongDigest),
            "{error}"
        );
    }
    assert_eq!(index.decode_span(99, right), Err(SpanError::NoSuchSpan(99)));
    assert_eq!(
        index
            .verify_span(0, &plain)
            .unwrap_err()
            .to_string()
            .split(',')
            .count(),
        2
    );
}

#[test]
fn a_file_is_read_where_it_lies() {
    let plain = text(2_200_000);
    let blob = gzip(&plain, 1);
    let file = tempfile::NamedTempFile::new().unwrap();
    assert!(matches!(
        LayerIndex::open(file.path()),
        Err(IndexError::Damaged(_))
    ));
    std::fs::write(file.path(), index_file(Encoding::Gzip, &blob, &plain)).unwrap();
    let index = LayerIndex::open(file.path()).unwrap();
    assert_eq!(read(&index, &blob, 0..plain.len() as u64), plain);
}

#[test]
fn any_change_of_header_or_table_is_noticed() {
    let plain = text(1_500_000);
    let blob = gzip(&plain, 6);
    let file = index_file(Encoding::Gzip, &blob, &plain);
    let table_end = format::HEADER + 2 * format::ENTRY;
    for at in 0..table_end {
        let mut changed = file.clone();
        changed[at] ^= 1;
        assert!(LayerIndex::from_bytes(changed).is_err(), "byte {at}");
    }
    for end in [0, 8, 255, 256, 300, table_end, file.len() - 1] {
        assert!(
            LayerIndex::from_bytes(file[..end].to_vec()).is_err(),
            "cut at {end}"
        );
    }
    let mut older = file.clone();
    older[12] = 0;
    assert!(matches!(
        LayerIndex::from_bytes(older),
        Err(IndexError::OtherBuilder { found: 0 })
    ));
    // A window is not covered, but what it decodes to is.
    for back in 1..40 {
        let mut changed = file.clone();
        let at = file.len() - back;
        changed[at] ^= 1;
        let index = LayerIndex::from_bytes(changed).unwrap();
        let span = index.span(1).unwrap();
        if let Ok(decoded) = index.decode_span(1, slice(&blob, span.compressed)) {
            assert_eq!(decoded, slice(&plain, span.uncompressed));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    #[test]
    fn any_range_reads_as_in_the_archive(
        length in 1_usize..3_000_000,
        level in 0_u32..10,
        ranges in prop::collection::vec((0.0..1.0, 0.0..0.3), 1..5),
    ) {
        let plain = text(length);
        let blob = gzip(&plain, level);
        let index = index(Encoding::Gzip, &blob, &plain);
        for (start, share) in ranges {
            let start = (length as f64 * start) as u64;
            let end = (start + (length as f64 * share) as u64).min(length as u64);
            prop_assert_eq!(read(&index, &blob, start..end), slice(&plain, start..end));
        }
    }
}

proptest! {
    /// Bytes of a table that has the right digest but the wrong content never lead a reader astray.
    #[test]
    fn any_table(changes in prop::collection::vec((8_usize..400, any::<u8>()), 1..8)) {
        static FILE: LazyLock<Vec<u8>> = LazyLock::new(|| {
            let plain = text(2_500_000);
            index_file(Encoding::Gzip, &gzip(&plain, 6), &plain)
        });
        let mut file = FILE.clone();
        for (at, byte) in changes {
            file[at] = byte;
        }
        format::sign(&mut file);
        if let Ok(index) = LayerIndex::from_bytes(file) {
            for n in 0..=index.span_count() {
                if let Some(span) = index.span(n) {
                    prop_assert!(span.uncompressed.end - span.uncompressed.start <= MAX_SPAN);
                    prop_assert!(span.compressed.end - span.compressed.start <= MAX_SPAN);
                    let length = (span.compressed.end - span.compressed.start) as usize;
                    let _ = index.decode_span(n, &vec![0; length]);
                }
            }
            let _ = index.spans_covering(0..u64::MAX);
        }
    }
}
