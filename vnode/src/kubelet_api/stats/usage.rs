//! Joins the hosts' reports into the usage of one node. Pure.

use std::collections::BTreeMap;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{ContainerStatus, Pod, ResourceRequirements};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use sandman_protocol::v1;

use super::counter::NodeCounter;
use crate::quantity;
use crate::view::{HostName, PodView};

/// Usage of the node at one moment.
#[derive(Debug, Clone, PartialEq)]
pub(in crate::kubelet_api) struct NodeUsage {
    pub(super) at: Timestamp,
    /// Cumulative, over all hosts that were ever seen.
    pub(super) cpu_nanos: u64,
    /// Sums over the hosts that answered; `cpu_nanos` in it is not used.
    pub(super) memory: v1::Usage,
    /// Sum over the hosts' file systems of logs and volumes.
    pub(super) files: Option<v1::FileUsage>,
    pub(super) pods: Vec<PodUsage>,
}

/// Usage of one pod; its containers are all of its running ones, and none of
/// them is without a value.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct PodUsage {
    pub(super) at: Timestamp,
    pub(super) namespace: String,
    pub(super) name: String,
    pub(super) uid: String,
    pub(super) started: Option<Timestamp>,
    /// Of a pod with a link of its own.
    pub(super) network: Option<v1::NetworkUsage>,
    pub(super) containers: Vec<ContainerUsage>,
}

/// Usage of one container.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct ContainerUsage {
    pub(super) name: String,
    /// The runtime's id, without the runtime's name.
    pub(super) id: String,
    pub(super) image: String,
    pub(super) started: Option<Timestamp>,
    pub(super) usage: v1::Usage,
    pub(super) logs: Option<v1::FileUsage>,
    pub(super) cpu_request_millis: u64,
    pub(super) cpu_limit_millis: Option<u64>,
    pub(super) memory_limit_bytes: Option<u64>,
}

impl PodUsage {
    /// Sum over the containers.
    pub(super) fn total(&self) -> v1::Usage {
        let mut total = v1::Usage::default();
        for container in &self.containers {
            add(&mut total, &container.usage);
        }
        total
    }
}

/// Joins what the hosts report, or `None` if no host answered.
///
/// A host speaks only for pods that are placed on it. A pod is left out as a
/// whole while one of its running containers has no CPU time or no memory yet:
/// metrics-server takes a part of a pod for the whole, and drops a pod that has a
/// zero in it.
pub(in crate::kubelet_api) fn join(
    reports: &[(HostName, v1::Stats)],
    view: &dyn PodView,
    counter: &mut NodeCounter,
    now: Timestamp,
) -> Option<NodeUsage> {
    let mut memory = v1::Usage::default();
    let mut files: Option<v1::FileUsage> = None;
    let mut pods = Vec::new();
    for (host, report) in reports {
        let at = report.at.as_ref().and_then(timestamp).unwrap_or(now);
        if let Some(usage) = &report.host {
            counter.observe(host, usage.cpu_nanos);
            add(&mut memory, usage);
        }
        if let Some(usage) = &report.files {
            add_files(files.get_or_insert_default(), usage);
        }
        for sandbox in &report.sandboxes {
            if view.host_of(&sandbox.uid).as_ref() != Some(host) {
                continue;
            }
            if let Some(pod) = view.find_by_uid(&sandbox.uid) {
                pods.extend(pod_usage(&pod, sandbox, at));
            }
        }
    }
    let answered = !reports.is_empty();
    answered.then(|| NodeUsage {
        at: now,
        cpu_nanos: counter.total(),
        memory,
        files,
        pods,
    })
}

fn pod_usage(pod: &Pod, sandbox: &v1::SandboxStats, at: Timestamp) -> Option<PodUsage> {
    let status = pod.status.as_ref()?;
    let running: BTreeMap<&str, &ContainerStatus> = [
        &status.container_statuses,
        &status.init_container_statuses,
        &status.ephemeral_container_statuses,
    ]
    .into_iter()
    .flatten()
    .flatten()
    .filter(|status| {
        let state = status.state.as_ref();
        state.is_some_and(|state| state.running.is_some())
    })
    .map(|status| (status.name.as_str(), status))
    .collect();
    let mut containers: Vec<ContainerUsage> = Vec::with_capacity(running.len());
    for (name, status) in running {
        let stats = sandbox.containers.iter().find(|stats| stats.name == name)?;
        let usage = stats.usage?;
        if usage.cpu_nanos == 0 || usage.memory_working_set_bytes == 0 {
            return None;
        }
        let id = status.container_id.as_deref().unwrap_or_default();
        let given = resources(pod, name);
        containers.push(ContainerUsage {
            name: name.to_owned(),
            id: id.rsplit("//").next().unwrap_or_default().to_owned(),
            image: status.image.clone(),
            started: stats.started_at.as_ref().and_then(timestamp),
            usage,
            logs: stats.logs,
            cpu_request_millis: given
                .request("cpu")
                .and_then(quantity::millis)
                .unwrap_or_default(),
            cpu_limit_millis: given.limit("cpu").and_then(quantity::millis),
            memory_limit_bytes: given.limit("memory").and_then(quantity::units),
        });
    }
    if containers.is_empty() {
        return None;
    }
    Some(PodUsage {
        at,
        namespace: pod.metadata.namespace.clone().unwrap_or_default(),
        name: pod.metadata.name.clone().unwrap_or_default(),
        uid: sandbox.uid.clone(),
        started: containers.iter().filter_map(|one| one.started).min(),
        network: sandbox.network,
        containers,
    })
}

