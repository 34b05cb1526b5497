//! Takes in what came of jobs.

use jiff::Timestamp;
use tracing::{info, warn};

use super::{MAX_RETRY, Output, Worker};
use crate::images::{Image, ImageError};
use crate::sandbox::facts::{Attempt, Phase, Termination};
use crate::sandbox::jobs::{About, Outcome, Started};
use crate::sandbox::live::{Step, Waiting};
use crate::sandbox::plan::is_finished;
use crate::spec::pod_label;

impl Worker {
    pub(super) fn finish(&mut self, outcome: Outcome) {
        let now = Timestamp::now();
        match outcome {
            Outcome::Network(Ok((network, bounds))) => {
                self.live.network = Step::Done;
                self.facts.pod_ip = network.ip;
                self.facts.bounds = bounds;
                self.facts.started_at.get_or_insert(now);
                self.network = Some(network);
                self.persist();
            }
            Outcome::Network(Err(waiting)) => self.live.network.fail(now, MAX_RETRY, waiting),
            Outcome::Volumes(Ok(paths)) => {
                let again = std::mem::take(&mut self.live.volumes_again);
                self.live.volumes = if again { Step::Todo } else { Step::Done };
                self.facts.volumes = Some(paths);
                self.persist();
            }
            Outcome::Volumes(Err(waiting)) => {
                self.live.volumes_again = false;
                self.live.volumes.fail(now, MAX_RETRY, waiting);
            }
            Outcome::Image {
                container,
                reference,
                result,
            } => self.image(&container, &reference, *result, now),
            Outcome::Start(name, started) => self.started(&name, *started, now),
            Outcome::Probed(probing, verdict) => self.probed(&probing, &verdict, now),
            Outcome::Resized(resized) => self.resized(resized, now),
            Outcome::Hooked {
                container,
                attempt,
                kind,
                done,
            } => self.hooked(&container, attempt, kind, done, now),
            Outcome::Collected(name, end) => {
                self.live
                    .containers
                    .entry(name.clone())
                    .or_default()
                    .collecting = false;
                self.ended(&name, end);
            }
            Outcome::Released(Ok(())) => {
                self.live.release = Step::Done;
                self.facts.volumes = None;
                self.persist();
            }
            Outcome::Released(Err(waiting)) => {
                warn!(
                    pod_uid = self.spec.uid,
                    error = waiting.message,
                    "cannot release what an ended sandbox holds"
                );
                self.live.release.fail(now, MAX_RETRY, waiting);
            }
            Outcome::TornDown(Ok(())) => {
                self.live.teardown = Step::Done;
                self.facts.removed = true;
                self.facts.volumes = None;
                self.outputs.clear();
                self.persist();
                if let Ok(users) = &self.host.users {
                    users.give_back(&self.spec.uid);
                }
                self.host.room.notify_one();
                info!(
                    pod_uid = self.spec.uid,
                    pod = pod_label(&self.spec),
                    "sandbox removed"
                );
            }
            Outcome::TornDown(Err(waiting)) => {
                warn!(
                    pod_uid = self.spec.uid,
                    error = waiting.message,
                    "cannot remove sandbox"
                );
                let about = About::sandbox_trouble();
                self.host
                    .event(&self.spec, about, &waiting.reason, &waiting.message);
                self.live.teardown.fail(now, MAX_RETRY, waiting);
            }
        }
    }

    pub(super) fn image(
        &mut self,
        name: &str,
        reference: &str,
        result: Result<Image, ImageError>,
        now: Timestamp,
    ) {
        // It may have ended at the moment at which the pod began to name another.
        let wanted = self.member(name).is_some_and(|(c, _)| c.image == reference);
        if !wanted {
            return;
        }
        self.pulls.remove(name);
        let live = self.live.containers.entry(name.to_owned()).or_default();
        match result {
            Ok(image) => {
                live.image = Step::Done;
                self.images.insert(name.to_owned(), image);
            }
            Err(error) => {
                live.pulls.advance(now, now);
                let delay = live.pulls.delay(now);
                let waiting = Waiting {
                    reason: error.reason().to_owned(),
                    message: error.message().to_owned(),
                };
                live.image.fail_for(now, delay, waiting);
            }
        }
    }

    pub(super) fn started(&mut self, name: &str, started: Started, now: Timestamp) {
        let live = self.live.containers.entry(name.to_owned()).or_default();
        match started {
            Started::Running {
                identity,
                since,
                log,
                user,
                size,
            } => {
                live.start = Step::Todo;
                live.image = Step::Todo;
                self.outputs.insert(name.to_owned(), Output::new(log));
                let mut attempt = Attempt::running(&identity, since);
                attempt.user = user;
                attempt.size = Some(size);
                info!(
                    pod_uid = self.spec.uid,
                    container = name,
                    attempt = attempt.number,
                    "container started"
                );
                self.facts
                    .containers
                    .entry(name.to_owned())
                    .or_default()
                    .begin(attempt, now);
                self.persist();
                // Its end may have been announced before anybody knew the container.
                self.look_at = Some(now);
            }
            Started::Failed { identity, end } => {
                live.start = Step::Todo;
                live.image = Step::Todo;
                let mut attempt = Attempt::running(&identity, end.finished_at);
                attempt.phase = Phase::Exited {
                    since: end.finished_at,
                    code: end.exit_code,
                    at: end.finished_at,
                    lost: false,
                };
                self.facts
                    .containers
                    .entry(name.to_owned())
                    .or_default()
                    .begin(attempt, now);
                self.ended(name, end);
            }
            Started::Retry(waiting) => live.start_failed(now, MAX_RETRY, waiting),
        }
    }

    pub(super) fn ended(&mut self, name: &str, end: Termination) {
        if let Some(output) = self.outputs.remove(name) {
            output.running.send_replace(false);
        }
        self.abandon_hook(name);
        let Some(facts) = self.facts.containers.get_mut(name) else {
            return;
        };
        let due = facts.due(&end);
        let Some(attempt) = facts.current.as_mut() else {
            return;
        };
        attempt.phase = Phase::Ended(end);
        self.persist();
        if is_finished(&self.spec, &self.facts) {
            self.host.room.notify_one();
        }
        let Some((container, kind)) = self.member(name) else {
            return;
        };
        let stopping = self.facts.removal.is_some()
            || self.facts.ended.is_some()
            || is_finished(&self.spec, &self.facts);
        let policy = self.spec.restart_policy();
        let again = self
            .facts
            .attempt(name)
            .is_some_and(|attempt| attempt.is_followed(policy, kind, &container));
        if again && !stopping && due > Timestamp::now() {
            let message = format!(
                "Back-off restarting failed container {name} in pod {}",
                pod_label(&self.spec)
            );
            self.host
                .event(&self.spec, About::trouble(name, kind), "BackOff", &message);
        }
    }
}
