//! Growing delays between attempts, as the kubelet's (client-go util/flowcontrol): 10 s, doubled
//! up to 5 min, forgotten after 10 min without trouble.

use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};

const FIRST: SignedDuration = SignedDuration::from_secs(10);
const MAX: SignedDuration = SignedDuration::from_secs(300);
/// Twice the longest delay, as client-go forgets.
const FORGET: SignedDuration = SignedDuration::from_secs(600);

/// Delay of one container's restarts or one image's pulls.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Backoff {
    entry: Option<Entry>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Entry {
    delay: SignedDuration,
    updated: Timestamp,
}

impl Backoff {
    fn fresh(&self, event: Timestamp) -> Option<Entry> {
        self.entry
            .filter(|entry| event.duration_since(entry.updated) <= FORGET)
    }

    /// The delay that counts for something that ended at `event`; zero when none does.
    #[must_use]
    pub fn delay(&self, event: Timestamp) -> SignedDuration {
        self.fresh(event)
            .map_or(SignedDuration::ZERO, |entry| entry.delay)
    }

    /// When the next attempt after `event` may begin.
    #[must_use]
    pub fn due(&self, event: Timestamp) -> Timestamp {
        event.saturating_add(self.delay(event)).unwrap_or(event)
    }

    /// Counts an attempt that begins at `now` because the one before ended at `event`.
    pub fn advance(&mut self, event: Timestamp, now: Timestamp) {
        let delay = match self.fresh(event) {
            Some(entry) => (entry.delay * 2).min(MAX),
            None => FIRST,
        };
        self.entry = Some(Entry {
            delay,
            updated: now,
        });
    }
}

/// Delay after the `failures`th failure of something that only needs another try: 1 s, doubled
/// up to `max`.
#[must_use]
pub fn retry_delay(failures: u32, max: SignedDuration) -> SignedDuration {
    let seconds = 1_i64
        .checked_shl(failures.saturating_sub(1))
        .unwrap_or(i64::MAX);
    SignedDuration::from_secs(seconds.clamp(1, 3600)).min(max)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(1_700_000_000 + second).unwrap()
    }

    #[test]
    fn first_restart_is_immediate_then_delays_double() {
        let mut backoff = Backoff::default();
        let mut now = 0;
        let mut delays = vec![];
        for _ in 0..8 {
            let ended = at(now + 1);
            delays.push(backoff.delay(ended).as_secs());
            let begin = backoff.due(ended);
            backoff.advance(ended, begin);
            now = begin.as_second() - 1_700_000_000;
        }
        assert_eq!(delays, [0, 10, 20, 40, 80, 160, 300, 300]);
    }

    #[test]
    fn ten_good_minutes_forget_the_past() {
        let mut backoff = Backoff::default();
        backoff.advance(at(0), at(0));
        assert_eq!(backoff.delay(at(600)).as_secs(), 10);
        assert_eq!(backoff.delay(at(601)).as_secs(), 0);
        backoff.advance(at(601), at(601));
        assert_eq!(backoff.delay(at(602)).as_secs(), 10);
    }

    #[test]
    fn retries_never_stop_growing_beyond_the_limit() {
        let max = SignedDuration::from_secs(30);
        let seconds: Vec<i64> = (1..8).map(|n| retry_delay(n, max).as_secs()).collect();
        assert_eq!(seconds, [1, 2, 4, 8, 16, 30, 30]);
        assert_eq!(retry_delay(u32::MAX, max), max);
    }
}
