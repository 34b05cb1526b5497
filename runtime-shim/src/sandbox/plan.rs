//! What to do next for a sandbox: a pure function of what is wanted, what has happened and what
//! is going on.
//!
//! The order is the kubelet's: network, volumes, then per container its image and its start; init
//! containers one after the other with sidecars in place, then the others together.

use jiff::{SignedDuration, Timestamp};
use sandman_protocol::v1;

use super::facts::{Attempt, Facts, Phase};
use super::identity::{Kind, spec_hash};
use super::live::{Live, LiveContainer, Step};
use super::probe::{self, Due};
use super::resize;

/// Processes get at least this long between the request to end and the kill
/// (kuberuntime `minimumGracePeriodInSeconds`).
pub const MIN_GRACE: SignedDuration = SignedDuration::from_secs(2);
/// Grace period of a pod that names none (API default).
pub const DEFAULT_GRACE: SignedDuration = SignedDuration::from_secs(30);
/// A kill that was answered but had no effect is repeated.
const KILL_AGAIN: SignedDuration = SignedDuration::from_secs(5);

/// One thing to do. All of them are safe to do twice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Make the namespaces.
    SetUpNetwork,
    /// Make the volumes, or bring their contents up to date.
    ApplyVolumes,
    /// Make the image of a container present.
    EnsureImage(String),
    /// Make and start the next attempt of a container.
    Start(String),
    /// Run one probe of a container.
    Probe(String, probe::Kind),
    /// Give what runs the sizes that it should have.
    Resize,
    /// Run the postStart hook of a container.
    PostStart(String),
    /// Ask a container's process to end.
    Ask {
        /// The container.
        container: String,
        /// For the Killing event.
        why: Why,
        /// Run its preStop hook, and signal only when told to.
        hook: bool,
    },
    /// Signal a container's process whose preStop hook is over, or has used up the time for it.
    Signal(String),
    /// Kill a container's process.
    Kill(String),
    /// Stop waiting for a pull.
    AbandonImage(String),
    /// The sandbox is over by the host's decision.
    End {
        /// For example DeadlineExceeded.
        reason: &'static str,
        /// For people.
        message: &'static str,
    },
    /// Remove what a sandbox that the host ended no longer needs: all but its logs.
    Release,
    /// Remove all that is left.
    TearDown,
}

/// Why a process is asked to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// The sandbox ends.
    Stopping,
    /// The pod's image for this container changed.
    Changed,
    /// Its facts say why: [`super::facts::Doom`].
    Doomed,
    /// It should have another size, which needs a new process.
    Resized,
}

/// What to do now, and when to look again if nothing happens before.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// All of these may begin now.
    pub actions: Vec<Action>,
    /// The next moment at which time alone changes the plan.
    pub wake: Option<Timestamp>,
}

/// A container with its place in the pod.
#[derive(Clone, Copy, Debug)]
pub struct Member<'a> {
    /// Its spec.
    pub spec: &'a v1::Container,
    /// Init, regular or ephemeral.
    pub kind: Kind,
}

/// All containers of a sandbox: init containers, then regular, then ephemeral ones.
pub fn members(spec: &v1::SandboxSpec) -> impl DoubleEndedIterator<Item = Member<'_>> {
    let init = spec.init_containers.iter().map(|spec| Member {
        spec,
        kind: Kind::Init,
    });
    let regular = spec.containers.iter().map(|spec| Member {
        spec,
        kind: Kind::Regular,
    });
    let ephemeral = spec.ephemeral_containers.iter().map(|spec| Member {
        spec,
        kind: Kind::Ephemeral,
    });
    init.chain(regular).chain(ephemeral)
}

/// Containers that `new` gives another image.
pub fn changed_images(old: &v1::SandboxSpec, new: &v1::SandboxSpec) -> Vec<String> {
    let changed = |member: &Member<'_>| {
        members(old).any(|before| {
            before.spec.name == member.spec.name && before.spec.image != member.spec.image
        })
    };
    members(new)
        .filter(changed)
        .map(|member| member.spec.name.clone())
        .collect()
}

/// Whether no container will run again, by the restart policy. Sidecars do not count.
#[must_use]
pub fn is_finished(spec: &v1::SandboxSpec, facts: &Facts) -> bool {
    let over = |member: &Member<'_>| {
        facts.attempt(&member.spec.name).is_some_and(|attempt| {
            !attempt.is_live()
                && !attempt.is_followed(spec.restart_policy(), member.kind, member.spec)
        })
    };
    let init_failed = members(spec).any(|member| {
        member.kind == Kind::Init
            && over(&member)
            && facts
                .attempt(&member.spec.name)
                .and_then(Attempt::termination)
                .is_some_and(|end| end.exit_code != 0)
    });
    init_failed
        || (!spec.containers.is_empty()
            && members(spec)
                .filter(|m| m.kind == Kind::Regular)
                .all(|m| over(&m)))
}

