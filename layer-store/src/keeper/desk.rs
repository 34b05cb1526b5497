//! What the keeper knows, and how it takes and answers questions. No sockets.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd, RawFd};
use std::time::Duration;

use super::blobs::Blobs;
use super::gate::Served;
use super::journal::{Journal, Unanswered};
use super::protocol::{Gate, GroupId, Kept, Limits, Status};
use super::table::{EventId, Instant, Question, Table};
use crate::LayerDigest;
use crate::fuse::{Connection, Service, Step};
use crate::sys::fanotify::{EVENT_BYTES, Event, Group, Verdict};

/// Most events taken by one read.
const BATCH: usize = 64;
/// Bounds of [`Limits::slots`].
const MAX_SLOTS: u32 = 1 << 16;
/// Descriptors that are not events: blobs, mounts, clients.
const OTHER_DESCRIPTORS: u64 = 4096;

/// How the kernel takes the answer to an open question.
#[derive(Debug)]
enum Waiting {
    /// An event of fanotify.
    Event {
        number: RawFd,
        /// Reserves the number. Absent for what the keeper before this one read.
        reserved: Option<OwnedFd>,
    },
    /// A request of FUSE.
    Read { unique: u64 },
}

/// A served group.
#[derive(Debug)]
pub(super) struct Desk {
    served: Served,
    journal: Journal,
    questions: Table<Waiting>,
    /// Questions of the keeper before this one that are still open. Nothing is read before they
    /// are answered: a new event may come up with the number of an old one.
    inherited: usize,
    /// Layers whose blobs were let go of without a request.
    gone: Vec<LayerDigest>,
    mounts: HashMap<LayerDigest, OwnedFd>,
    deadline: Duration,
    counts: Status,
}

/// What a successor is handed, piece by piece.
#[derive(Debug, Default)]
pub(super) struct Inheritance {
    group: Option<OwnedFd>,
    tree: Option<OwnedFd>,
    journal: Option<OwnedFd>,
    blobs: Vec<(LayerDigest, OwnedFd)>,
    mounts: HashMap<LayerDigest, OwnedFd>,
}

impl Inheritance {
    /// One piece.
    pub(super) fn add(&mut self, kept: Kept, fd: OwnedFd) {
        match kept {
            Kept::Group => self.group = Some(fd),
            Kept::Tree => self.tree = Some(fd),
            Kept::Journal => self.journal = Some(fd),
            Kept::Blob(layer) => self.blobs.push((layer, fd)),
            Kept::Mount(layer) => drop(self.mounts.insert(layer, fd)),
        }
    }
}

impl Desk {
    /// Serves a new group.
    ///
    /// # Errors
    /// What failed, with the system's error.
    pub(super) fn start(limits: Limits) -> Result<Self, (&'static str, io::Error)> {
        let served = Served::start(limits.gate)?;
        let numbers = descriptor_limit();
        let id = GroupId(random().map_err(|error| ("name the group", error))?);
        let journal = Journal::new(id, slots(limits, numbers), numbers)
            .map_err(|error| ("make the journal", error))?;
        Self::new(served, journal, limits)
    }

    /// Serves the group of the keeper before this one. A FUSE connection that is dead is replaced
    /// by a new one, under another name: its readers got errors and have to be started anew.
    ///
    /// # Errors
    /// What failed, with the system's error.
    pub(super) fn resume(
        inheritance: Inheritance,
        root: BorrowedFd<'_>,
        limits: Limits,
        now: Instant,
    ) -> Result<Self, (&'static str, io::Error)> {
        let missing = |what| (what, io::Error::from(io::ErrorKind::NotFound));
        let group = inheritance.group;
        let group = || group.ok_or_else(|| missing("find the kept group"));
        let served = match limits.gate {
            Gate::Closed => Served::Closed,
            Gate::Fanotify => Served::Fanotify {
                group: Group::kept(group()?),
                blobs: Blobs::default(),
            },
            Gate::Fuse => {
                let connection = Connection::kept(group()?);
                let tree = inheritance.tree;
                let tree = tree.ok_or_else(|| missing("find the kept folder"))?;
                if connection.is_dead() {
                    return Self::start(limits);
                }
                Served::Fuse(Box::new(Service::kept(connection, tree)))
            }
        };
        let journal = inheritance
            .journal
            .ok_or_else(|| missing("find the kept journal"))?;
        let (journal, unanswered) =
            Journal::open(journal).map_err(|error| ("read the kept journal", error))?;
        let mut desk = Self::new(served, journal, limits)?;
        desk.mounts = inheritance.mounts;
        for (layer, blob) in inheritance.blobs {
            let mounted = desk.mounts.contains_key(&layer);
            if !desk.served.restore(root, layer, blob, mounted)? {
                desk.gone.push(layer);
            }
        }
        let taken_over = match &desk.served {
            Served::Closed => Ok(()),
            Served::Fanotify { .. } => desk.inherit(&unanswered, now),
            Served::Fuse(service) => service.resend(),
        };
        taken_over.map_err(|error| ("take over open questions", error))?;
        Ok(desk)
    }

