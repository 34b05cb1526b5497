//! What a pod asks for, counted as the scheduler counts it
//! (`k8s.io/component-helpers/resource.PodRequests`).

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Container, ContainerStatus, Pod, PodSpec, ResourceRequirements};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use sandman_protocol::v1::Resources;

use crate::quantity;

type List = BTreeMap<String, Quantity>;

/// CPU and memory that an unspecified request counts as when hosts are compared
/// (`schedutil.DefaultMilliCPURequest`, `DefaultMemoryRequest`); without it, pods
/// that ask for nothing would all look free.
const ASSUMED_CPU_MILLIS: u64 = 100;
const ASSUMED_MEMORY_BYTES: u64 = 200 << 20;

/// What the pod requests, with one pod slot.
pub fn requests(pod: &Pod) -> Resources {
    sum(pod, container_requests, from_list)
}

/// What the pod takes on its host. While it is being resized that is the most of what it asks for,
/// what is set aside for it and what it has, but not what it will never get (`PodRequests` with
/// `UseStatusResources`).
pub fn taken(pod: &Pod) -> Resources {
    let Some(status) = &pod.status else {
        return requests(pod);
    };
    let infeasible = status.conditions.iter().flatten().any(|condition| {
        condition.type_ == "PodResizePending" && condition.reason.as_deref() == Some("Infeasible")
    });
    let most = |asked: Resources, allocated: Option<&List>, has: Option<&ResourceRequirements>| {
        let has = has.and_then(|has| has.requests.as_ref());
        let known = [allocated, has].into_iter().flatten().map(from_list);
        let known = known.reduce(|a, b| zip(a, b, u64::max));
        match known {
            Some(known) if infeasible => known,
            Some(known) => zip(asked, known, u64::max),
            None => asked,
        }
    };
    let statuses = status.init_container_statuses.iter().flatten();
    let statuses = statuses.chain(status.container_statuses.iter().flatten());
    let by_name: BTreeMap<&str, &ContainerStatus> = statuses
        .map(|status| (status.name.as_str(), status))
        .collect();
    sum(
        pod,
        |container| {
            let status = by_name.get(container.name.as_str());
            most(
                container_requests(container),
                status.and_then(|s| s.allocated_resources.as_ref()),
                status.and_then(|s| s.resources.as_ref()),
            )
        },
        |own| {
            let allocated = status.allocated_resources.as_ref();
            most(from_list(own), allocated, status.resources.as_ref())
        },
    )
}

fn sum(
    pod: &Pod,
    of_container: impl Fn(&Container) -> Resources,
    of_pod: impl Fn(&List) -> Resources,
) -> Resources {
    let Some(spec) = &pod.spec else {
        return Resources {
            pods: 1,
            ..Resources::default()
        };
    };
    let mut total = effective(spec, of_container);
    if let Some(pod_level) = spec.resources.as_ref().and_then(|r| r.requests.as_ref()) {
        let own = of_pod(pod_level);
        if pod_level.contains_key("cpu") {
            total.cpu_millis = own.cpu_millis;
        }
        if pod_level.contains_key("memory") {
            total.memory_bytes = own.memory_bytes;
        }
    }
    if let Some(overhead) = &spec.overhead {
        total = add(total, from_list(overhead));
    }
    Resources { pods: 1, ..total }
}

/// The requests with assumed values in place of missing ones.
pub fn assumed(requests: Resources) -> Resources {
    let or = |value, assumed| if value == 0 { assumed } else { value };
    Resources {
        cpu_millis: or(requests.cpu_millis, ASSUMED_CPU_MILLIS),
        memory_bytes: or(requests.memory_bytes, ASSUMED_MEMORY_BYTES),
        ..requests
    }
}

/// Sum, saturating.
pub fn add(a: Resources, b: Resources) -> Resources {
    zip(a, b, u64::saturating_add)
}

/// Difference, not below zero.
pub fn subtract(a: Resources, b: Resources) -> Resources {
    zip(a, b, u64::saturating_sub)
}

fn zip(a: Resources, b: Resources, f: fn(u64, u64) -> u64) -> Resources {
    Resources {
        cpu_millis: f(a.cpu_millis, b.cpu_millis),
        memory_bytes: f(a.memory_bytes, b.memory_bytes),
        ephemeral_storage_bytes: f(a.ephemeral_storage_bytes, b.ephemeral_storage_bytes),
        pods: f(a.pods, b.pods),
    }
}

/// Regular containers and sidecars run together; each init container runs
/// beside the sidecars that started before it.
fn effective(spec: &PodSpec, of: impl Fn(&Container) -> Resources) -> Resources {
    let mut running = Resources::default();
    for container in &spec.containers {
        running = add(running, of(container));
    }
    let mut sidecars = Resources::default();
    let mut peak = Resources::default();
    for container in spec.init_containers.iter().flatten() {
        let own = of(container);
        if is_sidecar(container) {
            sidecars = add(sidecars, own);
            peak = zip(peak, sidecars, u64::max);
        } else {
            peak = zip(peak, add(sidecars, own), u64::max);
        }
    }
    zip(add(running, sidecars), peak, u64::max)
}

