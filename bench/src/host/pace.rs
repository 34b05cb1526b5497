//! Work begun at a fixed rate, whether or not what began before has ended: a subject that falls
//! behind is not given time to recover, and each is timed from when it should have begun.

use std::time::{Duration, Instant};

use tokio::task::JoinSet;

/// What came of it.
#[derive(Debug, Default)]
pub(super) struct Paced {
    /// Of the successes, in milliseconds.
    pub(super) milliseconds: Vec<f64>,
    /// The others.
    pub(super) failed: usize,
    /// From the first beginning to the last end.
    span: Duration,
}

impl Paced {
    /// Successes a second.
    pub(super) fn rate(&self) -> Option<f64> {
        if self.span.is_zero() {
            return None;
        }
        #[expect(
            clippy::cast_precision_loss,
            reason = "a count of sandboxes is far below 2^52"
        )]
        let successes = self.milliseconds.len() as f64;
        Some(successes / self.span.as_secs_f64())
    }
}

/// Begins `count` of them, `rate` a second; returns when all have ended.
pub(super) async fn paced<F>(count: usize, rate: u32, mut begin: impl FnMut() -> F) -> Paced
where
    F: Future<Output = anyhow::Result<()>> + Send + 'static,
{
    let step = Duration::from_secs(1) / rate;
    let first = Instant::now();
    let mut due = first;
    let mut running = JoinSet::new();
    for _ in 0..count {
        tokio::time::sleep_until(due.into()).await;
        let (work, should_begin) = (begin(), due);
        running.spawn(async move { (work.await, should_begin.elapsed()) });
        due += step;
    }
    let mut paced = Paced::default();
    while let Some(done) = running.join_next().await {
        match done {
            Ok((Ok(()), took)) => paced.milliseconds.push(took.as_secs_f64() * 1e3),
            Ok((Err(error), _)) => {
                paced.failed += 1;
                tracing::warn!(error = format!("{error:#}"), "failed");
            }
            Err(error) => {
                paced.failed += 1;
                tracing::warn!(%error, "failed");
            }
        }
    }
    paced.span = first.elapsed();
    paced
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn slow_ones_do_not_hold_up_those_after_them() {
        let mut begun = 0;
        let barrier = std::sync::Arc::new(tokio::sync::Barrier::new(5));
        // None ends before the last has begun.
        let paced = paced(5, 50, || {
            begun += 1;
            let (fails, barrier) = (begun == 2, barrier.clone());
            async move {
                barrier.wait().await;
                anyhow::ensure!(!fails, "fails");
                Ok(())
            }
        })
        .await;
        assert_eq!((paced.milliseconds.len(), paced.failed), (4, 1));
        assert!(paced.rate().unwrap() > 0.0);
    }
}
