//! Probes and hooks of the containers that run: started here, and what came of them taken in.

use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher};

use jiff::Timestamp;
use sandman_protocol::v1;

use super::Worker;
use crate::handler::{Target, Verdict};
use crate::sandbox::facts::{Attempt, Doom};
use crate::sandbox::identity::Kind;
use crate::sandbox::jobs::{self, About, HookKind, Outcome, Probing};
use crate::sandbox::live::Step;
use crate::sandbox::plan::members;
use crate::sandbox::probe;

impl Worker {
    /// Whom probes and hooks of a container that runs are about.
    fn target(&self, name: &str) -> Option<(Attempt, Target)> {
        let attempt = self.facts.attempt(name)?.clone();
        let target = Target {
            runtime: self.host.runtime.clone(),
            fifo_dir: self.host.fifo_dir.clone(),
            container_id: attempt.id.clone(),
            process: self.outputs.get(name)?.process.clone(),
            pod_ip: self.facts.pod_ip,
        };
        Some((attempt, target))
    }

    pub(super) fn probe(&mut self, name: &str, kind: probe::Kind, now: Timestamp) {
        let Some((container, _)) = self.member(name) else {
            return;
        };
        let (Some(probe), Some((attempt, target))) = (kind.of(&container), self.target(name))
        else {
            return;
        };
        let live = self.live.containers.entry(name.to_owned()).or_default();
        live.probe_mut(kind).begin(probe, now);
        let probing = Probing {
            container: name.to_owned(),
            attempt: attempt.number,
            kind,
        };
        let probe = probe.clone();
        self.jobs.spawn(async move {
            let verdict = jobs::run_probe(&probe, &target).await;
            Outcome::Probed(probing, verdict)
        });
    }

    pub(super) fn probed(&mut self, probing: &Probing, verdict: &Verdict, now: Timestamp) {
        let name = &probing.container;
        let Some((container, kind)) = self.member(name) else {
            return;
        };
        let same = self
            .facts
            .attempt(name)
            .is_some_and(|attempt| attempt.number == probing.attempt && attempt.is_running());
        let Some(probe) = probing.kind.of(&container).filter(|_| same) else {
            return;
        };
        self.host.metrics.probe(probing.kind, verdict);
        let live = self.live.containers.entry(name.clone()).or_default();
        // One that is being ended may fail as it likes, and nobody needs to be told.
        let ending = live.asked_at.is_some();
        let state = live.probe_mut(probing.kind);
        let outcome = state.end(probing.kind, probe, probe::counts_as(verdict));
        if ending && probing.kind != probe::Kind::Readiness {
            return;
        }
        if let Some((reason, message)) = probe::event(probing.kind, verdict) {
            self.host
                .event(&self.spec, About::trouble(name, kind), reason, &message);
        }
        let Some(well) = outcome else { return };
        let current = self.facts.containers.get_mut(name);
        if let Some(attempt) = current.and_then(|facts| facts.current.as_mut())
            && probe::apply(attempt, &container, probing.kind, well, now)
        {
            self.persist();
        }
    }

    pub(super) fn post_start(&mut self, name: &str) {
        self.run_hook(name, HookKind::PostStart);
    }

    /// Begins the preStop hook; false when there is none after all.
    pub(super) fn pre_stop(&mut self, name: &str) -> bool {
        self.run_hook(name, HookKind::PreStop)
    }

    fn run_hook(&mut self, name: &str, hook: HookKind) -> bool {
        let Some((container, kind)) = self.member(name) else {
            return false;
        };
        let handler = match hook {
            HookKind::PostStart => container.post_start,
            HookKind::PreStop => container.pre_stop,
        };
        let (Some(handler), Some((attempt, target))) = (handler, self.target(name)) else {
            return false;
        };
        self.hook_step(name, hook).begin();
        let (host, spec, container) = (self.host.clone(), self.spec.clone(), name.to_owned());
        let job = self.jobs.spawn(async move {
            let about = (container.as_str(), kind);
            let done = jobs::run_hook(&host, &spec, about, hook, &handler, &target).await;
            Outcome::Hooked {
                container,
                attempt: attempt.number,
                kind: hook,
                done,
            }
        });
        if let Some(before) = self.hooks.insert(name.to_owned(), job) {
            before.abort();
        }
        true
    }

    fn hook_step(&mut self, name: &str, hook: HookKind) -> &mut Step {
        let live = self.live.containers.entry(name.to_owned()).or_default();
        match hook {
            HookKind::PostStart => &mut live.post_start,
            HookKind::PreStop => &mut live.pre_stop,
        }
    }

    /// Stops waiting for a hook that runs.
    pub(super) fn abandon_hook(&mut self, name: &str) {
        if let Some(job) = self.hooks.remove(name) {
            job.abort();
        }
    }

    pub(super) fn hooked(
        &mut self,
        name: &str,
        number: u32,
        hook: HookKind,
        done: bool,
        now: Timestamp,
    ) {
        let current = self.facts.containers.get_mut(name);
        let Some(attempt) = current
            .and_then(|facts| facts.current.as_mut())
            .filter(|attempt| attempt.number == number)
        else {
            return;
        };
        match hook {
            // Whether it succeeded or not: the signal follows.
            HookKind::PreStop => {}
            HookKind::PostStart if done => attempt.health.hooked = true,
            HookKind::PostStart => {
                attempt.doom.get_or_insert_with(|| Doom {
                    since: now,
                    message: "FailedPostStartHook".to_owned(),
                    grace_seconds: None,
                });
            }
        }
        *self.hook_step(name, hook) = Step::Done;
        self.hooks.remove(name);
        self.persist();
    }

    /// After a restart of this service, which must not make all probes of the host run at once.
    pub(super) fn spread_probes(&mut self, now: Timestamp) {
        let spec = self.spec.clone();
        for member in members(&spec) {
            for kind in probe::Kind::ALL {
                let Some(probe) = kind.of(member.spec) else {
                    continue;
                };
                let seed = BuildHasherDefault::<DefaultHasher>::default().hash_one((
                    &spec.uid,
                    &member.spec.name,
                    kind,
                ));
                let live = self.live.containers.entry(member.spec.name.clone());
                live.or_default().probe_mut(kind).spread(probe, seed, now);
            }
        }
    }

    /// The text of the event that says why a container must end.
    pub(super) fn doom_message(&self, name: &str) -> String {
        let Some(attempt) = self.facts.attempt(name) else {
            return String::new();
        };
        let Some(doom) = &attempt.doom else {
            return String::new();
        };
        // Of hooks the kubelet says no more than that.
        let again = self.member(name).is_some_and(|(container, kind)| {
            doom.message.starts_with("Container ")
                && runs_again(self.spec.restart_policy(), kind, &container)
        });
        if again {
            format!("{}, will be restarted", doom.message)
        } else {
            doom.message.clone()
        }
    }
}

/// Whether a container that is ended for its own sake runs again, whatever its exit code; its rules
/// are not looked at, because it still runs (`computePodActions`).
fn runs_again(policy: v1::RestartPolicy, kind: Kind, container: &v1::Container) -> bool {
    let policy = match container.restart_policy() {
        v1::RestartPolicy::Unspecified => policy,
        own => own,
    };
    container.sidecar || (kind == Kind::Regular && policy != v1::RestartPolicy::Never)
}
