//! What a Lease says of who leads, and what is written into it. Pure.

use std::time::Duration;

use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use k8s_openapi::jiff::Timestamp;
use tokio::time::Instant;

/// How long a leader is believed in, and how it keeps that up. The shares are those
/// of client-go's `leaderelection`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Timing {
    /// How long others wait for a leader that does not renew.
    pub(super) duration: Duration,
}

impl Timing {
    /// How often a leader renews.
    pub(super) fn renew(self) -> Duration {
        self.duration / 3
    }

    /// A leader that could not renew for so long leads no more. Less than the
    /// duration, so that it has stopped before another one starts.
    pub(super) fn renew_deadline(self) -> Duration {
        self.duration * 2 / 3
    }

    /// A call that takes longer hangs on a dead connection. Two of them fit into
    /// the time in which a leader must have renewed.
    pub(super) fn call(self) -> Duration {
        self.duration / 4
    }
}

/// Another's word on its own duration counts between these.
const SANE_DURATION: std::ops::RangeInclusive<u64> = 1..=300;
/// What a Lease without a duration is taken to say.
const USUAL_DURATION: u64 = 15;

/// Who leads, as far as one look at the Lease tells.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Standing {
    /// Nobody, or somebody who has not renewed in time: it may be claimed.
    Free,
    /// Somebody else, at least until this moment.
    Held {
        /// When it may be claimed unless it is renewed.
        until: Instant,
    },
}

/// A Lease and since when it has not changed, by this process's own clock:
/// clocks of two machines are not compared.
#[derive(Debug, Default)]
pub(super) struct Observed {
    lease: Option<(Lease, Instant)>,
}

// === impl Observed ===

impl Observed {
    /// Takes note of a copy; one that was seen before changes nothing.
    pub(super) fn see(&mut self, lease: Lease, now: Instant) {
        let version = |lease: &Lease| lease.metadata.resource_version.clone();
        match &self.lease {
            Some((known, _)) if version(known) == version(&lease) => {}
            _ => self.lease = Some((lease, now)),
        }
    }

    /// The newest copy.
    pub(super) fn newest(&self) -> Option<&Lease> {
        self.lease.as_ref().map(|(lease, _)| lease)
    }

    /// Who leads, asked by `me`. An earlier process of the same name is gone,
    /// or there are two of one name, of which the older one steps down.
    pub(super) fn standing(&self, me: &str, now: Instant) -> Standing {
        let Some((lease, since)) = &self.lease else {
            return Standing::Free;
        };
        match holder(lease) {
            None => Standing::Free,
            Some(holder) if holder == me => Standing::Free,
            Some(_) => {
                let until = *since + stated_duration(lease);
                if now < until {
                    Standing::Held { until }
                } else {
                    Standing::Free
                }
            }
        }
    }
}

/// Who holds a Lease.
pub(super) fn holder(lease: &Lease) -> Option<&str> {
    let holder = lease.spec.as_ref()?.holder_identity.as_deref()?;
    (!holder.is_empty()).then_some(holder)
}

/// The number that hosts compare: grows with each claim.
pub(super) fn term(lease: &Lease) -> u64 {
    let transitions = lease.spec.as_ref().and_then(|spec| spec.lease_transitions);
    transitions
        .and_then(|n| u64::try_from(n).ok())
        .unwrap_or_default()
}

/// The copy that makes `me` the leader.
///
/// A Lease without a count starts at the minutes since 1970: if somebody deletes
/// it and makes it anew, the count goes on above all earlier ones as long as
/// there was less than one claim a minute, and hosts obey the new leader.
pub(super) fn claimed(mut lease: Lease, me: &str, timing: Timing, now: Timestamp) -> Lease {
    let spec = lease.spec.get_or_insert_with(LeaseSpec::default);
    let minutes = i32::try_from(now.as_second() / 60).unwrap_or(i32::MAX);
    spec.lease_transitions = Some(match spec.lease_transitions {
        Some(n) if n > 0 => n.saturating_add(1),
        _ => minutes,
    });
    spec.holder_identity = Some(me.to_owned());
    spec.lease_duration_seconds = Some(seconds(timing.duration));
    spec.acquire_time = Some(MicroTime(now));
    spec.renew_time = Some(MicroTime(now));
    lease
}