/// Decides what to do next.
#[must_use]
pub fn plan(spec: &v1::SandboxSpec, facts: &Facts, live: &Live, now: Timestamp) -> Plan {
    let mut planner = Planner {
        spec,
        facts,
        live,
        now,
        plan: Plan::default(),
    };
    planner.run();
    planner.plan
}

/// The grace period of a sandbox.
#[must_use]
pub fn grace(spec: &v1::SandboxSpec) -> SignedDuration {
    spec.termination_grace_period
        .map_or(DEFAULT_GRACE, |grace| {
            SignedDuration::from_secs(grace.seconds)
        })
        .max(MIN_GRACE)
}

struct Planner<'a> {
    spec: &'a v1::SandboxSpec,
    facts: &'a Facts,
    live: &'a Live,
    now: Timestamp,
    plan: Plan,
}

impl Planner<'_> {
    fn run(&mut self) {
        if self.facts.removed {
            return;
        }
        let ends = [
            self.facts.removal.as_ref().map(|removal| removal.deadline),
            self.facts.ended.as_ref().map(|ended| ended.deadline),
        ];
        if let Some(deadline) = ends.into_iter().flatten().min() {
            self.stop_all(deadline);
            return;
        }
        // Schema 0 is a sandbox known only from containerd's labels: nothing may be decided for
        // it until the virtual node says what it should be.
        if self.spec.schema == 0 {
            return;
        }
        if is_finished(self.spec, self.facts) {
            self.stop_sidecars();
            return;
        }
        if self.deadline_passed() {
            return;
        }
        if !self.prepared() {
            return;
        }
        if resize::change(self.spec, self.facts).is_some() && self.ready(&self.live.resize) {
            self.act(Action::Resize);
        }
        for member in members(self.spec).filter(|member| member.kind == Kind::Ephemeral) {
            self.keep_running(member);
        }
        if !self.initialised() {
            return;
        }
        for member in members(self.spec).filter(|member| member.kind == Kind::Regular) {
            self.keep_running(member);
        }
    }

    fn act(&mut self, action: Action) {
        self.plan.actions.push(action);
    }

    fn wake(&mut self, at: Timestamp) {
        self.plan.wake = Some(self.plan.wake.map_or(at, |wake| wake.min(at)));
    }

    /// Whether the step may begin now; if it only waits for time, says when to look again.
    fn ready(&mut self, step: &Step) -> bool {
        match step {
            Step::Todo => true,
            Step::Retry(retry) if retry.at <= self.now => true,
            Step::Retry(retry) => {
                self.wake(retry.at);
                false
            }
            Step::Busy(_) | Step::Done => false,
        }
    }

    fn deadline_passed(&mut self) -> bool {
        let (Some(limit), Some(started)) = (self.spec.active_deadline, self.facts.started_at)
        else {
            return false;
        };
        let limit = SignedDuration::from_secs(limit.seconds);
        let Ok(end) = started.saturating_add(limit) else {
            return false;
        };
        if end > self.now {
            self.wake(end);
            return false;
        }
        self.act(Action::End {
            reason: "DeadlineExceeded",
            message: "Pod was active on the node longer than the specified deadline",
        });
        true
    }

    /// Network, then volumes. Containers that run already do not wait for either.
    fn prepared(&mut self) -> bool {
        let live = self.live;
        if !live.network.is_done() {
            if self.ready(&live.network) {
                self.act(Action::SetUpNetwork);
            }
            return false;
        }
        if !live.volumes.is_done() {
            // A record of our own lacks the contents; the virtual node sends them again.
            if live.contents_known && self.ready(&live.volumes) {
                self.act(Action::ApplyVolumes);
            }
            // An update of contents changes nothing for the containers.
            return self.facts.volumes.is_some();
        }
        true
    }

    /// Brings the init containers on; true when the others may start.
    fn initialised(&mut self) -> bool {
        // Once a regular container has started, initialisation is over for good.
        let over = self
            .spec
            .containers
            .iter()
            .any(|c| self.facts.attempt(&c.name).is_some());
        for member in members(self.spec).filter(|member| member.kind == Kind::Init) {
            let attempt = self.facts.attempt(&member.spec.name);
            if member.spec.sidecar {
                self.keep_running(member);
                let started = attempt
                    .is_some_and(|attempt| attempt.is_running() && attempt.is_started(member.spec));
                if !over && !started && !self.went_past(&member.spec.name) {
                    return false;
                }
                continue;
            }
            if over
                || attempt
                    .and_then(Attempt::termination)
                    .is_some_and(|t| t.exit_code == 0)
            {
                continue;
            }
            self.keep_running(member);
            return false;
        }
        true
    }

    /// Whether an init container after this one has begun already: a sidecar that comes back
    /// holds nobody up.
    fn went_past(&self, name: &str) -> bool {
        self.spec
            .init_containers
            .iter()
            .skip_while(|container| container.name != name)
            .skip(1)
            .any(|container| self.facts.attempt(&container.name).is_some())
    }

    fn keep_running(&mut self, member: Member<'_>) {
        let name = &member.spec.name;
        let facts = self.facts.containers.get(name);
        let attempt = facts.and_then(|facts| facts.current.as_ref());
        if let Some(attempt) = attempt.filter(|attempt| attempt.is_live()) {
            self.look_after(member.spec, attempt);
            return;
        }
        if let (Some(facts), Some(attempt)) = (facts, attempt)
            && let Some(end) = attempt.termination()
        {
            let policy = self.spec.restart_policy();
            if !attempt.is_followed(policy, member.kind, member.spec) {
                return;
            }
            let due = facts.due(end);
            if due > self.now {
                self.wake(due);
                return;
            }
        }
        let idle = LiveContainer::default();
        let live = self.live.containers.get(name).unwrap_or(&idle);
        if !live.image.is_done() {
            if self.ready(&live.image) {
                self.act(Action::EnsureImage(name.clone()));
            }
        } else if self.ready(&live.start) {
            self.act(Action::Start(name.clone()));
        }
    }

    /// A container that runs: whether it may go on, then its hook, then its probes.
    fn look_after(&mut self, container: &v1::Container, attempt: &Attempt) {
        let Phase::Running { since } = attempt.phase else {
            return;
        };
        let name = &container.name;
        let idle = LiveContainer::default();
        let live = self.live.containers.get(name).unwrap_or(&idle);
        let changed = attempt.spec_hash != spec_hash(container);
        if changed || resize::must_restart(self.spec, self.facts, container) {
            let asked = live.asked_at.unwrap_or(self.now);
            let deadline = asked.saturating_add(grace(self.spec)).unwrap_or(self.now);
            let why = if changed { Why::Changed } else { Why::Resized };
            self.stop(name, deadline, why);
        } else if let Some(doom) = &attempt.doom {
            let grace = doom.grace_seconds.map_or_else(
                || grace(self.spec),
                |seconds| SignedDuration::from_secs(seconds.into()).max(MIN_GRACE),
            );
            let deadline = doom.since.saturating_add(grace).unwrap_or(self.now);
            self.stop(name, deadline, Why::Doomed);
        } else if container.post_start.is_some() && !attempt.health.hooked {
            if self.ready(&live.post_start) {
                self.act(Action::PostStart(name.clone()));
            }
        } else {
            for kind in probe::Kind::ALL {
                self.probe(container, attempt, since, kind);
            }
        }
    }

    fn probe(
        &mut self,
        container: &v1::Container,
        attempt: &Attempt,
        since: Timestamp,
        kind: probe::Kind,
    ) {
        // The startup probe until it succeeds, the others from then on.
        let Some(probe) = kind
            .of(container)
            .filter(|_| (kind == probe::Kind::Startup) != attempt.is_started(container))
        else {
            return;
        };
        let fresh = probe::State::default();
        let live = self.live.containers.get(&container.name);
        let state = live.map_or(&fresh, |live| live.probe(kind));
        match state.due(probe, since, self.now) {
            Due::Now => self.act(Action::Probe(container.name.clone(), kind)),
            Due::At(at) => self.wake(at),
            Due::Never => {}
        }
    }

    /// Brings the end of one running container on: preStop hook, signal, kill. Hooks that take
    /// all of the time leave their container [`MIN_GRACE`] (kuberuntime `killContainer`).
    fn stop(&mut self, name: &str, deadline: Timestamp, why: Why) {
        let idle = LiveContainer::default();
        let live = self.live.containers.get(name).unwrap_or(&idle);
        if !self.facts.attempt(name).is_some_and(Attempt::is_running) {
            return;
        }
        let mut deadline = deadline;
        if live.asked_at.is_none() {
            let hook = deadline > self.now && self.has_pre_stop(name);
            self.act(Action::Ask {
                container: name.to_owned(),
                why,
                hook,
            });
            if hook {
                self.wake(deadline);
                return;
            }
        } else if live.pre_stop != Step::Todo {
            if live.pre_stop.is_busy() && deadline > self.now {
                self.wake(deadline);
                return;
            }
            if live.signalled_at.is_none() {
                self.act(Action::Signal(name.to_owned()));
            }
            let signalled = live.signalled_at.unwrap_or(self.now);
            deadline = deadline.max(signalled.saturating_add(MIN_GRACE).unwrap_or(signalled));
        }
        if deadline > self.now {
            self.wake(deadline);
            return;
        }
        let again = live
            .killed_at
            .and_then(|at| at.saturating_add(KILL_AGAIN).ok());
        match again {
            Some(again) if again > self.now => self.wake(again),
            _ => self.act(Action::Kill(name.to_owned())),
        }
    }

    fn has_pre_stop(&self, name: &str) -> bool {
        members(self.spec).any(|member| member.spec.name == name && member.spec.pre_stop.is_some())
    }

    /// preStop hooks of sidecars run from the beginning, beside those of the others; only their
    /// signals wait for their turn.
    fn run_hooks_of_sidecars(&mut self, deadline: Timestamp) {
        for sidecar in self.spec.init_containers.iter().filter(|c| c.sidecar) {
            let name = &sidecar.name;
            let asked = self
                .live
                .containers
                .get(name)
                .is_some_and(|live| live.asked_at.is_some());
            let running = self.facts.attempt(name).is_some_and(Attempt::is_running);
            if sidecar.pre_stop.is_some() && running && !asked && deadline > self.now {
                self.act(Action::Ask {
                    container: name.clone(),
                    why: Why::Stopping,
                    hook: true,
                });
            }
        }
    }

    /// Clients are told until the end whether a container serves.
    fn keep_asking_readiness(&mut self) {
        for member in members(self.spec) {
            if let Some(attempt) = self.facts.attempt(&member.spec.name)
                && let Phase::Running { since } = attempt.phase
                && attempt.is_started(member.spec)
            {
                self.probe(member.spec, attempt, since, probe::Kind::Readiness);
            }
        }
    }

    /// Ends everything: regular and init containers together, sidecars after them in reverse.
    fn stop_all(&mut self, deadline: Timestamp) {
        let mut starting = false;
        for (name, live) in &self.live.containers {
            if live.image.is_busy() {
                self.act(Action::AbandonImage(name.clone()));
            }
            starting |= live.start.is_busy() || live.collecting;
        }
        // Names come from the facts: containers of a spec that changed end as well.
        let sidecar = |name: &str| {
            self.spec
                .init_containers
                .iter()
                .any(|c| c.sidecar && c.name == name)
        };
        let running: Vec<&String> = self
            .facts
            .containers
            .iter()
            .filter(|(_, facts)| facts.current.as_ref().is_some_and(Attempt::is_live))
            .map(|(name, _)| name)
            .collect();
        let mut others = false;
        for name in running.iter().filter(|name| !sidecar(name)) {
            others = true;
            self.stop(name, deadline, Why::Stopping);
        }
        if !others || deadline <= self.now {
            self.stop_sidecars_until(deadline);
        } else {
            self.run_hooks_of_sidecars(deadline);
            self.wake(deadline);
        }
        self.keep_asking_readiness();
        let idle = running.is_empty() && !starting;
        let busy = self.live.network.is_busy() || self.live.volumes.is_busy();
        if !idle || busy || self.live.release.is_busy() {
            return;
        }
        if self.facts.removal.is_some() {
            if self.ready(&self.live.teardown) {
                self.act(Action::TearDown);
            }
        } else if self.facts.volumes.is_some() && self.ready(&self.live.release) {
            // Whoever is evicted for its storage must give it back, long before it is deleted.
            self.act(Action::Release);
        }
    }

    fn stop_sidecars(&mut self) {
        // An init container that failed for good counts as well: then no regular one ever ran, and
        // the deadline must not move on with the clock.
        let last = members(self.spec)
            .filter(|member| !member.spec.sidecar && member.kind != Kind::Ephemeral)
            .filter_map(|member| self.facts.attempt(&member.spec.name)?.termination())
            .map(|t| t.finished_at)
            .max();
        let deadline = last.unwrap_or(self.now).saturating_add(grace(self.spec));
        let deadline = deadline.unwrap_or(self.now);
        for container in &self.spec.ephemeral_containers {
            self.stop(&container.name, deadline, Why::Stopping);
        }
        self.stop_sidecars_until(deadline);
    }

    fn stop_sidecars_until(&mut self, deadline: Timestamp) {
        for sidecar in self.spec.init_containers.iter().filter(|c| c.sidecar).rev() {
            if self
                .facts
                .attempt(&sidecar.name)
                .is_some_and(Attempt::is_live)
            {
                self.stop(&sidecar.name, deadline, Why::Stopping);
                // One after the other, until there is no time left for that.
                if deadline > self.now {
                    return;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
