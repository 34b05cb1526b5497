//! A keyed work queue: each key is worked on by one worker at a time, and a key
//! that is added while it is being worked on runs once more afterwards. Carries
//! no data, so that every run looks at the newest state.

use std::collections::{BTreeSet, HashMap, HashSet, VecDeque};
use std::hash::Hash;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;

use crate::backoff::jittered;

/// Delay before the first retry of a failed key.
const FIRST_RETRY: Duration = Duration::from_millis(100);
/// Longest delay between retries; failed work is never given up.
const MAX_RETRY: Duration = Duration::from_secs(30);

/// The queue. All methods take `&self`; none of the non-async ones blocks.
#[derive(Debug)]
pub struct Queue<K> {
    inner: Mutex<Inner<K>>,
    /// There is a key to work on, or nobody who waits for the timers.
    wake: Notify,
    /// The earliest timer is another one.
    timer: Notify,
}

#[derive(Debug)]
struct Inner<K> {
    ready: VecDeque<K>,
    /// In `ready`, or to be put there once its worker is done.
    dirty: HashSet<K>,
    working: HashSet<K>,
    /// Earliest time each key is wanted for, besides what is ready.
    later: HashMap<K, Instant>,
    /// `later` in order of time.
    timers: BTreeSet<(Instant, K)>,
    /// One of those who wait for a key waits for the timers too.
    timed: bool,
    failures: HashMap<K, u32>,
}

impl<K: Clone + Eq + Hash + Ord> Queue<K> {
    /// An empty queue.
    pub fn new() -> Self {
        Self {
            inner: Mutex::new(Inner {
                ready: VecDeque::new(),
                dirty: HashSet::new(),
                working: HashSet::new(),
                later: HashMap::new(),
                timers: BTreeSet::new(),
                timed: false,
                failures: HashMap::new(),
            }),
            wake: Notify::new(),
            timer: Notify::new(),
        }
    }

    /// Wants `key` to be worked on now. A need for a later time stays: this run
    /// may not be the one that it is for.
    pub fn add(&self, key: K) {
        let mut inner = self.lock();
        if inner.make_ready(key) {
            drop(inner);
            self.wake.notify_one();
        }
    }

    /// Wants `key` to be worked on in `delay` at the latest. Only the earliest
    /// time of a key is kept; a run states again what it needs after that.
    pub fn add_after(&self, key: K, delay: Duration) {
        let at = Instant::now() + delay;
        let mut inner = self.lock();
        if inner.later.get(&key).is_some_and(|old| *old <= at) {
            return;
        }
        inner.cancel_timer(&key);
        inner.later.insert(key.clone(), at);
        inner.timers.insert((at, key));
        let earliest = inner.timers.first().is_some_and(|(first, _)| *first == at);
        drop(inner);
        if earliest {
            self.timer.notify_one();
        }
    }

    /// Takes the next key. It must be handed back with [`Queue::done`].
    pub async fn take(&self) -> K {
        loop {
            let next_timer = {
                let mut inner = self.lock();
                inner.fire_timers(Instant::now());
                if let Some(key) = inner.ready.pop_front() {
                    inner.dirty.remove(&key);
                    inner.working.insert(key.clone());
                    if !inner.ready.is_empty() || !inner.timed {
                        self.wake.notify_one();
                    }
                    return key;
                }
                if inner.timed {
                    None
                } else {
                    inner.timed = true;
                    Some(inner.timers.first().map(|(at, _)| *at))
                }
            };
            match next_timer {
                Some(at) => self.wait_for_timer(at).await,
                None => self.wake.notified().await,
            }
        }
    }

    /// Waits for a key or for the first timer, on behalf of all who wait: a
    /// timer wakes one of them.
    async fn wait_for_timer(&self, at: Option<Instant>) {
        let mut turn = Turn {
            queue: self,
            dropped: true,
        };
        let timer = async {
            match at {
                Some(at) => tokio::time::sleep_until(at).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = self.wake.notified() => {}
            () = self.timer.notified() => {}
            () = timer => {}
        }
        turn.dropped = false;
    }

    /// Ends the work on `key` that [`Queue::take`] began. A failure is retried
    /// with a growing delay, a success forgets earlier failures. Returns the
    /// delay before the retry.
    pub fn done(&self, key: &K, succeeded: bool) -> Option<Duration> {
        let mut inner = self.lock();
        inner.working.remove(key);
        let retry = if succeeded {
            inner.failures.remove(key);
            None
        } else {
            let failures = inner.failures.entry(key.clone()).or_default();
            let step = FIRST_RETRY
                .saturating_mul(1 << (*failures).min(16))
                .min(MAX_RETRY);
            *failures = failures.saturating_add(1);
            Some(jittered(step))
        };
        if inner.dirty.contains(key) {
            inner.ready.push_back(key.clone());
            self.wake.notify_one();
        }
        drop(inner);
        if let Some(delay) = retry {
            self.add_after(key.clone(), delay);
        }
        retry
    }

    /// Drops what is remembered of a key that will not come back.
    pub fn forget(&self, key: &K) {
        let mut inner = self.lock();
        inner.failures.remove(key);
        inner.cancel_timer(key);
    }

    /// Keys that wait for a worker.
    pub fn depth(&self) -> usize {
        self.lock().ready.len()
    }

    fn lock(&self) -> MutexGuard<'_, Inner<K>> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The duty to wait for the timers. Whoever has it looks at the queue once more
/// after it ends, or, if dropped before, hands it on.
struct Turn<'a, K: Clone + Eq + Hash + Ord> {
    queue: &'a Queue<K>,
    dropped: bool,
}

impl<K: Clone + Eq + Hash + Ord> Drop for Turn<'_, K> {
    fn drop(&mut self) {
        self.queue.lock().timed = false;
        if self.dropped {
            self.queue.wake.notify_one();
        }
    }
}

