//! What is going on right now in a sandbox: jobs, retries and errors, all of it lost without harm
//! when this process ends.

use std::collections::BTreeMap;

use jiff::{SignedDuration, Timestamp};

use super::backoff::{Backoff, retry_delay};
use super::probe;

/// The kubelet's words for a wait.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Waiting {
    /// For example ErrImagePull.
    pub reason: String,
    /// For people.
    pub message: String,
}

/// One thing that must be done before the next.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Step {
    /// Not begun.
    #[default]
    Todo,
    /// A job is at it; what went wrong before still stands until it is done.
    Busy(Option<Box<Retry>>),
    /// True.
    Done,
    /// Failed; to be tried again.
    Retry(Box<Retry>),
}

/// A failure that waits for its next try.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Retry {
    /// Failures in a row.
    pub failures: u32,
    /// When it failed last.
    pub since: Timestamp,
    /// When to try again.
    pub at: Timestamp,
    /// What to show meanwhile.
    pub waiting: Waiting,
}

/// The passing state of a sandbox.
#[derive(Clone, Debug, Default)]
pub struct Live {
    /// Namespaces and address.
    pub network: Step,
    /// Volumes and managed files.
    pub volumes: Step,
    /// The contents changed while the volumes were being made.
    pub volumes_again: bool,
    /// The spec came with the contents of its volumes, not from our record.
    pub contents_known: bool,
    /// Giving what runs other sizes.
    pub resize: Step,
    /// Other sizes were wished for while a job was at it.
    pub resize_again: bool,
    /// The removal of what is left.
    pub teardown: Step,
    /// The removal of what an ended sandbox no longer needs.
    pub release: Step,
    /// By container name.
    pub containers: BTreeMap<String, LiveContainer>,
}

/// The passing state of one container.
#[derive(Clone, Debug, Default)]
pub struct LiveContainer {
    /// The image for the next attempt.
    pub image: Step,
    /// Delay of this image's pulls.
    pub pulls: Backoff,
    /// Making and starting the next attempt.
    pub start: Step,
    /// The collection of an exit is under way.
    pub collecting: bool,
    /// Its postStart hook.
    pub post_start: Step,
    /// Its preStop hook; stays to do when there is none, or no time for it.
    pub pre_stop: Step,
    /// Its probes, in the order of [`probe::Kind::ALL`].
    pub probes: [probe::State; 3],
    /// When it was decided that the process must end.
    pub asked_at: Option<Timestamp>,
    /// When the process was told so, which its preStop hook may delay.
    pub signalled_at: Option<Timestamp>,
    /// When it was last killed.
    pub killed_at: Option<Timestamp>,
}

impl Step {
    /// Whether a job is at it.
    #[must_use]
    pub fn is_busy(&self) -> bool {
        matches!(self, Self::Busy(_))
    }

    /// Whether it is true.
    #[must_use]
    pub fn is_done(&self) -> bool {
        matches!(self, Self::Done)
    }

    fn trouble(&self) -> Option<&Retry> {
        match self {
            Self::Retry(retry) | Self::Busy(Some(retry)) => Some(retry),
            Self::Todo | Self::Busy(None) | Self::Done => None,
        }
    }

    /// What to show while it is not done.
    #[must_use]
    pub fn waiting(&self) -> Option<&Waiting> {
        self.trouble().map(|retry| &retry.waiting)
    }

    /// A job takes it up.
    pub fn begin(&mut self) {
        *self = match std::mem::take(self) {
            Self::Retry(retry) => Self::Busy(Some(retry)),
            Self::Busy(before) => Self::Busy(before),
            Self::Todo | Self::Done => Self::Busy(None),
        };
    }

    fn next_failure(&self) -> u32 {
        self.trouble()
            .map_or(0, |retry| retry.failures)
            .saturating_add(1)
    }

    /// The job failed: try again after a delay that grows up to `max`.
    pub fn fail(&mut self, now: Timestamp, max: SignedDuration, waiting: Waiting) {
        self.fail_for(now, retry_delay(self.next_failure(), max), waiting);
    }

    /// The job failed: try again after `delay`.
    pub fn fail_for(&mut self, now: Timestamp, delay: SignedDuration, waiting: Waiting) {
        let failures = self.next_failure();
        let at = now.saturating_add(delay).unwrap_or(now);
        *self = Self::Retry(Box::new(Retry {
            failures,
            since: now,
            at,
            waiting,
        }));
    }
}

impl LiveContainer {
    /// The pod names another image: what was done about the old one does not count. An attempt
    /// that is being made of it is replaced once it runs.
    pub fn renew_image(&mut self) {
        self.image = Step::Todo;
        self.pulls = Backoff::default();
        if !self.start.is_busy() {
            self.start = Step::Todo;
        }
    }

    /// A new attempt begins: what the one before it was asked and told does not count.
    pub fn begin_attempt(&mut self) {
        self.post_start = Step::Todo;
        self.pre_stop = Step::Todo;
        self.probes = Default::default();
        (self.asked_at, self.signalled_at, self.killed_at) = (None, None, None);
    }

    /// The state of one of its probes.
    #[must_use]
    pub fn probe(&self, kind: probe::Kind) -> &probe::State {
        &self.probes[kind as usize]
    }

    /// The state of one of its probes.
    pub fn probe_mut(&mut self, kind: probe::Kind) -> &mut probe::State {
        &mut self.probes[kind as usize]
    }

    /// No attempt could be made: the next try looks for its image again, which may be gone.
    pub fn start_failed(&mut self, now: Timestamp, max: SignedDuration, waiting: Waiting) {
        self.start.fail(now, max, waiting);
        self.image = Step::Todo;
    }

    /// What the next attempt waits for, when something went wrong.
    #[must_use]
    pub fn waiting(&self) -> Option<&Waiting> {
        self.start.waiting().or_else(|| self.image.waiting())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAX: SignedDuration = SignedDuration::from_secs(30);

    fn waiting() -> Waiting {
        Waiting {
            reason: "CreateContainerError".into(),
            message: String::new(),
        }
    }

    #[test]
    fn another_image_begins_anew() {
        let now = Timestamp::UNIX_EPOCH;
        let mut live = LiveContainer::default();
        live.image.fail(now, MAX, waiting());
        live.pulls.advance(now, now);
        live.start.fail(now, MAX, waiting());
        live.renew_image();
        assert_eq!((&live.image, &live.start), (&Step::Todo, &Step::Todo));
        assert_eq!(live.pulls, Backoff::default());
        live.start.begin();
        live.renew_image();
        assert!(live.start.is_busy(), "the job is still at it");
    }

    #[test]
    fn a_failed_start_looks_for_its_image_again() {
        let mut live = LiveContainer {
            image: Step::Done,
            ..Default::default()
        };
        live.start.begin();
        live.start_failed(Timestamp::UNIX_EPOCH, MAX, waiting());
        assert_eq!(live.image, Step::Todo);
        assert_eq!(live.waiting(), Some(&waiting()));
    }
}
