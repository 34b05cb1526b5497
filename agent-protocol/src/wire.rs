//! Bytes to values and back. A reader checks lengths against what is there before it takes them.

use alloc::vec::Vec;
use core::fmt;

/// A message that ends early, goes on after its end, or holds a value that means nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Malformed(
    /// What was being read.
    pub &'static str,
);

impl fmt::Display for Malformed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "malformed message at {}", self.0)
    }
}

impl core::error::Error for Malformed {}

pub(crate) type Result<T> = core::result::Result<T, Malformed>;

/// Appends values to a message.
#[derive(Default)]
pub(crate) struct Writer(pub(crate) Vec<u8>);

impl Writer {
    pub(crate) fn u8(&mut self, value: u8) {
        self.0.push(value);
    }

    pub(crate) fn bool(&mut self, value: bool) {
        self.u8(u8::from(value));
    }

    pub(crate) fn u16(&mut self, value: u16) {
        self.0.extend_from_slice(&value.to_le_bytes());
    }

    pub(crate) fn u32(&mut self, value: u32) {
        self.0.extend_from_slice(&value.to_le_bytes());
    }

    pub(crate) fn u64(&mut self, value: u64) {
        self.0.extend_from_slice(&value.to_le_bytes());
    }

    /// At most `max` items; what would not be read is not written.
    pub(crate) fn list<T>(
        &mut self,
        items: &[T],
        max: usize,
        what: &'static str,
        mut write: impl FnMut(&mut Self, &T),
    ) -> Result<()> {
        let count = u16::try_from(items.len()).ok();
        let count = count
            .filter(|_| items.len() <= max)
            .ok_or(Malformed(what))?;
        self.u16(count);
        for item in items {
            write(self, item);
        }
        Ok(())
    }

    /// Longer ones than a message holds make the message too long, which its end finds out.
    pub(crate) fn bytes(&mut self, value: &[u8]) {
        self.u32(u32::try_from(value.len()).unwrap_or(u32::MAX));
        self.0.extend_from_slice(value);
    }
}

/// Takes values off a message.
pub(crate) struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    pub(crate) fn new(message: &'a [u8], max: usize) -> Result<Self> {
        if message.len() > max {
            return Err(Malformed("length"));
        }
        Ok(Self(message))
    }

    pub(crate) fn end(&self) -> Result<()> {
        if self.0.is_empty() {
            Ok(())
        } else {
            Err(Malformed("end"))
        }
    }

    fn take<const N: usize>(&mut self, what: &'static str) -> Result<[u8; N]> {
        let (head, tail) = self.0.split_first_chunk::<N>().ok_or(Malformed(what))?;
        self.0 = tail;
        Ok(*head)
    }

    pub(crate) fn u8(&mut self) -> Result<u8> {
        self.take::<1>("u8").map(|[byte]| byte)
    }

    pub(crate) fn bool(&mut self) -> Result<bool> {
        match self.u8()? {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err(Malformed("bool")),
        }
    }

    pub(crate) fn u16(&mut self) -> Result<u16> {
        self.take("u16").map(u16::from_le_bytes)
    }

    pub(crate) fn u32(&mut self) -> Result<u32> {
        self.take("u32").map(u32::from_le_bytes)
    }

    pub(crate) fn u64(&mut self) -> Result<u64> {
        self.take("u64").map(u64::from_le_bytes)
    }

    pub(crate) fn bytes(&mut self) -> Result<&'a [u8]> {
        let length = self.u32()? as usize;
        let (head, tail) = self.0.split_at_checked(length).ok_or(Malformed("bytes"))?;
        self.0 = tail;
        Ok(head)
    }

    /// A string for the kernel, which ends those at a NUL byte.
    pub(crate) fn string(&mut self) -> Result<&'a [u8]> {
        let bytes = self.bytes()?;
        if bytes.contains(&0) {
            return Err(Malformed("NUL byte"));
        }
        Ok(bytes)
    }

    pub(crate) fn list<T>(
        &mut self,
        max: usize,
        what: &'static str,
        mut read: impl FnMut(&mut Self) -> Result<T>,
    ) -> Result<Vec<T>> {
        let count = usize::from(self.u16()?);
        // Each item has a byte at least: no count makes us reserve more than was sent.
        if count > max || count > self.0.len() {
            return Err(Malformed(what));
        }
        let mut items = Vec::with_capacity(count);
        for _ in 0..count {
            items.push(read(self)?);
        }
        Ok(items)
    }
}