    fn new(
        served: Served,
        journal: Journal,
        limits: Limits,
    ) -> Result<Self, (&'static str, io::Error)> {
        let generation = random().map_err(|error| ("name questions", error))?;
        Ok(Self {
            questions: Table::new(journal.capacity(), u32::from_ne_bytes(generation)),
            inherited: 0,
            gone: Vec::new(),
            mounts: HashMap::new(),
            deadline: Duration::from_millis(limits.deadline_ms.into()),
            counts: Status {
                group: Some(journal.group()),
                gate: served.gate(),
                ..Status::default()
            },
            served,
            journal,
        })
    }

    /// Takes over what the keeper before this one left open, slot by slot, so that the journal is
    /// true already. Each gets its full time once more: the filler may have died too.
    fn inherit(&mut self, unanswered: &[Unanswered], now: Instant) -> io::Result<()> {
        for entry in unanswered {
            let question = Question {
                deadline: self.due(now),
                ..entry.question
            };
            let waiting = Waiting::Event {
                number: entry.number,
                reserved: None,
            };
            if self.questions.restore(entry.slot, question, waiting) {
                self.inherited += 1;
            }
        }
        if self.inherited == 0 {
            self.sweep()?;
        }
        Ok(())
    }

    /// Answers with an error whatever the keeper before this one read and did not record.
    fn sweep(&self) -> io::Result<()> {
        if let Served::Fanotify { group, .. } = &self.served {
            for number in 0..self.journal.numbers() {
                group.answer(number, Verdict::InputOutputError)?;
            }
        }
        Ok(())
    }

    /// Whether events may be read now.
    #[must_use]
    pub(super) fn may_read(&self) -> bool {
        self.inherited == 0 && self.questions.room() > 0
    }

    /// Reads questions that are there, as far as there is room for them.
    ///
    /// # Errors
    /// The group cannot be read, or a question cannot be recorded or answered.
    pub(super) fn read(&mut self, now: Instant) -> io::Result<()> {
        let mut buffer = [0_u8; EVENT_BYTES * BATCH];
        let room = self.questions.room().min(BATCH) * EVENT_BYTES;
        if !self.may_read() {
            return Ok(());
        }
        match &self.served {
            Served::Closed => {}
            Served::Fanotify { group, .. } => {
                let events = group.read(buffer.get_mut(..room).unwrap_or_default())?;
                // The iterator borrows only the buffer.
                for event in events {
                    self.take(event, now)?;
                }
            }
            Served::Fuse(_) => {
                for _ in 0..BATCH {
                    if !self.may_read() || !self.step(now)? {
                        break;
                    }
                }
            }
        }
        Ok(())
    }

    /// Takes one request of FUSE. Whether there was one.
    fn step(&mut self, now: Instant) -> io::Result<bool> {
        let deadline = self.due(now);
        let Served::Fuse(service) = &mut self.served else {
            return Ok(false);
        };
        match service.step()? {
            Step::Idle => return Ok(false),
            Step::Done => {}
            Step::Unknown => self.counts.unknown += 1,
            Step::Gone(layer) => self.gone.push(layer),
            Step::Question(read) => {
                self.counts.asked += 1;
                let question = Question {
                    layer: read.layer,
                    range: read.range,
                    deadline,
                };
                let unique = read.unique;
                // No more is read than there is room for.
                if self
                    .questions
                    .insert(question, Waiting::Read { unique })
                    .is_err()
                {
                    let error = Verdict::InputOutputError;
                    service.answer(unique, read.layer, read.range, error)?;
                }
            }
        }
        Ok(true)
    }

    /// A layer whose blob is held no longer, though nobody asked for that.
    pub(super) fn next_gone(&mut self) -> Option<LayerDigest> {
        self.gone.pop()
    }

