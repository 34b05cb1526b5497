//! When a probe is due and what its results mean: pure, as the kubelet's prober worker
//! (`pkg/kubelet/prober/worker.go`).
//!
//! What must outlive this process is in [`super::facts::Health`]; the rest begins anew with each
//! attempt, and after a restart of this service.

use jiff::{SignedDuration, Timestamp};
use sandman_protocol::v1;

use super::facts::{Attempt, Doom};
use crate::handler::Verdict;

/// The API's defaults, for a virtual node that sends none.
const DEFAULT_PERIOD: u32 = 10;
const DEFAULT_FAILURES: u32 = 3;

/// What a probe is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// Holds the others back until it succeeds once.
    Startup,
    /// Its failure ends the container.
    Liveness,
    /// Decides whether the container is ready.
    Readiness,
}

impl Kind {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Startup, Self::Liveness, Self::Readiness];

    /// As events name it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Startup => "Startup",
            Self::Liveness => "Liveness",
            Self::Readiness => "Readiness",
        }
    }

    /// The probe of a container, if it has one.
    #[must_use]
    pub fn of(self, container: &v1::Container) -> Option<&v1::Probe> {
        match self {
            Self::Startup => container.startup_probe.as_ref(),
            Self::Liveness => container.liveness_probe.as_ref(),
            Self::Readiness => container.readiness_probe.as_ref(),
        }
    }
}

/// The passing state of one probe of one attempt.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct State {
    /// When it is to be run next; after the initial delay when not set.
    next: Option<Timestamp>,
    busy: bool,
    last: Option<bool>,
    /// The same result so many times.
    run: u32,
    /// It has decided, and waits for the next attempt.
    on_hold: bool,
}

/// Whether something is to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Due {
    /// Not before something else happens.
    Never,
    /// Not before this moment.
    At(Timestamp),
    /// Now.
    Now,
}

/// Time for one answer.
#[must_use]
pub fn timeout(probe: &v1::Probe) -> std::time::Duration {
    std::time::Duration::from_secs(probe.timeout_seconds.max(1).into())
}

fn period(probe: &v1::Probe) -> SignedDuration {
    let seconds = match probe.period_seconds {
        0 => DEFAULT_PERIOD,
        seconds => seconds,
    };
    SignedDuration::from_secs(seconds.into())
}

impl State {
    /// When this probe of an attempt that began at `since` is due.
    #[must_use]
    pub fn due(&self, probe: &v1::Probe, since: Timestamp, now: Timestamp) -> Due {
        if self.busy || self.on_hold {
            return Due::Never;
        }
        let delay = SignedDuration::from_secs(probe.initial_delay_seconds.into());
        let first = since.saturating_add(delay).unwrap_or(now);
        let due = self.next.map_or(first, |next| next.max(first));
        if due <= now { Due::Now } else { Due::At(due) }
    }

    /// It is run.
    pub fn begin(&mut self, probe: &v1::Probe, now: Timestamp) {
        self.busy = true;
        self.next = now.saturating_add(period(probe)).ok();
    }

    /// Puts the next run off to some moment within a period, the same for the same `seed`: after a
    /// restart of this service not all probes of the host are run at once.
    pub fn spread(&mut self, probe: &v1::Probe, seed: u64, now: Timestamp) {
        let period = u64::try_from(period(probe).as_millis()).unwrap_or(1).max(1);
        let wait = i64::try_from(seed % period).unwrap_or(0);
        self.next = now.saturating_add(SignedDuration::from_millis(wait)).ok();
    }

    /// It will not be heard of any more.
    pub fn abandon(&mut self) {
        self.busy = false;
    }

    /// Takes a result in; the outcome once enough of the same came in a row. `None` is a run that
    /// says nothing.
    pub fn end(&mut self, kind: Kind, probe: &v1::Probe, well: Option<bool>) -> Option<bool> {
        self.busy = false;
        let well = well?;
        self.run = if self.last == Some(well) {
            self.run.saturating_add(1)
        } else {
            1
        };
        self.last = Some(well);
        let threshold = match (well, probe.failure_threshold) {
            (true, _) => probe.success_threshold.max(1),
            (false, 0) => DEFAULT_FAILURES,
            (false, failures) => failures,
        };
        if self.run < threshold {
            return None;
        }
        if kind == Kind::Startup || (kind == Kind::Liveness && !well) {
            self.on_hold = true;
            self.run = 0;
        }
        Some(well)
    }
}

/// What a verdict counts as: success, failure, or nothing.
#[must_use]
pub fn counts_as(verdict: &Verdict) -> Option<bool> {
    match verdict {
        Verdict::Success | Verdict::Warning(_) => Some(true),
        Verdict::Failure(_) => Some(false),
        Verdict::Unknown(_) => None,
    }
}

