//! One header block.

use super::Fault;

/// A header block with a right checksum.
#[derive(Debug, Clone)]
pub(super) struct Header {
    block: [u8; 512],
}

/// Which fields beyond the oldest ones a header has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Format {
    /// The seventh edition's.
    V7,
    /// POSIX, also with PAX headers before.
    Ustar,
    /// GNU's, in which other things lie where ustar has its prefix.
    Gnu,
}

// === impl Header ===

impl Header {
    /// Checks the checksum, which old programs computed with signed bytes.
    pub(super) fn new(block: [u8; 512]) -> Result<Self, Fault> {
        let header = Self { block };
        let wanted = header.number(148, 8)?;
        let (mut unsigned, mut signed) = (0_i64, 0_i64);
        for (at, byte) in block.iter().enumerate() {
            let byte = if (148..156).contains(&at) {
                b' '
            } else {
                *byte
            };
            unsigned += i64::from(byte);
            signed += i64::from(byte.cast_signed());
        }
        if wanted == unsigned || wanted == signed {
            Ok(header)
        } else {
            Err(Fault::Malformed("its checksum is wrong"))
        }
    }

    pub(super) fn type_flag(&self) -> u8 {
        self.block[156]
    }

    pub(super) fn path(&self) -> Vec<u8> {
        let name = self.text(0, 100);
        let prefix = match self.format() {
            Format::Ustar => self.text(345, 155),
            Format::V7 | Format::Gnu => &[],
        };
        if prefix.is_empty() {
            name.to_vec()
        } else {
            [prefix, b"/", name].concat()
        }
    }

    pub(super) fn link(&self) -> Vec<u8> {
        self.text(157, 100).to_vec()
    }

    pub(super) fn mode(&self) -> Result<u16, Fault> {
        // Some writers put the file type above the permission bits.
        Ok((self.number(100, 8)? & 0o7777) as u16)
    }

    pub(super) fn uid(&self) -> Result<u32, Fault> {
        id(self.number(108, 8)?)
    }

    pub(super) fn gid(&self) -> Result<u32, Fault> {
        id(self.number(116, 8)?)
    }

    pub(super) fn size(&self) -> Result<u64, Fault> {
        u64::try_from(self.number(124, 12)?).map_err(|_| Fault::Malformed("its size is negative"))
    }

    pub(super) fn mtime(&self) -> Result<i64, Fault> {
        self.number(136, 12)
    }

    pub(super) fn device(&self) -> Result<(u32, u32), Fault> {
        if self.format() == Format::V7 {
            return Ok((0, 0));
        }
        let major = self.number(329, 8)?;
        let minor = self.number(337, 8)?;
        // What the kernel's own device numbers hold.
        if !(0..1 << 12).contains(&major) || !(0..1 << 20).contains(&minor) {
            return Err(Fault::Unsupported("a device number beyond 12 and 20 bits"));
        }
        Ok((major as u32, minor as u32))
    }

    fn format(&self) -> Format {
        match &self.block[257..265] {
            b"ustar  \0" => Format::Gnu,
            magic if magic.starts_with(b"ustar\0") => Format::Ustar,
            _ => Format::V7,
        }
    }

    /// A field up to its first zero.
    fn text(&self, start: usize, length: usize) -> &[u8] {
        let field = &self.block[start..start + length];
        let end = field.iter().position(|byte| *byte == 0).unwrap_or(length);
        &field[..end]
    }

    /// Octal digits, or a big-endian two's complement number marked by its highest bit.
    fn number(&self, start: usize, length: usize) -> Result<i64, Fault> {
        let field = &self.block[start..start + length];
        if field[0] & 0x80 != 0 {
            return binary(field);
        }
        let field = self.text(start, length).trim_ascii();
        if field.is_empty() {
            return Ok(0);
        }
        (field.iter())
            .try_fold(0_i64, |value, byte| match byte {
                b'0'..=b'7' => value.checked_mul(8)?.checked_add(i64::from(byte - b'0')),
                _ => None,
            })
            .ok_or(Fault::Malformed("a number in it is not octal"))
    }
}

fn binary(field: &[u8]) -> Result<i64, Fault> {
    let negative = field[0] & 0x40 != 0;
    let first = if negative { field[0] } else { field[0] & 0x7f };
    let fill: i128 = if negative { -1 } else { 0 };
    // At most 12 bytes, of which the sign extends the first: 96 bits.
    let value = [first]
        .iter()
        .chain(&field[1..])
        .fold(fill, |value, byte| (value << 8) | i128::from(*byte));
    i64::try_from(value).map_err(|_| Fault::Malformed("a number in it is too large"))
}

/// A user or group ID.
pub(super) fn id(value: i64) -> Result<u32, Fault> {
    u32::try_from(value).map_err(|_| Fault::Unsupported("an owner beyond 32 bits"))
}
