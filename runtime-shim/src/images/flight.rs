//! Doing the same work once: callers that ask for a key while it is being
//! worked on share the one result, which outlives callers that give up; or,
//! where each has its own part to do, wait for each other by key.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use futures::FutureExt as _;
use futures::future::{BoxFuture, Shared};

/// Work in progress by key.
pub(super) struct Flights<K, V> {
    current: Arc<Mutex<HashMap<K, Shared<BoxFuture<'static, V>>>>>,
}

impl<K, V> Clone for Flights<K, V> {
    fn clone(&self) -> Self {
        Self {
            current: Arc::clone(&self.current),
        }
    }
}

impl<K, V> Flights<K, V>
where
    K: Clone + Eq + Hash + Send + 'static,
    V: Clone + Send + Sync + 'static,
{
    pub(super) fn new() -> Self {
        Self {
            current: Arc::default(),
        }
    }

    /// Joins the work on `key`, or starts it. `lost` is the result if the work panics.
    pub(super) async fn join<F>(&self, key: K, lost: V, work: impl FnOnce() -> F) -> V
    where
        F: Future<Output = V> + Send + 'static,
    {
        let flight = {
            let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(flight) = current.get(&key) {
                flight.clone()
            } else {
                let (work, map, own_key) = (work(), Arc::clone(&self.current), key.clone());
                // A task of its own, so that a caller that goes away ends nothing.
                let task = tokio::spawn(async move {
                    let result = std::panic::AssertUnwindSafe(work).catch_unwind().await;
                    map.lock()
                        .unwrap_or_else(PoisonError::into_inner)
                        .remove(&own_key);
                    result
                });
                let flight = task.map(|done| match done {
                    Ok(Ok(value)) => value,
                    Ok(Err(_)) | Err(_) => lost,
                });
                let flight = flight.boxed().shared();
                current.insert(key, flight.clone());
                flight
            }
        };
        flight.await
    }
}

/// One lock a key, for as long as somebody holds or awaits it.
#[derive(Clone, Default)]
pub(super) struct Locks {
    held: Arc<Mutex<HashMap<String, Weak<tokio::sync::Mutex<()>>>>>,
}

impl Locks {
    /// The lock of a key.
    pub(super) fn of(&self, key: &str) -> Arc<tokio::sync::Mutex<()>> {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(lock) = held.get(key).and_then(Weak::upgrade) {
            return lock;
        }
        held.retain(|_, lock| lock.strong_count() > 0);
        let lock = Arc::default();
        held.insert(key.to_owned(), Arc::downgrade(&lock));
        lock
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use tokio::sync::Notify;

    use super::*;

    #[tokio::test]
    async fn callers_share_one_run_and_the_next_starts_afresh() {
        let flights: Flights<&str, u32> = Flights::new();
        let runs = Arc::new(AtomicU32::new(0));
        let gate = Arc::new(Notify::new());
        let ask = || {
            let (flights, runs, gate) = (flights.clone(), Arc::clone(&runs), Arc::clone(&gate));
            async move {
                let work = || async move {
                    gate.notified().await;
                    runs.fetch_add(1, Ordering::SeqCst)
                };
                flights.join("key", 99, work).await
            }
        };
        let both = async { tokio::join!(ask(), ask(), async { gate.notify_one() }) };
        let (first, second, ()) = both.await;
        assert_eq!((first, second), (0, 0));
        gate.notify_one();
        assert_eq!(ask().await, 1);
    }

    #[tokio::test]
    async fn a_panic_is_a_result() {
        let flights: Flights<&str, u32> = Flights::new();
        assert_eq!(
            flights
                .join("key", 7, || async { panic!("as tests do") })
                .await,
            7
        );
        assert_eq!(flights.join("key", 7, || async { 1 }).await, 1);
    }
}
