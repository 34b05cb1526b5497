//! The Node object as a pure function of the configuration and of what is known
//! about the hosts. Follows `pkg/kubelet/kubelet_node_status.go` and
//! `pkg/kubelet/nodestatus/setters.go` of Kubernetes 1.36.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1::{
    ContainerImage, DaemonEndpoint, Node, NodeAddress, NodeCondition, NodeDaemonEndpoints,
    NodeFeatures, NodeRuntimeHandler, NodeRuntimeHandlerFeatures, NodeSpec, NodeStatus,
    NodeSystemInfo, Taint,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use k8s_openapi::jiff::Timestamp;
use sandman_protocol::v1;
use sandman_protocol::v1::host_condition::Kind;
use sha2::{Digest, Sha256};

use crate::config::Config;
use crate::hosts::{Connection, HostView, local_architecture};
use crate::quantity;

/// `status.nodeInfo.kubeletVersion`. Clients read it as a semantic version to
/// judge version skew, so it names the Kubernetes release whose kubelet this
/// node behaves like; build metadata says who it is.
pub const KUBELET_VERSION: &str = concat!("v1.36.3+sandman.", env!("CARGO_PKG_VERSION"));

/// Condition that names hosts which cannot be reached.
pub const HOSTS_REACHABLE: &str = "HostsReachable";

/// Node-status limits of the kubelet (`--node-status-max-images`,
/// `maxNamesPerImageInNodeStatus`).
const MAX_IMAGES: usize = 50;
const MAX_NAMES_PER_IMAGE: usize = 5;
/// Host names listed in the condition's message.
const MAX_NAMED_HOSTS: usize = 20;

/// The whole Node for registration.
pub fn node(config: &Config, hosts: &[HostView], now: Timestamp) -> Node {
    Node {
        metadata: ObjectMeta {
            name: Some(config.node_name.clone()),
            labels: Some(labels(config, hosts)),
            annotations: Some(BTreeMap::from([(
                "volumes.kubernetes.io/controller-managed-attach-detach".to_owned(),
                "true".to_owned(),
            )])),
            ..ObjectMeta::default()
        },
        spec: Some(NodeSpec {
            provider_id: Some(config.node.provider_id.clone()),
            taints: config.node.taint.then(|| {
                vec![Taint {
                    key: "virtual-kubelet.io/provider".to_owned(),
                    value: Some("sandman".to_owned()),
                    effect: "NoSchedule".to_owned(),
                    time_added: None,
                }]
            }),
            ..NodeSpec::default()
        }),
        status: Some(status(config, hosts, &NodeStatus::default(), now)),
    }
}

/// The labels that the node owns.
pub fn labels(config: &Config, hosts: &[HostView]) -> BTreeMap<String, String> {
    let (os, arch) = platform(hosts);
    let mut labels = config.node.labels.clone();
    for (label, value) in [
        ("type", "virtual-kubelet"),
        ("kubernetes.io/hostname", config.node_name.as_str()),
        ("kubernetes.io/os", os.as_str()),
        ("kubernetes.io/arch", arch.as_str()),
        ("beta.kubernetes.io/os", os.as_str()),
        ("beta.kubernetes.io/arch", arch.as_str()),
    ] {
        labels.insert(label.to_owned(), value.to_owned());
    }
    labels
}

/// Operating system and architecture of the node: those of most of its hosts,
/// so that no single one can say what the node is. Pods are not placed on hosts
/// of another one.
pub fn platform(hosts: &[HostView]) -> (String, String) {
    let local = ("linux", local_architecture());
    let mut counts: BTreeMap<(&str, &str), usize> = BTreeMap::new();
    for inventory in hosts.iter().filter_map(|host| host.inventory.as_deref()) {
        let platform = (&*inventory.operating_system, &*inventory.architecture);
        *counts.entry(platform).or_default() += 1;
    }
    let most = counts
        .into_iter()
        .max_by_key(|(platform, count)| (*count, *platform == local));
    let (os, architecture) = most.map_or(local, |(platform, _)| platform);
    (os.to_owned(), architecture.to_owned())
}

