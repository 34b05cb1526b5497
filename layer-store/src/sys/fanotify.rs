//! A fanotify group of pre-content events: the kernel asks before a marked file is read.
//!
//! Interface of Linux 6.14 and later: `fanotify_init(2)`, `fanotify_mark(2)`, `fanotify(7)` and
//! `include/uapi/linux/fanotify.h`. The group fails open: when its last descriptor closes, waiting
//! readers go on with whatever is in the file. See `keeper` for what follows from that.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd, RawFd};

/// `FAN_PRE_ACCESS`: before a range of a file is read, written or mapped.
const PRE_ACCESS: u64 = 0x0010_0000;
/// `FAN_MARK_ADD` and `FAN_MARK_REMOVE`.
const MARK_ADD: u32 = 0x1;
const MARK_REMOVE: u32 = 0x2;
/// `FAN_EVENT_INFO_TYPE_RANGE`.
const INFO_TYPE_RANGE: u8 = 6;
/// `FANOTIFY_METADATA_VERSION`.
const METADATA_VERSION: u8 = 3;
/// `FAN_ALLOW`, `FAN_DENY` and where `FAN_DENY_ERRNO` puts the error.
const ALLOW: u32 = 0x1;
const DENY: u32 = 0x2;
const DENY_ERRNO_SHIFT: u32 = 24;
/// `struct fanotify_event_metadata` and `struct fanotify_event_info_range`.
const METADATA_BYTES: usize = 24;
const RANGE_BYTES: usize = 24;

/// Room that one event takes when the group is read.
pub(crate) const EVENT_BYTES: usize = METADATA_BYTES + RANGE_BYTES;

/// The bytes of a file that a reader waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ByteRange {
    /// First byte.
    pub offset: u64,
    /// Number of bytes.
    pub count: u64,
}

/// One question of the kernel.
#[derive(Debug)]
pub(crate) struct Event {
    /// Open on the file. It stays open until the event is answered: the kernel matches answers by
    /// number alone, so the number must not come up a second time before. Absent for an overflow.
    pub fd: Option<OwnedFd>,
    /// Which bytes. Absent when the kernel names none.
    pub range: Option<ByteRange>,
}

/// An event as the kernel wrote it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct RawEvent {
    fd: RawFd,
    range: Option<ByteRange>,
}

/// What the reader is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The bytes are there.
    Allow,
    /// The read fails with `EIO`.
    InputOutputError,
    /// The read fails with `ENOSPC`.
    NoSpace,
}

impl Verdict {
    fn response(self) -> u32 {
        let denied = |errno: i32| DENY | (errno.unsigned_abs() << DENY_ERRNO_SHIFT);
        match self {
            Self::Allow => ALLOW,
            Self::InputOutputError => denied(libc::EIO),
            Self::NoSpace => denied(libc::ENOSPC),
        }
    }
}

/// A fanotify group. Any number of processes may hold its descriptor.
#[derive(Debug)]
pub(crate) struct Group {
    fd: OwnedFd,
}

impl Group {
    /// A new group with neither a limit of queued events nor of marks: what overflows a bounded
    /// queue is answered by the kernel with `FAN_ALLOW`, over bytes that are not there.
    ///
    /// # Errors
    /// `EPERM` without `CAP_SYS_ADMIN`, `EINVAL` when the kernel knows no pre-content events,
    /// `EMFILE` at the limit of groups.
    pub(crate) fn new() -> io::Result<Self> {
        let flags = libc::FAN_CLASS_PRE_CONTENT
            | libc::FAN_CLOEXEC
            | libc::FAN_NONBLOCK
            | libc::FAN_UNLIMITED_QUEUE
            | libc::FAN_UNLIMITED_MARKS;
        let event_flags = libc::O_RDWR | libc::O_LARGEFILE | libc::O_CLOEXEC;
        // SAFETY: takes no pointers.
        let fd = unsafe { libc::fanotify_init(flags, event_flags.unsigned_abs()) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the call returned a new descriptor that nothing else owns.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        Ok(Self { fd })
    }

    /// Takes over a descriptor of a group that another process made.
    #[must_use]
    pub(crate) fn kept(fd: OwnedFd) -> Self {
        Self { fd }
    }

    /// Asks for an event before each read through descriptors that are opened **after** this call.
    /// Those from before keep silent, which is how a filler writes without waiting for itself.
    ///
    /// # Errors
    /// `EOPNOTSUPP` when the file system has no pre-content events (tmpfs, overlayfs).
    pub(crate) fn mark(&self, file: BorrowedFd<'_>) -> io::Result<()> {
        self.change_mark(MARK_ADD, file)
    }

    /// Asks for no more events. A file without a mark is no error.
    ///
    /// # Errors
    /// Those of `fanotify_mark(2)`.
    pub(crate) fn unmark(&self, file: BorrowedFd<'_>) -> io::Result<()> {
        match self.change_mark(MARK_REMOVE, file) {
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(()),
            other => other,
        }
    }

    fn change_mark(&self, flags: u32, file: BorrowedFd<'_>) -> io::Result<()> {
        // SAFETY: a null path names `dirfd` itself (fanotify_mark(2)); both descriptors are open.
        let done = unsafe {
            libc::fanotify_mark(
                self.fd.as_raw_fd(),
                flags,
                PRE_ACCESS,
                file.as_raw_fd(),
                std::ptr::null(),
            )
        };
        if done < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(())
    }

    /// Reads as many events as fit into `buffer`; none when there are none at the moment.
    ///
    /// # Errors
    /// Those of `read(2)`.
    pub(crate) fn read<'b>(&self, buffer: &'b mut [u8]) -> io::Result<Events<'b>> {
        match rustix::io::read(&self.fd, &mut *buffer) {
            Ok(length) => Ok(Events {
                rest: buffer.get(..length).unwrap_or_default(),
            }),
            Err(rustix::io::Errno::AGAIN) => Ok(Events { rest: &[] }),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Answers the event of this number. Whether there was one: the kernel forgets events whose
    /// reader was killed.
    ///
    /// # Errors
    /// Those of `write(2)`.
    pub(crate) fn answer(&self, number: RawFd, verdict: Verdict) -> io::Result<bool> {
        let mut response = [0_u8; 8];
        response[..4].copy_from_slice(&number.to_ne_bytes());
        response[4..].copy_from_slice(&verdict.response().to_ne_bytes());
        match rustix::io::write(&self.fd, &response) {
            Ok(_) => Ok(true),
            Err(rustix::io::Errno::NOENT) => Ok(false),
            Err(errno) => Err(errno.into()),
        }
    }
}

impl AsFd for Group {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Events of one read. Whoever drops it half read leaves readers without an answer.
#[derive(Debug)]
pub(crate) struct Events<'b> {
    rest: &'b [u8],
}

impl Events<'_> {
    fn next_raw(&mut self) -> Option<RawEvent> {
        let (event, length) = parse(self.rest)?;
        self.rest = self.rest.get(length..).unwrap_or_default();
        Some(event)
    }
}

