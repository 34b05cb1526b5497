//! Layout of an index file. Integers are little endian.
//!
//! ```text
//! header 256 bytes | table: 64 bytes a span | windows, each packed by itself
//! ```
//!
//! | header | | | table entry | |
//! |---|---|---|---|---|
//! | 0   | magic                    | | 0  | offset of the first byte in the blob |
//! | 8   | version of this layout   | | 8  | offset in the archive                |
//! | 12  | builder                  | | 16 | offset of the window, from the first |
//! | 16  | encoding, random access  | | 24 | bytes of the packed window           |
//! | 20  | number of spans          | | 28 | bytes of the window                  |
//! | 24  | layer digest             | | 30 | bits of the first byte that belong here |
//! | 56  | diff ID                  | | 31 | zero                                 |
//! | 88  | bytes of the blob        | | 32 | BLAKE3 of the span                   |
//! | 96  | bytes of the archive     | | | |
//! | 104 | bytes of the metadata    | | | |
//! | 112 | BLAKE3 of the metadata   | | | |
//! | 144 | bytes of all windows     | | | |
//! | 152 | implied directories      | | | |
//! | 160 | inodes                   | | | |
//! | 168 | zero                     | | | |
//! | 224 | BLAKE3 of 0..224 and the table | | | |

use super::{Encoding, IndexError};
use crate::digest::{DiffId, LayerDigest, SpanDigest};

/// Version of everything that is made at first sight: of this layout and of the EROFS metadata. A
/// change of either needs another number, and makes older indexes be built again.
pub const BUILDER: u32 = 1;

/// Span that is aimed at, in bytes of the archive: large enough that an origin's latency is paid
/// seldom, small enough that a small read does not fetch much more than it needs.
pub const SPAN: u64 = 1 << 20;

/// Longest span, in bytes of the archive and in bytes of the blob. A span is held in memory as a
/// whole, and its readers wait for all of it; a blob that cannot be cut finer is fetched whole.
pub const MAX_SPAN: u64 = 32 << 20;

pub(super) const HEADER: usize = 256;
pub(super) const ENTRY: usize = 64;
/// Covers 4 TiB in spans of 1 MiB.
pub(super) const MAX_SPANS: u32 = 1 << 22;

const MAGIC: [u8; 8] = *b"sandidx\0";
const LAYOUT: u32 = 1;
const DIGESTED: usize = 224;

/// A place where decoding can start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Point {
    /// Offset in the blob of the first byte that is needed.
    pub(super) compressed: u64,
    /// Offset in the archive.
    pub(super) uncompressed: u64,
    /// High bits of the first byte that belong to this span; 0 means all of them, and that they
    /// belong to this span alone.
    pub(super) bits: u8,
    pub(super) window_offset: u64,
    pub(super) window_packed: u32,
    pub(super) window_length: u16,
    pub(super) digest: SpanDigest,
}

/// What is said once.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) encoding: Encoding,
    pub(super) random_access: bool,
    pub(super) span_count: u32,
    pub(super) layer: LayerDigest,
    pub(super) diff_id: DiffId,
    pub(super) compressed_size: u64,
    pub(super) tar_size: u64,
    pub(super) meta_size: u64,
    pub(super) meta_digest: SpanDigest,
    pub(super) windows_size: u64,
    pub(super) implicit_directories: u32,
    pub(super) inodes: u64,
}

/// Header and table, ready to be written in front of the windows.
pub(super) fn encode(header: &Header, points: &[Point]) -> Vec<u8> {
    let mut out = Vec::with_capacity(HEADER + points.len() * ENTRY);
    out.extend(MAGIC);
    out.extend(LAYOUT.to_le_bytes());
    out.extend(BUILDER.to_le_bytes());
    out.extend([
        match header.encoding {
            Encoding::Plain => 0,
            Encoding::Gzip => 1,
            Encoding::Zstd => 2,
        },
        u8::from(header.random_access),
        0,
        0,
    ]);
    out.extend(header.span_count.to_le_bytes());
    out.extend(header.layer.0);
    out.extend(header.diff_id.0);
    out.extend(header.compressed_size.to_le_bytes());
    out.extend(header.tar_size.to_le_bytes());
    out.extend(header.meta_size.to_le_bytes());
    out.extend(header.meta_digest.0);
    out.extend(header.windows_size.to_le_bytes());
    out.extend(header.implicit_directories.to_le_bytes());
    out.extend([0; 4]);
    out.extend(header.inodes.to_le_bytes());
    out.resize(HEADER, 0);
    for point in points {
        out.extend(point.compressed.to_le_bytes());
        out.extend(point.uncompressed.to_le_bytes());
        out.extend(point.window_offset.to_le_bytes());
        out.extend(point.window_packed.to_le_bytes());
        out.extend(point.window_length.to_le_bytes());
        out.extend([point.bits, 0]);
        out.extend(point.digest.0);
    }
    let digest = digest(&out);
    out[DIGESTED..HEADER].copy_from_slice(&digest);
    out
}

/// Reads the header, and refuses a file in which any entry of the table could mislead a reader.
pub(super) fn check(bytes: &[u8]) -> Result<Header, IndexError> {
    let header = decode_header(bytes)?;
    let table_end = HEADER + header.span_count as usize * ENTRY;
    let size = (table_end as u64).checked_add(header.windows_size);
    if size != Some(bytes.len() as u64) {
        return Err(IndexError::Damaged(
            "its length is not what its header says",
        ));
    }
    let covered = bytes
        .get(..table_end)
        .ok_or(IndexError::Damaged("cut short"))?;
    if bytes.get(DIGESTED..HEADER) != Some(&digest(covered)) {
        return Err(IndexError::Damaged("its digest is wrong"));
    }
    check_table(bytes, &header)?;
    Ok(header)
}

