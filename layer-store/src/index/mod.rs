//! The index of a layer: what a host must know to read any part of it without reading all of it.
//!
//! One file a layer, written once at first sight ([`write`]) and mapped read-only afterwards, so
//! that two hundred open layers cost page cache, not heap. [`format`] is its layout. A file that is
//! damaged, or that an older builder made, does not open: the index is then made again.

mod format;
mod map;
mod write;

use std::{ops::Range, path::Path};

use self::{format::Header, map::Bytes};
use crate::{
    digest::{DiffId, LayerDigest, SpanDigest},
    gzip,
};

pub use self::{
    format::{BUILDER, MAX_SPAN, SPAN},
    write::{IndexWriter, LayerFacts},
};

/// How the registry's blob holds the tar archive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Encoding {
    /// As it is: the blob is the archive.
    Plain,
    /// One or more gzip members.
    Gzip,
    /// Zstandard frames.
    Zstd,
}

/// A part of a layer that is fetched, verified and filled as a whole.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Span {
    /// Bytes of the registry's blob that decode to this span. Neighbours may share their border
    /// byte. Empty when the layer has no random access ([`LayerIndex::random_access`]).
    pub compressed: Range<u64>,
    /// Bytes of the tar archive.
    pub uncompressed: Range<u64>,
    /// Digest of the uncompressed bytes.
    pub digest: SpanDigest,
}