/// Whether an init container keeps running beside the regular ones.
pub fn is_sidecar(container: &Container) -> bool {
    container.restart_policy.as_deref() == Some("Always")
}

fn container_requests(container: &Container) -> Resources {
    from_list(
        container
            .resources
            .as_ref()
            .and_then(|r| r.requests.as_ref())
            .unwrap_or(&List::new()),
    )
}

fn from_list(list: &List) -> Resources {
    let units = |name: &str| list.get(name).and_then(quantity::units).unwrap_or(0);
    Resources {
        cpu_millis: list.get("cpu").and_then(quantity::millis).unwrap_or(0),
        memory_bytes: units("memory"),
        ephemeral_storage_bytes: units("ephemeral-storage"),
        pods: 0,
    }
}

/// The pod's quality of service class (`v1qos.ComputePodQOS`).
pub fn qos_class(spec: &PodSpec) -> &'static str {
    let of = |resources: Option<&ResourceRequirements>| {
        let read = |list: Option<&List>, name: &str| {
            list.and_then(|list| list.get(name))
                .and_then(quantity::millis)
                .unwrap_or(0)
        };
        let (requests, limits) = match resources {
            Some(r) => (r.requests.as_ref(), r.limits.as_ref()),
            None => (None, None),
        };
        ["cpu", "memory"].map(|name| (read(requests, name), read(limits, name)))
    };
    let pod_level = spec.resources.as_ref().map(|resources| of(Some(resources)));
    let all: Vec<[(u64, u64); 2]> = match pod_level {
        Some(values) => vec![values],
        None => spec
            .init_containers
            .iter()
            .flatten()
            .chain(&spec.containers)
            .map(|container| of(container.resources.as_ref()))
            .collect(),
    };
    if all
        .iter()
        .flatten()
        .all(|(request, limit)| *request == 0 && *limit == 0)
    {
        "BestEffort"
    } else if all
        .iter()
        .flatten()
        .all(|(request, limit)| *limit > 0 && request == limit)
    {
        "Guaranteed"
    } else {
        "Burstable"
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn spec(value: serde_json::Value) -> Pod {
        serde_json::from_value(json!({ "spec": value })).unwrap()
    }

    #[test]
    fn counts_as_the_scheduler_does() {
        let c = |cpu: &str| json!({"name": "c", "resources": {"requests": {"cpu": cpu}}});
        let sidecar = |cpu: &str| json!({"name": "s", "restartPolicy": "Always", "resources": {"requests": {"cpu": cpu}}});
        for (name, value, millis) in [
            ("sum", json!({"containers": [c("1"), c("500m")]}), 1500),
            (
                "init larger",
                json!({"containers": [c("1")], "initContainers": [c("3")]}),
                3000,
            ),
            (
                "init smaller",
                json!({"containers": [c("4")], "initContainers": [c("3")]}),
                4000,
            ),
            (
                "sidecar adds",
                json!({"containers": [c("1")], "initContainers": [sidecar("1"), c("2")]}),
                3000,
            ),
            (
                "later sidecar",
                json!({"containers": [c("1")], "initContainers": [c("2"), sidecar("2")]}),
                3000,
            ),
            (
                "overhead",
                json!({"containers": [c("1")], "overhead": {"cpu": "250m"}}),
                1250,
            ),
            (
                "pod level",
                json!({"containers": [c("1")], "resources": {"requests": {"cpu": "7"}}}),
                7000,
            ),
        ] {
            let requests = requests(&spec(value));
            assert_eq!((requests.cpu_millis, requests.pods), (millis, 1), "{name}");
        }
    }

    #[test]
    fn a_resize_takes_the_most_but_not_what_it_never_gets() {
        let taken = |reason: &str| {
            let pod = json!({
                "spec": {"containers": [{"name": "c", "resources": {"requests": {"cpu": "5"}}}]},
                "status": {
                    "conditions": [{"type": "PodResizePending", "status": "True", "reason": reason}],
                    "containerStatuses": [{
                        "name": "c", "image": "", "imageID": "", "ready": true, "restartCount": 0,
                        "allocatedResources": {"cpu": "2"}, "resources": {"requests": {"cpu": "3"}},
                    }],
                },
            });
            taken(&serde_json::from_value(pod).unwrap()).cpu_millis
        };
        assert_eq!((taken("Deferred"), taken("Infeasible")), (5000, 3000));
        let plain =
            spec(json!({"containers": [{"name": "c", "resources": {"requests": {"cpu": "1"}}}]}));
        assert_eq!(super::taken(&plain), requests(&plain));
    }

    #[test]
    fn quality_of_service() {
        let class = |value| {
            qos_class(
                spec(json!({"containers": [{"name": "c", "resources": value}]}))
                    .spec
                    .as_ref()
                    .unwrap(),
            )
        };
        assert_eq!(class(json!({})), "BestEffort");
        assert_eq!(class(json!({"requests": {"cpu": "1"}})), "Burstable");
        let both = json!({"cpu": "1", "memory": "1Gi"});
        assert_eq!(
            class(json!({"requests": both, "limits": both})),
            "Guaranteed"
        );
        assert_eq!(
            class(json!({"requests": {"cpu": "1"}, "limits": {"cpu": "1"}})),
            "Burstable"
        );
    }
}
