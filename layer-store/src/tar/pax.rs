//! Extended headers: `length key=value` records that override fields of the next entry.

use super::{Fault, MAX_PATH, header::id};

/// What came before an entry to change it.
#[derive(Debug, Default)]
pub(super) struct Overrides {
    pub(super) path: Option<Vec<u8>>,
    pub(super) link: Option<Vec<u8>>,
    pub(super) size: Option<u64>,
    pub(super) uid: Option<u32>,
    pub(super) gid: Option<u32>,
    pub(super) mtime: Option<(i64, u32)>,
    pub(super) xattrs: Vec<(Vec<u8>, Vec<u8>)>,
}

/// Prefix of records that hold extended attributes, as star, GNU tar and Go write them.
const XATTR: &[u8] = b"SCHILY.xattr.";

// === impl Overrides ===

impl Overrides {
    /// Takes the records of one extended header.
    pub(super) fn new(mut records: &[u8]) -> Result<Self, Fault> {
        let mut overrides = Self::default();
        while !records.is_empty() {
            let length = record_length(records)?;
            let (record, rest) = records.split_at(length);
            let (key, value) = split(record)?;
            overrides.set(key, value)?;
            records = rest;
        }
        Ok(overrides)
    }

    /// An empty value takes an override back.
    fn set(&mut self, key: &[u8], value: &[u8]) -> Result<(), Fault> {
        let given = !value.is_empty();
        match key {
            b"path" => self.path = given.then(|| name(value)).transpose()?,
            b"linkpath" => self.link = given.then(|| name(value)).transpose()?,
            b"size" => {
                let size = given.then(|| integer(value)).transpose()?;
                let negative = |_| Fault::Malformed("its size is negative");
                self.size = size.map(u64::try_from).transpose().map_err(negative)?;
            }
            b"uid" => self.uid = given.then(|| integer(value).and_then(id)).transpose()?,
            b"gid" => self.gid = given.then(|| integer(value).and_then(id)).transpose()?,
            b"mtime" => self.mtime = given.then(|| time(value)).transpose()?,
            _ if key.starts_with(b"GNU.sparse.") => {
                return Err(Fault::Unsupported("a sparse file"));
            }
            _ => {
                if let Some(attribute) = key.strip_prefix(XATTR) {
                    self.xattrs.retain(|(name, _)| name != attribute);
                    self.xattrs.push((attribute.to_vec(), value.to_vec()));
                }
            }
        }
        Ok(())
    }
}

const WRONG: Fault = Fault::Malformed("its extended header is not made of records");

/// Bytes of the first record.
fn record_length(records: &[u8]) -> Result<usize, Fault> {
    let mut start = records.iter().take(20);
    let space = start.position(|byte| *byte == b' ').ok_or(WRONG)?;
    usize::try_from(integer(&records[..space])?)
        .ok()
        .filter(|length| *length <= records.len())
        .ok_or(WRONG)
}

/// Key and value of one record.
fn split(record: &[u8]) -> Result<(&[u8], &[u8]), Fault> {
    let space = record.iter().position(|byte| *byte == b' ').ok_or(WRONG)?;
    let text = record[space + 1..].strip_suffix(b"\n").ok_or(WRONG)?;
    let equals = text.iter().position(|byte| *byte == b'=').ok_or(WRONG)?;
    let (key, value) = (&text[..equals], &text[equals + 1..]);
    if key.is_empty() || key.contains(&0) {
        return Err(WRONG);
    }
    Ok((key, value))
}

/// A path that may come from anywhere.
pub(super) fn name(value: &[u8]) -> Result<Vec<u8>, Fault> {
    if value.contains(&0) {
        return Err(Fault::Malformed("a zero byte in a name"));
    }
    if value.len() > MAX_PATH {
        return Err(Fault::Unsupported("a name longer than 32 KiB"));
    }
    Ok(value.to_vec())
}

fn integer(value: &[u8]) -> Result<i64, Fault> {
    std::str::from_utf8(value)
        .ok()
        .filter(|text| !text.starts_with('+'))
        .and_then(|text| text.parse().ok())
        .ok_or(Fault::Malformed("a number in its extended header is none"))
}

/// Seconds with any number of decimals, possibly negative.
fn time(value: &[u8]) -> Result<(i64, u32), Fault> {
    let (whole, decimals) = match value.iter().position(|byte| *byte == b'.') {
        Some(dot) => (&value[..dot], &value[dot + 1..]),
        None => (value, &[][..]),
    };
    let seconds = integer(whole)?;
    if !decimals.iter().all(u8::is_ascii_digit) {
        return Err(Fault::Malformed("a time in its extended header is none"));
    }
    let digits = decimals.iter().map(|digit| u32::from(digit - b'0'));
    let nanos =
        (digits.chain(std::iter::repeat(0)).take(9)).fold(0, |value, digit| value * 10 + digit);
    if whole.starts_with(b"-") && nanos > 0 {
        // -1.25 is 0.75 after -2.
        let seconds = (seconds.checked_sub(1)).ok_or(Fault::Malformed("a time is too early"))?;
        return Ok((seconds, 1_000_000_000 - nanos));
    }
    Ok((seconds, nanos))
}
