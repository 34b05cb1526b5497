//! From bytes to entries.

use super::{
    BLOCK, Entry, Fault, Kind, Meta, TarError,
    header::Header,
    pax::{self, Overrides},
};

/// Longest extended header, as Go has it.
const MAX_EXTENSION: u64 = 1 << 20;

/// Receives entries.
pub trait TarSink {
    /// Why parsing is to stop.
    type Error: From<TarError>;

    /// The archive contains `entry`. Its data, if any, has not been seen yet.
    fn entry(&mut self, entry: Entry) -> Result<(), Self::Error>;
}

/// Finds the entries of an archive that comes in pieces. Memory is bounded by the longest extended
/// header.
#[derive(Debug)]
pub struct Parser {
    /// Bytes of the archive seen so far.
    at: u64,
    state: State,
    /// A block or an extension that is not complete yet.
    partial: Vec<u8>,
    /// For the next entry.
    overrides: Overrides,
    gnu_path: Option<Vec<u8>>,
    gnu_link: Option<Vec<u8>>,
    /// There are some; an archive cannot end with them.
    pending: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// A header comes.
    Header,
    /// One block of zeros has come; another one ends the archive.
    Ending,
    /// An extension comes, of this many bytes.
    Extension(Extension, u64),
    /// Data and padding come, of this many bytes.
    Skip(u64),
    /// Whatever comes is no part of the archive.
    Ended,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Extension {
    Pax,
    GnuPath,
    GnuLink,
}

// === impl Parser ===

impl Default for Parser {
    fn default() -> Self {
        Self::new()
    }
}

impl Parser {
    /// A parser at the start of an archive.
    pub fn new() -> Self {
        Self {
            at: 0,
            state: State::Header,
            partial: Vec::new(),
            overrides: Overrides::default(),
            gnu_path: None,
            gnu_link: None,
            pending: false,
        }
    }

    /// The archive goes on with `input`.
    pub fn push<S: TarSink>(&mut self, mut input: &[u8], sink: &mut S) -> Result<(), S::Error> {
        while !input.is_empty() {
            match self.state {
                State::Header | State::Ending => {
                    if let Some(block) = self.gather(&mut input, BLOCK) {
                        self.header(&block, sink)?;
                    }
                }
                State::Extension(kind, size) => {
                    if let Some(bytes) = self.gather(&mut input, size) {
                        self.extension(kind, &bytes)
                            .map_err(|fault| fault.at(self.at - size))?;
                        self.skip(padding(size));
                    }
                }
                State::Skip(left) => {
                    let now = left.min(input.len() as u64);
                    self.at += now;
                    input = &input[now as usize..];
                    self.skip(left - now);
                }
                State::Ended => {
                    self.at += input.len() as u64;
                    return Ok(());
                }
            }
        }
        Ok(())
    }

    /// The archive has ended. The two blocks of zeros at its end may be missing.
    pub fn finish(&self) -> Result<(), TarError> {
        let between = matches!(self.state, State::Header | State::Ending | State::Ended);
        if between && self.partial.is_empty() && !self.pending {
            Ok(())
        } else {
            Err(TarError::Truncated { at: self.at })
        }
    }

    /// Collects `wanted` bytes; they come back once they are complete.
    fn gather(&mut self, input: &mut &[u8], wanted: u64) -> Option<Vec<u8>> {
        // At most MAX_EXTENSION.
        let missing = (wanted as usize).saturating_sub(self.partial.len());
        let (now, later) = input.split_at(missing.min(input.len()));
        self.partial.extend_from_slice(now);
        self.at += now.len() as u64;
        *input = later;
        (self.partial.len() as u64 == wanted).then(|| std::mem::take(&mut self.partial))
    }

    fn skip(&mut self, bytes: u64) {
        self.state = if bytes == 0 {
            State::Header
        } else {
            State::Skip(bytes)
        };
    }

    fn header<S: TarSink>(&mut self, block: &[u8], sink: &mut S) -> Result<(), S::Error> {
        let start = self.at - BLOCK;
        if block.iter().all(|byte| *byte == 0) {
            if self.pending {
                let fault = Fault::Malformed("an extended header without an entry");
                return Err(fault.at(start).into());
            }
            self.state = if self.state == State::Ending {
                State::Ended
            } else {
                State::Ending
            };
            return Ok(());
        }
        if self.state == State::Ending {
            return Err(Fault::Malformed("a single block of zeros").at(start).into());
        }
        match self.read_header(block).map_err(|fault| fault.at(start))? {
            Some(entry) => sink.entry(entry),
            None => Ok(()),
        }
    }

