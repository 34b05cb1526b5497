//! Base64 decoding of a message that arrives in pieces.

use base64::{Engine as _, engine::general_purpose::STANDARD};
use bytes::BytesMut;

use super::Error;

/// State between the pieces of one message.
#[derive(Default)]
pub(super) struct Base64Decoder {
    /// Characters of an incomplete group of four.
    group: Vec<u8>,
    /// A padded group ended the data.
    padded: bool,
}

impl Base64Decoder {
    /// Decodes a piece; what does not fill a group of four is kept for the next.
    pub(super) fn decode(&mut self, piece: &[u8]) -> Result<BytesMut, Error> {
        // Line breaks are allowed anywhere, as Go's decoder does.
        self.group.extend(
            piece
                .iter()
                .copied()
                .filter(|byte| !matches!(byte, b'\r' | b'\n')),
        );
        let whole = self.group.len() - self.group.len() % 4;
        if whole == 0 {
            return Ok(BytesMut::new());
        }
        if self.padded {
            return Err(Error::Base64);
        }
        self.padded = self.group[whole - 1] == b'=';
        let plain = STANDARD
            .decode(&self.group[..whole])
            .map_err(|_| Error::Base64)?;
        self.group.drain(..whole);
        Ok(BytesMut::from(&plain[..]))
    }

    /// Checks that nothing is left over at the end of the message.
    pub(super) fn finish(&mut self) -> Result<(), Error> {
        let complete = self.group.is_empty();
        *self = Self::default();
        if complete { Ok(()) } else { Err(Error::Base64) }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn decode(text: &[u8], cut: usize) -> Result<Vec<u8>, Error> {
        let mut decoder = Base64Decoder::default();
        let (head, tail) = text.split_at(cut.min(text.len()));
        let mut plain = decoder.decode(head)?.to_vec();
        plain.extend(decoder.decode(tail)?);
        decoder.finish()?;
        Ok(plain)
    }

    #[test]
    fn padding_ends_the_data() {
        assert_eq!(decode(b"Zm9v\r\nCg==", 3).unwrap(), b"foo\n");
        for bad in [&b"Zm9"[..], b"Z===", b"Cg==Zm9v", b"Cg=a", b"!!!!"] {
            for cut in 0..bad.len() {
                assert_eq!(decode(bad, cut), Err(Error::Base64), "{bad:?} cut at {cut}");
            }
        }
    }

    proptest! {
        #[test]
        fn any_cut_gives_the_same(data in prop::collection::vec(any::<u8>(), 0..200), cut in 0usize..300) {
            let text = STANDARD.encode(&data);
            prop_assert_eq!(decode(text.as_bytes(), cut).unwrap(), data);
        }
    }
}