    fn take(&mut self, event: Event, now: Instant) -> io::Result<()> {
        // An overflow cannot happen in an unlimited queue, and asks nothing.
        let Some(fd) = event.fd else { return Ok(()) };
        let number = fd.as_raw_fd();
        self.counts.asked += 1;
        let Served::Fanotify { group, blobs } = &self.served else {
            return Ok(());
        };
        let layer = blobs.of_file(fd.as_fd()).unwrap_or(None);
        let (Some(layer), Some(range)) = (layer, event.range) else {
            self.counts.unknown += 1;
            group.answer(number, Verdict::InputOutputError)?;
            return Ok(());
        };
        let question = Question {
            layer,
            range,
            deadline: self.due(now),
        };
        let waiting = Waiting::Event {
            number,
            reserved: Some(fd),
        };
        match self.questions.insert(question, waiting) {
            Ok(id) => {
                let slot = Table::<Waiting>::slot(id);
                self.journal.record(slot, number, &question)
            }
            // Not reached: no more is read than there is room for.
            Err(_) => {
                group.answer(number, Verdict::InputOutputError)?;
                Ok(())
            }
        }
    }

    /// Answers a question. One that was answered before is no error.
    ///
    /// # Errors
    /// The kernel or the journal does not take it.
    pub(super) fn answer(&mut self, event: EventId, verdict: Verdict) -> io::Result<()> {
        let answered = self.finish(event, verdict)?;
        self.counts.refused += u64::from(answered && verdict != Verdict::Allow);
        Ok(())
    }

    /// Ends the questions whose time is up.
    ///
    /// # Errors
    /// Those of [`Self::answer`].
    pub(super) fn expire(&mut self, now: Instant) -> io::Result<()> {
        while let Some((event, question)) = self.questions.first() {
            if question.deadline > now {
                break;
            }
            self.counts.expired += 1;
            self.finish(event, Verdict::InputOutputError)?;
        }
        Ok(())
    }

    /// The order matters: a record that outlives its answer is answered twice, which the kernel
    /// does not mind; an answer that outlives its record would be lost.
    fn finish(&mut self, event: EventId, verdict: Verdict) -> io::Result<bool> {
        let Some((question, waiting)) = self.questions.remove(event) else {
            return Ok(false);
        };
        match (&mut self.served, waiting) {
            (Served::Fanotify { group, .. }, Waiting::Event { number, reserved }) => {
                group.answer(number, verdict)?;
                self.journal.clear(Table::<Waiting>::slot(event))?;
                if reserved.is_none() {
                    self.inherited -= 1;
                    if self.inherited == 0 {
                        self.sweep()?;
                    }
                }
            }
            (Served::Fuse(service), Waiting::Read { unique }) => {
                service.answer(unique, question.layer, question.range, verdict)?;
            }
            // Each gate has questions of its own kind only.
            _ => {}
        }
        Ok(true)
    }

    /// When [`Self::expire`] has something to do.
    #[must_use]
    pub(super) fn next_deadline(&self) -> Option<Instant> {
        self.questions
            .first()
            .map(|(_, question)| question.deadline)
    }

    /// The next question for the filler; [`Self::delivered`] goes on.
    #[must_use]
    pub(super) fn next_undelivered(&self) -> Option<(EventId, Question)> {
        self.questions.next_undelivered()
    }

    /// The filler has what [`Self::next_undelivered`] returned.
    pub(super) fn delivered(&mut self) {
        self.questions.delivered();
    }

    /// Another filler begins.
    pub(super) fn deliver_again(&mut self) {
        self.questions.deliver_again();
    }

    /// Begins to ask about a layer's blob.
    ///
    /// # Errors
    /// What failed, with the system's error.
    pub(super) fn watch(
        &mut self,
        root: BorrowedFd<'_>,
        layer: LayerDigest,
    ) -> Result<(), (&'static str, io::Error)> {
        self.served.watch(root, layer)
    }

    /// Whether questions about a layer are asked.
    #[must_use]
    pub(super) fn is_watched(&self, layer: LayerDigest) -> bool {
        self.served.is_watched(layer)
    }

    /// Asks no more about a layer's blob. Open questions about it stay open. Whether it is let go;
    /// otherwise [`Self::next_gone`] says so later.
    ///
    /// # Errors
    /// What failed, with the system's error.
    pub(super) fn unwatch(
        &mut self,
        root: BorrowedFd<'_>,
        layer: LayerDigest,
    ) -> Result<bool, (&'static str, io::Error)> {
        self.served.unwatch(root, layer)
    }

