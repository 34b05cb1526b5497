//! The status of a pod as a pure function of its specification, its last status
//! and what the host reports. Follows `generateAPIPodStatus` and the status
//! manager of the kubelet (Kubernetes 1.36).

mod conditions;
mod containers;
mod phase;
mod sizes;

use k8s_openapi::api::core::v1::{HostIP, Pod, PodIP, PodSpec, PodStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use sandman_protocol::v1;

use super::admit::Rejection;
use super::resources::qos_class;
use crate::view::HostName;

/// What is known about a pod at one moment, besides its API object.
#[derive(Debug, Default, Clone, Copy)]
pub struct Observation<'a> {
    /// The host's newest report.
    pub report: Option<&'a v1::SandboxReport>,
    /// The sandbox's address, if it is one that the host may give out.
    pub pod_ip: Option<&'a str>,
    /// The placement; none before there is one.
    pub host_ip: Option<&'a str>,
    /// Why no sandbox is made, when that is so.
    pub waiting: Option<&'a Waiting>,
    /// Set while the host is silent for too long.
    pub lost: Option<&'a HostName>,
    /// Nothing of the pod will run again.
    pub ended: bool,
    /// The pod is refused.
    pub rejection: Option<&'a Rejection>,
}

/// Why a pod waits although nothing on a host holds it up.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Waiting {
    /// Container that it is about; all when `None`.
    pub container: Option<String>,
    /// State reason of the containers, in the kubelet's words.
    pub reason: &'static str,
    /// For the user.
    pub message: String,
    /// Whether reason and message are the pod's own too, not just its containers'.
    pub whole_pod: bool,
}

/// The status that should be.
pub fn generate(pod: &Pod, seen: Observation<'_>, now: Timestamp) -> PodStatus {
    let empty_spec = PodSpec::default();
    let spec = pod.spec.as_ref().unwrap_or(&empty_spec);
    let empty_status = PodStatus::default();
    let old = pod.status.as_ref().unwrap_or(&empty_status);
    let generation = observed_generation(pod, seen);

    let mut new = old.clone();
    new.observed_generation = old.observed_generation.max(generation);
    new.qos_class = old
        .qos_class
        .clone()
        .or_else(|| Some(qos_class(spec).to_owned()));
    if let Some(rejection) = seen.rejection {
        new.phase = Some("Failed".to_owned());
        new.reason = Some(rejection.reason.to_owned());
        new.message = Some(format!("Pod was rejected: {}", rejection.message));
        new.start_time = old.start_time.clone().or(Some(Time(now)));
        conditions::for_terminal(&mut new, spec, old, generation, now);
        return new;
    }
    if seen.host_ip.is_some() || seen.report.is_some() || seen.ended {
        new.start_time = old.start_time.clone().or(Some(Time(now)));
    }
    if let Some(ip) = seen.host_ip {
        new.host_ip = Some(ip.to_owned());
        new.host_ips = Some(vec![HostIP { ip: ip.to_owned() }]);
    }
    let pod_ip = if spec.host_network == Some(true) {
        seen.host_ip
    } else {
        seen.pod_ip
    };
    if let Some(ip) = pod_ip {
        new.pod_ip = Some(ip.to_owned());
        new.pod_ips = Some(vec![PodIP { ip: ip.to_owned() }]);
    }
    containers::fill(&mut new, spec, old, seen);
    sizes::fill_pod_level(&mut new, spec, old, seen);
    set_phase(&mut new, spec, old, seen);
    if is_terminal(new.phase.as_deref()) {
        conditions::for_terminal(&mut new, spec, old, generation, now);
        conditions::note_disruption(&mut new, generation, now);
    } else {
        conditions::fill(&mut new, spec, old, seen, generation, now);
    }
    new
}

/// The generation that is true of the containers. The host's word counts while it works on the pod:
/// what it was told a moment ago it may not have done.
fn observed_generation(pod: &Pod, seen: Observation<'_>) -> Option<i64> {
    let generation = pod.metadata.generation;
    let ends = seen.ended || pod.metadata.deletion_timestamp.is_some();
    let report = seen
        .report
        .filter(|report| report.lifecycle() == v1::Lifecycle::Active)
        .filter(|_| !ends && seen.waiting.is_none());
    report.map_or(generation, |report| {
        generation.map(|generation| generation.min(report.observed_generation))
    })
}

fn set_phase(new: &mut PodStatus, spec: &PodSpec, old: &PodStatus, seen: Observation<'_>) {
    let old_phase = old.phase.as_deref();
    if is_terminal(old_phase) {
        // Never left, whatever is reported.
        return;
    }
    let computed = phase::of(spec, new, seen.ended);
    let running = new
        .init_container_statuses
        .iter()
        .flatten()
        .chain(new.container_statuses.iter().flatten())
        .chain(new.ephemeral_container_statuses.iter().flatten())
        .any(|status| {
            status
                .state
                .as_ref()
                .is_some_and(|state| state.running.is_some())
        });
    let ended_by_host = seen
        .ended
        .then_some(seen.report)
        .flatten()
        .filter(|r| !r.reason.is_empty());
    let phase = match computed {
        _ if ended_by_host.is_some() => "Failed",
        // A terminal phase frees what the pod holds: not while anything runs.
        "Succeeded" | "Failed" if running => old_phase.unwrap_or("Pending"),
        // Whatever is not known at the end counts as failed.
        "Pending" | "Running" if seen.ended => "Failed",
        computed => computed,
    };
    new.phase = Some(phase.to_owned());
    let (reason, message) = match (ended_by_host, seen.waiting, seen.report) {
        (Some(report), ..) => (Some(report.reason.clone()), Some(report.message.clone())),
        (_, Some(waiting), _) if waiting.whole_pod => (
            Some(waiting.reason.to_owned()),
            Some(waiting.message.clone()),
        ),
        _ => (None, None),
    };
    new.reason = reason.map(|text| containers::clipped(&text, MAX_REASON));
    new.message = message.map(|text| containers::clipped(&text, MAX_MESSAGE));
}

/// Longest reason and message of a host that go into a status, in bytes.
const MAX_REASON: usize = 128;
const MAX_MESSAGE: usize = 2048;

/// Whether a phase is final.
pub fn is_terminal(phase: Option<&str>) -> bool {
    matches!(phase, Some("Succeeded" | "Failed"))
}

/// Whether readers wait for the difference: then it is written at once, while
/// other changes are collected for a moment so that a start is one write.
pub fn is_urgent(old: &PodStatus, new: &PodStatus) -> bool {
    let ready = |status: &PodStatus| {
        let conditions = status.conditions.iter().flatten();
        conditions
            .into_iter()
            .any(|c| c.type_ == "Ready" && c.status == "True")
    };
    let failing = |status: &PodStatus| -> Vec<(String, i32, Option<String>)> {
        let statuses = status.init_container_statuses.iter().flatten();
        statuses
            .chain(status.container_statuses.iter().flatten())
            .map(|status| {
                let state = status.state.as_ref();
                let waiting = state.and_then(|s| s.waiting.as_ref()?.reason.clone());
                let waiting =
                    waiting.filter(|r| r != "ContainerCreating" && r != "PodInitializing");
                (status.name.clone(), status.restart_count, waiting)
            })
            .filter(|(_, restarts, waiting)| *restarts > 0 || waiting.is_some())
            .collect()
    };
    old.phase != new.phase
        || ready(old) != ready(new)
        || old.host_ip != new.host_ip
        || old.reason != new.reason
        || failing(old) != failing(new)
}

#[cfg(test)]
mod tests;
