//! Decoding from the middle of a blob.

use super::{
    Corrupt,
    sys::{Framing, Inflater},
};

/// Bytes of a gzip trailer: checksum and length.
const TRAILER: usize = 8;

/// Fills `plain` with what `compressed` decodes to, from a place that a [`super::Scanner`] named.
///
/// Where a member ends and another begins, decoding goes on with that one. Checksums of members
/// that are not seen from their start cannot be verified: the caller compares the digest of the
/// result.
pub fn decode_from(
    compressed: &[u8],
    bits: u8,
    window: &[u8],
    plain: &mut [u8],
) -> Result<(), Corrupt> {
    let mut inflater = Inflater::new(Framing::Raw);
    let mut framing = Framing::Raw;
    let mut input = compressed;
    if bits > 0 {
        let (first, rest) = input.split_first().ok_or(SHORT)?;
        inflater.prime(bits, *first)?;
        input = rest;
    }
    if !window.is_empty() {
        inflater.set_window(window)?;
    }
    let mut filled = 0;
    while filled < plain.len() {
        let step = inflater.step(input, &mut plain[filled..])?;
        input = &input[step.consumed..];
        filled += step.produced;
        if step.ended {
            if framing == Framing::Raw {
                input = input.get(TRAILER..).ok_or(SHORT)?;
            }
            framing = Framing::Gzip;
            inflater.reset(framing);
        } else if input.is_empty() && step.produced == 0 {
            return Err(SHORT);
        }
    }
    Ok(())
}

const SHORT: Corrupt = Corrupt("it ends too early");
