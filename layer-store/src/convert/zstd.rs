//! Zstandard, any number of frames.

use std::io::{self, BufRead, BufReader, Read};

use ruzstd::decoding::{
    BlockDecodingStrategy, FrameDecoder,
    errors::{FrameDecoderError, ReadFrameHeaderError},
};

/// Largest window, which a decoder keeps in memory: what `zstd --ultra --long` makes by default.
const MAX_WINDOW: u64 = 128 << 20;

/// Decodes one frame after the other.
pub(super) struct Frames<R> {
    source: Counted<BufReader<R>>,
    decoder: FrameDecoder,
    within: bool,
}

impl<R: Read> Frames<R> {
    pub(super) fn new(source: R) -> Self {
        let mut decoder = FrameDecoder::new();
        decoder.set_max_window_size(MAX_WINDOW);
        Self {
            source: Counted {
                inner: BufReader::with_capacity(128 << 10, source),
                count: 0,
            },
            decoder,
            within: false,
        }
    }

    /// Bytes taken from the source.
    pub(super) fn consumed(&self) -> u64 {
        self.source.count
    }

    /// Starts the next frame, unless the source has ended.
    fn next_frame(&mut self) -> io::Result<bool> {
        loop {
            if self.source.inner.fill_buf()?.is_empty() {
                return Ok(false);
            }
            match self.decoder.reset(&mut self.source) {
                Ok(()) => {
                    self.within = true;
                    return Ok(true);
                }
                Err(FrameDecoderError::ReadFrameHeaderError(ReadFrameHeaderError::SkipFrame {
                    length,
                    ..
                })) => {
                    let length = u64::from(length);
                    let skipped = io::copy(&mut (&mut self.source).take(length), &mut io::sink())?;
                    if skipped < length {
                        return Err(io::ErrorKind::UnexpectedEof.into());
                    }
                }
                Err(error) => return Err(invalid(&error)),
            }
        }
    }
}

impl<R: Read> Read for Frames<R> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        loop {
            if !self.within && !self.next_frame()? {
                return Ok(0);
            }
            while self.decoder.can_collect() == 0 && !self.decoder.is_finished() {
                // A block is at most 128 KiB.
                self.decoder
                    .decode_blocks(&mut self.source, BlockDecodingStrategy::UptoBlocks(1))
                    .map_err(|error| invalid(&error))?;
            }
            let count = self.decoder.read(out)?;
            if count > 0 {
                return Ok(count);
            }
            self.within = false;
        }
    }
}

fn invalid(error: &FrameDecoderError) -> io::Error {
    io::Error::new(
        io::ErrorKind::InvalidData,
        format!("invalid zstd data: {error}"),
    )
}

struct Counted<R> {
    inner: R,
    count: u64,
}

impl<R: Read> Read for Counted<R> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let count = self.inner.read(out)?;
        self.count += count as u64;
        Ok(count)
    }
}
