//! One task a sandbox: takes wishes and hints, looks, plans, starts jobs, writes facts down, tells.
//!
//! Nothing here is remembered only by the order of steps. The task may die at any line; the next
//! one starts from the record, containerd's labels and the tasks' states.

mod act;
mod health;
mod journal;
mod observe;
mod outcome;
mod resize;
mod tell;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use jiff::{SignedDuration, Timestamp};
use oci_spec::runtime::Process;
use sandman_protocol::v1;
use tokio::sync::{Notify, OnceCell, watch};
use tokio::task::{AbortHandle, JoinSet};
use tokio_util::sync::CancellationToken;
use tracing::warn;

use self::journal::Journal;
use super::adopt;
use super::facts::{Attempt, Ended, Facts, Removal};
use super::identity::{Identity, Kind};
use super::jobs::{About, Host, Outcome};
use super::live::{Live, Step, Waiting};
use super::plan::{MIN_GRACE, changed_images, is_finished, members, plan};
use super::probe;
use super::resize::{Pending, is_resize};
use super::view::View;
use crate::images::Image;
use crate::logs::ContainerLog;
use crate::network::PodNetwork;

/// Longest delay between tries of what only needs another try.
const MAX_RETRY: SignedDuration = SignedDuration::from_secs(30);

/// Wishes and hints for a worker, newest wins.
#[derive(Debug, Default)]
pub(super) struct Inbox {
    pub(super) spec: Option<v1::SandboxSpec>,
    /// Goes with `spec`.
    pub(super) pending: Option<Pending>,
    pub(super) removal: Option<Removal>,
    /// Why the host needs it to end.
    pub(super) eviction: Option<String>,
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

/// What goes with one attempt that runs.
struct Output {
    log: Option<ContainerLog>,
    running: watch::Sender<bool>,
    process: Arc<OnceCell<Process>>,
}

impl Output {
    fn new(log: Option<ContainerLog>) -> Self {
        Self {
            log,
            running: watch::Sender::new(true),
            process: Arc::default(),
        }
    }
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
    hooks: HashMap<String, AbortHandle>,
    look_at: Option<Timestamp>,
    journal: Journal,
    /// Cancelled when the sandbox is to end.
    stopping: CancellationToken,
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
            hooks: HashMap::new(),
            look_at: None,
            journal: Journal::default(),
            stopping: CancellationToken::new(),
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
            self.outputs.insert(name, Output::new(log));
        }
        self.spread_probes(Timestamp::now());
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
            if self.journal.retry_at().is_some_and(|at| at <= now) {
                self.persist();
                if self.journal.is_current() {
                    // For the exits that waited for this.
                    self.look_at = Some(now);
                }
            }
            if self.look_at.is_some_and(|at| at <= now) {
                self.look().await;
            }
            let decided = plan(&self.spec, &self.facts, &self.live, now);
            for action in decided.actions {
                self.act(action, now).await;
            }
            let noted = self.note_backoff(now);
            self.publish();
            let wake = [decided.wake, self.look_at, noted, self.journal.retry_at()]
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
            self.host.board.forget(&self.spec.uid);
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
            for name in changed_images(&self.spec, &spec) {
                self.abandon_pull(&name);
                self.images.remove(&name);
                self.live.containers.entry(name).or_default().renew_image();
            }
            let resized = is_resize(&self.spec, &spec);
            self.spec = spec;
            self.resize_decided(inbox.pending, resized);
        }
        if let Some(removal) = inbox.removal
            && self
                .facts
                .removal
                .as_ref()
                .is_none_or(|old| removal.deadline < old.deadline)
        {
            self.stopping.cancel();
            self.facts.removal = Some(removal);
            self.persist();
        }
        if let Some(message) = inbox.eviction {
            self.evict(message);
        }
        if inbox.look {
            self.look().await;
        }
        false
    }

    /// At once, as the kubelet does for a hard threshold.
    fn evict(&mut self, message: String) {
        let over = self.facts.removal.is_some()
            || self.facts.ended.is_some()
            || is_finished(&self.spec, &self.facts);
        if over {
            return;
        }
        self.stopping.cancel();
        let now = Timestamp::now();
        let about = About::sandbox_trouble();
        self.host.event(&self.spec, about, "Evicted", &message);
        self.facts.ended = Some(Ended {
            reason: "Evicted".to_owned(),
            message,
            deadline: now.saturating_add(MIN_GRACE).unwrap_or(now),
        });
        self.persist();
    }

    fn member(&self, name: &str) -> Option<(v1::Container, Kind)> {
        members(&self.spec)
            .find(|member| member.spec.name == name)
            .map(|member| (member.spec.clone(), member.kind))
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
                live.probes.iter_mut().for_each(probe::State::abandon);
                if live.pre_stop.is_busy() {
                    live.pre_stop = Step::Done;
                }
                [&mut live.image, &mut live.start, &mut live.post_start]
            })
            .chain([
                &mut self.live.network,
                &mut self.live.volumes,
                &mut self.live.resize,
                &mut self.live.release,
                &mut self.live.teardown,
            ]);
        for step in steps.filter(|step| step.is_busy()) {
            step.fail(now, MAX_RETRY, waiting());
        }
        self.look_at = Some(now);
    }

    fn persist(&mut self) {
        let now = Timestamp::now();
        self.journal
            .write(&self.host.store, &self.spec.uid, &self.facts, now);
    }
}
