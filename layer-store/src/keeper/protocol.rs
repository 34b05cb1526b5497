//! Messages between the keeper and its clients. Pure.
//!
//! One packet of a `SOCK_SEQPACKET` Unix socket is one message; descriptors ride along. A
//! connection begins as a controller's, where each request gets one answer; [`Request::Hold`] and
//! [`Request::Fill`] turn it into a holder's or the filler's, which then mostly listen.

use super::table::EventId;
use crate::LayerDigest;
use crate::sys::fanotify::{ByteRange, Verdict};

/// Longest message in bytes.
pub(super) const MAX_MESSAGE: usize = 320;
/// Longest text of an error in bytes.
const MAX_TEXT: usize = 256;

/// How the kernel asks for bytes that a blob lacks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Gate {
    /// It does not: only complete layers are mounted, and the keeper keeps their mounts.
    #[default]
    Closed,
    /// By pre-content events of the marked blobs.
    Fanotify,
    /// By reads of files of a FUSE file system, which stand for the blobs.
    Fuse,
}

impl Gate {
    const fn code(self) -> u8 {
        match self {
            Self::Closed => 0,
            Self::Fanotify => 1,
            Self::Fuse => 2,
        }
    }

    fn of(code: u8) -> Option<Self> {
        [Self::Closed, Self::Fanotify, Self::Fuse]
            .into_iter()
            .find(|gate| gate.code() == code)
    }
}

/// Names one fanotify group or FUSE connection for as long as it exists. A mount made under another group must not be
/// used any more: its readers may have been shown zeros.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GroupId(pub [u8; 16]);

/// What survives the keeper, because another process holds a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kept {
    /// The fanotify group, or the connection of the FUSE file system.
    Group,
    /// The folder of the FUSE file system.
    Tree,
    /// The journal of unanswered questions.
    Journal,
    /// A marked blob, opened before it was marked.
    Blob(LayerDigest),
    /// A layer's detached mount.
    Mount(LayerDigest),
}

/// From a client to the keeper.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Request {
    /// Make a new group. Refused when there is one.
    Start(Limits),
    /// Take back what the keeper before this one had. Comes with a descriptor.
    Restore(Kept),
    /// All is handed back: go on.
    Restored(Limits),
    /// Send me a copy of everything kept, now and later.
    Hold,
    /// I fill: send me the questions.
    Fill,
    /// Open and mark this layer's blob, and send me its descriptor.
    Watch(LayerDigest),
    /// The blob is complete, or nothing reads it any more: remove the mark.
    Unwatch(LayerDigest),
    /// Send me the descriptor of this watched blob.
    Blob(LayerDigest),
    /// Keep this layer's mount. Comes with a descriptor.
    KeepMount(LayerDigest),
    /// Send me this layer's mount.
    Mount(LayerDigest),
    /// Send me the folder of the FUSE file system.
    Tree,
    /// Let go of this layer's mount.
    DropMount(LayerDigest),
    /// Answer of the filler.
    Answer(EventId, Verdict),
    /// How is it going?
    Status,
}

/// How a group is served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// How long a reader waits before it gets an error, in milliseconds.
    pub deadline_ms: u32,
    /// How many questions are taken from the kernel at once.
    pub slots: u32,
    /// How the kernel asks.
    pub gate: Gate,
}

/// Counters and state of a keeper.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Status {
    /// The group, if there is one.
    pub group: Option<GroupId>,
    /// How the kernel asks.
    pub gate: Gate,
    /// Questions without an answer.
    pub open: u64,
    /// Marked blobs.
    pub watched: u64,
    /// Kept mounts.
    pub mounts: u64,
    /// Whether a filler is connected.
    pub filler: bool,
    /// Questions taken from the kernel.
    pub asked: u64,
    /// Questions answered with an error by the filler.
    pub refused: u64,
    /// Questions answered with an error because their time was up.
    pub expired: u64,
    /// Questions about files that nobody watches, or without a range; answered with an error.
    pub unknown: u64,
}

