//! Carries out what was planned. What takes time becomes a job.

use jiff::Timestamp;

use super::{MAX_RETRY, Worker};
use crate::sandbox::facts::Ended;
use crate::sandbox::identity::{Identity, Kind, signal_number, spec_hash};
use crate::sandbox::jobs::{self, About, Outcome, StartRequest};
use crate::sandbox::live::{Step, Waiting};
use crate::sandbox::plan::{Action, Why, grace};

const SIGKILL: u32 = libc::SIGKILL as u32;

impl Worker {
    pub(super) async fn act(&mut self, action: Action, now: Timestamp) {
        match action {
            Action::SetUpNetwork => self.set_up_network(now),
            Action::ApplyVolumes => {
                let Some(network) = self.network.clone() else {
                    return;
                };
                self.live.volumes.begin();
                let (host, spec) = (self.host.clone(), self.spec.clone());
                let stopping = self.stopping.clone();
                self.jobs.spawn(async move {
                    Outcome::Volumes(jobs::apply_volumes(&host, &spec, &network, &stopping).await)
                });
            }
            Action::EnsureImage(name) => self.ensure_image(name),
            Action::Start(name) => self.start(&name),
            Action::Probe(name, kind) => self.probe(&name, kind, now),
            Action::Resize => self.resize(),
            Action::PostStart(name) => self.post_start(&name),
            Action::Ask {
                container,
                why,
                hook,
            } => self.ask(&container, why, hook, now).await,
            Action::Signal(name) => self.signal(&name, now).await,
            Action::Kill(name) => self.kill(&name, now).await,
            Action::AbandonImage(name) => {
                self.abandon_pull(&name);
                self.live.containers.entry(name).or_default().image = Step::Todo;
            }
            Action::End { reason, message } => {
                self.stopping.cancel();
                self.facts.ended = Some(Ended {
                    reason: reason.to_owned(),
                    message: message.to_owned(),
                    deadline: now.saturating_add(grace(&self.spec)).unwrap_or(now),
                });
                self.persist();
                self.shared.wake.notify_one();
            }
            // A lagging record does not say yet what is to be removed, or why.
            Action::Release | Action::TearDown if !self.journal.is_current() => {}
            Action::Release => {
                self.live.release.begin();
                let (host, spec, facts) =
                    (self.host.clone(), self.spec.clone(), self.facts.clone());
                self.jobs.spawn(async move {
                    Outcome::Released(jobs::release(&host, &spec, &facts).await)
                });
            }
            Action::TearDown => {
                self.live.teardown.begin();
                let (host, spec, facts) =
                    (self.host.clone(), self.spec.clone(), self.facts.clone());
                self.jobs.spawn(async move {
                    Outcome::TornDown(jobs::tear_down(&host, &spec, &facts).await)
                });
            }
        }
    }

    fn set_up_network(&mut self, now: Timestamp) {
        if self.spec.own_users && self.facts.users.is_none() {
            let users = self.host.users.as_ref();
            let range = users.map_err(Clone::clone).and_then(|users| {
                let taken = users.take(&self.spec.uid);
                taken.ok_or_else(|| "all ids are taken; see user_namespaces.pods".to_owned())
            });
            match range {
                Ok(range) => {
                    self.facts.users = Some(range);
                    self.persist();
                }
                Err(why) => {
                    let message = format!("Failed to create pod sandbox: spec.hostUsers: {why}");
                    let reason = "FailedCreatePodSandBox";
                    let about = About::sandbox_trouble();
                    self.host.event(&self.spec, about, reason, &message);
                    let reason = reason.to_owned();
                    let waiting = Waiting { reason, message };
                    self.live.network.fail(now, MAX_RETRY, waiting);
                    return;
                }
            }
        }
        // Its ids are on record before anything has them.
        if self.facts.users.is_some() && !self.journal.is_current() {
            return;
        }
        self.live.network.begin();
        let (host, spec) = (self.host.clone(), self.spec.clone());
        let (bounds, users) = (self.facts.bounds, self.facts.users);
        self.jobs.spawn(async move {
            Outcome::Network(jobs::set_up_network(&host, &spec, bounds, users).await)
        });
    }

    pub(super) fn ensure_image(&mut self, name: String) {
        let Some((container, kind)) = self.member(&name) else {
            return;
        };
        self.live
            .containers
            .entry(name.clone())
            .or_default()
            .image
            .begin();
        let (host, spec) = (self.host.clone(), self.spec.clone());
        let key = name.clone();
        let pull = self.jobs.spawn(async move {
            let image = jobs::ensure_image(&host, &spec, &container, kind).await;
            Outcome::Image {
                container: name,
                reference: container.image,
                result: Box::new(image),
            }
        });
        self.pulls.insert(key, pull);
    }