/// What a container was given by its pod.
#[derive(Default)]
struct Given<'a>(Option<&'a ResourceRequirements>);

fn resources<'a>(pod: &'a Pod, name: &str) -> Given<'a> {
    let Some(spec) = &pod.spec else {
        return Given::default();
    };
    let all = spec
        .containers
        .iter()
        .chain(spec.init_containers.iter().flatten());
    let container = all.into_iter().find(|container| container.name == name);
    Given(container.and_then(|container| container.resources.as_ref()))
}

impl<'a> Given<'a> {
    fn limit(&self, name: &str) -> Option<&'a Quantity> {
        self.0?.limits.as_ref()?.get(name)
    }

    /// A request that is not stated is the limit.
    fn request(&self, name: &str) -> Option<&'a Quantity> {
        let requests = self.0?.requests.as_ref();
        requests
            .and_then(|requests| requests.get(name))
            .or_else(|| self.limit(name))
    }
}

fn add(total: &mut v1::Usage, part: &v1::Usage) {
    let sum = u64::saturating_add;
    total.cpu_nanos = sum(total.cpu_nanos, part.cpu_nanos);
    total.memory_working_set_bytes = sum(
        total.memory_working_set_bytes,
        part.memory_working_set_bytes,
    );
    total.memory_usage_bytes = sum(total.memory_usage_bytes, part.memory_usage_bytes);
    total.memory_rss_bytes = sum(total.memory_rss_bytes, part.memory_rss_bytes);
    total.swap_bytes = sum(total.swap_bytes, part.swap_bytes);
    total.processes = sum(total.processes, part.processes);
}

fn add_files(total: &mut v1::FileUsage, part: &v1::FileUsage) {
    let sum = u64::saturating_add;
    total.capacity_bytes = sum(total.capacity_bytes, part.capacity_bytes);
    total.available_bytes = sum(total.available_bytes, part.available_bytes);
    total.used_bytes = sum(total.used_bytes, part.used_bytes);
    total.inodes = sum(total.inodes, part.inodes);
    total.inodes_free = sum(total.inodes_free, part.inodes_free);
    total.inodes_used = sum(total.inodes_used, part.inodes_used);
}

/// A host's time, unless it is none.
fn timestamp(at: &prost_types::Timestamp) -> Option<Timestamp> {
    let at = Timestamp::new(at.seconds, at.nanos).ok()?;
    (at > Timestamp::UNIX_EPOCH).then_some(at)
}

#[cfg(test)]
pub(super) mod tests {
    use std::sync::Arc;

    use serde_json::json;

    use super::*;

    /// Pods by UID with the host of each.
    pub(in crate::kubelet_api::stats) struct Placed(
        pub(in crate::kubelet_api::stats) BTreeMap<String, (HostName, Arc<Pod>)>,
    );

    impl PodView for Placed {
        fn pods(&self) -> Vec<Arc<Pod>> {
            self.0.values().map(|(_, pod)| Arc::clone(pod)).collect()
        }
        fn find(&self, _: &str, _: &str) -> Option<Arc<Pod>> {
            None
        }
        fn find_by_uid(&self, uid: &str) -> Option<Arc<Pod>> {
            self.0.get(uid).map(|(_, pod)| Arc::clone(pod))
        }
        fn host_of(&self, uid: &str) -> Option<HostName> {
            self.0.get(uid).map(|(host, _)| host.clone())
        }
        fn running_pods(&self) -> Vec<Arc<Pod>> {
            self.pods()
        }
    }

    pub(in crate::kubelet_api::stats) fn now() -> Timestamp {
        "2026-11-29T12:00:00.5Z".parse().expect("a valid time")
    }

