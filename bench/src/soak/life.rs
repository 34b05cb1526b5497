//! Where each pod that is there is in its life. Pure: times come from outside.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::pod::Progress;
use crate::watch::Change;

/// The pods that are on their way, there, or on their way out.
#[derive(Debug)]
pub(super) struct Lives {
    deadline: Duration,
    pods: BTreeMap<String, Life>,
}

#[derive(Debug)]
enum Life {
    /// Since then.
    Requested(Instant),
    /// It is to be deleted, since then.
    Leaving(Instant),
}

/// What follows from something that happened.
#[derive(Debug, PartialEq)]
pub(super) enum Next {
    Nothing,
    /// It took so long; delete it.
    Ready(String, Duration),
    /// Why; delete it if it is there.
    Failed(String, String),
}

impl Lives {
    /// None yet. Each must be Ready, and again gone, within `deadline`.
    pub(super) fn new(deadline: Duration) -> Self {
        Self {
            deadline,
            pods: BTreeMap::new(),
        }
    }

    pub(super) fn len(&self) -> usize {
        self.pods.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.pods.is_empty()
    }

    /// It is being created.
    pub(super) fn requested(&mut self, name: &str, at: Instant) {
        self.pods.insert(name.to_owned(), Life::Requested(at));
    }

    /// A request about it failed. While it leaves, that alone is no failure: it is deleted once
    /// more when it is late.
    pub(super) fn refused(&mut self, name: &str, reason: String) -> Next {
        match self.pods.get(name) {
            Some(Life::Requested(_)) => {
                self.pods.remove(name);
                Next::Failed(name.to_owned(), reason)
            }
            Some(Life::Leaving(_)) | None => Next::Nothing,
        }
    }

    /// The watch showed it.
    pub(super) fn changed(&mut self, change: Change) -> Next {
        match change {
            Change::Gone(name) => match self.pods.remove(&name) {
                Some(Life::Requested(_)) => Next::Failed(name, "was deleted".to_owned()),
                Some(Life::Leaving(_)) | None => Next::Nothing,
            },
            Change::Pod(name, progress, at) => {
                let Some(life) = self.pods.get_mut(&name) else {
                    return Next::Nothing;
                };
                let Life::Requested(since) = *life else {
                    return Next::Nothing;
                };
                match progress {
                    Progress::Waiting(_) => Next::Nothing,
                    Progress::Ready => {
                        *life = Life::Leaving(at);
                        Next::Ready(name, at.saturating_duration_since(since))
                    }
                    Progress::Failed(reason) => {
                        *life = Life::Leaving(at);
                        Next::Failed(name, reason)
                    }
                }
            }
        }
    }

    /// One whose time is up is given up: another takes its place.
    pub(super) fn late(&mut self, now: Instant) -> Next {
        let late = self.pods.iter().find_map(|(name, life)| {
            let (since, what) = match life {
                Life::Requested(since) => (since, "not Ready in time"),
                Life::Leaving(since) => (since, "not gone in time"),
            };
            let waited = now.saturating_duration_since(*since);
            (waited > self.deadline).then(|| (name.clone(), what))
        });
        let Some((name, what)) = late else {
            return Next::Nothing;
        };
        self.pods.remove(&name);
        Next::Failed(name, what.to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn shown(name: &str, progress: Progress, at: Instant) -> Change {
        Change::Pod(name.to_owned(), progress, at)
    }

    #[test]
    fn a_life_is_timed_until_it_is_ready_and_holds_its_place_until_it_is_gone() {
        let start = Instant::now();
        let mut lives = Lives::new(10 * SECOND);
        lives.requested("a", start);
        let waiting = shown("a", Progress::Waiting("Pending".into()), start);
        assert_eq!(lives.changed(waiting), Next::Nothing);
        let ready = || shown("a", Progress::Ready, start + SECOND);
        assert_eq!(lives.changed(ready()), Next::Ready("a".into(), SECOND));
        // Its end is its own, whatever it looks like.
        assert_eq!(lives.changed(ready()), Next::Nothing);
        let ended = shown("a", Progress::Failed("exit code 137".into()), start);
        assert_eq!(lives.changed(ended), Next::Nothing);
        assert_eq!(lives.len(), 1);
        assert_eq!(lives.changed(Change::Gone("a".into())), Next::Nothing);
        assert!(lives.is_empty());
    }

    #[test]
    fn what_goes_wrong_is_a_failure_once() {
        let start = Instant::now();
        let mut lives = Lives::new(10 * SECOND);
        for name in ["gone", "refused", "failed", "late"] {
            lives.requested(name, start);
        }
        let failed = |name: &str, why: &str| Next::Failed(name.to_owned(), why.to_owned());
        let gone = lives.changed(Change::Gone("gone".into()));
        assert_eq!(gone, failed("gone", "was deleted"));
        assert_eq!(
            lives.refused("refused", "quota".into()),
            failed("refused", "quota")
        );
        let ended = shown("failed", Progress::Failed("OOMKilled".into()), start);
        assert_eq!(lives.changed(ended), failed("failed", "OOMKilled"));
        assert_eq!(lives.refused("failed", "timeout".into()), Next::Nothing);
        assert_eq!(lives.late(start + 9 * SECOND), Next::Nothing);
        let late = start + 11 * SECOND;
        assert_eq!(lives.late(late), failed("failed", "not gone in time"));
        assert_eq!(lives.late(late), failed("late", "not Ready in time"));
        assert_eq!(lives.late(late), Next::Nothing);
        assert!(lives.is_empty());
    }
}