    /// Returns an entry, or takes note of an extension. Sets what comes next.
    fn read_header(&mut self, block: &[u8]) -> Result<Option<Entry>, Fault> {
        let block = block
            .first_chunk()
            .ok_or(Fault::Malformed("half a block"))?;
        let header = Header::new(*block)?;
        let size = header.size()?;
        let extension = match header.type_flag() {
            b'x' => Some(Extension::Pax),
            b'L' => Some(Extension::GnuPath),
            b'K' => Some(Extension::GnuLink),
            b'g' => {
                // Of the whole archive; Go reports it and unpackers ignore it.
                self.skip(padded(size)?);
                return Ok(None);
            }
            _ => None,
        };
        if let Some(kind) = extension {
            if size > MAX_EXTENSION {
                return Err(Fault::Unsupported("an extended header beyond 1 MiB"));
            }
            self.pending = true;
            self.state = State::Extension(kind, size);
            if size == 0 {
                self.extension(kind, &[])?;
                self.state = State::Header;
            }
            return Ok(None);
        }
        self.pending = false;
        let mut overrides = std::mem::take(&mut self.overrides);
        // Where both notations name something, GNU's has the last word.
        overrides.path = self.gnu_path.take().or(overrides.path);
        overrides.link = self.gnu_link.take().or(overrides.link);
        self.entry(&header, overrides).map(Some)
    }

    fn entry(&mut self, header: &Header, overrides: Overrides) -> Result<Entry, Fault> {
        let path = overrides.path.unwrap_or_else(|| header.path());
        let link = || overrides.link.clone().unwrap_or_else(|| header.link());
        let mut data = 0;
        let kind = match header.type_flag() {
            // Before ustar, a directory was a file whose name ends with a slash.
            0 if path.ends_with(b"/") => Kind::Directory,
            0 | b'0' | b'7' => {
                let size = match overrides.size {
                    Some(size) => size,
                    None => header.size()?,
                };
                data = padded(size)?;
                let offset = self.at;
                Kind::File { offset, size }
            }
            // These have no data, whatever their size says.
            b'1' => Kind::Hardlink(link()),
            b'2' => Kind::Symlink(link()),
            b'3' => {
                let (major, minor) = header.device()?;
                Kind::Character { major, minor }
            }
            b'4' => {
                let (major, minor) = header.device()?;
                Kind::Block { major, minor }
            }
            b'5' => Kind::Directory,
            b'6' => Kind::Fifo,
            b'S' => return Err(Fault::Unsupported("a sparse file")),
            _ => return Err(Fault::Unsupported("an entry of an unknown type")),
        };
        let (mtime, mtime_nanos) = match overrides.mtime {
            Some(mtime) => mtime,
            None => (header.mtime()?, 0),
        };
        let meta = Meta {
            mode: header.mode()?,
            uid: overrides.uid.map_or_else(|| header.uid(), Ok)?,
            gid: overrides.gid.map_or_else(|| header.gid(), Ok)?,
            mtime,
            mtime_nanos,
        };
        self.skip(data);
        Ok(Entry {
            path,
            kind,
            meta,
            xattrs: overrides.xattrs,
        })
    }

    fn extension(&mut self, kind: Extension, bytes: &[u8]) -> Result<(), Fault> {
        match kind {
            // Of several before one entry, the last one counts.
            Extension::Pax => self.overrides = Overrides::new(bytes)?,
            Extension::GnuPath => self.gnu_path = Some(gnu_name(bytes)?),
            Extension::GnuLink => self.gnu_link = Some(gnu_name(bytes)?),
        }
        Ok(())
    }
}

/// A name that ends at its first zero.
fn gnu_name(bytes: &[u8]) -> Result<Vec<u8>, Fault> {
    let end = bytes.iter().position(|byte| *byte == 0);
    pax::name(&bytes[..end.unwrap_or(bytes.len())])
}

fn padded(size: u64) -> Result<u64, Fault> {
    size.checked_next_multiple_of(BLOCK)
        // Offsets of an archive stay far from the end of the numbers.
        .filter(|size| *size < 1 << 60)
        .ok_or(Fault::Malformed("its size is too large"))
}

fn padding(size: u64) -> u64 {
    size.next_multiple_of(BLOCK) - size
}