    pub(in crate::kubelet_api::stats) fn view() -> Placed {
        let running = |name: &str| {
            json!({"name": name, "image": "i", "imageID": "i", "ready": true,
                   "containerID": format!("containerd://c-{name}"),
                   "restartCount": 0, "state": {"running": {}}})
        };
        let given = |name: &&str| {
            json!({"name": name, "resources": {
                "limits": {"cpu": "1500m", "memory": "1Mi"}, "requests": {"cpu": "500m"},
            }})
        };
        let pod = |uid: &str, containers: &[&str]| {
            let statuses: Vec<_> = containers.iter().map(|name| running(name)).collect();
            let pod = json!({
                "metadata": {"namespace": "ns", "name": format!("pod-{uid}"), "uid": uid},
                "spec": {"containers": containers.iter().map(given).collect::<Vec<_>>()},
                "status": {"containerStatuses": statuses},
            });
            Arc::new(serde_json::from_value(pod).expect("a pod"))
        };
        Placed(BTreeMap::from([
            ("1".into(), ("a".into(), pod("1", &["x", "y"]))),
            ("2".into(), ("b".into(), pod("2", &["x"]))),
        ]))
    }

    pub(in crate::kubelet_api::stats) fn sandbox(
        uid: &str,
        containers: &[(&str, u64, u64)],
    ) -> v1::SandboxStats {
        let container = |(name, cpu, memory): &(&str, u64, u64)| v1::ContainerStats {
            name: (*name).into(),
            started_at: Some(prost_types::Timestamp {
                seconds: 1_700_000_000,
                nanos: 0,
            }),
            usage: Some(v1::Usage {
                cpu_nanos: *cpu,
                memory_working_set_bytes: *memory,
                ..v1::Usage::default()
            }),
            logs: Some(v1::FileUsage {
                used_bytes: 12,
                inodes_used: 1,
                ..v1::FileUsage::default()
            }),
        };
        v1::SandboxStats {
            uid: uid.into(),
            containers: containers.iter().map(container).collect(),
            ..v1::SandboxStats::default()
        }
    }

    pub(in crate::kubelet_api::stats) fn report(
        cpu: u64,
        sandboxes: Vec<v1::SandboxStats>,
    ) -> v1::Stats {
        v1::Stats {
            host: Some(v1::Usage {
                cpu_nanos: cpu,
                memory_working_set_bytes: 1000,
                processes: 7,
                ..v1::Usage::default()
            }),
            sandboxes,
            at: None,
            files: Some(v1::FileUsage {
                capacity_bytes: 100,
                available_bytes: 40,
                used_bytes: 60,
                inodes: 10,
                inodes_free: 6,
                inodes_used: 4,
            }),
        }
    }

    fn names(usage: &NodeUsage) -> Vec<&str> {
        usage.pods.iter().map(|pod| pod.name.as_str()).collect()
    }

    #[test]
    fn hosts_add_up_and_speak_only_for_their_own_pods() {
        let whole = sandbox("1", &[("x", 5, 6), ("y", 7, 8), ("pause", 1, 1)]);
        let foreign = sandbox("2", &[("x", 1, 1)]);
        let unknown = sandbox("3", &[("x", 1, 1)]);
        let reports = [
            ("a".into(), report(100, vec![whole, foreign, unknown])),
            ("b".into(), report(10, vec![sandbox("2", &[("x", 2, 2)])])),
        ];
        let mut counter = NodeCounter::default();
        let usage = join(&reports, &view(), &mut counter, now()).expect("two hosts answered");
        assert_eq!(usage.cpu_nanos, 110);
        assert_eq!(usage.memory.memory_working_set_bytes, 2000);
        assert_eq!(usage.files.expect("files").capacity_bytes, 200);
        assert_eq!(names(&usage), ["pod-1", "pod-2"]);
        assert_eq!(usage.pods[0].total().cpu_nanos, 12);
        assert_eq!(usage.pods[0].containers.len(), 2);
        assert_eq!(usage.pods[1].total().cpu_nanos, 2);
    }

    #[test]
    fn partial_and_zero_pods_are_left_out() {
        for containers in [
            &[("x", 5, 6)][..],
            &[("x", 5, 6), ("y", 0, 8)],
            &[("x", 5, 6), ("y", 7, 0)],
            &[],
        ] {
            let reports = [("a".into(), report(1, vec![sandbox("1", containers)]))];
            let usage = join(&reports, &view(), &mut NodeCounter::default(), now());
            assert_eq!(
                names(&usage.expect("a host answered")),
                [""; 0],
                "{containers:?}"
            );
        }
    }

    #[test]
    fn no_host_is_no_usage() {
        assert_eq!(join(&[], &view(), &mut NodeCounter::default(), now()), None);
    }
}
