//! What is told of in-place resizes, in the kubelet's words
//! (`pkg/kubelet/events/resize.go`). Pure.
//!
//! Hosts decide and act; this compares what the API server knows with what is
//! true now, so that a restart in between loses no event.

use k8s_openapi::api::core::v1::{
    Container, ContainerStatus, Pod, PodCondition, PodStatus, ResourceRequirements,
};
use serde::Serialize;

use super::spec::resources;

/// An event about a pod.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Told {
    pub(super) warning: bool,
    pub(super) reason: &'static str,
    pub(super) message: String,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Summary<'a> {
    #[serde(skip_serializing_if = "Vec::is_empty")]
    init_containers: Vec<Allocation<'a>>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    containers: Vec<Allocation<'a>>,
    generation: i64,
    #[serde(skip_serializing_if = "str::is_empty")]
    error: &'a str,
}

#[derive(Serialize)]
struct Allocation<'a> {
    name: &'a str,
    resources: ResourceRequirements,
}

/// What is to be told of the step from one status to the next.
pub(super) fn events(pod: &Pod, old: &PodStatus, new: &PodStatus) -> Vec<Told> {
    let mut told = Vec::new();
    let pending = condition(new, "PodResizePending");
    if let Some(now) = pending
        && condition(old, "PodResizePending").is_none_or(|before| {
            (&before.reason, before.observed_generation) != (&now.reason, now.observed_generation)
        })
    {
        let infeasible = now.reason.as_deref() == Some("Infeasible");
        let (reason, prefix) = if infeasible {
            ("ResizeInfeasible", "Pod resize Infeasible")
        } else {
            ("ResizeDeferred", "Pod resize Deferred")
        };
        told.push(warning(reason, text(pod, prefix, now.message.as_deref())));
    }
    let (was, is) = (
        condition(old, "PodResizeInProgress"),
        condition(new, "PodResizeInProgress"),
    );
    // One that was over before anybody looked is told as well.
    let changed = sizes_changed(old, new);
    if is.is_some() && was.is_none() || is.is_none() && was.is_none() && changed {
        let message = text(pod, "Pod resize started", None);
        told.push(normal("ResizeStarted", message));
    }
    if let Some(now) = is.filter(|now| now.reason.as_deref() == Some("Error"))
        && was.is_none_or(|before| (&before.reason, &before.message) != (&now.reason, &now.message))
    {
        let message = text(pod, "Pod resize error", now.message.as_deref());
        told.push(warning("ResizeError", message));
    }
    if is.is_none() && (was.is_some() || changed) {
        let message = text(pod, "Pod resize completed", None);
        told.push(normal("ResizeCompleted", message));
    }
    told
}

fn normal(reason: &'static str, message: String) -> Told {
    Told {
        warning: false,
        reason,
        message,
    }
}

fn warning(reason: &'static str, message: String) -> Told {
    Told {
        warning: true,
        ..normal(reason, message)
    }
}

fn condition<'a>(status: &'a PodStatus, kind: &str) -> Option<&'a PodCondition> {
    let mut conditions = status.conditions.iter().flatten();
    conditions.find(|condition| condition.type_ == kind)
}

/// Whether something that was there before has another size now.
fn sizes_changed(old: &PodStatus, new: &PodStatus) -> bool {
    let changed = |old: &Option<Vec<ContainerStatus>>, new: &Option<Vec<ContainerStatus>>| {
        old.iter().flatten().any(|before| {
            let mut now = new.iter().flatten();
            let now = now.find(|now| now.name == before.name);
            now.is_some_and(|now| differ(before.resources.as_ref(), now.resources.as_ref()))
        })
    };
    changed(&old.container_statuses, &new.container_statuses)
        || changed(&old.init_container_statuses, &new.init_container_statuses)
        || differ(old.resources.as_ref(), new.resources.as_ref())
}

fn differ(old: Option<&ResourceRequirements>, new: Option<&ResourceRequirements>) -> bool {
    old.is_some() && new.is_some() && resources(old) != resources(new)
}

