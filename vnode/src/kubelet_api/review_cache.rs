//! A bounded cache in front of the API server's reviews: one question is asked
//! once however many requests wait for its answer, answers live as long as their
//! asker says, and failures are not remembered.

use std::collections::HashMap;
use std::future::Future;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures::FutureExt;
use futures::future::{BoxFuture, Shared};
use tokio::time::Instant;

use super::review::ReviewError;

/// Digest of a question. Fixed in size, so that no caller decides how much
/// memory an entry takes, and no token is kept.
pub(super) type Key = [u8; 32];

/// Different questions that may wait for their answer at a time. Strangers can
/// ask new ones as fast as they like; more are refused at once.
const MAX_PENDING: usize = 512;

/// A cache of at most `capacity` answers.
pub(super) struct ReviewCache<V> {
    slots: Arc<Mutex<HashMap<Key, Slot<V>>>>,
    capacity: usize,
    pending: Arc<AtomicUsize>,
}

enum Slot<V> {
    Pending(Pending<V>),
    Known(V, Instant),
}

type Pending<V> = Shared<BoxFuture<'static, Result<V, ReviewError>>>;

impl<V: Clone + Send + Sync + 'static> ReviewCache<V> {
    pub(super) fn new(capacity: usize) -> Self {
        Self {
            slots: Arc::default(),
            capacity,
            pending: Arc::default(),
        }
    }

    /// The known answer, or the one that `ask` gives together with the time that
    /// it may be kept.
    pub(super) async fn get<F>(&self, key: Key, ask: F) -> Result<V, ReviewError>
    where
        F: Future<Output = Result<(V, Duration), ReviewError>> + Send + 'static,
    {
        let pending = {
            let mut slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
            let now = Instant::now();
            if slots.len() >= self.capacity && !slots.contains_key(&key) {
                make_room(&mut slots, self.capacity, now);
            }
            match slots.get(&key) {
                Some(Slot::Known(value, until)) if now < *until => return Ok(value.clone()),
                Some(Slot::Pending(pending)) => pending.clone(),
                Some(Slot::Known(..)) | None => {
                    if self.pending.load(Ordering::Relaxed) >= MAX_PENDING {
                        return Err(ReviewError::Busy);
                    }
                    let pending = self.start(key, ask);
                    slots.insert(key, Slot::Pending(pending.clone()));
                    pending
                }
            }
        };
        pending.await
    }

    /// Asks on a task of its own: the caller that came first may go away while
    /// others wait for the same answer.
    fn start<F>(&self, key: Key, ask: F) -> Pending<V>
    where
        F: Future<Output = Result<(V, Duration), ReviewError>> + Send + 'static,
    {
        let slots = Arc::clone(&self.slots);
        let counted = Counted::new(&self.pending);
        let asking = tokio::spawn(ask);
        let task = tokio::spawn(async move {
            let _counted = counted;
            let answer = asking.await.unwrap_or_else(|error| {
                Err(ReviewError::Failed(format!(
                    "the review ended early: {error}"
                )))
            });
            let mut slots = slots.lock().unwrap_or_else(PoisonError::into_inner);
            match answer {
                Ok((value, keep)) => {
                    slots.insert(key, Slot::Known(value.clone(), Instant::now() + keep));
                    Ok(value)
                }
                Err(error) => {
                    slots.remove(&key);
                    Err(error)
                }
            }
        });
        async move {
            task.await
                .unwrap_or_else(|error| Err(ReviewError::Failed(error.to_string())))
        }
        .boxed()
        .shared()
    }
}

/// Counts one question for as long as it lives, however it ends.
struct Counted(Arc<AtomicUsize>);

