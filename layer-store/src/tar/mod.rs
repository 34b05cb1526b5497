//! The tar archives that image layers are.
//!
//! [`Parser`] is fed an archive piece by piece and names its entries, each with the place of its
//! data in the archive; it never holds file data. What it accepts is what Go's `archive/tar`
//! accepts, because that is what built the image and what other runtimes unpack it with: ustar,
//! PAX and GNU names and numbers. Sparse files are refused, for their data does not lie in the
//! archive as it is in the file.

mod header;
mod parser;
mod pax;

pub use self::parser::{Parser, TarSink};

/// Blocks of an archive.
pub const BLOCK: u64 = 512;

/// Longest name or link target, in bytes. Far beyond what a path can be on Linux.
pub const MAX_PATH: usize = 32 << 10;

/// One entry of an archive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// Path as written; not made safe in any way.
    pub path: Vec<u8>,
    /// What it is.
    pub kind: Kind,
    /// Owner and times.
    pub meta: Meta,
    /// Extended attributes by their full names (`security.capability`), without duplicates.
    pub xattrs: Vec<(Vec<u8>, Vec<u8>)>,
}

/// What every kind of file has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Meta {
    /// Permission bits, with set-user-ID, set-group-ID and sticky: at most 0o7777.
    pub mode: u16,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Seconds since 1970, possibly before.
    pub mtime: i64,
    /// Nanoseconds to be added, below 1,000,000,000.
    pub mtime_nanos: u32,
}

/// Kinds of entries.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Kind {
    /// A regular file whose data is in the archive.
    File {
        /// Offset in the archive, a multiple of [`BLOCK`].
        offset: u64,
        /// Bytes.
        size: u64,
    },
    /// A directory.
    Directory,
    /// A symbolic link to this target.
    Symlink(Vec<u8>),
    /// Another name of the entry with this path.
    Hardlink(Vec<u8>),
    /// A character device.
    Character {
        /// Major number.
        major: u32,
        /// Minor number.
        minor: u32,
    },
    /// A block device.
    Block {
        /// Major number.
        major: u32,
        /// Minor number.
        minor: u32,
    },
    /// A named pipe.
    Fifo,
}

/// Why an archive is not read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum TarError {
    /// It ends within an entry.
    #[error("the archive is cut short after {at} bytes")]
    Truncated {
        /// Bytes seen.
        at: u64,
    },
    /// It is not an archive.
    #[error("at byte {at} of the archive: {what}")]
    Malformed {
        /// Offset of the entry.
        at: u64,
        /// What is wrong.
        what: &'static str,
    },
    /// It may well be one, but this program does not read such a one.
    #[error("at byte {at} of the archive: {what}, which is not supported")]
    Unsupported {
        /// Offset of the entry.
        at: u64,
        /// What is not supported.
        what: &'static str,
    },
}

/// What is wrong with one entry; its place is added by the parser.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    Malformed(&'static str),
    Unsupported(&'static str),
}

impl Fault {
    fn at(self, at: u64) -> TarError {
        match self {
            Self::Malformed(what) => TarError::Malformed { at, what },
            Self::Unsupported(what) => TarError::Unsupported { at, what },
        }
    }
}

#[cfg(test)]
mod tests;
