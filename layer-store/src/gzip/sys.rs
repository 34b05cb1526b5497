//! The calls of zlib-rs that its safe interface does not offer: stopping at block boundaries, and
//! starting in the middle of a byte.

#![allow(unsafe_code)]

use std::{ffi::c_int, ptr};

use libz_rs_sys as z;

use super::{Corrupt, WINDOW};

/// What a stream starts with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Framing {
    /// A gzip header; a trailer follows the data, and both are verified.
    Gzip,
    /// The first deflate block.
    Raw,
}

/// What one step did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Step {
    /// Bytes taken from the input.
    pub(super) consumed: usize,
    /// Bytes put into the output.
    pub(super) produced: usize,
    /// The stream has ended: the last block in `Raw` framing, the trailer in `Gzip`.
    pub(super) ended: bool,
    /// The next bit is the first of a block. Holds the bits of the last consumed byte that belong
    /// to that block.
    pub(super) boundary: Option<u8>,
}

/// A decoder.
pub(super) struct Inflater {
    /// Boxed: the C interface does not promise that a stream may be moved.
    stream: Box<z::z_stream>,
}

// SAFETY: the stream owns its state, which nothing else refers to, and its input and output
// pointers are only used within `step`.
unsafe impl Send for Inflater {}

// === impl Inflater ===

impl Inflater {
    pub(super) fn new(framing: Framing) -> Self {
        let mut stream = Box::<z::z_stream>::default();
        // SAFETY: the stream is valid and the version and size are those of the linked library.
        let code = unsafe {
            z::inflateInit2_(
                &mut *stream,
                window_bits(framing),
                z::zlibVersion(),
                size_of::<z::z_stream>() as c_int,
            )
        };
        // Only memory can be short, which ends a Rust program anyway.
        assert_eq!(code, z::Z_OK, "no memory for a decoder");
        Self { stream }
    }

    /// Starts again, as if new.
    pub(super) fn reset(&mut self, framing: Framing) {
        // SAFETY: the stream was initialised in `new`.
        let code = unsafe { z::inflateReset2(&mut *self.stream, window_bits(framing)) };
        debug_assert_eq!(code, z::Z_OK);
    }

    /// Starts with the `bits` high bits of `byte` (`Raw` framing, before the first step).
    pub(super) fn prime(&mut self, bits: u8, byte: u8) -> Result<(), Corrupt> {
        if !(1..8).contains(&bits) {
            return Err(Corrupt("a byte has no such bits"));
        }
        let value = c_int::from(byte >> (8 - bits));
        // SAFETY: the stream was initialised in `new`.
        let code = unsafe { z::inflatePrime(&mut *self.stream, c_int::from(bits), value) };
        accept(code, "cannot start within a byte")
    }

    /// Makes `window` the bytes that came before (`Raw` framing, before the first step).
    pub(super) fn set_window(&mut self, window: &[u8]) -> Result<(), Corrupt> {
        if window.len() > WINDOW {
            return Err(Corrupt("window is longer than 32 KiB"));
        }
        // SAFETY: the stream was initialised in `new`; pointer and length are those of a slice,
        // which is copied.
        let code = unsafe {
            z::inflateSetDictionary(&mut *self.stream, window.as_ptr(), window.len() as u32)
        };
        accept(code, "cannot set the window")
    }

    /// Decodes until `input` or `output` is used up or the stream ends, and no further than the
    /// next block boundary.
    pub(super) fn step(&mut self, input: &[u8], output: &mut [u8]) -> Result<Step, Corrupt> {
        let available_in = u32::try_from(input.len()).unwrap_or(u32::MAX);
        let available_out = u32::try_from(output.len()).unwrap_or(u32::MAX);
        self.stream.next_in = input.as_ptr();
        self.stream.avail_in = available_in;
        self.stream.next_out = output.as_mut_ptr();
        self.stream.avail_out = available_out;
        // SAFETY: the stream was initialised in `new`; input and output are the slices of this
        // call, live until it returns, not overlapping, and at least as long as stated.
        let code = unsafe { z::inflate(&mut *self.stream, z::Z_BLOCK) };
        let step = Step {
            consumed: (available_in - self.stream.avail_in) as usize,
            produced: (available_out - self.stream.avail_out) as usize,
            ended: code == z::Z_STREAM_END,
            boundary: boundary(self.stream.data_type),
        };
        self.stream.next_in = ptr::null();
        self.stream.avail_in = 0;
        self.stream.next_out = ptr::null_mut();
        self.stream.avail_out = 0;
        match code {
            // The latter is not an error: neither input nor output had room.
            z::Z_OK | z::Z_STREAM_END | z::Z_BUF_ERROR => Ok(step),
            _ => Err(Corrupt("invalid gzip data")),
        }
    }
}

impl Drop for Inflater {
    fn drop(&mut self) {
        // SAFETY: the stream was initialised in `new` and is not used again.
        unsafe { z::inflateEnd(&mut *self.stream) };
    }
}

fn window_bits(framing: Framing) -> c_int {
    match framing {
        Framing::Gzip => 16 + 15,
        Framing::Raw => -15,
    }
}

/// Meaning of `data_type` after a call with `Z_BLOCK`, as zlib.h documents it: 128 at the start of
/// a block, 64 after the last one, and below that the number of unused bits.
fn boundary(data_type: c_int) -> Option<u8> {
    let at_block = data_type & 128 != 0 && data_type & 64 == 0;
    at_block.then_some((data_type & 7) as u8)
}

fn accept(code: c_int, refused: &'static str) -> Result<(), Corrupt> {
    if code == z::Z_OK {
        Ok(())
    } else {
        Err(Corrupt(refused))
    }
}