fn check_table(bytes: &[u8], header: &Header) -> Result<(), IndexError> {
    if (header.span_count == 0) != (header.tar_size == 0) {
        return Err(IndexError::Damaged("spans do not cover the archive"));
    }
    // Walked backwards, so that each entry finds the end of its span.
    let (mut end_in, mut end_out) = (header.compressed_size, header.tar_size);
    for n in (0..header.span_count).rev() {
        let point = point(bytes, n).ok_or(IndexError::Damaged("cut short"))?;
        let length = end_out.checked_sub(point.uncompressed);
        if !length.is_some_and(|length| (1..=MAX_SPAN).contains(&length)) {
            return Err(IndexError::Damaged("spans are not in order"));
        }
        if header.random_access {
            let length = end_in.checked_sub(point.compressed);
            if !length.is_some_and(|length| (1..=MAX_SPAN).contains(&length)) || point.bits > 7 {
                return Err(IndexError::Damaged("compressed spans are not in order"));
            }
            if header.encoding == Encoding::Plain && point.compressed != point.uncompressed {
                return Err(IndexError::Damaged("a plain blob has its spans elsewhere"));
            }
        }
        if window(bytes, header, &point).is_none() {
            return Err(IndexError::Damaged("a window is outside of the file"));
        }
        end_in = point.compressed + u64::from(point.bits > 0);
        end_out = point.uncompressed;
    }
    if end_out != 0 {
        return Err(IndexError::Damaged("the first span does not start at 0"));
    }
    Ok(())
}

/// Entry `n` of the table.
pub(super) fn point(bytes: &[u8], n: u32) -> Option<Point> {
    let start = HEADER.checked_add((n as usize).checked_mul(ENTRY)?)?;
    let entry = bytes.get(start..)?.first_chunk::<ENTRY>()?;
    let mut fields = Fields(entry);
    Some(Point {
        compressed: fields.u64()?,
        uncompressed: fields.u64()?,
        window_offset: fields.u64()?,
        window_packed: fields.u32()?,
        window_length: fields.u16()?,
        bits: fields.take::<2>()?[0],
        digest: SpanDigest(fields.take()?),
    })
}

/// The packed window of a point.
pub(super) fn window<'a>(bytes: &'a [u8], header: &Header, point: &Point) -> Option<&'a [u8]> {
    let windows = bytes.get(HEADER + header.span_count as usize * ENTRY..)?;
    let start = usize::try_from(point.window_offset).ok()?;
    windows.get(start..start.checked_add(point.window_packed as usize)?)
}

fn decode_header(bytes: &[u8]) -> Result<Header, IndexError> {
    let damaged = || IndexError::Damaged("cut short");
    let head = bytes.first_chunk::<HEADER>().ok_or_else(damaged)?;
    let mut fields = Fields(head);
    if fields.take() != Some(MAGIC) {
        return Err(IndexError::Damaged("it is not an index"));
    }
    let layout = fields.u32().ok_or_else(damaged)?;
    let found = fields.u32().ok_or_else(damaged)?;
    if layout != LAYOUT || found != BUILDER {
        return Err(IndexError::OtherBuilder { found });
    }
    let [encoding, random_access, ..] = fields.take::<4>().ok_or_else(damaged)?;
    let encoding = match encoding {
        0 => Encoding::Plain,
        1 => Encoding::Gzip,
        2 => Encoding::Zstd,
        _ => return Err(IndexError::Damaged("its encoding is unknown")),
    };
    let random_access = random_access == 1;
    if random_access && encoding == Encoding::Zstd {
        return Err(IndexError::Damaged("zstd has no random access"));
    }
    let header = (|| {
        Some(Header {
            encoding,
            random_access,
            span_count: fields.u32()?,
            layer: LayerDigest(fields.take()?),
            diff_id: DiffId(fields.take()?),
            compressed_size: fields.u64()?,
            tar_size: fields.u64()?,
            meta_size: fields.u64()?,
            meta_digest: SpanDigest(fields.take()?),
            windows_size: fields.u64()?,
            implicit_directories: {
                let count = fields.u32()?;
                fields.u32()?;
                count
            },
            inodes: fields.u64()?,
        })
    })()
    .ok_or_else(damaged)?;
    if header.span_count > MAX_SPANS {
        return Err(IndexError::Damaged("it has too many spans"));
    }
    Ok(header)
}

/// Digest over the header, without the digest itself, and the table.
fn digest(covered: &[u8]) -> [u8; 32] {
    let mut hasher = blake3::Hasher::new();
    hasher.update(&covered[..DIGESTED]);
    hasher.update(&covered[HEADER..]);
    *hasher.finalize().as_bytes()
}

/// Takes fixed-size fields off the front.
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (field, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*field)
    }

    fn u16(&mut self) -> Option<u16> {
        self.take().map(u16::from_le_bytes)
    }

    fn u32(&mut self) -> Option<u32> {
        self.take().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Option<u64> {
        self.take().map(u64::from_le_bytes)
    }
}

/// Gives a changed file the digest that it should have.
#[cfg(test)]
pub(super) fn sign(file: &mut [u8]) {
    let table_end = point_count(file)
        .and_then(|count| (count as usize).checked_mul(ENTRY))
        .map_or(file.len(), |table| file.len().min(HEADER + table));
    let digest = digest(&file[..table_end]);
    file[DIGESTED..HEADER].copy_from_slice(&digest);
}

#[cfg(test)]
fn point_count(file: &[u8]) -> Option<u32> {
    file.get(20..)?
        .first_chunk()
        .copied()
        .map(u32::from_le_bytes)
}
