//! What is remembered of a peer's failures. Pure.

use std::time::{Duration, Instant};

/// The first pause after a failure; it doubles with each further one.
const FIRST_PAUSE: Duration = Duration::from_millis(500);
const LONGEST_PAUSE: Duration = Duration::from_secs(60);
/// A peer whose bytes are wrong is broken or worse.
const PAUSE_OF_LIARS: Duration = Duration::from_secs(600);

/// How a peer failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// It cannot be reached, or its connection broke.
    Dead,
    /// It kept us waiting.
    Slow,
    /// It sent bytes that are not what the index says.
    Lie,
}

impl Fault {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Dead, Self::Slow, Self::Lie];

    /// The label of the metric.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Dead => "dead",
            Self::Slow => "slow",
            Self::Lie => "lie",
        }
    }
}

/// Whether a peer is asked.
#[derive(Clone, Copy, Debug, Default)]
pub struct Standing {
    strikes: u32,
    until: Option<Instant>,
}

impl Standing {
    /// Whether it is asked now. After its pause it gets another chance.
    #[must_use]
    pub fn is_good(&self, now: Instant) -> bool {
        self.until.is_none_or(|until| until <= now)
    }

    /// It kept its promise.
    pub fn delivered(&mut self) {
        *self = Self::default();
    }

    /// It did not. Failures of what was asked before the pause began count once.
    pub fn failed(&mut self, fault: Fault, now: Instant) {
        if fault != Fault::Lie && !self.is_good(now) {
            return;
        }
        let pause = match fault {
            Fault::Lie => PAUSE_OF_LIARS,
            Fault::Dead | Fault::Slow => {
                let doubled = FIRST_PAUSE.saturating_mul(1 << self.strikes.min(16));
                doubled.min(LONGEST_PAUSE)
            }
        };
        self.strikes = self.strikes.saturating_add(1);
        self.until = Some(now + pause);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_and_end() {
        let start = Instant::now();
        let mut standing = Standing::default();
        assert!(standing.is_good(start));
        let mut now = start;
        for round in 0..20 {
            standing.failed(Fault::Slow, now);
            // Others that were asked at the same time do not add to it.
            standing.failed(Fault::Dead, now);
            let pause = FIRST_PAUSE
                .saturating_mul(1 << round.min(16))
                .min(LONGEST_PAUSE);
            assert!(
                !standing.is_good(now + pause - Duration::from_millis(1)),
                "{round}"
            );
            now += pause;
            assert!(standing.is_good(now), "{round}");
        }
        standing.delivered();
        standing.failed(Fault::Dead, now);
        assert!(standing.is_good(now + FIRST_PAUSE));
    }

    #[test]
    fn liars_wait_longest() {
        let now = Instant::now();
        let mut standing = Standing::default();
        standing.failed(Fault::Slow, now);
        standing.failed(Fault::Lie, now);
        assert!(!standing.is_good(now + LONGEST_PAUSE));
        assert!(standing.is_good(now + PAUSE_OF_LIARS));
    }
}
