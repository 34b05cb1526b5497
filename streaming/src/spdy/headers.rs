//! Header blocks: decompression with state that spans the connection, and parsing.
//!
//! Everything in a block is chosen by the client, so output, count and lengths are
//! capped before anything is allocated for them.

use flate2::{Decompress, FlushDecompress, Status};

use super::{
    Error, MAX_HEADER_BLOCK, MAX_HEADERS,
    dictionary::{ADLER32, DICTIONARY},
};

/// Headers of one SYN_STREAM frame, names in lower case.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HeaderBlock {
    fields: Vec<(String, String)>,
}

impl HeaderBlock {
    /// First value of a header; `name` is compared without regard to case.
    ///
    /// A header with several values joins them with NUL bytes.
    pub fn get(&self, name: &str) -> Option<&str> {
        let (_, value) = self
            .fields
            .iter()
            .find(|(n, _)| n.eq_ignore_ascii_case(name))?;
        value.split('\0').next()
    }

    /// All headers in the order of the wire.
    pub fn fields(&self) -> &[(String, String)] {
        &self.fields
    }

    #[cfg(test)]
    pub(crate) fn from_fields(fields: &[(&str, &str)]) -> Self {
        let fields = fields
            .iter()
            .map(|(name, value)| ((*name).into(), (*value).into()));
        Self {
            fields: fields.collect(),
        }
    }

    pub(super) fn parse(block: &[u8]) -> Result<Self, Error> {
        let mut rest = block;
        let count = take_u32(&mut rest)?;
        if count > MAX_HEADERS {
            return Err(Error::MalformedHeaders);
        }
        let mut fields = Vec::new();
        for _ in 0..count {
            let name = take_string(&mut rest)?;
            let value = take_string(&mut rest)?;
            fields.push((name.to_ascii_lowercase(), value.to_owned()));
        }
        if !rest.is_empty() {
            return Err(Error::MalformedHeaders);
        }
        Ok(Self { fields })
    }
}

fn take_u32(rest: &mut &[u8]) -> Result<u32, Error> {
    let (head, tail) = rest.split_first_chunk().ok_or(Error::MalformedHeaders)?;
    *rest = tail;
    Ok(u32::from_be_bytes(*head))
}

fn take_string<'a>(rest: &mut &'a [u8]) -> Result<&'a str, Error> {
    let length = take_u32(rest)?;
    let length = usize::try_from(length).map_err(|_| Error::MalformedHeaders)?;
    let (head, tail) = rest
        .split_at_checked(length)
        .ok_or(Error::MalformedHeaders)?;
    *rest = tail;
    std::str::from_utf8(head).map_err(|_| Error::MalformedHeaders)
}

/// Inflates the header blocks of one direction of a connection.
///
/// All blocks form one zlib stream, flushed at each block's end: a block cannot be
/// skipped, not even one of a frame that means nothing to the server.
pub(super) struct Inflater {
    zlib: Decompress,
}

impl Inflater {
    pub(super) fn new() -> Self {
        Self {
            zlib: Decompress::new(true),
        }
    }

    pub(super) fn inflate(&mut self, mut block: &[u8]) -> Result<Vec<u8>, Error> {
        let mut plain = Vec::with_capacity(512);
        loop {
            let before = self.zlib.total_in();
            let result = self
                .zlib
                .decompress_vec(block, &mut plain, FlushDecompress::Sync);
            let read =
                usize::try_from(self.zlib.total_in() - before).map_err(|_| Error::Compression)?;
            block = block.get(read..).ok_or(Error::Compression)?;
            match result {
                Err(error) if error.needs_dictionary() == Some(ADLER32) => {
                    self.zlib
                        .set_dictionary(DICTIONARY)
                        .map_err(|_| Error::Compression)?;
                }
                // The stream lives as long as the connection; its end in a block is an error.
                Err(_) | Ok(Status::StreamEnd) => return Err(Error::Compression),
                // Only spare room in `plain` proves that nothing is held back inside.
                Ok(_) if plain.len() == plain.capacity() => {
                    if plain.len() >= MAX_HEADER_BLOCK {
                        return Err(Error::HeaderBlockTooLong);
                    }
                    plain.reserve(plain.len());
                }
                Ok(_) if block.is_empty() => break,
                Ok(_) if read == 0 => return Err(Error::Compression),
                Ok(_) => {}
            }
        }
        if plain.len() > MAX_HEADER_BLOCK {
            return Err(Error::HeaderBlockTooLong);
        }
        Ok(plain)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dictionary_is_the_one_that_peers_name() {
        let (mut a, mut b) = (1u32, 0u32);
        for byte in DICTIONARY {
            a = (a + u32::from(*byte)) % 65_521;
            b = (b + a) % 65_521;
        }
        assert_eq!(DICTIONARY.len(), 1423);
        assert_eq!((b << 16) | a, ADLER32);
    }

    #[test]
    fn parses_names_and_first_values() {
        let mut block = 2u32.to_be_bytes().to_vec();
        for text in ["StreamType", "stdin", "port", "80\x0081"] {
            block.extend(u32::try_from(text.len()).unwrap().to_be_bytes());
            block.extend(text.as_bytes());
        }
        let headers = HeaderBlock::parse(&block).unwrap();
        assert_eq!(headers.get("streamtype"), Some("stdin"));
        assert_eq!(headers.get("Port"), Some("80"));
        assert_eq!(headers.get("other"), None);
    }

    #[test]
    fn refuses_blocks_that_lie_about_their_size() {
        let lengths: [&[u8]; 5] = [
            b"",
            b"\0\0\0\x01",
            b"\0\0\0\x01\xff\xff\xff\xffname",
            b"\xff\xff\xff\xff",
            b"\0\0\0\0rest",
        ];
        for block in lengths {
            assert_eq!(HeaderBlock::parse(block), Err(Error::MalformedHeaders));
        }
    }

    #[test]
    fn a_bomb_is_cut_at_the_cap() {
        let mut zlib = flate2::Compress::new(flate2::Compression::best(), true);
        zlib.set_dictionary(DICTIONARY).unwrap();
        let mut bomb = Vec::with_capacity(64 * 1024);
        zlib.compress_vec(&vec![0; 8 << 20], &mut bomb, flate2::FlushCompress::Sync)
            .unwrap();
        assert!(bomb.len() < 16 * 1024);
        assert_eq!(
            Inflater::new().inflate(&bomb),
            Err(Error::HeaderBlockTooLong)
        );
    }

    #[test]
    fn another_dictionary_is_refused() {
        let mut zlib = flate2::Compress::new(flate2::Compression::fast(), true);
        zlib.set_dictionary(b"some other words").unwrap();
        let mut block = Vec::with_capacity(64);
        zlib.compress_vec(b"\0\0\0\0", &mut block, flate2::FlushCompress::Sync)
            .unwrap();
        assert_eq!(Inflater::new().inflate(&block), Err(Error::Compression));
    }
}
