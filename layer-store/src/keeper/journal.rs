//! What a successor of the keeper must know about unanswered questions.
//!
//! A memory file of fixed size whose descriptor a second process holds too. A record is written
//! right after its event was read and cleared right after the kernel took the answer; each write is
//! one system call, so a keeper that dies leaves whole records. Between `read` of the group and the
//! record an event is known to the kernel alone: [`Journal::numbers`] bounds the sweep that finds it.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd, RawFd};

use rustix::fs::{MemfdFlags, SealFlags};

use super::protocol::GroupId;
use super::table::{Instant, Question};
use crate::LayerDigest;
use crate::sys::fanotify::ByteRange;

const MAGIC: [u8; 8] = *b"sandmanJ";
const VERSION: u32 = 1;
const HEADER_BYTES: usize = 64;
const RECORD_BYTES: usize = 80;
/// More slots than any keeper has; bounds what a damaged file makes us allocate.
const MAX_CAPACITY: u32 = 1 << 20;

/// A question that the keeper before this one left open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Unanswered {
    /// Where it is recorded.
    pub slot: u32,
    /// Number of the event's descriptor, by which the kernel takes the answer.
    pub number: RawFd,
    /// What was asked.
    pub question: Question,
    /// Place in the order of arrival.
    sequence: u64,
}

/// The memory file.
#[derive(Debug)]
pub(super) struct Journal {
    file: OwnedFd,
    group: GroupId,
    capacity: u32,
    numbers: RawFd,
    sequence: u64,
}

impl Journal {
    /// An empty journal of `capacity` questions whose descriptors are all below `numbers`.
    ///
    /// # Errors
    /// Those of `memfd_create(2)` and of the first write.
    pub(super) fn new(group: GroupId, capacity: u32, numbers: RawFd) -> io::Result<Self> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = rustix::fs::memfd_create("sandman-keeper-journal", flags)?;
        let size = HEADER_BYTES + RECORD_BYTES * capacity as usize;
        rustix::fs::ftruncate(&file, size as u64)?;
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        let mut header = [0_u8; HEADER_BYTES];
        header[..8].copy_from_slice(&MAGIC);
        header[8..12].copy_from_slice(&VERSION.to_le_bytes());
        header[12..16].copy_from_slice(&capacity.to_le_bytes());
        header[16..20].copy_from_slice(&numbers.to_le_bytes());
        header[24..40].copy_from_slice(&group.0);
        write_all(&file, &header, 0)?;
        Ok(Self {
            file,
            group,
            capacity,
            numbers,
            sequence: 0,
        })
    }

    /// Opens the journal of the keeper before this one, with what it left unanswered in order of
    /// arrival.
    ///
    /// # Errors
    /// `InvalidData` when the file is no journal.
    pub(super) fn open(file: OwnedFd) -> io::Result<(Self, Vec<Unanswered>)> {
        let mut header = [0_u8; HEADER_BYTES];
        read_exact(&file, &mut header, 0)?;
        let word = |at: usize| le_u32(&header, at);
        let (capacity, numbers) = (word(12), word(16).cast_signed());
        if header[..8] != MAGIC || word(8) != VERSION || capacity > MAX_CAPACITY || numbers < 0 {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "the kept journal is none of this version",
            ));
        }
        let mut group = [0; 16];
        group.copy_from_slice(&header[24..40]);
        let mut unanswered = Vec::new();
        let mut record = [0_u8; RECORD_BYTES];
        for slot in 0..capacity {
            read_exact(&file, &mut record, offset(slot))?;
            unanswered.extend(decode(slot, &record));
        }
        unanswered.sort_unstable_by_key(|entry| entry.sequence);
        let sequence = unanswered.last().map_or(0, |entry| entry.sequence);
        let journal = Self {
            file,
            group: GroupId(group),
            capacity,
            numbers,
            sequence,
        };
        Ok((journal, unanswered))
    }

    /// The group whose events are recorded.
    #[must_use]
    pub(super) fn group(&self) -> GroupId {
        self.group
    }

    /// Number of questions it has room for.
    #[must_use]
    pub(super) fn capacity(&self) -> u32 {
        self.capacity
    }

    /// All descriptors of events are below this number.
    #[must_use]
    pub(super) fn numbers(&self) -> RawFd {
        self.numbers
    }

    /// Records a question before anybody else hears of it.
    ///
    /// # Errors
    /// Those of `pwrite(2)`.
    pub(super) fn record(
        &mut self,
        slot: u32,
        number: RawFd,
        question: &Question,
    ) -> io::Result<()> {
        self.sequence += 1;
        let mut record = [0_u8; RECORD_BYTES];
        record[..4].copy_from_slice(&1_u32.to_le_bytes());
        record[4..8].copy_from_slice(&number.to_le_bytes());
        record[8..16].copy_from_slice(&self.sequence.to_le_bytes());
        record[16..24].copy_from_slice(&question.range.offset.to_le_bytes());
        record[24..32].copy_from_slice(&question.range.count.to_le_bytes());
        record[32..40].copy_from_slice(&question.deadline.0.to_le_bytes());
        record[40..72].copy_from_slice(&question.layer.0);
        write_all(&self.file, &record, offset(slot))
    }

    /// The kernel has the answer.
    ///
    /// # Errors
    /// Those of `pwrite(2)`.
    pub(super) fn clear(&self, slot: u32) -> io::Result<()> {
        write_all(&self.file, &0_u32.to_le_bytes(), offset(slot))
    }
}

