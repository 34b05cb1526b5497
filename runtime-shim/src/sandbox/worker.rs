//! One task a sandbox: takes wishes and hints, looks, plans, starts jobs, writes facts down, tells.
//!
//! Nothing here is remembered only by the order of steps. The task may die at any line; the next
//! one starts from the record, containerd's labels and the tasks' states.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, PoisonError};

use jiff::{SignedDuration, Timestamp};
use sandman_protocol::v1;
use tokio::sync::{Notify, watch};
use tokio::task::{AbortHandle, JoinSet};
use tracing::{info, warn};

use super::adopt;
use super::facts::{Attempt, Facts, Phase, Removal, restarts};
use super::identity::{Identity, Kind, signal_number, spec_hash};
use super::jobs::{self, About, Host, Last, Outcome, StartRequest, Started};
use super::live::{Live, Step, Waiting};
use super::plan::{Action, Why, grace, is_finished, members, plan};
use super::report::report;
use super::view::{ContainerView, View};
use crate::images::{Image, ImageError};
use crate::logs::ContainerLog;
use crate::network::PodNetwork;
use crate::runtime::{Exit, RuntimeError, TaskStatus};
use crate::spec::pod_label;

const SIGKILL: u32 = libc::SIGKILL as u32;
/// Longest delay between tries of what only needs another try.
const MAX_RETRY: SignedDuration = SignedDuration::from_secs(30);
/// When containerd could not be asked about a container.
const LOOK_AGAIN: SignedDuration = SignedDuration::from_secs(2);
/// How long a failed pull shows its own reason before the back-off's (the kubelet: until its
/// next sync).
const SHOW_ERROR: SignedDuration = SignedDuration::from_secs(2);

/// Wishes and hints for a worker, newest wins.
#[derive(Debug, Default)]
pub(super) struct Inbox {
    pub(super) spec: Option<v1::SandboxSpec>,
    pub(super) removal: Option<Removal>,
    pub(super) look: bool,
    pub(super) stop: bool,
}

/// What the rest of the process sees of a worker.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) inbox: Mutex<Inbox>,
    pub(super) wake: Notify,
    pub(super) view: Mutex<Arc<View>>,
}

impl Shared {
    pub(super) fn send(&self, change: impl FnOnce(&mut Inbox)) {
        change(&mut self.inbox.lock().unwrap_or_else(PoisonError::into_inner));
        self.wake.notify_one();
    }
}

struct Output {
    log: Option<ContainerLog>,
    running: watch::Sender<bool>,
}

/// The state of one worker.
pub(super) struct Worker {
    host: Arc<Host>,
    shared: Arc<Shared>,
    spec: v1::SandboxSpec,
    facts: Facts,
    live: Live,
    network: Option<PodNetwork>,
    images: HashMap<String, Image>,
    outputs: HashMap<String, Output>,
    jobs: JoinSet<Outcome>,
    pulls: HashMap<String, AbortHandle>,
    look_at: Option<Timestamp>,
}

impl Worker {
    /// A worker for a sandbox with this record.
    pub(super) fn new(
        host: Arc<Host>,
        shared: Arc<Shared>,
        spec: v1::SandboxSpec,
        facts: Facts,
        contents_known: bool,
    ) -> Self {
        Self {
            host,
            shared,
            spec,
            facts,
            live: Live {
                contents_known,
                ..Default::default()
            },
            network: None,
            images: HashMap::new(),
            outputs: HashMap::new(),
            jobs: JoinSet::new(),
            pulls: HashMap::new(),
            look_at: None,
        }
    }

    /// Takes over what an earlier process left in containerd.
    pub(super) async fn adopt(&mut self, found: Vec<Identity>) {
        let known = self.spec.schema > 0;
        adopt::merge(&self.host, known, &mut self.facts, found).await;
        if self.facts.volumes.is_some() {
            self.live.volumes = Step::Done;
        }
        let running: Vec<(String, Attempt)> = self
            .facts
            .containers
            .iter()
            .filter_map(|(name, facts)| Some((name.clone(), facts.current.clone()?)))
            .filter(|(_, attempt)| attempt.is_live())
            .collect();
        for (name, attempt) in running {
            let log = adopt::reopen_log(&self.host, &self.spec, &name, &attempt);
            self.outputs.insert(
                name,
                Output {
                    log,
                    running: watch::Sender::new(true),
                },
            );
        }
        self.look().await;
        self.persist();
        self.publish();
    }

