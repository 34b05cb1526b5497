//! What the child says on its error output: metadata, index, and how it went, each in pieces.
//!
//! ```text
//! kind (1 byte) | length (4 bytes, little endian) | that many bytes
//! ```
//!
//! Anything else there is the text of a panic, for the person who looks for the cause.

use std::io::{self, Read, Write};

/// Longest piece.
const MAX_PIECE: usize = 1 << 20;

/// What a piece is part of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Meta,
    Index,
    /// The end: `Result<(), ConvertError>` as JSON, in one piece.
    Outcome,
}

impl Kind {
    /// No byte of a text.
    fn byte(self) -> u8 {
        match self {
            Self::Meta => 0xf1,
            Self::Index => 0xf2,
            Self::Outcome => 0xf3,
        }
    }
}

/// Writes in pieces of one kind.
pub(super) struct PieceWriter<W> {
    pub(super) inner: W,
    pub(super) kind: Kind,
}

impl<W: Write> Write for PieceWriter<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let piece = &bytes[..bytes.len().min(MAX_PIECE)];
        let [a, b, c, d] = (piece.len() as u32).to_le_bytes();
        self.inner.write_all(&[self.kind.byte(), a, b, c, d])?;
        self.inner.write_all(piece)?;
        Ok(piece.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

/// What was read.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Piece {
    Of(Kind, Vec<u8>),
    /// What is no piece, up to the end, cut to a readable length.
    Text(String),
    End,
}

/// Reads the next piece.
pub(super) fn read_piece(from: &mut dyn Read) -> io::Result<Piece> {
    let mut first = [0];
    if from.read(&mut first)? == 0 {
        return Ok(Piece::End);
    }
    let kind = [Kind::Meta, Kind::Index, Kind::Outcome]
        .into_iter()
        .find(|kind| kind.byte() == first[0]);
    let mut length = [0; 4];
    if let Some(kind) = kind {
        from.read_exact(&mut length)?;
        let length = u32::from_le_bytes(length) as usize;
        if length <= MAX_PIECE {
            let mut piece = vec![0; length];
            from.read_exact(&mut piece)?;
            return Ok(Piece::Of(kind, piece));
        }
    }
    let mut text = first.to_vec();
    from.take(2000).read_to_end(&mut text)?;
    Ok(Piece::Text(
        String::from_utf8_lossy(&text).trim().to_owned(),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_come_back() {
        let long = vec![7; MAX_PIECE + 1];
        let mut wire = Vec::new();
        let mut writer = PieceWriter {
            inner: &mut wire,
            kind: Kind::Meta,
        };
        writer.write_all(&long).unwrap();
        writer.kind = Kind::Outcome;
        writer.write_all(b"x").unwrap();
        let mut from = wire.as_slice();
        for piece in [
            Piece::Of(Kind::Meta, vec![7; MAX_PIECE]),
            Piece::Of(Kind::Meta, vec![7]),
            Piece::Of(Kind::Outcome, b"x".to_vec()),
            Piece::End,
        ] {
            assert_eq!(read_piece(&mut from).unwrap(), piece);
        }
    }

    #[test]
    fn a_panic_is_text() {
        let text = Piece::Text("thread 'main' panicked".to_owned());
        assert_eq!(
            read_piece(&mut &b"\nthread 'main' panicked\n"[..]).unwrap(),
            text
        );
    }

    #[test]
    fn too_long_and_cut_short() {
        let long = [0xf1, 0xff, 0xff, 0xff, 0xff, 1];
        assert!(matches!(
            read_piece(&mut &long[..]).unwrap(),
            Piece::Text(_)
        ));
        assert!(read_piece(&mut &[0xf1, 9, 0, 0, 0, 1][..]).is_err());
    }
}