/// Why an index cannot be used. Each means: make it again.
#[derive(Debug, thiserror::Error)]
pub enum IndexError {
    /// The file could not be read.
    #[error("cannot read the layer index: {0}")]
    Io(#[from] std::io::Error),
    /// Not an index, or cut short, or changed after it was written.
    #[error("the layer index is damaged: {0}")]
    Damaged(&'static str),
    /// Another version of this program made it.
    #[error("the layer index was made by builder {found}, this is builder {BUILDER}")]
    OtherBuilder {
        /// What the file says.
        found: u32,
    },
}

/// Why bytes were not accepted as a span.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SpanError {
    /// The layer has fewer spans.
    #[error("the layer has no span {0}")]
    NoSuchSpan(u32),
    /// The blob can only be decoded from its beginning.
    #[error("the layer has no random access; it is only readable as a whole")]
    NoRandomAccess,
    /// The wrong number of bytes was given.
    #[error("span needs {wanted} bytes, {given} were given")]
    WrongLength {
        /// Length of the span's range.
        wanted: u64,
        /// Length of what came.
        given: u64,
    },
    /// The bytes do not decode.
    #[error("span does not decode: {0}")]
    Corrupt(&'static str),
    /// The bytes decode to something else.
    #[error("span has another digest than its index says")]
    WrongDigest,
}

/// An open index.
#[derive(Debug)]
pub struct LayerIndex {
    bytes: Bytes,
    header: Header,
}

// === impl LayerIndex ===

impl LayerIndex {
    /// Maps the file at `path` and checks its header and its table of spans.
    ///
    /// The windows that follow the table are not read: whatever is wrong with one of them shows in
    /// the digest of the span that it decodes.
    pub fn open(path: &Path) -> Result<Self, IndexError> {
        Self::new(Bytes::map(path)?)
    }

    /// The same for an index that is not a file yet, such as one that a peer sent.
    pub fn from_bytes(bytes: Vec<u8>) -> Result<Self, IndexError> {
        Self::new(Bytes::Heap(bytes))
    }

    fn new(bytes: Bytes) -> Result<Self, IndexError> {
        let header = format::check(&bytes)?;
        Ok(Self { bytes, header })
    }

    /// What the registry calls the layer.
    pub fn layer(&self) -> LayerDigest {
        self.header.layer
    }

    /// Digest of the tar archive, verified when the index was made.
    pub fn diff_id(&self) -> DiffId {
        self.header.diff_id
    }

    /// How the blob holds the archive.
    pub fn encoding(&self) -> Encoding {
        self.header.encoding
    }

    /// Whether single spans can be decoded from ranges of the registry's blob. Without it the blob
    /// is fetched whole; spans are then only good for verifying and for sharing among peers.
    pub fn random_access(&self) -> bool {
        self.header.random_access
    }

    /// Bytes of the registry's blob.
    pub fn compressed_size(&self) -> u64 {
        self.header.compressed_size
    }

    /// Bytes of the tar archive, which is the size of the blob that the EROFS metadata refers to.
    pub fn tar_size(&self) -> u64 {
        self.header.tar_size
    }

    /// Bytes of the EROFS metadata image that belongs to this index.
    pub fn meta_size(&self) -> u64 {
        self.header.meta_size
    }

    /// BLAKE3 of the EROFS metadata image. To be checked before the kernel sees the image.
    pub fn meta_digest(&self) -> SpanDigest {
        self.header.meta_digest
    }

    /// Directories that the archive implies but does not contain. In an upper layer they would
    /// hide the owner and mode of the same directory below.
    pub fn implicit_directories(&self) -> u32 {
        self.header.implicit_directories
    }

    /// Number of inodes of the metadata image.
    pub fn inodes(&self) -> u64 {
        self.header.inodes
    }

    /// Number of spans; they cover the archive without gap or overlap.
    pub fn span_count(&self) -> u32 {
        self.header.span_count
    }

    /// Span number `n`, counted from 0.
    pub fn span(&self, n: u32) -> Option<Span> {
        let at = self.point(n)?;
        let (next_in, next_out) = match n.checked_add(1).and_then(|next| self.point(next)) {
            Some(next) => (
                next.compressed + u64::from(next.bits > 0),
                next.uncompressed,
            ),
            None => (self.header.compressed_size, self.header.tar_size),
        };
        let compressed = if self.header.random_access {
            at.compressed..next_in
        } else {
            0..0
        };
        Some(Span {
            compressed,
            uncompressed: at.uncompressed..next_out,
            digest: at.digest,
        })
    }

    /// All spans, in order.
    pub fn spans(&self) -> impl Iterator<Item = Span> + '_ {
        (0..self.span_count()).filter_map(|n| self.span(n))
    }

    /// Numbers of the spans that hold any byte of `range` of the archive.
    pub fn spans_covering(&self, range: Range<u64>) -> Range<u32> {
        let end = range.end.min(self.tar_size());
        if range.start >= end {
            return 0..0;
        }
        // The first span starts at 0, so at least one starts at or before any offset.
        let first = self
            .starts_before(range.start.saturating_add(1))
            .saturating_sub(1);
        first..self.starts_before(end)
    }

    /// Decodes span `n` from exactly the bytes of its compressed range, and verifies it.
    pub fn decode_span(&self, n: u32, compressed: &[u8]) -> Result<Vec<u8>, SpanError> {
        let span = self.span(n).ok_or(SpanError::NoSuchSpan(n))?;
        if !self.random_access() {
            return Err(SpanError::NoRandomAccess);
        }
        expect_length(&span.compressed, compressed)?;
        let plain = match self.header.encoding {
            Encoding::Plain => compressed.to_vec(),
            Encoding::Gzip => {
                let at = self.point(n).ok_or(SpanError::NoSuchSpan(n))?;
                let window = self.window(&at)?;
                // Bounded by MAX_SPAN when the index was opened.
                let mut plain = vec![0; (span.uncompressed.end - span.uncompressed.start) as usize];
                gzip::decode_from(compressed, at.bits, &window, &mut plain)
                    .map_err(|error| SpanError::Corrupt(error.what()))?;
                plain
            }
            // Not reached: `check` refuses random access into zstd.
            Encoding::Zstd => return Err(SpanError::NoRandomAccess),
        };
        verify(&span, &plain)?;
        Ok(plain)
    }

    /// Verifies bytes that somebody else decoded, such as a peer.
    pub fn verify_span(&self, n: u32, plain: &[u8]) -> Result<(), SpanError> {
        let span = self.span(n).ok_or(SpanError::NoSuchSpan(n))?;
        expect_length(&span.uncompressed, plain)?;
        verify(&span, plain)
    }

    fn point(&self, n: u32) -> Option<format::Point> {
        if n >= self.header.span_count {
            return None;
        }
        format::point(&self.bytes, n)
    }

    /// Number of spans that start below `offset`.
    fn starts_before(&self, offset: u64) -> u32 {
        let (mut low, mut high) = (0, self.span_count());
        while low < high {
            let middle = low + (high - low) / 2;
            match self.point(middle) {
                Some(point) if point.uncompressed < offset => low = middle + 1,
                _ => high = middle,
            }
        }
        low
    }

    /// The bytes before the span, as far as the decoder may refer to them.
    fn window(&self, at: &format::Point) -> Result<Vec<u8>, SpanError> {
        let stored = format::window(&self.bytes, &self.header, at)
            .ok_or(SpanError::Corrupt("its window is outside of the index"))?;
        gzip::unpack_window(stored, at.window_length)
            .map_err(|_| SpanError::Corrupt("its window is damaged"))
    }
}

fn expect_length(range: &Range<u64>, given: &[u8]) -> Result<(), SpanError> {
    let wanted = range.end - range.start;
    let given = given.len() as u64;
    if wanted == given {
        Ok(())
    } else {
        Err(SpanError::WrongLength { wanted, given })
    }
}

fn verify(span: &Span, plain: &[u8]) -> Result<(), SpanError> {
    if SpanDigest::of(plain) == span.digest {
        Ok(())
    } else {
        Err(SpanError::WrongDigest)
    }
}

#[cfg(test)]
mod tests;