/// From the keeper to a client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Notice {
    /// It is done.
    Done,
    /// It is not.
    Failed {
        /// The system's error number.
        errno: i32,
        /// What failed.
        what: String,
    },
    /// The descriptor that was asked for.
    Descriptor,
    /// To the filler: a question.
    Question(EventId, LayerDigest, ByteRange),
    /// To a holder, with a descriptor: keep this.
    Keep(Kept),
    /// To a holder: this is kept no longer.
    Drop(Kept),
    /// To a holder: that was everything that is kept now.
    UpToDate,
    /// Answer to [`Request::Status`].
    Status(Status),
}

/// Writes little-endian fields one after the other.
#[derive(Debug, Default)]
struct Writer(Vec<u8>);

impl Writer {
    fn kind(kind: u8) -> Self {
        let mut bytes = Vec::with_capacity(MAX_MESSAGE);
        bytes.push(kind);
        Self(bytes)
    }

    fn bytes(mut self, bytes: &[u8]) -> Self {
        self.0.extend_from_slice(bytes);
        self
    }

    fn u32(self, value: u32) -> Self {
        self.bytes(&value.to_le_bytes())
    }

    fn u64(self, value: u64) -> Self {
        self.bytes(&value.to_le_bytes())
    }

    fn layer(self, layer: LayerDigest) -> Self {
        self.bytes(&layer.0)
    }

    fn kept(self, kept: Kept) -> Self {
        match kept {
            Kept::Group => self.bytes(&[0]),
            Kept::Journal => self.bytes(&[1]),
            Kept::Blob(layer) => self.bytes(&[2]).layer(layer),
            Kept::Mount(layer) => self.bytes(&[3]).layer(layer),
            Kept::Tree => self.bytes(&[4]),
        }
    }

    fn limits(self, limits: Limits) -> Self {
        self.u32(limits.deadline_ms)
            .u32(limits.slots)
            .bytes(&[limits.gate.code()])
    }
}

/// Reads what [`Writer`] wrote; nothing at all of what is longer, shorter or unknown.
struct Reader<'b>(&'b [u8]);

impl Reader<'_> {
    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (head, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*head)
    }

    fn u8(&mut self) -> Option<u8> {
        self.array().map(|[byte]| byte)
    }

    fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }

    fn layer(&mut self) -> Option<LayerDigest> {
        self.array().map(LayerDigest)
    }

    fn kept(&mut self) -> Option<Kept> {
        Some(match self.u8()? {
            0 => Kept::Group,
            1 => Kept::Journal,
            2 => Kept::Blob(self.layer()?),
            3 => Kept::Mount(self.layer()?),
            4 => Kept::Tree,
            _ => return None,
        })
    }

    fn limits(&mut self) -> Option<Limits> {
        Some(Limits {
            deadline_ms: self.u32()?,
            slots: self.u32()?,
            gate: Gate::of(self.u8()?)?,
        })
    }

    fn end<T>(self, value: T) -> Option<T> {
        self.0.is_empty().then_some(value)
    }
}

impl Request {
    /// The packet.
    #[must_use]
    pub(super) fn encode(&self) -> Vec<u8> {
        let kind = Writer::kind;
        match *self {
            Self::Start(limits) => kind(1).limits(limits),
            Self::Restore(kept) => kind(2).kept(kept),
            Self::Restored(limits) => kind(3).limits(limits),
            Self::Hold => kind(4),
            Self::Fill => kind(5),
            Self::Watch(layer) => kind(6).layer(layer),
            Self::Unwatch(layer) => kind(7).layer(layer),
            Self::Blob(layer) => kind(8).layer(layer),
            Self::KeepMount(layer) => kind(9).layer(layer),
            Self::Mount(layer) => kind(10).layer(layer),
            Self::DropMount(layer) => kind(11).layer(layer),
            Self::Answer(event, verdict) => kind(12).u64(event.0).bytes(&[match verdict {
                Verdict::Allow => 0,
                Verdict::InputOutputError => 1,
                Verdict::NoSpace => 2,
            }]),
            Self::Status => kind(13),
            Self::Tree => kind(14),
        }
        .0
    }