/// The status that should be, given the one that is. Conditions of others are
/// kept, heartbeats are set to `now`.
pub fn status(config: &Config, hosts: &[HostView], old: &NodeStatus, now: Timestamp) -> NodeStatus {
    let reachable: Vec<&v1::Inventory> = hosts
        .iter()
        .filter(|host| !host.lost)
        .filter_map(|host| host.inventory.as_deref())
        .collect();
    let conditions = conditions(hosts, &reachable);
    NodeStatus {
        capacity: Some(resources(
            reachable.iter().filter_map(|i| i.capacity.as_ref()),
        )),
        allocatable: Some(resources(
            reachable.iter().filter_map(|i| i.allocatable.as_ref()),
        )),
        addresses: Some(vec![
            address("InternalIP", config.kubelet_api.address.to_string()),
            address("Hostname", config.node_name.clone()),
        ]),
        daemon_endpoints: Some(NodeDaemonEndpoints {
            kubelet_endpoint: Some(DaemonEndpoint {
                port: i32::from(config.kubelet_api.listen.port()),
            }),
        }),
        node_info: Some(node_info(config, hosts, &reachable)),
        images: non_empty(images(&reachable)),
        runtime_handlers: non_empty(runtime_handlers(&reachable)),
        features: Some(NodeFeatures {
            supplemental_groups_policy: Some(true),
        }),
        declared_features: non_empty(declared_features(config)),
        conditions: Some(merge_conditions(
            conditions,
            old.conditions.as_deref().unwrap_or_default(),
            now,
        )),
        ..old.clone()
    }
}

/// Whether two statuses say the same, heartbeats aside.
pub fn same(a: &NodeStatus, b: &NodeStatus) -> bool {
    let without_heartbeat = |status: &NodeStatus| {
        let mut status = status.clone();
        for condition in status.conditions.iter_mut().flatten() {
            condition.last_heartbeat_time = None;
        }
        status
    };
    without_heartbeat(a) == without_heartbeat(b)
}

fn declared_features(config: &Config) -> Vec<String> {
    // Sorted; each is listed once it is implemented, because pods that need it
    // are scheduled here from then on.
    let features = [
        ("ExtendWebSocketsToKubelet", config.kubelet_api.websockets),
        ("InPlacePodLevelResourcesVerticalScaling", true),
        ("InPlacePodVerticalScalingInitContainers", true),
    ];
    let declared = features.into_iter().filter(|(_, declared)| *declared);
    declared.map(|(name, _)| name.to_owned()).collect()
}

fn resources<'a>(all: impl Iterator<Item = &'a v1::Resources>) -> BTreeMap<String, Quantity> {
    let sum = all.fold(v1::Resources::default(), |sum, one| v1::Resources {
        cpu_millis: sum.cpu_millis.saturating_add(one.cpu_millis),
        memory_bytes: sum.memory_bytes.saturating_add(one.memory_bytes),
        ephemeral_storage_bytes: sum
            .ephemeral_storage_bytes
            .saturating_add(one.ephemeral_storage_bytes),
        pods: sum.pods.saturating_add(one.pods),
    });
    BTreeMap::from([
        ("cpu".to_owned(), quantity::from_millis(sum.cpu_millis)),
        ("memory".to_owned(), quantity::from_bytes(sum.memory_bytes)),
        (
            "ephemeral-storage".to_owned(),
            quantity::from_bytes(sum.ephemeral_storage_bytes),
        ),
        ("pods".to_owned(), Quantity(sum.pods.to_string())),
    ])
}

