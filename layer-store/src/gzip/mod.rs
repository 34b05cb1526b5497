//! Random access into gzip.
//!
//! A gzip stream can be decoded from any deflate block boundary, given the 32 KiB that came before
//! it and the bits of the byte in which the block starts. [`Scanner`] decodes a stream once from
//! front to back, verifies its checksums, and names such places; [`decode_from`] starts at one.

mod decode;
mod scan;
mod sys;
mod window;

pub use self::{
    decode::decode_from,
    scan::{GzipError, Place, ScanSink, Scanner},
    window::{pack_window, unpack_window},
};

/// How far back a deflate stream can refer.
pub const WINDOW: usize = 32 << 10;

/// Bytes that are not deflate or gzip.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Corrupt(&'static str);

impl Corrupt {
    /// What is wrong with them.
    pub fn what(self) -> &'static str {
        self.0
    }
}

#[cfg(test)]
mod tests;