/// The copy that says that its holder still leads.
pub(super) fn renewed(mut lease: Lease, now: Timestamp) -> Lease {
    let spec = lease.spec.get_or_insert_with(LeaseSpec::default);
    spec.renew_time = Some(MicroTime(now));
    lease
}

/// The copy that lets the next one claim at once.
pub(super) fn released(mut lease: Lease, now: Timestamp) -> Lease {
    let spec = lease.spec.get_or_insert_with(LeaseSpec::default);
    spec.holder_identity = None;
    spec.lease_duration_seconds = Some(1);
    spec.renew_time = Some(MicroTime(now));
    lease
}

fn stated_duration(lease: &Lease) -> Duration {
    let stated = lease
        .spec
        .as_ref()
        .and_then(|spec| spec.lease_duration_seconds)
        .and_then(|n| u64::try_from(n).ok())
        .unwrap_or(USUAL_DURATION);
    Duration::from_secs(stated.clamp(*SANE_DURATION.start(), *SANE_DURATION.end()))
}

fn seconds(duration: Duration) -> i32 {
    i32::try_from(duration.as_secs()).unwrap_or(i32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const DURATION: Duration = Duration::from_secs(15);
    const TIMING: Timing = Timing { duration: DURATION };

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    fn version(mut lease: Lease, version: &str) -> Lease {
        lease.metadata.resource_version = Some(version.to_owned());
        lease
    }

    #[test]
    fn a_lease_is_free_until_somebody_holds_it() {
        let now = Instant::now();
        let mut seen = Observed::default();
        assert_eq!(seen.standing("a", now), Standing::Free);
        seen.see(version(Lease::default(), "1"), now);
        assert_eq!(seen.standing("a", now), Standing::Free);
        seen.see(
            version(claimed(Lease::default(), "b", TIMING, at(0)), "2"),
            now,
        );
        let until = now + DURATION;
        assert_eq!(seen.standing("a", now), Standing::Held { until });
        assert_eq!(seen.standing("a", until), Standing::Free);
        assert_eq!(seen.standing("b", now), Standing::Free);
    }

    #[test]
    fn time_counts_from_the_last_change_not_from_the_last_look() {
        let start = Instant::now();
        let lease = version(claimed(Lease::default(), "b", TIMING, at(0)), "1");
        let mut seen = Observed::default();
        seen.see(lease.clone(), start);
        seen.see(lease.clone(), start + DURATION);
        assert_eq!(seen.standing("a", start + DURATION), Standing::Free);
        // However wrong the holder's clock is.
        let renewed = version(renewed(lease, at(-1_000_000)), "2");
        seen.see(renewed, start + DURATION);
        let until = start + DURATION * 2;
        assert_eq!(
            seen.standing("a", start + DURATION),
            Standing::Held { until }
        );
    }

    #[test]
    fn terms_only_grow() {
        let first = claimed(Lease::default(), "a", TIMING, at(600));
        assert_eq!(term(&first), 10);
        let again = claimed(renewed(first.clone(), at(601)), "a", TIMING, at(602));
        assert_eq!(term(&again), 11);
        let other = claimed(released(again, at(603)), "b", TIMING, at(604));
        assert_eq!((term(&other), holder(&other)), (12, Some("b")));
        // Deleted and made anew.
        assert!(term(&claimed(Lease::default(), "a", TIMING, at(6000))) > term(&other));
    }

    #[test]
    fn a_released_lease_is_free_at_once() {
        let now = Instant::now();
        let mut seen = Observed::default();
        let lease = released(claimed(Lease::default(), "b", TIMING, at(0)), at(1));
        seen.see(version(lease, "3"), now);
        assert_eq!(seen.standing("a", now), Standing::Free);
    }

    #[test]
    fn a_foreign_duration_is_kept_within_reason() {
        let now = Instant::now();
        for (stated, counts) in [(-5, DURATION.as_secs()), (0, 1), (7, 7), (86_400, 300)] {
            let mut lease = claimed(Lease::default(), "b", TIMING, at(0));
            lease.spec.as_mut().unwrap().lease_duration_seconds = Some(stated);
            let mut seen = Observed::default();
            seen.see(version(lease, "1"), now);
            let until = now + Duration::from_secs(counts);
            assert_eq!(seen.standing("a", now), Standing::Held { until });
        }
    }
}