    pub(super) fn abandon_pull(&mut self, name: &str) {
        if let Some(pull) = self.pulls.remove(name) {
            pull.abort();
        }
    }

    pub(super) fn start(&mut self, name: &str) {
        let Some((container, kind)) = self.member(name) else {
            return;
        };
        let (Some(image), Some(network), Some(paths)) = (
            self.images.get(name).cloned(),
            self.network.clone(),
            self.facts.volumes.clone(),
        ) else {
            return;
        };
        let facts = self.facts.containers.entry(name.to_owned()).or_default();
        let previous = facts.current.clone();
        let stop_signal = image
            .config
            .config()
            .as_ref()
            .and_then(|c| c.stop_signal().clone());
        let stop_signal = Some(container.stop_signal.clone())
            .filter(|signal| !signal.is_empty())
            .or(stop_signal);
        let identity = Identity {
            uid: self.spec.uid.clone(),
            namespace: self.spec.namespace.clone(),
            pod: self.spec.name.clone(),
            container: name.to_owned(),
            attempt: facts.next_attempt(),
            kind,
            spec_hash: spec_hash(&container),
            image: container.image.clone(),
            image_id: image.image_id.clone(),
            stop_signal: signal_number(stop_signal.as_deref().unwrap_or_default()),
        };
        let target = (!container.target.is_empty()).then(|| {
            let running = self.facts.attempt(&container.target);
            running
                .filter(|attempt| attempt.is_running())
                .map(|attempt| attempt.id.clone())
                .ok_or_else(|| format!("unable to find target container {}", container.target))
        });
        let live = self.live.containers.entry(name.to_owned()).or_default();
        live.start.begin();
        live.begin_attempt();
        let request = StartRequest {
            spec: self.spec.clone(),
            container,
            identity,
            image,
            network,
            paths,
            previous: previous.map(|attempt| attempt.id),
            target,
        };
        let (host, name) = (self.host.clone(), name.to_owned());
        self.jobs.spawn(async move {
            let started = jobs::start(&host, &request).await;
            Outcome::Start(name, Box::new(started))
        });
    }

    pub(super) async fn ask(&mut self, name: &str, why: Why, hook: bool, now: Timestamp) {
        let kind = self.member(name).map_or(Kind::Regular, |(_, kind)| kind);
        let message = match why {
            Why::Stopping => format!("Stopping container {name}"),
            Why::Changed => format!("Container {name} definition changed, will be restarted"),
            Why::Doomed => self.doom_message(name),
            Why::Resized => format!("Container {name} resize requires restart"),
        };
        self.host.event(
            &self.spec,
            About::container(name, kind),
            "Killing",
            &message,
        );
        // A postStart hook that still runs has nothing more to say.
        self.abandon_hook(name);
        let live = self.live.containers.entry(name.to_owned()).or_default();
        live.asked_at = Some(now);
        if matches!(why, Why::Changed | Why::Resized) {
            // Before the signal: however soon the process ends, it is known why.
            let current = self.facts.containers.get_mut(name);
            if let Some(attempt) = current.and_then(|facts| facts.current.as_mut()) {
                attempt.replaced = true;
            }
            self.persist();
        }
        if !(hook && self.pre_stop(name)) {
            self.signal(name, now).await;
        }
    }

    pub(super) async fn signal(&mut self, name: &str, now: Timestamp) {
        self.abandon_hook(name);
        let live = self.live.containers.entry(name.to_owned()).or_default();
        live.signalled_at = Some(now);
        if live.pre_stop.is_busy() {
            live.pre_stop = Step::Done;
        }
        let Some(attempt) = self.facts.attempt(name) else {
            return;
        };
        let (id, signal) = (attempt.id.clone(), attempt.stop_signal);
        if let Err(error) = self.host.runtime.kill(&id, None, signal).await {
            // The kill that follows at the deadline does not depend on this.
            self.look_later(&error);
        }
    }

    pub(super) async fn kill(&mut self, name: &str, now: Timestamp) {
        let Some(id) = self.facts.attempt(name).map(|attempt| attempt.id.clone()) else {
            return;
        };
        self.live
            .containers
            .entry(name.to_owned())
            .or_default()
            .killed_at = Some(now);
        if let Err(error) = self.host.runtime.kill(&id, None, SIGKILL).await {
            self.look_later(&error);
        }
    }
}
