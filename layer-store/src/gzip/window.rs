//! Windows as an index stores them: each packed by itself, so that one read needs one of them.

use flate2::{Compress, Compression, Decompress, FlushCompress, FlushDecompress, Status};

use super::{Corrupt, WINDOW};

/// Packs a window. What does not get smaller stays as it is.
pub fn pack_window(window: &[u8]) -> Vec<u8> {
    // A result that would not be smaller does not fit.
    let mut packed = Vec::with_capacity(window.len());
    let mut compress = Compress::new(Compression::fast(), false);
    match compress.compress_vec(window, &mut packed, FlushCompress::Finish) {
        Ok(Status::StreamEnd) if packed.len() < window.len() => packed,
        _ => window.to_vec(),
    }
}

/// The opposite of [`pack_window`], for a window of `length` bytes.
pub fn unpack_window(packed: &[u8], length: u16) -> Result<Vec<u8>, Corrupt> {
    let length = usize::from(length);
    if length > WINDOW || packed.len() > length {
        return Err(Corrupt("window is longer than 32 KiB"));
    }
    if packed.len() == length {
        return Ok(packed.to_vec());
    }
    let mut window = Vec::with_capacity(length);
    let mut decompress = Decompress::new(false);
    match decompress.decompress_vec(packed, &mut window, FlushDecompress::Finish) {
        Ok(Status::StreamEnd) if window.len() == length => Ok(window),
        _ => Err(Corrupt("window does not unpack")),
    }
}