    /// Runs until the sandbox is forgotten.
    pub(super) async fn run(mut self) {
        loop {
            if self.take_wishes().await {
                return;
            }
            let now = Timestamp::now();
            if self.look_at.is_some_and(|at| at <= now) {
                self.look().await;
            }
            let decided = plan(&self.spec, &self.facts, &self.live, now);
            for action in decided.actions {
                self.act(action, now).await;
            }
            let noted = self.note_backoff(now);
            self.publish();
            let wake = [decided.wake, self.look_at, noted]
                .into_iter()
                .flatten()
                .min();
            self.wait(wake).await;
        }
    }

    async fn wait(&mut self, wake: Option<Timestamp>) {
        let sleep = async {
            match wake {
                Some(at) => {
                    let left = at.duration_since(Timestamp::now());
                    tokio::time::sleep(left.try_into().unwrap_or_default()).await;
                }
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = self.shared.wake.notified() => {}
            Some(done) = self.jobs.join_next() => match done {
                Ok(outcome) => self.finish(outcome),
                // An abandoned pull; a panic is a mistake of ours that must not stop the rest.
                Err(error) if error.is_cancelled() => {}
                Err(error) => {
                    warn!(pod_uid = self.spec.uid, %error, "a job of the sandbox died");
                    self.forget_busy_steps();
                }
            },
            () = sleep => {}
        }
    }

    /// True when the sandbox is forgotten.
    async fn take_wishes(&mut self) -> bool {
        let inbox = std::mem::take(
            &mut *self
                .shared
                .inbox
                .lock()
                .unwrap_or_else(PoisonError::into_inner),
        );
        if inbox.stop {
            return true;
        }
        if let Some(spec) = inbox.spec {
            let contents_changed = !self.live.contents_known || spec.volumes != self.spec.volumes;
            if contents_changed && !self.live.volumes.is_busy() {
                self.live.volumes = Step::Todo;
            } else if contents_changed {
                // The job at it has the old contents: another follows.
                self.live.volumes = Step::Busy(None);
                self.live.volumes_again = true;
            }
            self.live.contents_known = true;
            self.spec = spec;
        }
        if let Some(removal) = inbox.removal
            && self
                .facts
                .removal
                .as_ref()
                .is_none_or(|old| removal.deadline < old.deadline)
        {
            self.facts.removal = Some(removal);
            self.persist();
        }
        if inbox.look {
            self.look().await;
        }
        false
    }

    /// Asks containerd about every container that should run.
    async fn look(&mut self) {
        self.look_at = None;
        let running: Vec<(String, String)> = self
            .facts
            .containers
            .iter()
            .filter_map(|(name, facts)| Some((name.clone(), facts.current.as_ref()?)))
            .filter(|(_, attempt)| attempt.is_live())
            .map(|(name, attempt)| (name, attempt.id.clone()))
            .collect();
        for (name, id) in running {
            if self.facts.attempt(&name).is_some_and(Attempt::is_running) {
                match self.host.runtime.state(&id).await {
                    Ok(Some(TaskStatus::Running)) => continue,
                    Ok(Some(TaskStatus::Stopped(exit))) => self.exited(&name, exit, false),
                    Ok(None | Some(TaskStatus::Created)) => self.lost(&name),
                    // Its shim is gone; what is left of the process must not stay.
                    Ok(Some(TaskStatus::Unknown)) => match jobs::kill_hard(&self.host, &id).await {
                        Ok(()) => self.lost(&name),
                        Err(error) => self.look_later(&error),
                    },
                    Err(error) => {
                        self.look_later(&error);
                        continue;
                    }
                }
            }
            self.collect(&name);
        }
    }

    fn look_later(&mut self, error: &RuntimeError) {
        self.host.metrics.runtime_error();
        warn!(pod_uid = self.spec.uid, %error, "cannot ask containerd about a container");
        self.look_at = Timestamp::now().saturating_add(LOOK_AGAIN).ok();
    }

    fn lost(&mut self, name: &str) {
        let exit = Exit {
            code: super::facts::UNKNOWN_EXIT_CODE,
            at: std::time::SystemTime::now(),
        };
        self.exited(name, exit, true);
    }

    fn exited(&mut self, name: &str, exit: Exit, lost: bool) {
        let Some(attempt) = self
            .facts
            .containers
            .get_mut(name)
            .and_then(|facts| facts.current.as_mut())
        else {
            return;
        };
        let Phase::Running { since } = attempt.phase else {
            return;
        };
        let at = Timestamp::try_from(exit.at).unwrap_or_else(|_| Timestamp::now());
        attempt.phase = Phase::Exited {
            since,
            code: exit.code,
            at: at.max(since),
            lost,
        };
        info!(
            pod_uid = self.spec.uid,
            container = name,
            attempt = attempt.number,
            exit_code = exit.code,
            lost,
            "container ended"
        );
        self.persist();
    }

    /// Starts the collection of an exit that is on record.
    fn collect(&mut self, name: &str) {
        let Some(attempt) = self.facts.attempt(name).cloned() else {
            return;
        };
        let Phase::Exited {
            since,
            code,
            at,
            lost,
        } = attempt.phase
        else {
            return;
        };
        let live = self.live.containers.entry(name.to_owned()).or_default();
        if std::mem::replace(&mut live.collecting, true) {
            return;
        }
        let policy = members(&self.spec)
            .find(|member| member.spec.name == name)
            .map_or(v1::TerminationMessagePolicy::File, |member| {
                member.spec.termination_message_policy()
            });
        let last = Last {
            log: crate::logs::LogId {
                uid: self.spec.uid.clone(),
                container: name.to_owned(),
                attempt: attempt.number,
            },
            container_id: attempt.id,
            since,
            code,
            at,
            lost,
            policy,
        };
        let log = self
            .outputs
            .get_mut(name)
            .and_then(|output| output.log.take());
        let (host, name) = (self.host.clone(), name.to_owned());
        self.jobs
            .spawn(async move { Outcome::Collected(name, jobs::collect(&host, &last, log).await) });
    }

    async fn act(&mut self, action: Action, now: Timestamp) {
        match action {
            Action::SetUpNetwork => {
                self.live.network.begin();
                let (host, spec) = (self.host.clone(), self.spec.clone());
                self.jobs.spawn(async move {
                    Outcome::Network(jobs::set_up_network(&host, &spec).await)
                });
            }
            Action::ApplyVolumes => {
                let Some(network) = self.network.clone() else {
                    return;
                };
                self.live.volumes.begin();
                let (host, spec) = (self.host.clone(), self.spec.clone());
                self.jobs.spawn(async move {
                    Outcome::Volumes(jobs::apply_volumes(&host, &spec, &network).await)
                });
            }
            Action::EnsureImage(name) => self.ensure_image(name),
            Action::Start(name) => self.start(&name, now),
            Action::Ask { container, why } => self.ask(&container, why, now).await,
            Action::Kill(name) => self.kill(&name, now).await,
            Action::AbandonImage(name) => {
                if let Some(pull) = self.pulls.remove(&name) {
                    pull.abort();
                }
                self.live.containers.entry(name).or_default().image = Step::Todo;
            }
            Action::End { reason, message } => {
                self.facts.ended = Some(super::facts::Ended {
                    reason: reason.to_owned(),
                    message: message.to_owned(),
                    deadline: now.saturating_add(grace(&self.spec)).unwrap_or(now),
                });
                self.persist();
                self.shared.wake.notify_one();
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

    fn member(&self, name: &str) -> Option<(v1::Container, Kind)> {
        members(&self.spec)
            .find(|member| member.spec.name == name)
            .map(|member| (member.spec.clone(), member.kind))
    }

    fn ensure_image(&mut self, name: String) {
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
            Outcome::Image(name, image)
        });
        self.pulls.insert(key, pull);
    }

    fn start(&mut self, name: &str, now: Timestamp) {
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
        if let Some(end) = previous.as_ref().and_then(Attempt::termination)
            && self
                .live
                .containers
                .get(name)
                .is_none_or(|live| live.start == Step::Todo)
        {
            facts.crash.advance(end.finished_at, now);
        }
        let stop_signal = image
            .config
            .config()
            .as_ref()
            .and_then(|c| c.stop_signal().clone());
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
        let live = self.live.containers.entry(name.to_owned()).or_default();
        live.start.begin();
        (live.asked_at, live.killed_at) = (None, None);
        let request = StartRequest {
            spec: self.spec.clone(),
            container,
            identity,
            image,
            network,
            paths,
            previous: previous.map(|attempt| attempt.id),
        };
        let (host, name) = (self.host.clone(), name.to_owned());
        self.jobs.spawn(async move {
            let started = jobs::start(&host, &request).await;
            Outcome::Start(name, Box::new(started))
        });
    }

    async fn ask(&mut self, name: &str, why: Why, now: Timestamp) {
        let Some(attempt) = self.facts.attempt(name).cloned() else {
            return;
        };
        let kind = self.member(name).map_or(Kind::Regular, |(_, kind)| kind);
        let message = match why {
            Why::Stopping => format!("Stopping container {name}"),
            Why::Changed => format!("Container {name} definition changed, will be restarted"),
        };
        self.host.event(
            &self.spec,
            About::container(name, kind),
            "Killing",
            &message,
        );
        self.live
            .containers
            .entry(name.to_owned())
            .or_default()
            .asked_at = Some(now);
        if let Err(error) = self
            .host
            .runtime
            .kill(&attempt.id, None, attempt.stop_signal)
            .await
        {
            // The kill that follows at the deadline does not depend on this.
            self.look_later(&error);
        }
    }

    async fn kill(&mut self, name: &str, now: Timestamp) {
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

    fn finish(&mut self, outcome: Outcome) {
        let now = Timestamp::now();
        match outcome {
            Outcome::Network(Ok(network)) => {
                self.live.network = Step::Done;
                self.facts.pod_ip = network.ip;
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
            Outcome::Image(name, result) => self.image(&name, result, now),
            Outcome::Start(name, started) => self.started(&name, *started, now),
            Outcome::Collected(name, end) => {
                self.live
                    .containers
                    .entry(name.clone())
                    .or_default()
                    .collecting = false;
                self.ended(&name, end);
            }
            Outcome::TornDown(Ok(())) => {
                self.live.teardown = Step::Done;
                self.facts.removed = true;
                self.facts.volumes = None;
                self.outputs.clear();
                self.persist();
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

    fn image(&mut self, name: &str, result: Result<Image, ImageError>, now: Timestamp) {
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

    fn started(&mut self, name: &str, started: Started, now: Timestamp) {
        let live = self.live.containers.entry(name.to_owned()).or_default();
        match started {
            Started::Running {
                identity,
                since,
                log,
            } => {
                live.start = Step::Todo;
                live.image = Step::Todo;
                let output = Output {
                    log,
                    running: watch::Sender::new(true),
                };
                self.outputs.insert(name.to_owned(), output);
                let attempt = Attempt::running(&identity, since);
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
                    .begin(attempt);
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
                    .begin(attempt);
                self.ended(name, end);
            }
            Started::Retry(waiting) => live.start.fail(now, MAX_RETRY, waiting),
        }
    }

    fn ended(&mut self, name: &str, end: super::facts::Termination) {
        if let Some(output) = self.outputs.remove(name) {
            output.running.send_replace(false);
        }
        let finished_at = end.finished_at;
        let Some(facts) = self.facts.containers.get_mut(name) else {
            return;
        };
        let due = facts.crash.due(finished_at);
        let Some(attempt) = facts.current.as_mut() else {
            return;
        };
        attempt.phase = Phase::Ended(end.clone());
        self.persist();
        let Some((container, kind)) = self.member(name) else {
            return;
        };
        let stopping = self.facts.removal.is_some()
            || self.facts.ended.is_some()
            || is_finished(&self.spec, &self.facts);
        let again = restarts(self.spec.restart_policy(), kind, container.sidecar, &end);
        if again && !stopping && due > Timestamp::now() {
            let message = format!(
                "Back-off restarting failed container {name} in pod {}",
                pod_label(&self.spec)
            );
            self.host
                .event(&self.spec, About::trouble(name, kind), "BackOff", &message);
        }
    }

    /// Turns failed pulls that wait into the kubelet's ImagePullBackOff; when to look next.
    fn note_backoff(&mut self, now: Timestamp) -> Option<Timestamp> {
        let mut next = None;
        let mut noted = vec![];
        for (name, live) in &mut self.live.containers {
            let Step::Retry(retry) = &mut live.image else {
                continue;
            };
            if !matches!(
                retry.waiting.reason.as_str(),
                "ErrImagePull" | "RegistryUnavailable"
            ) {
                continue;
            }
            let due = retry.since.saturating_add(SHOW_ERROR).unwrap_or(now);
            if due > now {
                next = Some(next.map_or(due, |next: Timestamp| next.min(due)));
                continue;
            }
            noted.push((name.clone(), std::mem::take(&mut retry.waiting.message)));
        }
        for (name, error) in noted {
            let Some((container, kind)) = self.member(&name) else {
                continue;
            };
            let message = format!("Back-off pulling image {:?}", container.image);
            self.host.event(
                &self.spec,
                About::container(&name, kind),
                "BackOff",
                &message,
            );
            let about = About::trouble(&name, kind);
            self.host
                .event(&self.spec, about, "Failed", "Error: ImagePullBackOff");
            if let Some(Step::Retry(retry)) = self
                .live
                .containers
                .get_mut(&name)
                .map(|live| &mut live.image)
            {
                let message = format!("{message}: {}: {error}", retry.waiting.reason);
                retry.waiting = Waiting {
                    reason: "ImagePullBackOff".to_owned(),
                    message,
                };
            }
        }
        next
    }

    fn forget_busy_steps(&mut self) {
        let now = Timestamp::now();
        let waiting = || Waiting {
            reason: "InternalError".to_owned(),
            message: "a task of the host service died; see its log".to_owned(),
        };
        let steps = self
            .live
            .containers
            .values_mut()
            .flat_map(|live| {
                live.collecting = false;
                [&mut live.image, &mut live.start]
            })
            .chain([
                &mut self.live.network,
                &mut self.live.volumes,
                &mut self.live.teardown,
            ]);
        for step in steps.filter(|step| step.is_busy()) {
            step.fail(now, MAX_RETRY, waiting());
        }
        self.look_at = Some(now);
    }

    fn persist(&self) {
        if let Err(error) = self.host.store.write_facts(&self.spec.uid, &self.facts) {
            warn!(pod_uid = self.spec.uid, %error, "cannot write the record of the sandbox");
        }
    }

    fn publish(&self) {
        let report = report(&self.spec, &self.facts, &self.live, Timestamp::now());
        let containers = members(&self.spec)
            .map(|member| {
                let name = &member.spec.name;
                let waiting = report
                    .init_containers
                    .iter()
                    .chain(&report.containers)
                    .find(|c| c.name == *name)
                    .and_then(|c| match &c.state {
                        Some(v1::container_report::State::Waiting(w)) => Some(w.reason.clone()),
                        _ => None,
                    });
                let running = self
                    .outputs
                    .get(name)
                    .map(|output| output.running.subscribe())
                    .unwrap_or_else(|| watch::channel(false).1);
                let attempt = self.facts.attempt(name).cloned();
                (
                    name.clone(),
                    ContainerView {
                        attempt,
                        waiting,
                        running,
                    },
                )
            })
            .collect::<BTreeMap<_, _>>();
        let view = View {
            namespace: self.spec.namespace.clone(),
            name: self.spec.name.clone(),
            lifecycle: report.lifecycle(),
            containers,
        };
        *self
            .shared
            .view
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = Arc::new(view);
        self.host.board.publish(report);
    }
}
