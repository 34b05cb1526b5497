//! `/stats/summary`: the kubelet's `stats.k8s.io/v1alpha1` Summary as JSON.
//! Fields for which no host has a measurement are absent, as the API allows.

use jiff::Timestamp;
use sandman_protocol::v1;
use serde::{Serialize, Serializer};

use super::usage::{ContainerUsage, NodeUsage, PodUsage};

/// `Summary` of the API.
#[derive(Debug, Serialize)]
pub(in crate::kubelet_api) struct Summary {
    node: NodeStats,
    pods: Vec<PodStats>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct NodeStats {
    node_name: String,
    #[serde(serialize_with = "time")]
    start_time: Option<Timestamp>,
    cpu: CpuStats,
    memory: MemoryStats,
    swap: SwapStats,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct PodStats {
    pod_ref: PodReference,
    #[serde(serialize_with = "time")]
    start_time: Option<Timestamp>,
    containers: Vec<ContainerStats>,
    cpu: CpuStats,
    memory: MemoryStats,
    swap: SwapStats,
    // The API spells this one field with an underscore.
    #[serde(rename = "process_stats", skip_serializing_if = "Option::is_none")]
    process_stats: Option<ProcessStats>,
}

#[derive(Debug, Serialize)]
struct PodReference {
    name: String,
    namespace: String,
    uid: String,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct ContainerStats {
    name: String,
    #[serde(serialize_with = "time")]
    start_time: Option<Timestamp>,
    cpu: CpuStats,
    memory: MemoryStats,
    swap: SwapStats,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct CpuStats {
    #[serde(serialize_with = "time")]
    time: Option<Timestamp>,
    usage_core_nano_seconds: u64,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct MemoryStats {
    #[serde(serialize_with = "time")]
    time: Option<Timestamp>,
    usage_bytes: u64,
    working_set_bytes: u64,
    rss_bytes: u64,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct SwapStats {
    #[serde(serialize_with = "time")]
    time: Option<Timestamp>,
    swap_usage_bytes: u64,
}

#[derive(Debug, Serialize)]
struct ProcessStats {
    // Spelled like this in the API.
    process_count: u64,
}

impl Summary {
    /// `started`: since when this process measures.
    pub(in crate::kubelet_api) fn new(
        usage: NodeUsage,
        node_name: &str,
        started: Timestamp,
        only_cpu_and_memory: bool,
    ) -> Self {
        let node = NodeStats {
            node_name: node_name.to_owned(),
            start_time: Some(started),
            cpu: cpu(usage.at, usage.cpu_nanos),
            memory: memory(usage.at, &usage.memory),
            swap: swap(usage.at, &usage.memory),
        };
        let pods = usage
            .pods
            .into_iter()
            .map(|pod| PodStats::new(pod, only_cpu_and_memory))
            .collect();
        Self { node, pods }
    }
}

impl PodStats {
    fn new(pod: PodUsage, only_cpu_and_memory: bool) -> Self {
        let total = pod.total();
        let at = pod.at;
        Self {
            start_time: pod.started,
            containers: pod
                .containers
                .into_iter()
                .map(|container| ContainerStats::new(container, at))
                .collect(),
            cpu: cpu(at, total.cpu_nanos),
            memory: memory(at, &total),
            swap: swap(at, &total),
            process_stats: (!only_cpu_and_memory && total.processes > 0).then_some(ProcessStats {
                process_count: total.processes,
            }),
            pod_ref: PodReference {
                name: pod.name,
                namespace: pod.namespace,
                uid: pod.uid,
            },
        }
    }
}

impl ContainerStats {
    fn new(container: ContainerUsage, at: Timestamp) -> Self {
        Self {
            name: container.name,
            start_time: container.started,
            cpu: cpu(at, container.usage.cpu_nanos),
            memory: memory(at, &container.usage),
            swap: swap(at, &container.usage),
        }
    }
}

fn cpu(at: Timestamp, nanos: u64) -> CpuStats {
    CpuStats {
        time: Some(at),
        usage_core_nano_seconds: nanos,
    }
}

fn memory(at: Timestamp, usage: &v1::Usage) -> MemoryStats {
    MemoryStats {
        time: Some(at),
        usage_bytes: usage.memory_usage_bytes,
        working_set_bytes: usage.memory_working_set_bytes,
        rss_bytes: usage.memory_rss_bytes,
    }
}

fn swap(at: Timestamp, usage: &v1::Usage) -> SwapStats {
    SwapStats {
        time: Some(at),
        swap_usage_bytes: usage.swap_bytes,
    }
}

/// `metav1.Time`: whole seconds, null for none.
fn time<S: Serializer>(at: &Option<Timestamp>, serializer: S) -> Result<S::Ok, S::Error> {
    let seconds = at.and_then(|at| Timestamp::from_second(at.as_second()).ok());
    seconds.serialize(serializer)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::usage::tests::{now, report, sandbox, view};
    use super::super::{NodeCounter, join};
    use super::*;

    #[test]
    fn json_is_the_kubelets() {
        let reports = [("b".into(), report(9, vec![sandbox("2", &[("x", 5, 6)])]))];
        let usage = join(&reports, &view(), &mut NodeCounter::default(), now());
        let summary = Summary::new(usage.expect("a host answered"), "node-1", now(), true);
        let at = "2026-11-29T12:00:00Z";
        let memory = |bytes: u64| json!({"time": at, "usageBytes": 0, "workingSetBytes": bytes, "rssBytes": 0});
        let swap = json!({"time": at, "swapUsageBytes": 0});
        assert_eq!(
            serde_json::to_value(&summary).expect("JSON"),
            json!({
                "node": {
                    "nodeName": "node-1",
                    "startTime": at,
                    "cpu": {"time": at, "usageCoreNanoSeconds": 9},
                    "memory": memory(1000),
                    "swap": swap,
                },
                "pods": [{
                    "podRef": {"name": "pod-2", "namespace": "ns", "uid": "2"},
                    "startTime": "2023-11-14T22:13:20Z",
                    "containers": [{
                        "name": "x",
                        "startTime": "2023-11-14T22:13:20Z",
                        "cpu": {"time": at, "usageCoreNanoSeconds": 5},
                        "memory": memory(6),
                        "swap": swap,
                    }],
                    "cpu": {"time": at, "usageCoreNanoSeconds": 5},
                    "memory": memory(6),
                    "swap": swap,
                }],
            })
        );
    }
}
