//! The pass itself, over any streams.

use std::io::{self, BufWriter, Read, Write};

use sha2::{Digest, Sha256};

use super::{ConvertError, Limits, Order, zstd};
use crate::{
    digest::{DiffId, LayerDigest, SpanDigest},
    erofs::{Tree, TreeError},
    gzip::{GzipError, Place, ScanSink, Scanner},
    index::{Encoding, IndexWriter, LayerFacts},
    tar::{Entry, Parser, TarError, TarSink},
};

const PIECE: usize = 128 << 10;

/// Reads `blob` to its end; writes the archive while it comes, metadata and index after that.
///
/// What was written is only worth something if this returns `Ok`.
pub fn convert(
    order: &Order,
    blob: impl Read,
    tar: impl Write,
    meta: &mut dyn Write,
    index: &mut dyn Write,
) -> Result<(), ConvertError> {
    let mut blob = Blob::new(blob, order.size);
    let result = decode(order, &mut blob, tar);
    // Whether a fault is the layer's or its source's, the whole blob tells.
    blob.drain().map_err(|error| host(order, &error))?;
    let (seen, found) = blob.finish();
    if seen != order.size || found != order.layer {
        return Err(ConvertError::WrongBlob {
            layer: order.layer,
            found: format!("{seen} bytes of {} with digest {found}", order.size),
        });
    }
    let archive = result.map_err(|stop| stop.of(order))?;
    if archive.diff_id != order.diff_id {
        return Err(ConvertError::WrongDiffId {
            layer: order.layer,
            diff_id: order.diff_id,
            found: archive.diff_id,
        });
    }
    let tree = archive.tree;
    let image = tree
        .finish(archive.size)
        .map_err(|error| Stop::from(error).of(order))?;
    let facts = LayerFacts {
        layer: order.layer,
        diff_id: order.diff_id,
        compressed_size: order.size,
        tar_size: archive.size,
        meta_size: image.bytes.len() as u64,
        meta_digest: SpanDigest::of(&image.bytes),
        implicit_directories: image.implicit_directories,
        inodes: image.inodes,
    };
    meta.write_all(&image.bytes)
        .and_then(|()| archive.index.finish(&facts, index))
        .map_err(|error| host(order, &error))
}

/// What the stream turned out to hold.
struct Archive {
    diff_id: DiffId,
    size: u64,
    tree: Tree,
    index: IndexWriter,
}

fn decode<R: Read>(order: &Order, blob: &mut Blob<R>, tar: impl Write) -> Result<Archive, Stop> {
    let mut first = vec![0; PIECE];
    let mut filled = 0;
    // Enough to know what it is.
    while filled < 4 {
        match blob.read(&mut first[filled..])? {
            0 => break,
            count => filled += count,
        }
    }
    let encoding = encoding(&first[..filled]);
    let mut sink = Sink {
        tar: BufWriter::with_capacity(PIECE, tar),
        hasher: Sha256::new(),
        size: 0,
        room: order.limits.tar_size,
        tree: TreeSink(Tree::new(order.limits.entries)),
        parser: Parser::new(),
        index: IndexWriter::new(encoding),
    };
    match encoding {
        Encoding::Gzip => {
            let mut scanner = Scanner::new();
            while filled > 0 {
                sink.allow(order.limits, blob.seen);
                scanner.push(&first[..filled], &mut sink)?;
                filled = blob.read(&mut first)?;
            }
            scanner.finish()?;
        }
        Encoding::Plain => {
            while filled > 0 {
                sink.data(&first[..filled])?;
                filled = blob.read(&mut first)?;
            }
        }
        Encoding::Zstd => {
            let mut frames = zstd::Frames::new((&first[..filled]).chain(blob));
            let mut plain = vec![0; PIECE];
            loop {
                // The decoder reads ahead of what it returns by a block at most.
                sink.allow(order.limits, frames.consumed());
                match frames.read(&mut plain)? {
                    0 => break,
                    count => sink.data(&plain[..count])?,
                }
            }
        }
    }
    sink.parser.finish()?;
    sink.tar.flush()?;
    Ok(Archive {
        diff_id: DiffId(sink.hasher.finalize().into()),
        size: sink.size,
        tree: sink.tree.0,
        index: sink.index,
    })
}

/// What the first bytes say, as other runtimes tell. The manifest's media type is often wrong.
fn encoding(first: &[u8]) -> Encoding {
    match first {
        [0x1f, 0x8b, ..] => Encoding::Gzip,
        [0x28, 0xb5, 0x2f, 0xfd, ..] | [0x50..=0x5f, 0x2a, 0x4d, 0x18, ..] => Encoding::Zstd,
        _ => Encoding::Plain,
    }
}

