//! Delays between attempts of work that is never given up. Exponential with
//! full jitter on the upper half, so that many waiters spread out.

use std::time::Duration;

/// A growing delay.
#[derive(Debug, Clone)]
pub struct Backoff {
    first: Duration,
    max: Duration,
    next: Duration,
}

impl Backoff {
    /// Starts at `first` and doubles up to `max`.
    pub fn new(first: Duration, max: Duration) -> Self {
        Self {
            first,
            max,
            next: first,
        }
    }

    /// The delay before the next attempt: between half and all of the current
    /// step.
    pub fn step(&mut self) -> Duration {
        let step = self.next;
        self.next = (step * 2).min(self.max);
        jittered(step)
    }

    /// Back to the first delay, after a success.
    pub fn reset(&mut self) {
        self.next = self.first;
    }
}

/// A duration between half of `step` and all of it.
pub fn jittered(step: Duration) -> Duration {
    step.mul_f64(0.5 + 0.5 * unit_random())
}

/// A number in 0..1 that is good enough to spread load, and nothing else: the
/// standard library's hasher is seeded per instance from the system's entropy.
pub fn unit_random() -> f64 {
    use std::hash::{BuildHasher, RandomState};
    let bits = RandomState::new().hash_one(0_u8) >> 11;
    bits as f64 / (1_u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grows_to_its_limit_and_starts_over() {
        let mut backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(1));
        for expected in [100, 200, 400, 800, 1000, 1000] {
            let delay = backoff.step();
            assert!(
                delay <= Duration::from_millis(expected),
                "{delay:?} > {expected}"
            );
            assert!(
                delay >= Duration::from_millis(expected / 2),
                "{delay:?} < {expected}/2"
            );
        }
        backoff.reset();
        assert!(backoff.step() <= Duration::from_millis(100));
    }
}