impl<K: Clone + Eq + Hash + Ord> Default for Queue<K> {
    fn default() -> Self {
        Self::new()
    }
}

// === impl Inner ===

impl<K: Clone + Eq + Hash + Ord> Inner<K> {
    /// Whether a worker should be woken.
    fn make_ready(&mut self, key: K) -> bool {
        if !self.dirty.insert(key.clone()) || self.working.contains(&key) {
            return false;
        }
        self.ready.push_back(key);
        true
    }

    fn cancel_timer(&mut self, key: &K) {
        if let Some(at) = self.later.remove(key) {
            self.timers.remove(&(at, key.clone()));
        }
    }

    fn fire_timers(&mut self, now: Instant) {
        while self.timers.first().is_some_and(|(at, _)| *at <= now) {
            let Some((_, key)) = self.timers.pop_first() else {
                return;
            };
            self.later.remove(&key);
            self.make_ready(key);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_key_added_while_worked_on_runs_once_more() {
        let queue = Queue::new();
        queue.add("a");
        queue.add("a");
        assert_eq!(queue.take().await, "a");
        queue.add("a");
        queue.add("a");
        assert_eq!(queue.depth(), 0, "never two workers on one key");
        queue.done(&"a", true);
        assert_eq!(queue.take().await, "a");
        queue.done(&"a", true);
        assert_eq!(queue.depth(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn the_earliest_of_several_delays_counts() {
        let queue = Queue::new();
        queue.add_after("late", Duration::from_secs(60));
        queue.add_after("key", Duration::from_secs(10));
        queue.add_after("key", Duration::from_secs(1));
        queue.add_after("key", Duration::from_secs(5));
        let start = Instant::now();
        assert_eq!(queue.take().await, "key");
        assert!(start.elapsed() < Duration::from_secs(2));
        queue.done(&"key", true);
        assert_eq!(queue.take().await, "late");
        assert!(start.elapsed() >= Duration::from_secs(60));
    }

    /// Of many waiters one waits for the timers, and another after it has gone.
    #[tokio::test(start_paused = true)]
    async fn timers_are_kept_whoever_waits() {
        use std::sync::Arc;
        let queue = Arc::new(Queue::new());
        let (sender, mut taken) = tokio::sync::mpsc::unbounded_channel();
        let start = |queue: &Arc<Queue<u64>>| {
            let (queue, sender) = (Arc::clone(queue), sender.clone());
            tokio::spawn(async move {
                loop {
                    let key = queue.take().await;
                    let _ = sender.send((key, Instant::now()));
                    queue.done(&key, true);
                }
            })
        };
        let workers: Vec<_> = (0..4).map(|_| start(&queue)).collect();
        tokio::task::yield_now().await;
        let begin = Instant::now();
        for key in [30, 10, 20, 10] {
            queue.add_after(key, Duration::from_secs(key));
        }
        queue.add(0);
        for expected in [0, 10, 20] {
            let (key, at) = taken.recv().await.unwrap();
            assert_eq!(
                (key, at.duration_since(begin).as_secs()),
                (expected, expected)
            );
        }
        // Whichever of them waits for the last timer ends before it.
        for worker in &workers[..3] {
            worker.abort();
            tokio::task::yield_now().await;
        }
        let (key, at) = taken.recv().await.unwrap();
        assert_eq!((key, at.duration_since(begin).as_secs()), (30, 30));
    }

    #[tokio::test(start_paused = true)]
    async fn failures_are_retried_for_ever_and_slower() {
        let queue = Queue::new();
        queue.add("key");
        let mut last = Duration::ZERO;
        for _ in 0..40 {
            let key = queue.take().await;
            last = queue.done(&key, false).unwrap();
        }
        assert!(last <= MAX_RETRY && last >= MAX_RETRY / 2);
        let key = queue.take().await;
        assert_eq!(queue.done(&key, true), None);
        queue.add("key");
        let key = queue.take().await;
        assert!(queue.done(&key, false).unwrap() <= FIRST_RETRY);
    }

    #[tokio::test(start_paused = true)]
    async fn adding_now_keeps_a_later_need() {
        let queue = Queue::new();
        let start = Instant::now();
        queue.add_after("key", Duration::from_secs(3600));
        queue.add("key");
        assert_eq!(queue.take().await, "key");
        assert_eq!(start.elapsed(), Duration::ZERO);
        queue.done(&"key", true);
        assert_eq!(queue.take().await, "key");
        assert!(start.elapsed() >= Duration::from_secs(3600));
        queue.done(&"key", true);

        queue.add_after("key", Duration::from_secs(3600));
        queue.forget(&"key");
        assert!(queue.lock().timers.is_empty());
    }
}
