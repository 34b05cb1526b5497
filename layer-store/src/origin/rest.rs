//! How long a source that failed is left alone. Pure.

use std::time::{Duration, Instant};

/// Pause after the first failure; each further one doubles it.
const FIRST: Duration = Duration::from_millis(100);
/// Short beside the time that a reader waits, so that it sees a source come back.
const LONGEST: Duration = Duration::from_secs(2);
/// What a source may ask for at most; more is a mistake or malice.
const LONGEST_ASKED: Duration = Duration::from_secs(300);

/// The state of one source.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Rest {
    failures: u32,
    until: Option<Instant>,
}

impl Rest {
    /// It delivered.
    pub(super) fn delivered(&mut self) {
        *self = Self::default();
    }

    /// It failed, and maybe asked for a pause.
    pub(super) fn failed(&mut self, now: Instant, asked: Option<Duration>) {
        let doubled = FIRST
            .saturating_mul(1 << self.failures.min(16))
            .min(LONGEST);
        self.failures = self.failures.saturating_add(1);
        let pause = asked.map_or(doubled, |asked| asked.min(LONGEST_ASKED).max(doubled));
        // Several requests fail at once when a source goes down: the longest pause counts.
        let until = now + pause;
        self.until = Some(self.until.map_or(until, |before| before.max(until)));
    }

    /// When it may be asked again, if not now.
    pub(super) fn until(&self, now: Instant) -> Option<Instant> {
        self.until.filter(|until| *until > now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_and_end_with_success() {
        let now = Instant::now();
        let mut rest = Rest::default();
        assert_eq!(rest.until(now), None);
        rest.failed(now, None);
        assert_eq!(rest.until(now), Some(now + FIRST));
        assert_eq!(rest.until(now + FIRST), None, "over");
        rest.failed(now, None);
        assert_eq!(rest.until(now), Some(now + FIRST * 2));
        for _ in 0..40 {
            rest.failed(now, None);
        }
        assert_eq!(rest.until(now), Some(now + LONGEST));
        rest.delivered();
        assert_eq!(rest.until(now), None);
    }

    #[test]
    fn what_a_source_asks_for_is_bounded() {
        let now = Instant::now();
        let mut rest = Rest::default();
        rest.failed(now, Some(Duration::from_secs(7)));
        assert_eq!(rest.until(now), Some(now + Duration::from_secs(7)));
        rest.failed(now, Some(Duration::from_secs(1 << 40)));
        assert_eq!(rest.until(now), Some(now + LONGEST_ASKED));
    }
}
