//! Byte encoding of messages between our own processes.
//!
//! Little endian, length-prefixed, no padding. Both ends come from one build or from neighbouring
//! versions of it, and the holder must stay tiny: a schema language would be most of its code.
//! A reader still trusts nothing: lengths are checked against what is there before anything is
//! allocated.

use std::fmt;

/// Appends values to a message.
#[derive(Debug, Default)]
pub struct Writer(Vec<u8>);

impl Writer {
    /// An empty message.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The bytes written so far.
    #[must_use]
    pub fn finish(self) -> Vec<u8> {
        self.0
    }

    /// Appends one byte.
    pub fn u8(&mut self, value: u8) {
        self.0.push(value);
    }

    /// Appends a flag as one byte.
    pub fn bool(&mut self, value: bool) {
        self.u8(u8::from(value));
    }

    /// Appends a number.
    pub fn u32(&mut self, value: u32) {
        self.0.extend_from_slice(&value.to_le_bytes());
    }

    /// Appends a number.
    pub fn i32(&mut self, value: i32) {
        self.0.extend_from_slice(&value.to_le_bytes());
    }

    /// Appends a number.
    pub fn u64(&mut self, value: u64) {
        self.0.extend_from_slice(&value.to_le_bytes());
    }

    /// Appends a number.
    pub fn i64(&mut self, value: i64) {
        self.0.extend_from_slice(&value.to_le_bytes());
    }

    /// Appends a string of bytes, at most 4 GiB long.
    ///
    /// # Panics
    /// When it is longer: nothing we send comes near.
    pub fn bytes(&mut self, value: &[u8]) {
        #[expect(
            clippy::expect_used,
            reason = "documented, and impossible for our messages"
        )]
        self.u32(u32::try_from(value.len()).expect("a field below 4 GiB"));
        self.0.extend_from_slice(value);
    }

    /// Appends a list: its length, then each item by `write`.
    ///
    /// # Panics
    /// As [`Writer::bytes`].
    pub fn list<T>(&mut self, items: &[T], mut write: impl FnMut(&mut Self, &T)) {
        #[expect(
            clippy::expect_used,
            reason = "documented, and impossible for our messages"
        )]
        self.u32(u32::try_from(items.len()).expect("a list below 4 G items"));
        for item in items {
            write(self, item);
        }
    }

    /// Appends a value that may be absent.
    pub fn option<T>(&mut self, value: Option<&T>, write: impl FnOnce(&mut Self, &T)) {
        self.bool(value.is_some());
        if let Some(value) = value {
            write(self, value);
        }
    }
}

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

impl std::error::Error for Malformed {}

