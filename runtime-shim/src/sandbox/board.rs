//! The newest report of every sandbox and the events nobody has been sent yet, for `Watch`.
//!
//! Reports coalesce: a slow reader skips states in between. Events do not: each is kept until it
//! was sent once, within a bound that only a long absence of the virtual node can reach.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use sandman_protocol::v1;
use tokio::sync::watch;
use tracing::warn;

/// Events kept while nobody listens; about 10 MB.
const MAX_EVENTS: usize = 16_384;

/// Shared by all sandboxes of a host.
#[derive(Debug)]
pub struct Board {
    inner: Mutex<Inner>,
    changed: watch::Sender<u64>,
}

#[derive(Debug, Default)]
struct Inner {
    /// Counts changes of reports.
    sequence: u64,
    reports: HashMap<String, (u64, Arc<v1::SandboxReport>)>,
    by_sequence: BTreeMap<u64, String>,
    events: VecDeque<v1::SandboxEvent>,
    lost_events: u64,
}

impl Default for Board {
    fn default() -> Self {
        Self {
            inner: Mutex::default(),
            changed: watch::Sender::new(0),
        }
    }
}

impl Board {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wake(&self) {
        self.changed
            .send_modify(|count| *count = count.wrapping_add(1));
    }

    /// Publishes a report, unless it says nothing new.
    pub fn publish(&self, report: v1::SandboxReport) {
        {
            let mut inner = self.lock();
            let uid = report.uid.clone();
            let old = inner
                .reports
                .get(&uid)
                .map(|(sequence, old)| (*sequence, **old == report));
            match old {
                Some((_, true)) => return,
                Some((sequence, false)) => {
                    inner.by_sequence.remove(&sequence);
                }
                None => {}
            }
            inner.sequence += 1;
            let sequence = inner.sequence;
            inner.by_sequence.insert(sequence, uid.clone());
            inner.reports.insert(uid, (sequence, Arc::new(report)));
        }
        self.wake();
    }

    /// Drops a sandbox that is forgotten.
    pub fn forget(&self, uid: &str) {
        let mut inner = self.lock();
        if let Some((sequence, _)) = inner.reports.remove(uid) {
            inner.by_sequence.remove(&sequence);
        }
    }

    /// Queues an event.
    pub fn event(&self, event: v1::SandboxEvent) {
        {
            let mut inner = self.lock();
            if inner.events.len() >= MAX_EVENTS {
                inner.events.pop_front();
                inner.lost_events += 1;
                if inner.lost_events.is_power_of_two() {
                    warn!(
                        lost = inner.lost_events,
                        "nobody fetches events; dropping the oldest"
                    );
                }
            }
            inner.events.push_back(event);
        }
        self.wake();
    }

    /// The newest report of a sandbox.
    #[must_use]
    pub fn report(&self, uid: &str) -> Option<Arc<v1::SandboxReport>> {
        self.lock()
            .reports
            .get(uid)
            .map(|(_, report)| report.clone())
    }

    /// All newest reports.
    #[must_use]
    pub fn reports(&self) -> Vec<Arc<v1::SandboxReport>> {
        self.lock()
            .reports
            .values()
            .map(|(_, report)| report.clone())
            .collect()
    }

    /// A reader that starts with everything.
    #[must_use]
    pub fn reader(self: &Arc<Self>) -> Reader {
        let mut changed = self.changed.subscribe();
        changed.mark_changed();
        Reader {
            board: self.clone(),
            changed,
            seen: 0,
        }
    }
}

/// One stream's place in the changes.
#[derive(Debug)]
pub struct Reader {
    board: Arc<Board>,
    changed: watch::Receiver<u64>,
    seen: u64,
}

impl Reader {
    /// Waits until there may be something new. False when there never will be.
    pub async fn changed(&mut self) -> bool {
        self.changed.changed().await.is_ok()
    }

    /// The next changed report, oldest change first.
    pub fn next_report(&mut self) -> Option<Arc<v1::SandboxReport>> {
        let inner = self.board.lock();
        let (sequence, uid) = inner.by_sequence.range(self.seen + 1..).next()?;
        let (_, report) = inner.reports.get(uid)?;
        self.seen = *sequence;
        Some(report.clone())
    }

    /// Takes the oldest event; it is the caller's to send.
    pub fn next_event(&mut self) -> Option<v1::SandboxEvent> {
        self.board.lock().events.pop_front()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(uid: &str, generation: i64) -> v1::SandboxReport {
        v1::SandboxReport {
            uid: uid.into(),
            observed_generation: generation,
            ..Default::default()
        }
    }

    fn drain(reader: &mut Reader) -> Vec<(String, i64)> {
        std::iter::from_fn(|| reader.next_report())
            .map(|r| (r.uid.clone(), r.observed_generation))
            .collect()
    }

    #[tokio::test]
    async fn slow_readers_get_the_newest_state_only() {
        let board = Arc::new(Board::default());
        board.publish(report("a", 1));
        board.publish(report("b", 1));
        board.publish(report("a", 2));
        let mut reader = board.reader();
        assert!(reader.changed().await);
        assert_eq!(drain(&mut reader), [("b".into(), 1), ("a".into(), 2)]);
        board.publish(report("a", 2));
        assert_eq!(drain(&mut reader), []);
        board.publish(report("b", 2));
        assert_eq!(drain(&mut reader), [("b".into(), 2)]);
        board.forget("b");
        assert!(board.report("b").is_none());
        assert_eq!(drain(&mut board.reader()), [("a".into(), 2)]);
    }

    #[test]
    fn events_are_taken_once_and_bounded() {
        let board = Arc::new(Board::default());
        for number in 0..=MAX_EVENTS {
            let message = number.to_string();
            board.event(v1::SandboxEvent {
                message,
                ..Default::default()
            });
        }
        let mut reader = board.reader();
        assert_eq!(reader.next_event().unwrap().message, "1");
        assert_eq!(board.reader().next_event().unwrap().message, "2");
    }
}