/// Receives the archive.
struct Sink<W: Write> {
    tar: BufWriter<W>,
    hasher: Sha256,
    size: u64,
    /// Bytes that may still come.
    room: u64,
    tree: TreeSink,
    parser: Parser,
    index: IndexWriter,
}

impl<W: Write> Sink<W> {
    /// Sets how much may come next, when `seen` bytes of the blob have been read.
    fn allow(&mut self, limits: Limits, seen: u64) {
        let by_ratio = seen.saturating_mul(limits.ratio).max(limits.ratio_from);
        let total = by_ratio.min(limits.tar_size);
        self.room = total.saturating_sub(self.size);
    }
}

impl<W: Write> ScanSink for Sink<W> {
    type Error = Stop;

    fn data(&mut self, plain: &[u8]) -> Result<(), Stop> {
        let length = plain.len() as u64;
        self.room = self.room.checked_sub(length).ok_or_else(|| {
            let seen = self.size + length;
            Stop::TooLarge(format!("its archive is beyond the limits at {seen} bytes"))
        })?;
        self.size += length;
        self.hasher.update(plain);
        self.index.data(plain);
        self.tar.write_all(plain)?;
        self.parser.push(plain, &mut self.tree)
    }

    fn place(&mut self, place: Place<'_>) {
        self.index.offer(place);
    }
}

struct TreeSink(Tree);

impl TarSink for TreeSink {
    type Error = Stop;

    fn entry(&mut self, entry: Entry) -> Result<(), Stop> {
        Ok(self.0.add(entry)?)
    }
}

/// Why the pass ended early.
#[derive(Debug)]
enum Stop {
    Malformed(String),
    Unsupported(String),
    TooLarge(String),
    Io(io::Error),
}

impl Stop {
    fn of(self, order: &Order) -> ConvertError {
        let layer = order.layer;
        match self {
            Self::Malformed(what) => ConvertError::Malformed { layer, what },
            Self::Unsupported(what) => ConvertError::Unsupported { layer, what },
            Self::TooLarge(what) => ConvertError::TooLarge { layer, what },
            Self::Io(error) => host(order, &error),
        }
    }
}

impl From<io::Error> for Stop {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            // How readers say that their input is wrong.
            io::ErrorKind::InvalidData | io::ErrorKind::UnexpectedEof => {
                Self::Malformed(error.to_string())
            }
            _ => Self::Io(error),
        }
    }
}

impl From<GzipError> for Stop {
    fn from(error: GzipError) -> Self {
        Self::Malformed(error.to_string())
    }
}

impl From<TarError> for Stop {
    fn from(error: TarError) -> Self {
        match error {
            TarError::Truncated { .. } | TarError::Malformed { .. } => {
                Self::Malformed(error.to_string())
            }
            TarError::Unsupported { .. } => Self::Unsupported(error.to_string()),
        }
    }
}

impl From<TreeError> for Stop {
    fn from(error: TreeError) -> Self {
        Self::Unsupported(error.to_string())
    }
}

fn host(order: &Order, error: &io::Error) -> ConvertError {
    ConvertError::Host {
        layer: order.layer,
        what: error.to_string(),
    }
}

/// The registry's bytes, hashed as they come, and not one more than the manifest says.
struct Blob<R> {
    inner: R,
    hasher: Sha256,
    seen: u64,
    size: u64,
}

impl<R: Read> Blob<R> {
    fn new(inner: R, size: u64) -> Self {
        Self {
            inner,
            hasher: Sha256::new(),
            seen: 0,
            size,
        }
    }

    /// Reads on to the end.
    fn drain(&mut self) -> io::Result<()> {
        let mut rest = vec![0; PIECE];
        while self.read(&mut rest)? > 0 {}
        Ok(())
    }

    fn finish(self) -> (u64, LayerDigest) {
        (self.seen, LayerDigest(self.hasher.finalize().into()))
    }
}

impl<R: Read> Read for Blob<R> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        // One byte more shows that there is more.
        let left = (self.size + 1).saturating_sub(self.seen);
        let length = out.len().min(usize::try_from(left).unwrap_or(usize::MAX));
        let count = loop {
            match self.inner.read(&mut out[..length]) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                other => break other?,
            }
        };
        self.hasher.update(&out[..count]);
        self.seen += count as u64;
        Ok(count)
    }
}
