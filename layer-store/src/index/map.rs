//! A file's bytes without a copy of them.

#![allow(unsafe_code)]

use std::{fs::File, io, ops::Deref, path::Path};

use memmap2::Mmap;

/// Bytes of an index.
#[derive(Debug)]
pub(super) enum Bytes {
    /// A mapped file.
    Mapped(Mmap),
    /// In memory.
    Heap(Vec<u8>),
}

impl Bytes {
    /// Maps the file at `path` read-only.
    pub(super) fn map(path: &Path) -> io::Result<Self> {
        let file = File::open(path)?;
        if file.metadata()?.len() == 0 {
            // An empty file cannot be mapped.
            return Ok(Self::Heap(Vec::new()));
        }
        // SAFETY: an index is written under another name, renamed into its place when complete,
        // and never written or truncated afterwards: replacing it means another file, removing it
        // leaves this mapping alone. Its folder belongs to root. No reference into the mapping is
        // used to build a type with invalid values: only integers and bytes are read.
        let map = unsafe { Mmap::map(&file) }?;
        Ok(Self::Mapped(map))
    }
}

impl Deref for Bytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Self::Mapped(map) => map,
            Self::Heap(bytes) => bytes,
        }
    }
}
