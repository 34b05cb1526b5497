//! Questions that wait for an answer. Pure, and of fixed size: a burst of readers takes slots, not
//! memory. What has no slot stays in the kernel's queue, where it waits safely.

use crate::LayerDigest;
use crate::sys::fanotify::ByteRange;

/// Names a question to the filler. Never used twice while the keeper lives, so a late answer meets
/// nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct EventId(pub u64);

/// A point of the monotonic clock, in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Instant(pub u64);

/// One question.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Question {
    /// The layer whose blob is read.
    pub layer: LayerDigest,
    /// The bytes.
    pub range: ByteRange,
    /// When the reader gets an error instead.
    pub deadline: Instant,
}

const NONE: u32 = u32::MAX;

#[derive(Debug)]
struct Slot<T> {
    /// Taken slots carry their question and what the caller keeps with it.
    held: Option<(Question, T)>,
    generation: u32,
    previous: u32,
    next: u32,
}

/// Open questions in order of arrival. Deadlines are a fixed time after arrival, so the first is
/// also the first to expire; those from `undelivered` on have not been sent to a filler.
#[derive(Debug)]
pub(super) struct Table<T> {
    slots: Box<[Slot<T>]>,
    free: Vec<u32>,
    head: u32,
    tail: u32,
    undelivered: u32,
}

impl<T> Table<T> {
    /// A table of `capacity` slots. `first_generation` is random, so that a filler that mistakes
    /// one keeper for the next answers nothing.
    #[must_use]
    pub(super) fn new(capacity: u32, first_generation: u32) -> Self {
        let slot = |_| Slot {
            held: None,
            generation: first_generation,
            previous: NONE,
            next: NONE,
        };
        Self {
            slots: (0..capacity).map(slot).collect(),
            free: (0..capacity).rev().collect(),
            head: NONE,
            tail: NONE,
            undelivered: NONE,
        }
    }

    /// Number of free slots.
    #[must_use]
    pub(super) fn room(&self) -> usize {
        self.free.len()
    }

    /// Number of open questions.
    #[must_use]
    pub(super) fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Takes a question in, if there is room.
    ///
    /// # Errors
    /// Gives `kept` back when the table is full.
    pub(super) fn insert(&mut self, question: Question, kept: T) -> Result<EventId, T> {
        let Some(at) = self.free.pop() else {
            return Err(kept);
        };
        Ok(self.append(at, question, kept))
    }

    /// Takes a question in at the slot where it was before. Whether that was free.
    pub(super) fn restore(&mut self, slot: u32, question: Question, kept: T) -> bool {
        let Some(at) = self.free.iter().rposition(|free| *free == slot) else {
            return false;
        };
        self.free.remove(at);
        self.append(slot, question, kept);
        true
    }

    fn append(&mut self, at: u32, question: Question, kept: T) -> EventId {
        let tail = self.tail;
        let slot = &mut self.slots[at as usize];
        slot.generation = slot.generation.wrapping_add(1);
        slot.held = Some((question, kept));
        slot.previous = tail;
        slot.next = NONE;
        let id = id(at, slot.generation);
        match tail {
            NONE => self.head = at,
            _ => self.slots[tail as usize].next = at,
        }
        self.tail = at;
        if self.undelivered == NONE {
            self.undelivered = at;
        }
        id
    }

    /// The next question for the filler.
    #[must_use]
    pub(super) fn next_undelivered(&self) -> Option<(EventId, Question)> {
        self.at(self.undelivered)
    }

    /// Remembers that the filler has the one that [`Self::next_undelivered`] returned.
    pub(super) fn delivered(&mut self) {
        if self.undelivered != NONE {
            self.undelivered = self.slots[self.undelivered as usize].next;
        }
    }

    /// The filler is gone: all of them are sent again to the next.
    pub(super) fn deliver_again(&mut self) {
        self.undelivered = self.head;
    }

    /// The slot in which a question is, to say where it is journaled.
    #[must_use]
    pub(super) fn slot(id: EventId) -> u32 {
        // The lower half, by construction.
        (id.0 & u64::from(u32::MAX)) as u32
    }

    /// Takes a question out. None when it was answered before.
    pub(super) fn remove(&mut self, event: EventId) -> Option<(Question, T)> {
        let at = Self::slot(event);
        let slot = self.slots.get_mut(at as usize)?;
        if id(at, slot.generation) != event {
            return None;
        }
        let held = slot.held.take()?;
        let (previous, next) = (slot.previous, slot.next);
        match previous {
            NONE => self.head = next,
            _ => self.slots[previous as usize].next = next,
        }
        match next {
            NONE => self.tail = previous,
            _ => self.slots[next as usize].previous = previous,
        }
        if self.undelivered == at {
            self.undelivered = next;
        }
        self.free.push(at);
        Some(held)
    }