impl AsFd for Journal {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

fn offset(slot: u32) -> u64 {
    (HEADER_BYTES + RECORD_BYTES * slot as usize) as u64
}

fn decode(slot: u32, record: &[u8; RECORD_BYTES]) -> Option<Unanswered> {
    let mut layer = [0; 32];
    layer.copy_from_slice(&record[40..72]);
    (le_u32(record, 0) == 1).then(|| Unanswered {
        slot,
        number: le_u32(record, 4).cast_signed(),
        sequence: le_u64(record, 8),
        question: Question {
            layer: LayerDigest(layer),
            range: ByteRange {
                offset: le_u64(record, 16),
                count: le_u64(record, 24),
            },
            deadline: Instant(le_u64(record, 32)),
        },
    })
}

fn le_u32(bytes: &[u8], at: usize) -> u32 {
    let mut word = [0; 4];
    word.copy_from_slice(&bytes[at..at + 4]);
    u32::from_le_bytes(word)
}

fn le_u64(bytes: &[u8], at: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(word)
}

/// Memory files are written whole or not at all.
fn write_all(file: &OwnedFd, bytes: &[u8], at: u64) -> io::Result<()> {
    match rustix::io::pwrite(file, bytes, at)? {
        written if written == bytes.len() => Ok(()),
        _ => Err(io::ErrorKind::WriteZero.into()),
    }
}

fn read_exact(file: &OwnedFd, bytes: &mut [u8], at: u64) -> io::Result<()> {
    match rustix::io::pread(file, &mut *bytes, at)? {
        read if read == bytes.len() => Ok(()),
        _ => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn question(n: u64) -> Question {
        Question {
            layer: LayerDigest([9; 32]),
            range: ByteRange {
                offset: n * 4096,
                count: 4096,
            },
            deadline: Instant(n),
        }
    }

    #[test]
    fn a_successor_finds_what_is_open_in_order() {
        let mut journal = Journal::new(GroupId([3; 16]), 4, 1024).unwrap();
        journal.record(2, 70, &question(1)).unwrap();
        journal.record(0, 71, &question(2)).unwrap();
        journal.record(1, 72, &question(3)).unwrap();
        journal.clear(0).unwrap();
        let held = journal.as_fd().try_clone_to_owned().unwrap();
        drop(journal);
        let (successor, open) = Journal::open(held).unwrap();
        let open: Vec<_> = open
            .iter()
            .map(|entry| (entry.slot, entry.number, entry.question))
            .collect();
        assert_eq!(open, [(2, 70, question(1)), (1, 72, question(3))]);
        assert_eq!(successor.group(), GroupId([3; 16]));
        assert_eq!((successor.capacity(), successor.numbers()), (4, 1024));
        successor.clear(1).unwrap();
        successor.clear(2).unwrap();
        let held = successor.as_fd().try_clone_to_owned().unwrap();
        assert_eq!(Journal::open(held).unwrap().1, []);
    }

    #[test]
    fn refuses_other_files() {
        for content in [&b""[..], &[0; 64], &[0xff; 200]] {
            let file = rustix::fs::memfd_create("x", MemfdFlags::CLOEXEC).unwrap();
            if !content.is_empty() {
                write_all(&file, content, 0).unwrap();
            }
            Journal::open(file).unwrap_err();
        }
    }
}
