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
    #[serde(skip_serializing_if = "Option::is_none")]
    fs: Option<FsStats>,
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
    #[serde(skip_serializing_if = "Option::is_none")]
    network: Option<NetworkStats>,
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
    #[serde(skip_serializing_if = "Option::is_none")]
    logs: Option<FsStats>,
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
#[serde(rename_all = "camelCase")]
struct FsStats {
    #[serde(serialize_with = "time")]
    time: Option<Timestamp>,
    available_bytes: u64,
    capacity_bytes: u64,
    used_bytes: u64,
    inodes_free: u64,
    inodes: u64,
    inodes_used: u64,
}

#[derive(Debug, Serialize)]
struct NetworkStats {
    #[serde(serialize_with = "time")]
    time: Option<Timestamp>,
    /// The default interface, and then all there are.
    #[serde(flatten)]
    default: InterfaceStats,
    interfaces: [InterfaceStats; 1],
}

#[derive(Debug, Clone, Copy, Serialize)]
#[serde(rename_all = "camelCase")]
struct InterfaceStats {
    name: &'static str,
    rx_bytes: u64,
    rx_errors: u64,
    tx_bytes: u64,
    tx_errors: u64,
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
            fs: usage
                .files
                .filter(|_| !only_cpu_and_memory)
                .map(|files| fs(usage.at, &files, &files)),
        };
        let files = usage.files.filter(|_| !only_cpu_and_memory);
        let pods = usage
            .pods
            .into_iter()
            .map(|pod| PodStats::new(pod, files.as_ref(), only_cpu_and_memory))
            .collect();
        Self { node, pods }
    }
}

impl PodStats {
    fn new(pod: PodUsage, files: Option<&v1::FileUsage>, only_cpu_and_memory: bool) -> Self {
        let total = pod.total();
        let at = pod.at;
        Self {
            start_time: pod.started,
            containers: pod
                .containers
                .into_iter()
                .map(|container| ContainerStats::new(container, files, at))
                .collect(),
            cpu: cpu(at, total.cpu_nanos),
            memory: memory(at, &total),
            swap: swap(at, &total),
            network: pod
                .network
                .filter(|_| !only_cpu_and_memory)
                .map(|usage| network(at, &usage)),
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
    /// `files`: the file system that its log is on.
    fn new(container: ContainerUsage, files: Option<&v1::FileUsage>, at: Timestamp) -> Self {
        Self {
            name: container.name,
            start_time: container.started,
            cpu: cpu(at, container.usage.cpu_nanos),
            memory: memory(at, &container.usage),
            swap: swap(at, &container.usage),
            logs: files
                .zip(container.logs.as_ref())
                .map(|(files, logs)| fs(at, files, logs)),
        }
    }
}

/// The room of a whole file system, and what one user of it takes.
fn fs(at: Timestamp, whole: &v1::FileUsage, taken: &v1::FileUsage) -> FsStats {
    FsStats {
        time: Some(at),
        available_bytes: whole.available_bytes,
        capacity_bytes: whole.capacity_bytes,
        used_bytes: taken.used_bytes,
        inodes_free: whole.inodes_free,
        inodes: whole.inodes,
        inodes_used: taken.inodes_used,
    }
}

fn network(at: Timestamp, usage: &v1::NetworkUsage) -> NetworkStats {
    let interface = InterfaceStats {
        name: "eth0",
        rx_bytes: usage.rx_bytes,
        rx_errors: usage.rx_errors,
        tx_bytes: usage.tx_bytes,
        tx_errors: usage.tx_errors,
    };
    NetworkStats {
        time: Some(at),
        default: interface,
        interfaces: [interface],
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

    #[test]
    fn files_and_network_come_when_they_are_asked_for() {
        let mut one = sandbox("2", &[("x", 5, 6)]);
        one.network = Some(v1::NetworkUsage {
            rx_bytes: 10,
            tx_bytes: 20,
            ..v1::NetworkUsage::default()
        });
        let reports = [("b".into(), report(9, vec![one]))];
        let usage = join(&reports, &view(), &mut NodeCounter::default(), now());
        let summary = Summary::new(usage.expect("a host answered"), "node-1", now(), false);
        let summary = serde_json::to_value(&summary).expect("JSON");
        let at = "2026-11-29T12:00:00Z";
        let files = |used: u64, inodes: u64| {
            json!({"time": at, "availableBytes": 40, "capacityBytes": 100, "usedBytes": used,
                   "inodesFree": 6, "inodes": 10, "inodesUsed": inodes})
        };
        assert_eq!(summary["node"]["fs"], files(60, 4));
        assert_eq!(summary["pods"][0]["containers"][0]["logs"], files(12, 1));
        let interface = json!({"name": "eth0", "rxBytes": 10, "rxErrors": 0, "txBytes": 20,
                               "txErrors": 0});
        let mut network = interface.clone();
        network["time"] = at.into();
        network["interfaces"] = json!([interface]);
        assert_eq!(summary["pods"][0]["network"], network);
    }
}
