//! The conditions that a node owns (`pkg/kubelet/status/generate.go`). All
//! others belong to somebody else and are kept.

use k8s_openapi::api::core::v1::{
    ContainerState, ContainerStatus, PodCondition, PodSpec, PodStatus,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;

use sandman_protocol::v1;

use super::containers::clipped;
use super::{MAX_MESSAGE, Observation};
use crate::pods::resources::is_sidecar;

const OWNED: [&str; 7] = [
    "PodReadyToStartContainers",
    "Initialized",
    "Ready",
    "ContainersReady",
    "PodScheduled",
    "PodResizePending",
    "PodResizeInProgress",
];

struct Verdict {
    kind: &'static str,
    status: bool,
    reason: &'static str,
    message: String,
}

impl Verdict {
    fn yes(kind: &'static str) -> Self {
        Self {
            kind,
            status: true,
            reason: "",
            message: String::new(),
        }
    }

    fn no(kind: &'static str, reason: &'static str, message: String) -> Self {
        Self {
            kind,
            status: false,
            reason,
            message,
        }
    }
}

/// Sets the conditions of a pod that is not over.
pub(super) fn fill(
    new: &mut PodStatus,
    spec: &PodSpec,
    old: &PodStatus,
    seen: Observation<'_>,
    generation: Option<i64>,
    now: Timestamp,
) {
    let sandbox_ready = seen.report.map_or_else(
        || condition_is_true(old, "PodReadyToStartContainers"),
        |report| report.sandbox_ready,
    );
    let verdicts = [
        if sandbox_ready {
            Verdict::yes("PodReadyToStartContainers")
        } else {
            Verdict::no("PodReadyToStartContainers", "", String::new())
        },
        initialized(spec, new),
        ready(spec, new, old, seen),
        containers_ready("ContainersReady", spec, new, seen),
        Verdict::yes("PodScheduled"),
    ];
    let resize = seen.report.and_then(|report| report.resize.as_ref());
    let verdicts: Vec<_> = resize
        .map(resizing)
        .into_iter()
        .flatten()
        .chain(verdicts)
        .collect();
    merge(new, old, &verdicts, generation, now);
}

/// What is told of a resize that is not done; nothing is told of one that is.
fn resizing(resize: &v1::Resize) -> Vec<Verdict> {
    let text = |text: &str| clipped(text, MAX_MESSAGE);
    let pending = match resize.pending() {
        v1::resize::Pending::Unspecified => None,
        v1::resize::Pending::Deferred => Some("Deferred"),
        v1::resize::Pending::Infeasible => Some("Infeasible"),
    };
    let pending = pending.map(|reason| Verdict {
        reason,
        message: text(&resize.pending_message),
        ..Verdict::yes("PodResizePending")
    });
    let in_progress = resize.in_progress.then(|| Verdict {
        reason: if resize.error.is_empty() { "" } else { "Error" },
        message: text(&resize.error),
        ..Verdict::yes("PodResizeInProgress")
    });
    pending.into_iter().chain(in_progress).collect()
}

/// Sets the conditions of a pod in a terminal phase.
pub(super) fn for_terminal(
    new: &mut PodStatus,
    spec: &PodSpec,
    old: &PodStatus,
    generation: Option<i64>,
    now: Timestamp,
) {
    let succeeded = new.phase.as_deref() == Some("Succeeded");
    let reason = if succeeded {
        "PodCompleted"
    } else {
        "PodFailed"
    };
    let initialized = if succeeded {
        Verdict {
            reason: "PodCompleted",
            ..Verdict::yes("Initialized")
        }
    } else if new.container_statuses.is_none() || condition_is_true(old, "Initialized") {
        Verdict::yes("Initialized")
    } else {
        initialized(spec, new)
    };
    let verdicts = [
        Verdict::no("PodReadyToStartContainers", "", String::new()),
        initialized,
        Verdict::no("Ready", reason, String::new()),
        Verdict::no("ContainersReady", reason, String::new()),
        Verdict::yes("PodScheduled"),
    ];
    merge(new, old, &verdicts, generation, now);
}

/// How the texts of evictions begin that a shortage of the host caused.
const LOW_RESOURCE: &str = "The node was low on resource: ";

/// A pod that had to go for the node's sake says so to whoever decides about another try
/// (`evictPod` of the kubelet). One that broke its own limits does not.
pub(super) fn note_disruption(new: &mut PodStatus, generation: Option<i64>, now: Timestamp) {
    let message = new.message.as_deref().unwrap_or_default();
    let disrupted = new.reason.as_deref() == Some("Evicted") && message.starts_with(LOW_RESOURCE);
    let conditions = new.conditions.get_or_insert_default();
    if !disrupted || conditions.iter().any(|c| c.type_ == DISRUPTION_TARGET) {
        return;
    }
    conditions.push(PodCondition {
        type_: DISRUPTION_TARGET.to_owned(),
        status: "True".to_owned(),
        reason: Some("TerminationByKubelet".to_owned()),
        message: Some(message.to_owned()),
        observed_generation: generation,
        last_transition_time: whole_seconds(now),
        last_probe_time: None,
    });
}

const DISRUPTION_TARGET: &str = "DisruptionTarget";

fn initialized(spec: &PodSpec, new: &PodStatus) -> Verdict {
    let ran = |state: &ContainerState| state.running.is_some() || state.terminated.is_some();
    let started = |status: &ContainerStatus| {
        status.state.as_ref().is_some_and(ran) || status.last_state.as_ref().is_some_and(ran)
    };
    if new.container_statuses.iter().flatten().any(started) {
        return Verdict::yes("Initialized");
    }
    let statuses = new.init_container_statuses.as_deref().unwrap_or_default();
    let incomplete: Vec<&str> = spec
        .init_containers
        .iter()
        .flatten()
        .filter(|container| {
            let status = statuses.iter().find(|status| status.name == container.name);
            !status.is_some_and(|status| {
                if is_sidecar(container) {
                    status.started == Some(true)
                } else {
                    status.ready
                }
            })
        })
        .map(|container| container.name.as_str())
        .collect();
    if incomplete.is_empty() {
        return Verdict::yes("Initialized");
    }
    let message = format!(
        "containers with incomplete status: [{}]",
        incomplete.join(" ")
    );
    Verdict::no("Initialized", "ContainersNotInitialized", message)
}

fn containers_ready(
    kind: &'static str,
    spec: &PodSpec,
    new: &PodStatus,
    seen: Observation<'_>,
) -> Verdict {
    if let Some(host) = seen.lost {
        return Verdict::no(kind, "HostLost", format!("host {host} cannot be reached"));
    }
    let init = new.init_container_statuses.as_deref().unwrap_or_default();
    let regular = new.container_statuses.as_deref().unwrap_or_default();
    let is_ready = |statuses: &[ContainerStatus], name: &str| {
        statuses
            .iter()
            .any(|status| status.name == name && status.ready)
    };
    let sidecars = spec
        .init_containers
        .iter()
        .flatten()
        .filter(|c| is_sidecar(c));
    let unready: Vec<&str> = sidecars
        .filter(|container| !is_ready(init, &container.name))
        .chain(
            spec.containers
                .iter()
                .filter(|container| !is_ready(regular, &container.name)),
        )
        .map(|container| container.name.as_str())
        .collect();
    if unready.is_empty() {
        return Verdict::yes(kind);
    }
    let message = format!("containers with unready status: [{}]", unready.join(" "));
    Verdict::no(kind, "ContainersNotReady", message)
}

fn ready(spec: &PodSpec, new: &PodStatus, old: &PodStatus, seen: Observation<'_>) -> Verdict {
    let containers = containers_ready("Ready", spec, new, seen);
    if !containers.status {
        return containers;
    }
    let conditions = old.conditions.as_deref().unwrap_or_default();
    let unmet: Vec<String> = spec
        .readiness_gates
        .iter()
        .flatten()
        .filter_map(|gate| {
            let name = &gate.condition_type;
            match conditions.iter().find(|condition| condition.type_ == *name) {
                None => Some(format!(
                    "corresponding condition of pod readiness gate {name:?} does not exist."
                )),
                Some(condition) if condition.status != "True" => Some(format!(
                    "the status of pod readiness gate {name:?} is not \"True\", but {}",
                    condition.status
                )),
                Some(_) => None,
            }
        })
        .collect();
    if unmet.is_empty() {
        return Verdict::yes("Ready");
    }
    Verdict::no("Ready", "ReadinessGatesNotReady", unmet.join(", "))
}

fn condition_is_true(status: &PodStatus, kind: &str) -> bool {
    status
        .conditions
        .iter()
        .flatten()
        .any(|c| c.type_ == kind && c.status == "True")
}

fn merge(
    new: &mut PodStatus,
    old: &PodStatus,
    verdicts: &[Verdict],
    generation: Option<i64>,
    now: Timestamp,
) {
    let old = old.conditions.as_deref().unwrap_or_default();
    let foreign = old
        .iter()
        .filter(|c| !OWNED.contains(&c.type_.as_str()))
        .cloned();
    let owned = verdicts.iter().map(|verdict| {
        let status = if verdict.status { "True" } else { "False" };
        let before = old
            .iter()
            .find(|c| c.type_ == verdict.kind && c.status == status);
        let text = |text: &str| (!text.is_empty()).then(|| text.to_owned());
        PodCondition {
            type_: verdict.kind.to_owned(),
            status: status.to_owned(),
            reason: text(verdict.reason),
            message: text(&verdict.message),
            observed_generation: generation,
            last_transition_time: before
                .and_then(|c| c.last_transition_time.clone())
                .or_else(|| whole_seconds(now)),
            last_probe_time: before.and_then(|c| c.last_probe_time.clone()),
        }
    });
    new.conditions = Some(foreign.chain(owned).collect());
}

fn whole_seconds(now: Timestamp) -> Option<Time> {
    Timestamp::from_second(now.as_second()).ok().map(Time)
}