    /// The descriptor of something kept.
    #[must_use]
    pub(super) fn kept(&self, kept: Kept) -> Option<BorrowedFd<'_>> {
        match kept {
            Kept::Group => self.served.group(),
            Kept::Tree => self.served.tree(),
            Kept::Journal => Some(self.journal.as_fd()),
            Kept::Blob(layer) => self.served.blob(layer),
            Kept::Mount(layer) => self.mounts.get(&layer).map(AsFd::as_fd),
        }
    }

    /// Everything that is kept. Whoever has the journal has what it needs to go with it.
    #[must_use]
    pub(super) fn all_kept(&self) -> Vec<Kept> {
        let blobs = self.served.layers().into_iter().map(Kept::Blob);
        let mounts = self.mounts.keys().copied().map(Kept::Mount);
        [Kept::Group, Kept::Tree, Kept::Journal]
            .into_iter()
            .filter(|kept| self.kept(*kept).is_some())
            .chain(blobs)
            .chain(mounts)
            .collect()
    }

    /// Keeps a layer's mount.
    pub(super) fn keep_mount(&mut self, layer: LayerDigest, mount: OwnedFd) {
        self.mounts.insert(layer, mount);
    }

    /// Lets go of a layer's mount.
    pub(super) fn drop_mount(&mut self, layer: LayerDigest) {
        self.mounts.remove(&layer);
    }

    /// Counters. Whether a filler is connected is for the caller to say.
    #[must_use]
    pub(super) fn status(&self) -> Status {
        Status {
            open: self.questions.len() as u64,
            watched: self.served.watched() as u64,
            mounts: self.mounts.len() as u64,
            ..self.counts
        }
    }

    fn due(&self, now: Instant) -> Instant {
        let nanos = u64::try_from(self.deadline.as_nanos()).unwrap_or(u64::MAX);
        Instant(now.0.saturating_add(nanos))
    }
}

/// Soft limit of descriptors of this process, below which all their numbers are.
fn descriptor_limit() -> RawFd {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    RawFd::try_from(limit.unwrap_or(u64::MAX))
        .unwrap_or(1 << 20)
        .min(1 << 20)
}

fn random<const N: usize>() -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    rustix::rand::getrandom(&mut bytes[..], rustix::rand::GetRandomFlags::empty())?;
    Ok(bytes)
}

/// As many questions as wanted, and as there are descriptors for.
fn slots(limits: Limits, numbers: RawFd) -> u32 {
    let numbers = u64::from(numbers.unsigned_abs());
    let room = numbers.saturating_sub(OTHER_DESCRIPTORS).max(numbers / 2);
    let room = u32::try_from(room).unwrap_or(u32::MAX);
    limits.slots.clamp(1, MAX_SLOTS).min(room.max(1))
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::IntoRawFd as _;
    use std::os::unix::fs::FileExt as _;

    use super::*;

    const LIMITS: Limits = Limits {
        deadline_ms: 60_000,
        slots: 4,
        gate: Gate::Fanotify,
    };

    fn copy(desk: &Desk, kept: Kept) -> OwnedFd {
        desk.kept(kept).unwrap().try_clone_to_owned().unwrap()
    }

    /// A keeper that dies between reading an event and recording it leaves an event that only the
    /// kernel knows.
    #[test]
    fn a_successor_ends_what_was_read_and_not_recorded() {
        let root = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let layer = LayerDigest([1; 32]);
        let folder = root.path().join(crate::layout::folder_name(layer));
        std::fs::create_dir(&folder).unwrap();
        let blob = folder.join(crate::layout::BLOB);
        File::create(&blob).unwrap().set_len(4096).unwrap();
        let mut desk = match Desk::start(LIMITS) {
            Ok(desk) => desk,
            Err((what, error)) => return println!("skipped: cannot {what}: {error}"),
        };
        let opened = File::open(root.path()).unwrap();
        if let Err((what, error)) = desk.watch(opened.as_fd(), layer) {
            return println!("skipped: cannot {what}: {error}");
        }
        let reader = std::thread::spawn(move || {
            let file = File::open(blob).unwrap();
            file.read_at(&mut [0; 16], 0)
        });
        let group = desk.kept(Kept::Group).unwrap();
        let mut wanted = [rustix::event::PollFd::from_borrowed_fd(
            group,
            rustix::event::PollFlags::IN,
        )];
        rustix::event::poll(&mut wanted, None).unwrap();
        let mut buffer = [0; EVENT_BYTES];
        let Served::Fanotify { group, .. } = &desk.served else {
            panic!("another gate");
        };
        for event in group.read(&mut buffer).unwrap() {
            // The number stays taken, as it would in the table of a process that was killed.
            let _ = event.fd.unwrap().into_raw_fd();
        }
        let mut inheritance = Inheritance::default();
        for kept in [Kept::Group, Kept::Journal, Kept::Blob(layer)] {
            inheritance.add(kept, copy(&desk, kept));
        }
        drop(desk);
        let successor = Desk::resume(inheritance, opened.as_fd(), LIMITS, Instant(0)).unwrap();
        let error = reader.join().unwrap().unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EIO));
        assert!(successor.may_read());
    }
}
