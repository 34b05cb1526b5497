//! Makes an index, span by span.

use std::io::{self, Write};

use super::{
    Encoding, MAX_SPAN, SPAN,
    format::{self, Header, MAX_SPANS, Point},
};
use crate::{
    digest::{DiffId, LayerDigest, SpanDigest},
    gzip,
};

/// What is known of a layer when all of it has been seen.
#[derive(Debug, Clone)]
pub struct LayerFacts {
    /// Verified digest of the blob.
    pub layer: LayerDigest,
    /// Verified digest of the archive.
    pub diff_id: DiffId,
    /// Bytes of the blob.
    pub compressed_size: u64,
    /// Bytes of the archive.
    pub tar_size: u64,
    /// Bytes of the EROFS metadata.
    pub meta_size: u64,
    /// BLAKE3 of the EROFS metadata.
    pub meta_digest: SpanDigest,
    /// Directories that the archive implies but does not contain.
    pub implicit_directories: u32,
    /// Inodes of the metadata.
    pub inodes: u64,
}

/// Collects spans while a layer streams by. Holds 64 bytes and a packed window for each.
#[derive(Debug)]
pub struct IndexWriter {
    encoding: Encoding,
    random_access: bool,
    points: Vec<Point>,
    windows: Vec<u8>,
    /// Of the span that is being seen.
    hasher: blake3::Hasher,
    seen: u64,
}

// === impl IndexWriter ===

impl IndexWriter {
    /// An index without spans.
    pub fn new(encoding: Encoding) -> Self {
        Self {
            encoding,
            random_access: encoding != Encoding::Zstd,
            points: Vec::new(),
            windows: Vec::new(),
            hasher: blake3::Hasher::new(),
            seen: 0,
        }
    }

    /// Bytes of the archive seen so far.
    pub fn seen(&self) -> u64 {
        self.seen
    }

    /// The archive goes on with `plain`.
    ///
    /// Spans begin by themselves where the encoding allows it anywhere, or nowhere. A gzip blob has
    /// its own places, which the caller [offers](Self::offer), the first one before any data.
    pub fn data(&mut self, mut plain: &[u8]) {
        while !plain.is_empty() {
            let room = match self.points.last() {
                Some(last) => self.longest().saturating_sub(self.seen - last.uncompressed),
                None => 0,
            };
            if room == 0 {
                // For gzip: a block so long that no span could hold it.
                self.random_access &= self.encoding == Encoding::Plain;
                self.begin_span(self.seen, 0, &[]);
                continue;
            }
            let (now, later) = plain.split_at(plain.len().min(room as usize));
            self.hasher.update(now);
            self.seen += now.len() as u64;
            plain = later;
        }
    }

    /// A decoder can start at the archive's current offset. Begins a span there if the current one
    /// is long enough.
    pub fn offer(&mut self, place: gzip::Place<'_>) {
        let due = match self.points.last() {
            Some(last) => self.random_access && self.seen - last.uncompressed >= SPAN,
            None => true,
        };
        if due {
            self.begin_span(place.compressed, place.bits, place.window);
        }
    }

    fn begin_span(&mut self, compressed: u64, bits: u8, window: &[u8]) {
        self.end_span();
        let packed = if self.random_access {
            gzip::pack_window(window)
        } else {
            Vec::new()
        };
        self.points.push(Point {
            compressed,
            uncompressed: self.seen,
            bits,
            window_offset: self.windows.len() as u64,
            window_packed: packed.len() as u32,
            // A window is at most 32 KiB.
            window_length: window.len() as u16,
            digest: SpanDigest([0; 32]),
        });
        self.windows.extend(packed);
    }

    /// Writes the index. Random access is given up where a span is too long to be filled at once.
    pub fn finish(mut self, facts: &LayerFacts, out: &mut dyn Write) -> io::Result<()> {
        self.end_span();
        if self.seen != facts.tar_size || self.points.len() > MAX_SPANS as usize {
            return Err(io::Error::other("the spans do not make up the layer"));
        }
        if !self.random_access || !self.reachable(facts.compressed_size) {
            self.random_access = false;
            self.windows.clear();
            for point in &mut self.points {
                *point = Point {
                    compressed: 0,
                    bits: 0,
                    window_offset: 0,
                    window_packed: 0,
                    window_length: 0,
                    ..*point
                };
            }
        }
        let header = Header {
            encoding: self.encoding,
            random_access: self.random_access,
            span_count: self.points.len() as u32,
            layer: facts.layer,
            diff_id: facts.diff_id,
            compressed_size: facts.compressed_size,
            tar_size: facts.tar_size,
            meta_size: facts.meta_size,
            meta_digest: facts.meta_digest,
            windows_size: self.windows.len() as u64,
            implicit_directories: facts.implicit_directories,
            inodes: facts.inodes,
        };
        out.write_all(&format::encode(&header, &self.points))?;
        out.write_all(&self.windows)
    }

    /// Bytes of the archive after which a span must end.
    fn longest(&self) -> u64 {
        if self.random_access && self.encoding == Encoding::Gzip {
            MAX_SPAN
        } else {
            SPAN
        }
    }

    /// Whether no span needs too many bytes of the blob. A blob may consist of empty blocks.
    fn reachable(&self, compressed_size: u64) -> bool {
        let starts = self.points.iter().map(|point| point.compressed);
        let ends = (self.points.iter().skip(1))
            .map(|point| point.compressed + u64::from(point.bits > 0))
            .chain([compressed_size]);
        starts
            .zip(ends)
            .all(|(start, end)| (1..=MAX_SPAN).contains(&end.saturating_sub(start)))
    }

    fn end_span(&mut self) {
        if let Some(last) = self.points.last_mut() {
            if last.uncompressed == self.seen {
                // Nothing came since: the later place to start is as good.
                self.windows.truncate(last.window_offset as usize);
                self.points.pop();
            } else {
                last.digest = SpanDigest(*self.hasher.finalize().as_bytes());
            }
        }
        self.hasher.reset();
    }
}
