//! What the virtual node is told about a sandbox: a pure function of its state, in the kubelet's
//! words (pkg/kubelet/kubelet_pods.go, `convertToAPIContainerStatuses`).

use jiff::Timestamp;
use prost_types::Timestamp as WireTime;
use sandman_protocol::v1;

use super::facts::{ContainerFacts, Facts, Phase, Termination};
use super::identity::Kind;
use super::live::{Live, LiveContainer};
use super::plan::{Member, is_finished, members};
use super::resize::{Pending, is_in_progress};
use crate::spec::pod_label;

/// A time on the wire.
#[must_use]
pub fn wire_time(time: Timestamp) -> WireTime {
    WireTime {
        seconds: time.as_second(),
        nanos: time.subsec_nanosecond(),
    }
}

/// The report of a sandbox at `now`.
#[must_use]
pub fn report(
    spec: &v1::SandboxSpec,
    facts: &Facts,
    live: &Live,
    now: Timestamp,
) -> v1::SandboxReport {
    let view = View {
        spec,
        facts,
        live,
        now,
    };
    let over = facts.removal.is_some() || facts.ended.is_some() || facts.removed;
    let lifecycle = if facts.removed {
        v1::Lifecycle::Removed
    } else if facts.removal.is_some() {
        v1::Lifecycle::Terminating
    } else if !facts.any_running() && (facts.ended.is_some() || is_finished(spec, facts)) {
        v1::Lifecycle::Finished
    } else {
        v1::Lifecycle::Active
    };
    let trouble = live.network.waiting().or_else(|| live.volumes.waiting());
    let of = |kind| {
        members(spec)
            .filter(|member| member.kind == kind)
            .map(|member| view.container(member, over))
            .collect()
    };
    v1::SandboxReport {
        uid: spec.uid.clone(),
        namespace: spec.namespace.clone(),
        name: spec.name.clone(),
        observed_generation: spec.generation,
        lifecycle: lifecycle as i32,
        sandbox_ready: facts.started_at.is_some() && !facts.removed,
        pod_ip: facts.pod_ip.map(|ip| ip.to_string()).unwrap_or_default(),
        started_at: facts.started_at.map(wire_time),
        init_containers: of(Kind::Init),
        containers: of(Kind::Regular),
        ephemeral_containers: of(Kind::Ephemeral),
        reason: facts
            .ended
            .as_ref()
            .map(|e| e.reason.clone())
            .unwrap_or_default(),
        message: facts
            .ended
            .as_ref()
            .map(|e| e.message.clone())
            .unwrap_or_default(),
        waiting_reason: trouble.map(|t| t.reason.clone()).unwrap_or_default(),
        resize: view.resize(),
        pod_allocated: spec.pod_resources,
        waiting_message: trouble.map(|t| t.message.clone()).unwrap_or_default(),
    }
}

struct View<'a> {
    spec: &'a v1::SandboxSpec,
    facts: &'a Facts,
    live: &'a Live,
    now: Timestamp,
}