impl Iterator for Events<'_> {
    type Item = Event;

    fn next(&mut self) -> Option<Event> {
        let RawEvent { fd, range } = self.next_raw()?;
        // SAFETY: the kernel opened this number for the reader of the group, which is this process,
        // and each event of the buffer is passed by once.
        let fd = (fd >= 0).then(|| unsafe { OwnedFd::from_raw_fd(fd) });
        Some(Event { fd, range })
    }
}

/// The first event of a buffer and how long it is. Nothing when what is there is no event.
fn parse(bytes: &[u8]) -> Option<(RawEvent, usize)> {
    let length = u32_at(bytes, 0)? as usize;
    let version = *bytes.get(4)?;
    let head = usize::from(u16::from_ne_bytes(bytes.get(6..8)?.try_into().ok()?));
    let fd = i32::from_ne_bytes(bytes.get(16..20)?.try_into().ok()?);
    let whole = bytes.get(..length)?;
    if version != METADATA_VERSION || length < METADATA_BYTES || head < METADATA_BYTES {
        return None;
    }
    let event = RawEvent {
        fd,
        range: range(whole.get(head..)?),
    };
    Some((event, length))
}

/// The range among the records that follow an event.
fn range(mut records: &[u8]) -> Option<ByteRange> {
    loop {
        let kind = *records.first()?;
        let length = usize::from(u16::from_ne_bytes(records.get(2..4)?.try_into().ok()?));
        if kind == INFO_TYPE_RANGE {
            return Some(ByteRange {
                offset: u64_at(records, 8)?,
                count: u64_at(records, 16)?,
            });
        }
        if length < 4 {
            return None;
        }
        records = records.get(length..)?;
    }
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_ne_bytes(bytes.get(at..at + 8)?.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(fd: i32, records: &[u8]) -> Vec<u8> {
        let length = u32::try_from(METADATA_BYTES + records.len()).unwrap();
        let mut bytes = length.to_ne_bytes().to_vec();
        bytes.extend([METADATA_VERSION, 0]);
        bytes.extend(24_u16.to_ne_bytes());
        bytes.extend(PRE_ACCESS.to_ne_bytes());
        bytes.extend(fd.to_ne_bytes());
        bytes.extend(77_i32.to_ne_bytes());
        bytes.extend(records);
        bytes
    }

    fn record(kind: u8, payload: &[u8]) -> Vec<u8> {
        let length = u16::try_from(4 + payload.len()).unwrap();
        let mut bytes = vec![kind, 0];
        bytes.extend(length.to_ne_bytes());
        bytes.extend(payload);
        bytes
    }

    fn range_record(offset: u64, count: u64) -> Vec<u8> {
        let mut payload = vec![0; 4];
        payload.extend(offset.to_ne_bytes());
        payload.extend(count.to_ne_bytes());
        record(INFO_TYPE_RANGE, &payload)
    }

    fn first(rest: &[u8]) -> Option<RawEvent> {
        Events { rest }.next_raw()
    }

    #[test]
    fn reads_one_event_after_the_other() {
        let mut bytes = event(5, &range_record(4096, 8192));
        bytes.extend(event(6, &[record(9, &[0; 8]), range_record(0, 1)].concat()));
        bytes.extend(event(-1, &[]));
        let mut events = Events { rest: &bytes };
        let found: Vec<_> = std::iter::from_fn(|| events.next_raw()).collect();
        let of = |fd, range| RawEvent { fd, range };
        let range = |offset, count| Some(ByteRange { offset, count });
        assert_eq!(
            found,
            [of(5, range(4096, 8192)), of(6, range(0, 1)), of(-1, None)]
        );
    }

    #[test]
    fn ends_at_what_is_no_event() {
        let good = event(5, &range_record(0, 1));
        for cut in 0..good.len() {
            assert_eq!(first(&good[..cut]), None, "{cut}");
        }
        let mut old = good.clone();
        old[4] = 2;
        assert_eq!(first(&old), None);
        let endless = event(5, &record(9, &[])[..2]);
        assert_eq!(first(&endless).unwrap().range, None);
        let looping = event(5, &[9, 0, 0, 0]);
        assert_eq!(first(&looping).unwrap().range, None);
    }

    #[test]
    fn errors_travel_in_the_upper_byte() {
        assert_eq!(Verdict::Allow.response(), 1);
        assert_eq!(Verdict::InputOutputError.response(), 2 | (5 << 24));
        assert_eq!(Verdict::NoSpace.response(), 2 | (28 << 24));
    }
}