fn text(pod: &Pod, prefix: &str, error: Option<&str>) -> String {
    let spec = pod.spec.as_ref();
    fn allocations<'a>(containers: impl Iterator<Item = &'a Container>) -> Vec<Allocation<'a>> {
        let allocation = |container: &'a Container| Allocation {
            name: &container.name,
            resources: container.resources.clone().unwrap_or_default(),
        };
        containers.map(allocation).collect()
    }
    let init = spec.and_then(|spec| spec.init_containers.as_ref());
    let summary = Summary {
        init_containers: allocations(init.into_iter().flatten()),
        containers: allocations(spec.into_iter().flat_map(|spec| &spec.containers)),
        generation: pod.metadata.generation.unwrap_or(0),
        error: error.unwrap_or_default(),
    };
    match serde_json::to_string(&summary) {
        Ok(summary) => format!("{prefix}: {summary}"),
        Err(_) => prefix.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn pod() -> Pod {
        let c = |name: &str, value: Value| json!({"name": name, "resources": value});
        serde_json::from_value(json!({
            "metadata": {"generation": 2},
            "spec": {
                "initContainers": [c("c0", json!({"limits": {"cpu": "200m"}, "requests": {"cpu": "100m"}}))],
                "containers": [c("c1", json!({"requests": {"memory": "100"}})), c("c2", json!({}))],
            },
        }))
        .unwrap()
    }

    fn status(cpu: &str, conditions: Value) -> PodStatus {
        serde_json::from_value(json!({
            "containerStatuses": [{
                "name": "c1", "image": "", "imageID": "", "ready": true, "restartCount": 0,
                "resources": {"requests": {"cpu": cpu}},
            }],
            "conditions": conditions,
        }))
        .unwrap()
    }

    fn told(old: &PodStatus, new: &PodStatus) -> Vec<&'static str> {
        let events = events(&pod(), old, new);
        events.iter().map(|told| told.reason).collect()
    }

    fn in_progress(reason: &str) -> Value {
        json!([{"type": "PodResizeInProgress", "status": "True", "reason": reason}])
    }

    #[test]
    fn each_step_is_told_once() {
        let before = status("1", json!([]));
        let working = status("1", in_progress(""));
        let failing = status("1", in_progress("Error"));
        let done = status("2", json!([]));
        for (old, new, expected) in [
            (&before, &before, vec![]),
            (&before, &working, vec!["ResizeStarted"]),
            (&working, &working, vec![]),
            (&working, &failing, vec!["ResizeError"]),
            (&failing, &failing, vec![]),
            (&failing, &done, vec!["ResizeCompleted"]),
            (&before, &done, vec!["ResizeStarted", "ResizeCompleted"]),
            // Another spelling of the same.
            (&before, &status("1000m", json!([])), vec![]),
            // The first status of a pod is no resize.
            (&PodStatus::default(), &done, vec![]),
        ] {
            assert_eq!(told(old, new), expected);
        }
    }

    #[test]
    fn what_waits_is_told_with_its_reason() {
        let pending = |reason: &str, generation: i64| {
            status(
                "1",
                json!([{
                    "type": "PodResizePending", "status": "True", "reason": reason,
                    "message": "no room", "observedGeneration": generation,
                }]),
            )
        };
        let none = status("1", json!([]));
        assert_eq!(told(&none, &pending("Deferred", 1)), ["ResizeDeferred"]);
        assert!(told(&pending("Deferred", 1), &pending("Deferred", 1)).is_empty());
        let again = told(&pending("Deferred", 1), &pending("Infeasible", 2));
        assert_eq!(again, ["ResizeInfeasible"]);
    }

    #[test]
    fn messages_are_the_kubelets() {
        let told = events(
            &pod(),
            &status("1", json!([])),
            &status("1", in_progress("")),
        );
        assert_eq!(
            told[0].message,
            r#"Pod resize started: {"initContainers":[{"name":"c0","resources":{"limits":{"cpu":"200m"},"requests":{"cpu":"100m"}}}],"containers":[{"name":"c1","resources":{"requests":{"memory":"100"}}},{"name":"c2","resources":{}}],"generation":2}"#
        );
    }
}