impl Counted {
    fn new(count: &Arc<AtomicUsize>) -> Self {
        count.fetch_add(1, Ordering::Relaxed);
        Self(Arc::clone(count))
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Drops what has expired and, if that is not enough, the answers nearest to
/// their end, an eighth of the cache at a time so that the scan stays rare.
/// Pending questions stay: their number is bounded apart.
fn make_room<V>(slots: &mut HashMap<Key, Slot<V>>, capacity: usize, now: Instant) {
    slots.retain(|_, slot| !matches!(slot, Slot::Known(_, until) if *until <= now));
    if slots.len() < capacity {
        return;
    }
    let mut ends: Vec<(Instant, Key)> = slots
        .iter()
        .filter_map(|(key, slot)| match slot {
            Slot::Known(_, until) => Some((*until, *key)),
            Slot::Pending(_) => None,
        })
        .collect();
    ends.sort_unstable();
    for (_, key) in ends.iter().take(capacity / 8 + 1) {
        slots.remove(key);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    const KEEP: Duration = Duration::from_secs(60);

    fn key(n: u8) -> Key {
        [n; 32]
    }

    #[tokio::test(start_paused = true)]
    async fn one_question_for_many_waiters_until_it_expires() {
        let cache = Arc::new(ReviewCache::new(8));
        let asked = Arc::new(AtomicUsize::new(0));
        let ask = || {
            let asked = Arc::clone(&asked);
            async move {
                tokio::time::sleep(Duration::from_secs(1)).await;
                Ok((asked.fetch_add(1, Ordering::SeqCst), KEEP))
            }
        };
        let (first, second) = tokio::join!(cache.get(key(1), ask()), cache.get(key(1), ask()));
        assert_eq!((first, second), (Ok(0), Ok(0)));
        assert_eq!(cache.get(key(1), ask()).await, Ok(0));
        tokio::time::advance(KEEP).await;
        assert_eq!(cache.get(key(1), ask()).await, Ok(1));
    }

    #[tokio::test]
    async fn failures_reach_the_waiters_and_are_not_kept() {
        let cache = ReviewCache::new(8);
        let error = ReviewError::Failed("no".into());
        let failing = error.clone();
        assert_eq!(
            cache.get(key(1), async move { Err(failing) }).await,
            Err(error)
        );
        assert_eq!(cache.get(key(1), async { Ok((5, KEEP)) }).await, Ok(5));
    }

    #[tokio::test]
    async fn capacity_holds() {
        let cache = ReviewCache::new(16);
        for n in 0..200 {
            assert_eq!(cache.get(key(n), async move { Ok((n, KEEP)) }).await, Ok(n));
        }
        let slots = cache.slots.lock().expect("no test panicked with it");
        assert!(slots.len() <= 16, "{}", slots.len());
    }

    #[tokio::test(start_paused = true)]
    async fn questions_that_wait_are_bounded() {
        let cache = Arc::new(ReviewCache::new(8));
        let slow = || async {
            tokio::time::sleep(Duration::from_secs(5)).await;
            Ok(((), KEEP))
        };
        let key = |n: usize| {
            let mut key = [0; 32];
            key[..8].copy_from_slice(&n.to_le_bytes());
            key
        };
        let waiting = (0..MAX_PENDING).map(|n| cache.get(key(n), slow()));
        let waiting = futures::future::join_all(waiting);
        let late = async {
            tokio::time::sleep(Duration::from_secs(1)).await;
            let new = cache.get(key(MAX_PENDING), slow()).await;
            let same = cache.get(key(0), slow()).await;
            (new, same)
        };
        let (waited, late) = tokio::join!(waiting, late);
        assert!(waited.iter().all(Result::is_ok));
        assert_eq!(late, (Err(ReviewError::Busy), Ok(())));
        assert_eq!(cache.get(key(MAX_PENDING), slow()).await, Ok(()));
    }

    #[tokio::test(start_paused = true)]
    async fn a_waiter_that_leaves_does_not_stop_the_question() {
        let cache = Arc::new(ReviewCache::new(8));
        let slow = async {
            tokio::time::sleep(Duration::from_secs(5)).await;
            Ok((7, KEEP))
        };
        let left = tokio::time::timeout(Duration::from_secs(1), cache.get(key(1), slow)).await;
        assert!(left.is_err());
        let answer = cache.get(key(1), async { Ok((8, KEEP)) }).await;
        assert_eq!(answer, Ok(7));
    }
}
