//! What happened to each pod of a batch and when, as seen by the client. Pure: times come from
//! outside.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::pod::Progress;

/// Pods of one batch by name.
#[derive(Debug)]
pub(crate) struct Timeline {
    expected: usize,
    settled: usize,
    pods: BTreeMap<String, Track>,
}

/// One pod. Its first status may be seen before the answer to its creation.
#[derive(Debug, Default)]
struct Track {
    requested: Option<Instant>,
    ready: Option<Instant>,
    failure: Option<String>,
    waiting: String,
}

/// What came of a batch.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Outcome {
    /// From request to Ready, of the pods that did not fail, in the order of their requests.
    pub(crate) latencies: Vec<Duration>,
    /// From the first request to the last pod Ready.
    pub(crate) span: Duration,
    /// Name and reason of the others.
    pub(crate) failures: Vec<(String, String)>,
}

impl Timeline {
    /// For a batch of this size.
    pub(crate) fn new(expected: usize) -> Self {
        Self {
            expected,
            settled: 0,
            pods: BTreeMap::new(),
        }
    }

    /// The API server accepted a pod that was requested then.
    pub(crate) fn created(&mut self, name: &str, requested: Instant) {
        self.update(name, |track| track.requested = Some(requested));
    }

    /// The API server did not accept a pod.
    pub(crate) fn refused(&mut self, name: &str, requested: Instant, reason: String) {
        self.update(name, |track| {
            track.requested = Some(requested);
            track.failure = Some(reason);
        });
    }

    /// The watch showed a pod. The first Ready counts; a failure after it too.
    pub(crate) fn observed(&mut self, name: &str, progress: Progress, at: Instant) {
        self.update(name, |track| match progress {
            Progress::Waiting(reason) => track.waiting = reason,
            Progress::Ready => {
                track.ready.get_or_insert(at);
            }
            Progress::Failed(reason) => {
                track.failure.get_or_insert(reason);
            }
        });
    }

    /// Somebody removed a pod.
    pub(crate) fn removed(&mut self, name: &str) {
        self.update(name, |track| {
            track.failure.get_or_insert("was deleted".to_owned());
        });
    }

    fn update(&mut self, name: &str, change: impl FnOnce(&mut Track)) {
        let track = self.pods.entry(name.to_owned()).or_default();
        let before = track.is_settled();
        change(track);
        if !before && track.is_settled() {
            self.settled += 1;
        }
    }

    /// Whether all pods were requested and are Ready or failed.
    pub(crate) fn is_settled(&self) -> bool {
        self.settled >= self.expected
    }

    /// Number of pods that were requested and are Ready or failed.
    pub(crate) fn settled(&self) -> usize {
        self.settled
    }

    /// Sums up; what is not settled has failed, for its time is up.
    pub(crate) fn finish(self) -> Outcome {
        let mut outcome = Outcome::default();
        let first = self.pods.values().filter_map(|track| track.requested).min();
        let mut last = None;
        let mut ready_ones = Vec::new();
        for (name, track) in self.pods {
            match (track.failure, track.requested, track.ready) {
                (None, Some(requested), Some(ready)) => {
                    ready_ones.push((requested, ready.saturating_duration_since(requested)));
                    last = last.max(Some(ready));
                }
                (Some(reason), ..) => outcome.failures.push((name, reason)),
                (None, ..) => {
                    let reason = format!("not Ready in time: {}", track.waiting);
                    outcome.failures.push((name, reason));
                }
            }
        }
        ready_ones.sort();
        outcome.latencies = ready_ones.into_iter().map(|(_, took)| took).collect();
        if let (Some(first), Some(last)) = (first, last) {
            outcome.span = last.saturating_duration_since(first);
        }
        // A pod may have no trace at all if its creation was never answered.
        let seen = outcome.latencies.len() + outcome.failures.len();
        for _ in seen..self.expected {
            let reason = "its creation was not answered in time".to_owned();
            outcome.failures.push((String::new(), reason));
        }
        outcome
    }
}

impl Track {
    fn is_settled(&self) -> bool {
        self.requested.is_some() && (self.ready.is_some() || self.failure.is_some())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(start: Instant, milliseconds: u64) -> Instant {
        start + Duration::from_millis(milliseconds)
    }

    #[test]
    fn a_batch_is_settled_when_all_pods_are() {
        let start = Instant::now();
        let mut timeline = Timeline::new(2);
        timeline.created("a", start);
        // The watch may be faster than the answer.
        timeline.observed("b", Progress::Ready, after(start, 30));
        timeline.observed("a", Progress::Waiting("Pending".into()), after(start, 10));
        timeline.observed("a", Progress::Ready, after(start, 20));
        assert!(!timeline.is_settled());
        timeline.created("b", after(start, 5));
        assert!(timeline.is_settled());
        let outcome = timeline.finish();
        assert_eq!(outcome.latencies, [20, 25].map(Duration::from_millis));
        assert_eq!(outcome.span, Duration::from_millis(30));
        assert!(outcome.failures.is_empty());
    }

    #[test]
    fn the_first_ready_counts() {
        let start = Instant::now();
        let mut timeline = Timeline::new(1);
        timeline.created("a", start);
        timeline.observed("a", Progress::Ready, after(start, 10));
        timeline.observed("a", Progress::Ready, after(start, 90));
        assert_eq!(timeline.finish().latencies, [Duration::from_millis(10)]);
    }

    #[test]
    fn failures_outlast_readiness() {
        let start = Instant::now();
        let mut timeline = Timeline::new(3);
        for name in ["a", "b", "c"] {
            timeline.created(name, start);
            timeline.observed(name, Progress::Ready, after(start, 10));
        }
        timeline.observed("a", Progress::Failed("OOMKilled".into()), after(start, 20));
        timeline.removed("b");
        let outcome = timeline.finish();
        assert_eq!(outcome.latencies.len(), 1);
        let reasons: Vec<_> = outcome
            .failures
            .iter()
            .map(|(_, why)| why.as_str())
            .collect();
        assert_eq!(reasons, ["OOMKilled", "was deleted"]);
    }

    #[test]
    fn the_late_and_the_refused_failed() {
        let start = Instant::now();
        let mut timeline = Timeline::new(3);
        timeline.created("late", start);
        timeline.observed("late", Progress::Waiting("Pulling".into()), start);
        timeline.refused("refused", start, "quota".into());
        assert!(!timeline.is_settled());
        let outcome = timeline.finish();
        assert!(outcome.latencies.is_empty());
        assert_eq!(outcome.span, Duration::ZERO);
        // The third was never heard of.
        assert_eq!(outcome.failures.len(), 3);
    }
}