impl View<'_> {
    fn resize(&self) -> Option<v1::Resize> {
        let in_progress = is_in_progress(self.spec, self.facts);
        let pending = self.facts.pending.as_ref();
        if !in_progress && pending.is_none() {
            return None;
        }
        let error = self.live.resize.waiting().filter(|_| in_progress);
        Some(v1::Resize {
            pending: pending.map(Pending::kind).unwrap_or_default().into(),
            pending_message: pending.map(|p| p.message().to_owned()).unwrap_or_default(),
            in_progress,
            error: error
                .map(|waiting| waiting.message.clone())
                .unwrap_or_default(),
        })
    }

    fn container(&self, member: Member<'_>, over: bool) -> v1::ContainerReport {
        let name = &member.spec.name;
        let no_facts = ContainerFacts::default();
        let no_live = LiveContainer::default();
        let facts = self.facts.containers.get(name).unwrap_or(&no_facts);
        let live = self.live.containers.get(name).unwrap_or(&no_live);
        let mut report = v1::ContainerReport {
            name: name.clone(),
            image: member.spec.image.clone(),
            allocated: member.spec.resources,
            ..Default::default()
        };
        let Some(attempt) = &facts.current else {
            report.state = Some(if over {
                never_made(self.facts.removed, self.now)
            } else {
                waiting(self.first_wait(live))
            });
            return report;
        };
        report.image_id.clone_from(&attempt.image_id);
        report.container_id = format!("containerd://{}", attempt.id);
        report.restart_count = attempt.number;
        report.last_termination = facts.last.as_ref().map(terminated);
        report.user = attempt.user.as_ref().map(|user| v1::LinuxUser {
            uid: user.uid,
            gid: user.gid,
            supplemental_groups: user.groups.clone(),
        });
        report.resources = attempt
            .size
            .filter(|_| attempt.is_current() && member.kind != Kind::Ephemeral)
            .map(|size| size.put_into(member.spec.resources.unwrap_or_default()));
        match &attempt.phase {
            // As the kubelet, which looks again only after the hook.
            Phase::Running { .. }
                if member.spec.post_start.is_some() && !attempt.health.hooked && !over =>
            {
                report.state = Some(waiting(self.first_wait(live)));
            }
            // An exit that is not collected yet has no reason or message to tell.
            Phase::Running { since } | Phase::Exited { since, .. } => {
                report.started = attempt.is_started(member.spec);
                // One that makes room for another image serves until that runs, for all that
                // clients are told (kuberuntime kills and starts in one `SyncPod`).
                report.ready = attempt.is_ready(member.spec)
                    && (attempt.is_running() || (attempt.replaced && !over));
                let started_at = Some(wire_time(*since));
                report.state = Some(v1::container_report::State::Running(v1::Running {
                    started_at,
                }));
            }
            Phase::Ended(end) => {
                let policy = self.spec.restart_policy();
                let again = !over
                    && self.spec.schema > 0
                    && attempt.is_followed(policy, member.kind, member.spec);
                if again && attempt.replaced {
                    // An end of this pod's container, shown now, would count as the pod's own
                    // where the policy lets nothing run again.
                    report.last_termination = facts.last.as_ref().map(terminated);
                    report.state = Some(match (live.waiting(), end.started_at) {
                        (None, Some(since)) => {
                            report.started = attempt.is_started(member.spec);
                            report.ready = attempt.is_ready(member.spec);
                            let started_at = Some(wire_time(since));
                            v1::container_report::State::Running(v1::Running { started_at })
                        }
                        _ => waiting(self.first_wait(live)),
                    });
                    return report;
                }
                match self
                    .restart_wait(member, facts, live, end)
                    .filter(|_| again)
                {
                    Some(wait) => {
                        report.last_termination = Some(terminated(end));
                        report.state = Some(waiting(wait));
                    }
                    None => {
                        report.state =
                            Some(v1::container_report::State::Terminated(terminated(end)));
                    }
                }
            }
        }
        report
    }

    fn first_wait(&self, live: &LiveContainer) -> v1::Waiting {
        // An image that is a volume keeps all containers waiting, in an image's words.
        let image_volume = self.live.volumes.waiting();
        let image_volume = image_volume.filter(|wait| wait.reason != "ContainerCreating");
        if let Some(trouble) = live.waiting().or(image_volume) {
            return v1::Waiting {
                reason: trouble.reason.clone(),
                message: trouble.message.clone(),
            };
        }
        let reason = if self.spec.init_containers.is_empty() {
            "ContainerCreating"
        } else {
            "PodInitializing"
        };
        v1::Waiting {
            reason: reason.to_owned(),
            message: String::new(),
        }
    }

    /// Why the next attempt does not run yet; `None` shows how the last one ended.
    fn restart_wait(
        &self,
        member: Member<'_>,
        facts: &ContainerFacts,
        live: &LiveContainer,
        end: &Termination,
    ) -> Option<v1::Waiting> {
        if let Some(trouble) = live.waiting() {
            return Some(v1::Waiting {
                reason: trouble.reason.clone(),
                message: trouble.message.clone(),
            });
        }
        let delay = facts.crash.delay(end.finished_at);
        let due = facts.due(end);
        (due > self.now).then(|| v1::Waiting {
            reason: "CrashLoopBackOff".to_owned(),
            message: crash_loop_message(delay, &member.spec.name, self.spec),
        })
    }
}

fn crash_loop_message(
    delay: jiff::SignedDuration,
    container: &str,
    spec: &v1::SandboxSpec,
) -> String {
    format!(
        "back-off {} restarting failed container={container} pod={}",
        go_duration(delay),
        pod_label(spec)
    )
}

/// A duration as Go prints it: 10s, 1m20s, 5m0s.
#[must_use]
pub fn go_duration(duration: jiff::SignedDuration) -> String {
    let (minutes, seconds) = (duration.as_secs() / 60, duration.as_secs() % 60);
    if minutes > 0 {
        format!("{minutes}m{seconds}s")
    } else {
        format!("{seconds}s")
    }
}

fn waiting(waiting: v1::Waiting) -> v1::container_report::State {
    v1::container_report::State::Waiting(waiting)
}

/// A container that the end came before: as the kubelet judges one that nobody ever saw.
fn never_made(removed: bool, now: Timestamp) -> v1::container_report::State {
    if removed {
        return v1::container_report::State::Terminated(v1::Terminated {
            exit_code: super::facts::UNKNOWN_EXIT_CODE,
            reason: "ContainerStatusUnknown".to_owned(),
            message: "The container could not be located when the pod was terminated".to_owned(),
            finished_at: Some(wire_time(now)),
            ..Default::default()
        });
    }
    waiting(v1::Waiting {
        reason: "ContainerCreating".to_owned(),
        message: String::new(),
    })
}

fn terminated(end: &Termination) -> v1::Terminated {
    v1::Terminated {
        exit_code: end.exit_code,
        // As the kubelet: the CRI has no field for signals, the code tells.
        signal: 0,
        reason: end.reason.clone(),
        message: end.message.clone(),
        started_at: end.started_at.map(wire_time),
        finished_at: Some(wire_time(end.finished_at)),
        container_id: format!("containerd://{}", end.container_id),
    }
}

#[cfg(test)]
#[path = "report_tests.rs"]
mod tests;