    /// What a packet says, if it says anything.
    #[must_use]
    pub(super) fn decode(packet: &[u8]) -> Option<Self> {
        let mut reader = Reader(packet);
        let request = match reader.u8()? {
            1 => Self::Start(reader.limits()?),
            2 => Self::Restore(reader.kept()?),
            3 => Self::Restored(reader.limits()?),
            4 => Self::Hold,
            5 => Self::Fill,
            6 => Self::Watch(reader.layer()?),
            7 => Self::Unwatch(reader.layer()?),
            8 => Self::Blob(reader.layer()?),
            9 => Self::KeepMount(reader.layer()?),
            10 => Self::Mount(reader.layer()?),
            11 => Self::DropMount(reader.layer()?),
            12 => {
                let event = EventId(reader.u64()?);
                let verdict = match reader.u8()? {
                    0 => Verdict::Allow,
                    1 => Verdict::InputOutputError,
                    2 => Verdict::NoSpace,
                    _ => return None,
                };
                Self::Answer(event, verdict)
            }
            13 => Self::Status,
            14 => Self::Tree,
            _ => return None,
        };
        reader.end(request)
    }
}

impl Notice {
    /// The packet.
    #[must_use]
    pub(super) fn encode(&self) -> Vec<u8> {
        let kind = Writer::kind;
        match self {
            Self::Done => kind(1),
            Self::Failed { errno, what } => {
                let mut end = what.len().min(MAX_TEXT);
                while !what.is_char_boundary(end) {
                    end -= 1;
                }
                kind(2)
                    .u32(errno.cast_unsigned())
                    .bytes(&what.as_bytes()[..end])
            }
            Self::Descriptor => kind(3),
            Self::Question(event, layer, range) => kind(4)
                .u64(event.0)
                .layer(*layer)
                .u64(range.offset)
                .u64(range.count),
            Self::Keep(kept) => kind(5).kept(*kept),
            Self::Drop(kept) => kind(6).kept(*kept),
            Self::UpToDate => kind(7),
            Self::Status(status) => kind(8)
                .bytes(&[u8::from(status.group.is_some()), u8::from(status.filler)])
                .bytes(&[status.gate.code()])
                .bytes(&status.group.map_or([0; 16], |group| group.0))
                .u64(status.open)
                .u64(status.watched)
                .u64(status.mounts)
                .u64(status.asked)
                .u64(status.refused)
                .u64(status.expired)
                .u64(status.unknown),
        }
        .0
    }

