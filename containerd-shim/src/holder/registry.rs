//! What the holder remembers: keys, their processes, descriptors and notes, and orphans' exits.

use std::collections::{BTreeMap, HashMap, VecDeque};

use super::protocol::{Code, Entry, Exit, Key, MAX_SLOTS, Slot};

/// Exits of orphans kept until somebody claims them.
const ORPHANS: usize = 4096;

/// A refusal, with a text for people.
pub(super) type Refusal = (Code, &'static str);

#[derive(Debug)]
struct Kept<F> {
    process: Process,
    slots: BTreeMap<Slot, F>,
    note: Vec<u8>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Process {
    /// The key only holds descriptors or a note.
    None,
    /// The zygote has not answered yet.
    Launching,
    Running(i32),
    Ended(i32, Exit),
}

impl<F> Default for Kept<F> {
    fn default() -> Self {
        Self {
            process: Process::None,
            slots: BTreeMap::new(),
            note: Vec::new(),
        }
    }
}

/// `F` is a descriptor; tests use numbers.
#[derive(Debug)]
pub(super) struct Registry<F> {
    keys: HashMap<Key, Kept<F>>,
    running: HashMap<i32, Key>,
    orphans: VecDeque<(i32, Exit)>,
}

impl<F> Default for Registry<F> {
    fn default() -> Self {
        Self {
            keys: HashMap::new(),
            running: HashMap::new(),
            orphans: VecDeque::new(),
        }
    }
}

impl<F> Registry<F> {
    /// Whether this process has a key.
    pub(super) fn knows(&self, pid: i32) -> bool {
        self.running.contains_key(&pid)
    }

    /// Reserves a key for a process that is about to be made.
    pub(super) fn reserve(&mut self, key: &Key) -> Result<(), Refusal> {
        let kept = self.keys.entry(key.clone()).or_default();
        if kept.process != Process::None {
            return Err((Code::Exists, "the key has a process already"));
        }
        kept.process = Process::Launching;
        Ok(())
    }

    /// The process of a reserved key is there.
    pub(super) fn started(&mut self, key: &Key, pid: i32) {
        if let Some(kept) = self.keys.get_mut(key) {
            kept.process = Process::Running(pid);
            self.running.insert(pid, key.clone());
        }
    }

    /// No process came of a reserved key: it is forgotten with what came along for it.
    pub(super) fn failed(&mut self, key: &Key) {
        self.keys.remove(key);
    }

    /// Records the exit of a reaped child; returns its key if it has one.
    pub(super) fn ended(&mut self, pid: i32, exit: Exit) -> Option<Key> {
        let Some(key) = self.running.remove(&pid) else {
            if self.orphans.len() == ORPHANS {
                self.orphans.pop_front();
            }
            self.orphans.push_back((pid, exit));
            return None;
        };
        if let Some(kept) = self.keys.get_mut(&key) {
            kept.process = Process::Ended(pid, exit);
        }
        Some(key)
    }

    /// Gives an orphan's exit to a reserved key; the latest, if its id was used twice.
    pub(super) fn claim_ended(&mut self, key: &Key, pid: i32) -> bool {
        let Some(place) = self.orphans.iter().rposition(|(orphan, _)| *orphan == pid) else {
            return false;
        };
        if let (Some((pid, exit)), Some(kept)) =
            (self.orphans.remove(place), self.keys.get_mut(key))
        {
            kept.process = Process::Ended(pid, exit);
        }
        true
    }

    /// Keeps a descriptor.
    pub(super) fn keep(&mut self, key: &Key, slot: Slot, fd: F) -> Result<(), Refusal> {
        let kept = self.keys.entry(key.clone()).or_default();
        if kept.slots.len() >= MAX_SLOTS && !kept.slots.contains_key(&slot) {
            return Err((Code::Invalid, "the key has no slot left"));
        }
        kept.slots.insert(slot, fd);
        Ok(())
    }

    /// Closes a descriptor. One that is not there is closed already.
    pub(super) fn drop_slot(&mut self, key: &Key, slot: Slot) {
        if let Some(kept) = self.keys.get_mut(key) {
            kept.slots.remove(&slot);
            if kept.process == Process::None && kept.slots.is_empty() && kept.note.is_empty() {
                self.keys.remove(key);
            }
        }
    }

    /// Remembers a note.
    pub(super) fn note(&mut self, key: &Key, note: Vec<u8>) {
        self.keys.entry(key.clone()).or_default().note = note;
    }

    /// The key's process if it runs.
    pub(super) fn running(&self, key: &Key) -> Option<i32> {
        match self.keys.get(key)?.process {
            Process::Running(pid) => Some(pid),
            Process::None | Process::Launching | Process::Ended(..) => None,
        }
    }

    /// The key's exit if its process ended.
    pub(super) fn exit(&self, key: &Key) -> Option<(i32, Exit)> {
        match self.keys.get(key)?.process {
            Process::Ended(pid, exit) => Some((pid, exit)),
            Process::None | Process::Launching | Process::Running(_) => None,
        }
    }

    /// Forgets a key unless its process runs.
    pub(super) fn forget(&mut self, key: &Key) -> Result<(), Refusal> {
        match self.keys.get(key).map(|kept| kept.process) {
            Some(Process::Launching | Process::Running(_)) => {
                Err((Code::Running, "the process still runs"))
            }
            Some(Process::None | Process::Ended(..)) | None => {
                self.keys.remove(key);
                Ok(())
            }
        }
    }

    /// All keys.
    pub(super) fn keys(&self) -> impl Iterator<Item = &Key> {
        self.keys.keys()
    }

    /// What a key holds, with its descriptors in the order of their slots.
    pub(super) fn entry(&self, key: &Key) -> Option<(Entry, Vec<&F>)> {
        let kept = self.keys.get(key)?;
        let (pid, exit) = match kept.process {
            Process::None | Process::Launching => (None, None),
            Process::Running(pid) => (Some(pid), None),
            Process::Ended(pid, exit) => (Some(pid), Some(exit)),
        };
        let entry = Entry {
            key: key.clone(),
            pid,
            exit,
            slots: kept.slots.keys().copied().collect(),
            note: kept.note.clone(),
        };
        Some((entry, kept.slots.values().collect()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(name: &str) -> Key {
        Key::new(name).unwrap()
    }

    fn exit(code: u32) -> Exit {
        Exit { code, at_ns: 1 }
    }

    #[test]
    fn a_process_lives_and_ends_under_its_key() {
        let mut registry = Registry::<u8>::default();
        let a = key("a");
        registry.reserve(&a).unwrap();
        assert_eq!(registry.reserve(&a).unwrap_err().0, Code::Exists);
        assert_eq!(registry.forget(&a).unwrap_err().0, Code::Running);
        registry.started(&a, 5);
        assert!(registry.knows(5));
        assert_eq!(registry.running(&a), Some(5));
        assert_eq!(registry.forget(&a).unwrap_err().0, Code::Running);
        assert_eq!(registry.ended(5, exit(3)), Some(a.clone()));
        assert!(!registry.knows(5));
        assert_eq!(registry.running(&a), None);
        assert_eq!(registry.exit(&a), Some((5, exit(3))));
        // Until it is acknowledged, the key is not free.
        assert_eq!(registry.reserve(&a).unwrap_err().0, Code::Exists);
        registry.forget(&a).unwrap();
        assert!(registry.entry(&a).is_none());
        registry.forget(&a).unwrap();
        registry.reserve(&a).unwrap();
    }

    #[test]
    fn a_failed_launch_leaves_nothing() {
        let mut registry = Registry::default();
        let a = key("a");
        registry.reserve(&a).unwrap();
        registry.keep(&a, 0, 10).unwrap();
        registry.failed(&a);
        assert_eq!(registry.keys().count(), 0);
    }

    #[test]
    fn descriptors_and_notes_come_back_in_order() {
        let mut registry = Registry::default();
        let a = key("a");
        registry.keep(&a, 4, 40).unwrap();
        registry.keep(&a, 1, 10).unwrap();
        registry.keep(&a, 4, 41).unwrap();
        registry.note(&a, b"x".to_vec());
        let (entry, fds) = registry.entry(&a).unwrap();
        assert_eq!(
            (entry.slots, fds, entry.note),
            (vec![1, 4], vec![&10, &41], b"x".to_vec())
        );
        registry.drop_slot(&a, 1);
        registry.drop_slot(&a, 1);
        assert_eq!(registry.entry(&a).unwrap().0.slots, [4]);
        for slot in 5..u8::try_from(4 + MAX_SLOTS).unwrap() {
            registry.keep(&a, slot, 0).unwrap();
        }
        assert_eq!(registry.keep(&a, 99, 0).unwrap_err().0, Code::Invalid);
    }

    #[test]
    fn a_key_that_holds_nothing_is_none() {
        let mut registry = Registry::default();
        let a = key("a");
        registry.keep(&a, 1, 10).unwrap();
        registry.drop_slot(&a, 1);
        assert!(registry.entry(&a).is_none());
    }

    #[test]
    fn orphans_can_be_claimed_once_and_are_bounded() {
        let mut registry = Registry::<u8>::default();
        assert_eq!(registry.ended(7, exit(1)), None);
        assert_eq!(registry.ended(7, exit(2)), None);
        let a = key("a");
        registry.reserve(&a).unwrap();
        assert!(registry.claim_ended(&a, 7));
        assert_eq!(registry.exit(&a), Some((7, exit(2))));
        for pid in 0..i32::try_from(ORPHANS).unwrap() {
            registry.ended(1000 + pid, exit(0));
        }
        let b = key("b");
        registry.reserve(&b).unwrap();
        assert!(!registry.claim_ended(&b, 7));
        assert!(registry.claim_ended(&b, 1000));
    }
}