fn node_info(config: &Config, hosts: &[HostView], reachable: &[&v1::Inventory]) -> NodeSystemInfo {
    let (operating_system, architecture) = platform(hosts);
    let id = stable_id(config);
    // One host lends the node its identity; a fleet has one of its own.
    let (machine_id, boot_id) = match (hosts, reachable) {
        ([_], [one]) => (one.machine_id.clone(), one.boot_id.clone()),
        _ => (id.replace('-', ""), id.clone()),
    };
    NodeSystemInfo {
        architecture,
        operating_system,
        boot_id,
        machine_id,
        system_uuid: id,
        container_runtime_version: common(reachable, |i| &i.runtime_version),
        kernel_version: common(reachable, |i| &i.kernel_version),
        os_image: common(reachable, |i| &i.os_image),
        kubelet_version: KUBELET_VERSION.to_owned(),
        kube_proxy_version: String::new(),
        swap: None,
    }
}

/// What all hosts agree on, or a word that says that they do not.
fn common(inventories: &[&v1::Inventory], field: impl Fn(&v1::Inventory) -> &String) -> String {
    let values: BTreeSet<&String> = inventories.iter().map(|i| field(i)).collect();
    match values.len() {
        0 => "unknown".to_owned(),
        1 => values.into_iter().cloned().collect(),
        _ => "mixed".to_owned(),
    }
}

/// A UUID that only depends on the names of fleet and node.
fn stable_id(config: &Config) -> String {
    let hash = hex::encode(Sha256::digest(format!(
        "{}/{}",
        config.fleet, config.node_name
    )));
    // Version 8, variant 10: an identifier of the maker's own making.
    format!(
        "{}-{}-8{}-8{}-{}",
        &hash[..8],
        &hash[8..12],
        &hash[12..15],
        &hash[15..18],
        &hash[18..30]
    )
}

fn images(reachable: &[&v1::Inventory]) -> Vec<ContainerImage> {
    let mut by_names: BTreeMap<&[String], u64> = BTreeMap::new();
    for image in reachable.iter().flat_map(|inventory| &inventory.images) {
        let size = by_names.entry(&image.names).or_default();
        *size = (*size).max(image.size_bytes);
    }
    let mut images: Vec<_> = by_names
        .into_iter()
        .filter(|(names, _)| !names.is_empty())
        .collect();
    images.sort_by(|a, b| b.1.cmp(&a.1).then_with(|| a.0.cmp(b.0)));
    images
        .into_iter()
        .take(MAX_IMAGES)
        .map(|(names, size)| ContainerImage {
            names: Some(names.iter().take(MAX_NAMES_PER_IMAGE).cloned().collect()),
            size_bytes: i64::try_from(size).ok(),
        })
        .collect()
}

fn runtime_handlers(reachable: &[&v1::Inventory]) -> Vec<NodeRuntimeHandler> {
    let names: BTreeSet<&String> = reachable.iter().flat_map(|i| &i.runtime_handlers).collect();
    // Said of the node as a whole: placement finds a host that has what a pod asks for.
    let user_namespaces = reachable.iter().any(|i| i.user_namespaces);
    names
        .into_iter()
        .map(|name| NodeRuntimeHandler {
            name: Some(name.clone()),
            features: Some(NodeRuntimeHandlerFeatures {
                recursive_read_only_mounts: Some(true),
                user_namespaces: Some(user_namespaces),
            }),
        })
        .collect()
}

struct Condition {
    kind: &'static str,
    status: bool,
    reason: &'static str,
    message: String,
}