/// Takes values off a message.
#[derive(Debug)]
pub struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    /// Reads `message` from its start.
    #[must_use]
    pub fn new(message: &'a [u8]) -> Self {
        Self(message)
    }

    /// Checks that everything was read.
    ///
    /// # Errors
    /// [`Malformed`] when bytes are left.
    pub fn end(self) -> Result<(), Malformed> {
        if self.0.is_empty() {
            Ok(())
        } else {
            Err(Malformed("end"))
        }
    }

    fn take<const N: usize>(&mut self, what: &'static str) -> Result<[u8; N], Malformed> {
        let (head, tail) = self.0.split_first_chunk::<N>().ok_or(Malformed(what))?;
        self.0 = tail;
        Ok(*head)
    }

    /// Takes one byte.
    ///
    /// # Errors
    /// [`Malformed`] at the message's end; the same holds for the other readers.
    pub fn u8(&mut self) -> Result<u8, Malformed> {
        self.take::<1>("u8").map(|[byte]| byte)
    }

    /// Takes a flag.
    ///
    /// # Errors
    /// [`Malformed`], also for a byte that is neither 0 nor 1.
    pub fn bool(&mut self) -> Result<bool, Malformed> {
        match self.u8()? {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err(Malformed("bool")),
        }
    }

    /// Takes a number.
    ///
    /// # Errors
    /// [`Malformed`].
    pub fn u32(&mut self) -> Result<u32, Malformed> {
        self.take("u32").map(u32::from_le_bytes)
    }

    /// Takes a number.
    ///
    /// # Errors
    /// [`Malformed`].
    pub fn i32(&mut self) -> Result<i32, Malformed> {
        self.take("i32").map(i32::from_le_bytes)
    }

    /// Takes a number.
    ///
    /// # Errors
    /// [`Malformed`].
    pub fn u64(&mut self) -> Result<u64, Malformed> {
        self.take("u64").map(u64::from_le_bytes)
    }

    /// Takes a number.
    ///
    /// # Errors
    /// [`Malformed`].
    pub fn i64(&mut self) -> Result<i64, Malformed> {
        self.take("i64").map(i64::from_le_bytes)
    }

    /// Takes a string of bytes.
    ///
    /// # Errors
    /// [`Malformed`].
    pub fn bytes(&mut self) -> Result<&'a [u8], Malformed> {
        let length = self.u32()? as usize;
        let (head, tail) = self.0.split_at_checked(length).ok_or(Malformed("bytes"))?;
        self.0 = tail;
        Ok(head)
    }

    /// Takes a list whose items are each at least one byte long.
    ///
    /// # Errors
    /// [`Malformed`], also when it announces more items than there are bytes.
    pub fn list<T>(
        &mut self,
        mut read: impl FnMut(&mut Self) -> Result<T, Malformed>,
    ) -> Result<Vec<T>, Malformed> {
        let length = self.u32()? as usize;
        if length > self.0.len() {
            return Err(Malformed("list"));
        }
        (0..length).map(|_| read(self)).collect()
    }

    /// Takes a value that may be absent.
    ///
    /// # Errors
    /// [`Malformed`].
    pub fn option<T>(
        &mut self,
        read: impl FnOnce(&mut Self) -> Result<T, Malformed>,
    ) -> Result<Option<T>, Malformed> {
        if self.bool()? {
            read(self).map(Some)
        } else {
            Ok(None)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_written_is_read() {
        let mut writer = Writer::new();
        writer.u8(7);
        writer.bool(true);
        writer.u32(u32::MAX);
        writer.i32(-5);
        writer.u64(1 << 40);
        writer.i64(i64::MIN);
        writer.bytes(b"ab");
        writer.list(&[1_u8, 2], |w, item| w.u8(*item));
        writer.option(Some(&3_u8), |w, item| w.u8(*item));
        writer.option(None::<&u8>, |w, item| w.u8(*item));
        let message = writer.finish();
        let mut reader = Reader::new(&message);
        assert_eq!(reader.u8(), Ok(7));
        assert_eq!(reader.bool(), Ok(true));
        assert_eq!(reader.u32(), Ok(u32::MAX));
        assert_eq!(reader.i32(), Ok(-5));
        assert_eq!(reader.u64(), Ok(1 << 40));
        assert_eq!(reader.i64(), Ok(i64::MIN));
        assert_eq!(reader.bytes(), Ok(&b"ab"[..]));
        assert_eq!(reader.list(Reader::u8), Ok(vec![1, 2]));
        assert_eq!(reader.option(Reader::u8), Ok(Some(3)));
        assert_eq!(reader.option(Reader::u8), Ok(None));
        assert_eq!(reader.end(), Ok(()));
    }

    #[test]
    fn announced_lengths_are_not_believed() {
        let long = [0xff, 0xff, 0xff, 0xff, 1];
        assert_eq!(Reader::new(&long).bytes(), Err(Malformed("bytes")));
        assert_eq!(Reader::new(&long).list(Reader::u8), Err(Malformed("list")));
        assert_eq!(Reader::new(&[2]).bool(), Err(Malformed("bool")));
        assert_eq!(Reader::new(&[1]).end(), Err(Malformed("end")));
        assert_eq!(Reader::new(&[1, 2, 3]).u32(), Err(Malformed("u32")));
    }
}