    /// What a packet says, if it says anything.
    #[must_use]
    pub(super) fn decode(packet: &[u8]) -> Option<Self> {
        let mut reader = Reader(packet);
        let notice = match reader.u8()? {
            1 => Self::Done,
            2 => {
                let errno = reader.u32()?.cast_signed();
                let what = String::from_utf8_lossy(reader.0).into_owned();
                reader.0 = &[];
                Self::Failed { errno, what }
            }
            3 => Self::Descriptor,
            4 => {
                let (event, layer) = (EventId(reader.u64()?), reader.layer()?);
                let (offset, count) = (reader.u64()?, reader.u64()?);
                Self::Question(event, layer, ByteRange { offset, count })
            }
            5 => Self::Keep(reader.kept()?),
            6 => Self::Drop(reader.kept()?),
            7 => Self::UpToDate,
            8 => {
                let [has_group, filler, gate] = reader.array()?;
                let group = GroupId(reader.array()?);
                Self::Status(Status {
                    group: (has_group != 0).then_some(group),
                    gate: Gate::of(gate)?,
                    filler: filler != 0,
                    open: reader.u64()?,
                    watched: reader.u64()?,
                    mounts: reader.u64()?,
                    asked: reader.u64()?,
                    refused: reader.u64()?,
                    expired: reader.u64()?,
                    unknown: reader.u64()?,
                })
            }
            _ => return None,
        };
        reader.end(notice)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LAYER: [u8; 32] = [7; 32];

    fn requests() -> Vec<Request> {
        let layer = LayerDigest(LAYER);
        let limits = Limits {
            deadline_ms: 30_000,
            slots: 7,
            gate: Gate::Fuse,
        };
        vec![
            Request::Start(limits),
            Request::Restore(Kept::Group),
            Request::Restore(Kept::Journal),
            Request::Restore(Kept::Blob(layer)),
            Request::Restore(Kept::Mount(layer)),
            Request::Restored(limits),
            Request::Hold,
            Request::Fill,
            Request::Watch(layer),
            Request::Unwatch(layer),
            Request::Blob(layer),
            Request::KeepMount(layer),
            Request::Mount(layer),
            Request::Tree,
            Request::Restore(Kept::Tree),
            Request::DropMount(layer),
            Request::Answer(EventId(9), Verdict::Allow),
            Request::Answer(EventId(u64::MAX), Verdict::InputOutputError),
            Request::Answer(EventId(0), Verdict::NoSpace),
            Request::Status,
        ]
    }

    fn notices() -> Vec<Notice> {
        let layer = LayerDigest(LAYER);
        let failed = |what: &str| Notice::Failed {
            errno: -3,
            what: what.to_owned(),
        };
        let range = ByteRange {
            offset: 1 << 40,
            count: 4096,
        };
        vec![
            Notice::Done,
            failed(""),
            failed("mark the blob"),
            Notice::Descriptor,
            Notice::Question(EventId(1), layer, range),
            Notice::Keep(Kept::Group),
            Notice::Drop(Kept::Mount(layer)),
            Notice::UpToDate,
            Notice::Status(Status::default()),
            Notice::Status(Status {
                group: Some(GroupId([2; 16])),
                gate: Gate::Fanotify,
                open: 1,
                watched: 2,
                mounts: 3,
                filler: true,
                asked: 4,
                refused: 5,
                expired: 6,
                unknown: 7,
            }),
        ]
    }

    #[test]
    fn what_is_written_is_read() {
        for request in requests() {
            assert_eq!(Request::decode(&request.encode()), Some(request));
        }
        for notice in notices() {
            let packet = notice.encode();
            assert!(packet.len() <= MAX_MESSAGE);
            assert_eq!(Notice::decode(&packet), Some(notice));
        }
    }

    #[test]
    fn nothing_is_read_of_what_is_cut_or_longer() {
        for packet in requests().iter().map(Request::encode) {
            for cut in 0..packet.len() {
                assert_eq!(Request::decode(&packet[..cut]), None, "{packet:?}");
            }
            assert_eq!(Request::decode(&[&packet[..], &[0]].concat()), None);
        }
        for packet in notices().iter().map(Notice::encode).filter(|p| p[0] != 2) {
            for cut in 0..packet.len() {
                assert_eq!(Notice::decode(&packet[..cut]), None, "{packet:?}");
            }
            assert_eq!(Notice::decode(&[&packet[..], &[0]].concat()), None);
        }
    }

    #[test]
    fn long_errors_are_cut_between_characters() {
        let what = "é".repeat(MAX_TEXT);
        let packet = Notice::Failed { errno: 5, what }.encode();
        assert!(packet.len() <= MAX_MESSAGE);
        let Some(Notice::Failed { what, .. }) = Notice::decode(&packet) else {
            panic!("unreadable");
        };
        assert_eq!(what, "é".repeat(MAX_TEXT / 2));
    }
}