/// The event that tells of a verdict: reason and message (`prober.go`).
#[must_use]
pub fn event(kind: Kind, verdict: &Verdict) -> Option<(&'static str, String)> {
    let name = kind.name();
    match verdict {
        Verdict::Success => None,
        Verdict::Warning(text) => Some(("ProbeWarning", format!("{name} probe warning: {text}"))),
        Verdict::Failure(text) => Some(("Unhealthy", format!("{name} probe failed: {text}"))),
        Verdict::Unknown(text) => Some((
            "Unhealthy",
            format!("{name} probe errored and resulted in unknown state: {text}"),
        )),
    }
}

/// Writes an outcome into the attempt's facts; false when it says nothing new.
pub fn apply(
    attempt: &mut Attempt,
    container: &v1::Container,
    kind: Kind,
    well: bool,
    now: Timestamp,
) -> bool {
    let before = (attempt.health.clone(), attempt.doom.clone());
    match (kind, well) {
        (Kind::Readiness, ready) => attempt.health.ready = ready,
        (Kind::Startup, true) => attempt.health.started = true,
        (Kind::Liveness, true) => {}
        (Kind::Startup | Kind::Liveness, false) => {
            let probe = kind.of(container);
            attempt.doom.get_or_insert_with(|| Doom {
                since: now,
                message: format!(
                    "Container {} failed {} probe",
                    container.name,
                    kind.name().to_lowercase()
                ),
                grace_seconds: probe.and_then(|probe| probe.termination_grace_seconds),
            });
        }
    }
    before != (attempt.health.clone(), attempt.doom.clone())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(1_700_000_000 + second).unwrap()
    }

    fn probe() -> v1::Probe {
        v1::Probe {
            initial_delay_seconds: 5,
            period_seconds: 3,
            success_threshold: 1,
            failure_threshold: 2,
            ..Default::default()
        }
    }

    #[test]
    fn runs_come_after_the_delay_and_then_once_a_period() {
        let mut state = State::default();
        assert_eq!(state.due(&probe(), at(0), at(4)), Due::At(at(5)));
        assert_eq!(state.due(&probe(), at(0), at(5)), Due::Now);
        state.begin(&probe(), at(5));
        assert_eq!(state.due(&probe(), at(0), at(60)), Due::Never);
        state.end(Kind::Readiness, &probe(), Some(true));
        assert_eq!(state.due(&probe(), at(0), at(6)), Due::At(at(8)));
        // One that took longer than a period is run again at once.
        assert_eq!(state.due(&probe(), at(0), at(9)), Due::Now);
    }

    #[test]
    fn thresholds_count_results_in_a_row() {
        let mut state = State::default();
        let mut end = |well| state.end(Kind::Readiness, &probe(), well);
        assert_eq!(end(Some(false)), None);
        assert_eq!(end(Some(true)), Some(true));
        assert_eq!(end(Some(false)), None);
        // What says nothing neither counts nor interrupts.
        assert_eq!(end(None), None);
        assert_eq!(end(Some(false)), Some(false));
        assert_eq!(end(Some(false)), Some(false), "readiness is never on hold");
    }

    #[test]
    fn a_decided_probe_rests() {
        for (kind, well, rests) in [
            (Kind::Startup, true, true),
            (Kind::Startup, false, true),
            (Kind::Liveness, false, true),
            (Kind::Liveness, true, false),
        ] {
            let mut state = State::default();
            let probe = v1::Probe {
                failure_threshold: 1,
                ..probe()
            };
            assert_eq!(state.end(kind, &probe, Some(well)), Some(well));
            let due = state.due(&probe, at(0), at(100));
            assert_eq!(due == Due::Never, rests, "{kind:?} {well}");
        }
    }

    #[test]
    fn zeroes_are_the_defaults() {
        let probe = v1::Probe::default();
        assert_eq!(timeout(&probe).as_secs(), 1);
        let mut state = State::default();
        state.begin(&probe, at(0));
        let ends: Vec<_> = (0..3)
            .map(|_| state.end(Kind::Liveness, &probe, Some(false)))
            .collect();
        assert_eq!(ends, [None, None, Some(false)]);
    }

    #[test]
    fn a_restart_spreads_runs_over_a_period() {
        for seed in [0, 1, 2_999, u64::MAX] {
            let mut state = State::default();
            state.spread(&probe(), seed, at(100));
            match state.due(&probe(), at(0), at(100)) {
                Due::Now => assert_eq!(seed % 3_000, 0),
                Due::At(due) => assert!(due < at(103)),
                Due::Never => panic!("never"),
            }
        }
    }

    #[test]
    fn verdicts_are_told_in_the_kubelets_words() {
        assert_eq!(event(Kind::Liveness, &Verdict::Success), None);
        for (verdict, reason, message) in [
            (
                Verdict::Failure("x".into()),
                "Unhealthy",
                "Readiness probe failed: x",
            ),
            (
                Verdict::Warning("x".into()),
                "ProbeWarning",
                "Readiness probe warning: x",
            ),
            (
                Verdict::Unknown("x".into()),
                "Unhealthy",
                "Readiness probe errored and resulted in unknown state: x",
            ),
        ] {
            let told = event(Kind::Readiness, &verdict).unwrap();
            assert_eq!(told, (reason, message.to_owned()));
        }
    }
}
