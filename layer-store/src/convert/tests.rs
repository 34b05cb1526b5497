use std::io::{Read, Write};

use flate2::{Compression, write::GzEncoder};
use sha2::{Digest, Sha256};

use super::*;
use crate::{
    index::{Encoding, LayerIndex},
    testing::Archive,
};

fn sha256(bytes: &[u8]) -> [u8; 32] {
    Sha256::digest(bytes).into()
}

fn archive() -> Vec<u8> {
    let mut archive = Archive::default();
    archive
        .directory("etc", 0o755)
        .file("etc/hosts", b"127.0.0.1 localhost\n");
    let big: Vec<u8> = (0..700_000_u32)
        .flat_map(|n| n.wrapping_mul(2_654_435_761).to_le_bytes())
        .collect();
    archive.file("big", &big).end()
}

fn gzip(plain: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(plain).unwrap();
    encoder.finish().unwrap()
}

/// Zstandard without compression: raw blocks.
fn zstd(plain: &[u8]) -> Vec<u8> {
    // A frame that is skipped, then one with a window of 1 MiB and without its size or a checksum.
    let mut out = [
        &0x184d_2a53_u32.to_le_bytes()[..],
        &3_u32.to_le_bytes(),
        b"abc",
    ]
    .concat();
    out.extend(0xfd2f_b528_u32.to_le_bytes());
    out.extend([0, 10 << 3]);
    let mut blocks = plain.chunks(100_000).peekable();
    while let Some(block) = blocks.next() {
        let last = u32::from(blocks.peek().is_none());
        out.extend(&((block.len() as u32) << 3 | last).to_le_bytes()[..3]);
        out.extend(block);
    }
    out
}

fn order(blob: &[u8], archive: &[u8]) -> Order {
    Order {
        layer: LayerDigest(sha256(blob)),
        diff_id: DiffId(sha256(archive)),
        size: blob.len() as u64,
        limits: Limits::default(),
    }
}

struct Made {
    tar: Vec<u8>,
    index: LayerIndex,
}

fn convert_all(order: &Order, blob: impl Read) -> Result<Made, ConvertError> {
    let (mut tar, mut meta, mut index) = (Vec::new(), Vec::new(), Vec::new());
    convert(order, blob, &mut tar, &mut meta, &mut index)?;
    let index = LayerIndex::from_bytes(index).unwrap();
    assert_eq!(index.meta_size(), meta.len() as u64);
    Ok(Made { tar, index })
}

#[test]
fn all_encodings() {
    let archive = archive();
    for (encoding, blob) in [
        (Encoding::Gzip, gzip(&archive)),
        (Encoding::Zstd, zstd(&archive)),
        (Encoding::Plain, archive.clone()),
    ] {
        let order = order(&blob, &archive);
        let made = convert_all(&order, blob.as_slice()).unwrap();
        assert!(made.tar == archive);
        assert_eq!(made.index.encoding(), encoding);
        assert_eq!(made.index.random_access(), encoding != Encoding::Zstd);
        assert_eq!(made.index.layer(), order.layer);
        assert_eq!(made.index.diff_id(), order.diff_id);
        assert_eq!(made.index.inodes(), 4);
        assert!(made.index.span_count() > 1);
        for (n, span) in made.index.spans().enumerate() {
            let part = |range: std::ops::Range<u64>| range.start as usize..range.end as usize;
            let plain = &archive[part(span.uncompressed)];
            assert_eq!(made.index.verify_span(n as u32, plain), Ok(()));
            if made.index.random_access() {
                let decoded = made
                    .index
                    .decode_span(n as u32, &blob[part(span.compressed)]);
                assert!(decoded.unwrap() == plain);
            }
        }
    }
}

#[test]
fn a_blob_that_is_not_the_one_is_its_sources_fault() {
    let archive = archive();
    let blob = gzip(&archive);
    let order = order(&blob, &archive);
    let mut flipped = blob.clone();
    flipped[blob.len() / 2] ^= 1;
    let longer = [&blob[..], b"\0"].concat();
    for wrong in [
        &flipped[..],
        &blob[..blob.len() / 2],
        &longer,
        b"",
        b"<html>not found",
    ] {
        let error = convert_all(&order, wrong).err().unwrap();
        assert!(matches!(error, ConvertError::WrongBlob { .. }), "{error}");
    }
}

#[test]
fn the_layers_own_faults() {
    let archive = archive();
    let cut = &archive[..archive.len() / 2];
    let refused = |blob: &[u8], plain: &[u8]| convert_all(&order(blob, plain), blob).err().unwrap();
    let error = refused(&gzip(cut), cut);
    assert!(matches!(error, ConvertError::Malformed { .. }), "{error}");
    let short = &gzip(&archive)[..1000];
    let error = refused(short, &archive);
    assert!(error.to_string().contains("cut short"), "{error}");
    let short = &zstd(&archive)[..200_000];
    let error = refused(short, &archive);
    assert!(matches!(error, ConvertError::Malformed { .. }), "{error}");
    let error = refused(b"no archive", b"no archive");
    assert!(matches!(error, ConvertError::Malformed { .. }), "{error}");
    let links = Archive::default().link(b'1', "a", "b").end();
    let error = refused(&gzip(&links), &links);
    assert!(error.to_string().contains("left to containerd"), "{error}");
    let error = refused(&gzip(&archive), b"another");
    let ConvertError::WrongDiffId { found, .. } = error else {
        panic!("{error}");
    };
    assert_eq!(found, DiffId(sha256(&archive)));
}

#[test]
fn bombs() {
    let archive = Archive::default().file("zeros", &vec![0; 5 << 20]).end();
    let blob = gzip(&archive);
    let mut order = order(&blob, &archive);
    order.limits.tar_size = 4 << 20;
    let error = convert_all(&order, blob.as_slice()).err().unwrap();
    assert!(matches!(error, ConvertError::TooLarge { .. }), "{error}");
    order.limits = Limits {
        entries: 1,
        ..Limits::default()
    };
    let error = convert_all(&order, blob.as_slice()).err().unwrap();
    assert!(error.to_string().contains("one file more"), "{error}");
}

#[test]
fn a_ratio_is_a_bomb_once_it_matters() {
    let archive = Archive::default().file("zeros", &vec![0; 5 << 20]).end();
    let blob = gzip(&archive);
    let mut order = order(&blob, &archive);
    order.limits.ratio = 50;
    order.limits.ratio_from = 6 << 20;
    assert!(convert_all(&order, blob.as_slice()).is_ok());
    order.limits.ratio_from = 4 << 20;
    let error = convert_all(&order, blob.as_slice()).err().unwrap();
    assert!(matches!(error, ConvertError::TooLarge { .. }), "{error}");
    order.limits.ratio = 2000;
    assert!(convert_all(&order, blob.as_slice()).is_ok());
}
