//! In-place resize of what runs.

use jiff::Timestamp;

use super::{MAX_RETRY, Worker};
use crate::sandbox::jobs::{self, Outcome, Resized};
use crate::sandbox::live::Step;
use crate::sandbox::resize::{self, Pending};

impl Worker {
    /// Notes what came of a wish. `resized` tells that it changed a size.
    pub(super) fn resize_decided(&mut self, pending: Option<Pending>, resized: bool) {
        if resized {
            // What went wrong with the size before does not count.
            if self.live.resize.is_busy() {
                self.live.resize_again = true;
            } else {
                self.live.resize = Step::Todo;
            }
        }
        if self.facts.pending != pending {
            self.facts.pending = pending;
            self.persist();
        }
    }

    pub(super) fn resize(&mut self) {
        let Some(change) = resize::change(&self.spec, &self.facts) else {
            return;
        };
        self.live.resize.begin();
        let (host, spec) = (self.host.clone(), self.spec.clone());
        self.jobs.spawn(async move {
            let resized = jobs::resize(&host, &spec, &change).await;
            Outcome::Resized(resized)
        });
    }

    pub(super) fn resized(&mut self, resized: Resized, now: Timestamp) {
        for (container, number, size) in resized.sizes {
            let current = self.facts.containers.get_mut(&container);
            if let Some(attempt) = current
                .and_then(|facts| facts.current.as_mut())
                .filter(|attempt| attempt.number == number)
            {
                attempt.size = Some(size);
            }
        }
        if let Some(bounds) = resized.bounds {
            self.facts.bounds = Some(bounds);
        }
        self.persist();
        let again = std::mem::take(&mut self.live.resize_again);
        match resized.trouble {
            Some(waiting) if !again => self.live.resize.fail(now, MAX_RETRY, waiting),
            // The plan compares: another wish may have come meanwhile.
            _ => self.live.resize = Step::Todo,
        }
    }
}