    /// The oldest question.
    #[must_use]
    pub(super) fn first(&self) -> Option<(EventId, Question)> {
        self.at(self.head)
    }

    fn at(&self, at: u32) -> Option<(EventId, Question)> {
        let slot = self.slots.get(at as usize)?;
        let (question, _) = slot.held.as_ref()?;
        Some((id(at, slot.generation), *question))
    }
}

fn id(at: u32, generation: u32) -> EventId {
    EventId((u64::from(generation) << 32) | u64::from(at))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn question(n: u64) -> Question {
        Question {
            layer: LayerDigest([u8::try_from(n % 3).unwrap(); 32]),
            range: ByteRange {
                offset: n,
                count: 1,
            },
            deadline: Instant(n),
        }
    }

    #[test]
    fn answers_once() {
        let mut table = Table::new(2, u32::MAX - 1);
        let first = table.insert(question(1), "a").unwrap();
        assert_eq!(table.remove(first), Some((question(1), "a")));
        assert_eq!(table.remove(first), None);
        let second = table.insert(question(2), "b").unwrap();
        assert_eq!(Table::<&str>::slot(first), Table::<&str>::slot(second));
        assert_eq!(table.remove(first), None, "a late answer meets nobody");
        assert_eq!(table.remove(EventId(u64::MAX)), None);
    }

    #[test]
    fn holds_no_more_than_its_slots() {
        let mut table = Table::new(1, u32::MAX - 1);
        let first = table.insert(question(1), 1).unwrap();
        assert_eq!(table.insert(question(2), 2), Err(2));
        assert_eq!((table.room(), table.len()), (0, 1));
        table.remove(first);
        assert_eq!(table.len(), 0);
        table.insert(question(2), 2).unwrap();
    }

    #[test]
    fn sends_all_again_to_the_next_filler() {
        let mut table = Table::new(4, u32::MAX - 1);
        let ids: Vec<_> = (0..3)
            .map(|n| table.insert(question(n), ()).unwrap())
            .collect();
        table.delivered();
        table.delivered();
        assert_eq!(table.next_undelivered().unwrap().0, ids[2]);
        table.delivered();
        assert_eq!(table.next_undelivered(), None);
        table.remove(ids[1]);
        table.deliver_again();
        assert_eq!(table.next_undelivered().unwrap().0, ids[0]);
        table.delivered();
        assert_eq!(table.next_undelivered().unwrap().0, ids[2]);
    }

    #[test]
    fn a_successor_uses_the_same_slots() {
        let mut table = Table::new(3, u32::MAX - 1);
        assert!(table.restore(2, question(1), ()));
        assert!(table.restore(0, question(2), ()));
        assert!(!table.restore(0, question(3), ()) && !table.restore(9, question(3), ()));
        assert_eq!(table.first().unwrap().1, question(1));
        let id = table.insert(question(3), ()).unwrap();
        assert_eq!(Table::<()>::slot(id), 1);
        assert_eq!(table.room(), 0);
    }

    proptest! {
        /// The table against a plain list.
        #[test]
        fn keeps_order(steps in proptest::collection::vec((0..4_u8, 0..16_usize), 0..200)) {
            let mut table = Table::new(8, u32::MAX - 1);
            let mut list: Vec<(EventId, u64, bool)> = Vec::new();
            let mut n = 0;
            for (step, which) in steps {
                match step {
                    0 => {
                        n += 1;
                        match table.insert(question(n), n) {
                            Ok(id) => list.push((id, n, false)),
                            Err(_) => prop_assert_eq!(list.len(), 8),
                        }
                    }
                    1 if which < list.len() => {
                        let (id, n, _) = list.remove(which);
                        prop_assert_eq!(table.remove(id), Some((question(n), n)));
                    }
                    2 => {
                        let next = list.iter_mut().find(|(_, _, sent)| !sent);
                        prop_assert_eq!(
                            table.next_undelivered().map(|(id, _)| id),
                            next.as_ref().map(|(id, ..)| *id)
                        );
                        table.delivered();
                        next.into_iter().for_each(|(_, _, sent)| *sent = true);
                    }
                    3 if which == 0 => {
                        table.deliver_again();
                        list.iter_mut().for_each(|(_, _, sent)| *sent = false);
                    }
                    _ => {}
                }
                prop_assert_eq!(table.len(), list.len());
                prop_assert_eq!(
                    table.first().map(|(id, _)| id),
                    list.first().map(|(id, ..)| *id)
                );
            }
        }
    }
}
