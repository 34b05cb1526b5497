//! When data last moved on a connection, for its idle timer.
//!
//! Only data counts, not pings: a client's heartbeat must not keep a forgotten
//! session alive for ever.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use tokio::time::{Instant, sleep_until};

/// Shared by the reader and the writer of one connection.
#[derive(Clone)]
pub(crate) struct Activity {
    start: Instant,
    /// Milliseconds after `start`.
    last: Arc<AtomicU64>,
}

impl Activity {
    pub(crate) fn new() -> Self {
        Self {
            start: Instant::now(),
            last: Arc::default(),
        }
    }

    pub(crate) fn touch(&self) {
        let now = u64::try_from(self.start.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.last.store(now, Ordering::Relaxed);
    }

    fn last(&self) -> Instant {
        self.start + Duration::from_millis(self.last.load(Ordering::Relaxed))
    }

    /// Returns once nothing has moved for `limit`; never, without a limit.
    pub(crate) async fn idle_for(&self, limit: Option<Duration>) {
        let Some(limit) = limit else {
            return std::future::pending().await;
        };
        loop {
            let deadline = self.last() + limit;
            if deadline <= Instant::now() {
                return;
            }
            sleep_until(deadline).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn activity_postpones_idleness() {
        let activity = Activity::new();
        let begin = Instant::now();
        let touched = activity.clone();
        tokio::join!(
            activity.idle_for(Some(Duration::from_secs(10))),
            async move {
                tokio::time::sleep(Duration::from_secs(7)).await;
                touched.touch();
            }
        );
        assert_eq!(begin.elapsed().as_secs(), 17);
    }
}
