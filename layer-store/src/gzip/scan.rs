//! One pass over a gzip stream.

use super::{
    Corrupt, WINDOW,
    sys::{Framing, Inflater},
};

/// Why a blob is not accepted as gzip.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum GzipError {
    /// The data does not decode, or a checksum in it is wrong.
    #[error("at byte {at} of the blob: {what}")]
    Corrupt {
        /// Offset in the blob, a little before or after the fault.
        at: u64,
        /// What is wrong.
        what: Corrupt,
    },
    /// The blob ends within a member.
    #[error("the gzip stream is cut short after {at} bytes")]
    Truncated {
        /// Bytes seen.
        at: u64,
    },
    /// Something that is neither a member nor zero padding follows the last member.
    #[error("at byte {at} of the blob: garbage after the end of the gzip stream")]
    TrailingGarbage {
        /// Offset in the blob.
        at: u64,
    },
}

/// Where a decoder can start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place<'a> {
    /// Offset in the blob of the first byte that is needed.
    pub compressed: u64,
    /// High bits of that byte that are needed; 0 means the whole byte.
    pub bits: u8,
    /// What the decoder must know of the bytes before, at most [`WINDOW`] long.
    pub window: &'a [u8],
}

/// Receives what a [`Scanner`] finds.
pub trait ScanSink {
    /// Why the scan is to stop.
    type Error;

    /// The decoded stream goes on with `plain`.
    fn data(&mut self, plain: &[u8]) -> Result<(), Self::Error>;

    /// A decoder can start here, between what came as data and what comes next. Called at each
    /// block boundary.
    fn place(&mut self, place: Place<'_>);
}

/// Decodes a gzip stream of any number of members, piece by piece.
pub struct Scanner {
    inflater: Inflater,
    /// The last bytes that were decoded, then room for more.
    buffer: Vec<u8>,
    /// End of the decoded bytes in `buffer`.
    filled: usize,
    /// Decoded bytes of the current member that are still in `buffer`; no block of it refers
    /// further back.
    history: usize,
    consumed: u64,
    state: State,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// At the start of the first member.
    Start,
    Member,
    /// Between members, or at the end.
    Between,
    /// After the last member: zeros up to the end, as tapes and some uploaders leave them.
    Padding,
}

// Large enough that copying the window back costs little, small enough for the second-level cache.
const ROOM: usize = 256 << 10;

// === impl Scanner ===

impl Default for Scanner {
    fn default() -> Self {
        Self::new()
    }
}

impl Scanner {
    /// A scanner at the start of a blob.
    pub fn new() -> Self {
        Self {
            inflater: Inflater::new(Framing::Gzip),
            buffer: vec![0; WINDOW + ROOM],
            filled: 0,
            history: 0,
            consumed: 0,
            state: State::Start,
        }
    }

    /// Bytes of the blob seen so far.
    pub fn consumed(&self) -> u64 {
        self.consumed
    }

    /// The blob goes on with `input`.
    pub fn push<S>(&mut self, mut input: &[u8], sink: &mut S) -> Result<(), S::Error>
    where
        S: ScanSink,
        S::Error: From<GzipError>,
    {
        while !input.is_empty() {
            match self.state {
                State::Between if input[0] == GZIP_MAGIC => {
                    self.inflater.reset(Framing::Gzip);
                    self.history = 0;
                    self.state = State::Member;
                }
                State::Between if input[0] == 0 => self.state = State::Padding,
                State::Between => {
                    return Err(GzipError::TrailingGarbage { at: self.consumed }.into());
                }
                State::Padding => {
                    if let Some(garbage) = input.iter().position(|byte| *byte != 0) {
                        let at = self.consumed + garbage as u64;
                        return Err(GzipError::TrailingGarbage { at }.into());
                    }
                    self.consumed += input.len() as u64;
                    return Ok(());
                }
                State::Start | State::Member => {
                    self.state = State::Member;
                    let consumed = self.step(input, sink)?;
                    input = &input[consumed..];
                }
            }
        }
        Ok(())
    }

    /// The blob has ended.
    pub fn finish(&self) -> Result<(), GzipError> {
        match self.state {
            State::Between | State::Padding => Ok(()),
            State::Start | State::Member => Err(GzipError::Truncated { at: self.consumed }),
        }
    }

    fn step<S>(&mut self, input: &[u8], sink: &mut S) -> Result<usize, S::Error>
    where
        S: ScanSink,
        S::Error: From<GzipError>,
    {
        if self.filled == self.buffer.len() {
            let keep = self.filled - WINDOW;
            self.buffer.copy_within(keep.., 0);
            self.filled = WINDOW;
            self.history = self.history.min(WINDOW);
        }
        let step = (self.inflater)
            .step(input, &mut self.buffer[self.filled..])
            .map_err(|what| GzipError::Corrupt {
                at: self.consumed,
                what,
            })?;
        self.consumed += step.consumed as u64;
        if step.produced > 0 {
            let start = self.filled;
            self.filled += step.produced;
            self.history += step.produced;
            sink.data(&self.buffer[start..self.filled])?;
        }
        if step.ended {
            self.state = State::Between;
        } else if let Some(bits) = step.boundary {
            let window = self.history.min(WINDOW);
            sink.place(Place {
                compressed: self.consumed - u64::from(bits > 0),
                bits,
                window: &self.buffer[self.filled - window..self.filled],
            });
        }
        Ok(step.consumed)
    }
}

const GZIP_MAGIC: u8 = 0x1f;