/// The node's own conditions; Ready is last, as readers expect.
fn conditions(hosts: &[HostView], reachable: &[&v1::Inventory]) -> Vec<Condition> {
    let pressure = |kind: Kind, name, on: (&'static str, &str), off: (&'static str, &str)| {
        // The scheduler avoids the whole node for this, so all hosts must have
        // it; single hosts are avoided when pods are placed.
        let active = !reachable.is_empty() && reachable.iter().all(|i| under_pressure(i, kind));
        let (reason, message) = if active { on } else { off };
        Condition {
            kind: name,
            status: active,
            reason,
            message: message.to_owned(),
        }
    };
    vec![
        hosts_reachable(hosts),
        pressure(
            Kind::MemoryPressure,
            "MemoryPressure",
            (
                "KubeletHasInsufficientMemory",
                "every host has insufficient memory available",
            ),
            (
                "KubeletHasSufficientMemory",
                "kubelet has sufficient memory available",
            ),
        ),
        pressure(
            Kind::DiskPressure,
            "DiskPressure",
            ("KubeletHasDiskPressure", "every host has disk pressure"),
            ("KubeletHasNoDiskPressure", "kubelet has no disk pressure"),
        ),
        pressure(
            Kind::PidPressure,
            "PIDPressure",
            (
                "KubeletHasInsufficientPID",
                "every host has insufficient PID available",
            ),
            (
                "KubeletHasSufficientPID",
                "kubelet has sufficient PID available",
            ),
        ),
        if reachable.is_empty() {
            Condition {
                kind: "Ready",
                status: false,
                reason: "KubeletNotReady",
                message: format!("none of {} hosts can be reached", hosts.len()),
            }
        } else {
            Condition {
                kind: "Ready",
                status: true,
                reason: "KubeletReady",
                message: "kubelet is posting ready status".to_owned(),
            }
        },
    ]
}

/// Whether a host reports that condition as active.
pub fn under_pressure(inventory: &v1::Inventory, kind: Kind) -> bool {
    inventory
        .conditions
        .iter()
        .any(|condition| condition.kind() == kind && condition.active)
}

fn hosts_reachable(hosts: &[HostView]) -> Condition {
    let away: Vec<&HostView> = hosts
        .iter()
        .filter(|host| {
            host.lost || (host.inventory.is_none() && host.connection == Connection::Down)
        })
        .collect();
    if away.is_empty() {
        return Condition {
            kind: HOSTS_REACHABLE,
            status: true,
            reason: "AllHostsReachable",
            message: format!("{} hosts", hosts.len()),
        };
    }
    let named: Vec<String> = away
        .iter()
        .take(MAX_NAMED_HOSTS)
        .map(|host| {
            let since = Timestamp::try_from(host.down_since).unwrap_or_default();
            format!("{} (since {since:.0})", host.name)
        })
        .collect();
    let more = away.len() - named.len();
    let more = if more > 0 {
        format!(" and {more} more")
    } else {
        String::new()
    };
    Condition {
        kind: HOSTS_REACHABLE,
        status: false,
        reason: "HostsLost",
        message: format!("no connection to {}{more}", named.join(", ")),
    }
}

fn merge_conditions(
    own: Vec<Condition>,
    old: &[NodeCondition],
    now: Timestamp,
) -> Vec<NodeCondition> {
    let foreign = old
        .iter()
        .filter(|c| own.iter().all(|o| o.kind != c.type_))
        .cloned();
    let own = own.iter().map(|condition| {
        let status = if condition.status { "True" } else { "False" };
        let before = old
            .iter()
            .find(|c| c.type_ == condition.kind && c.status == status);
        let now = Time(now);
        NodeCondition {
            type_: condition.kind.to_owned(),
            status: status.to_owned(),
            reason: Some(condition.reason.to_owned()),
            message: Some(condition.message.clone()),
            last_heartbeat_time: Some(now.clone()),
            last_transition_time: before
                .and_then(|c| c.last_transition_time.clone())
                .or(Some(now)),
        }
    });
    foreign.chain(own).collect()
}

fn address(kind: &str, address: String) -> NodeAddress {
    NodeAddress {
        type_: kind.to_owned(),
        address,
    }
}

fn non_empty<T>(list: Vec<T>) -> Option<Vec<T>> {
    (!list.is_empty()).then_some(list)
}

#[cfg(test)]
pub(super) mod tests;
