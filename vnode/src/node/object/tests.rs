//! The node for a few hosts that differ.

use std::time::SystemTime;

use super::*;

fn config() -> Config {
    let mut config = crate::config::tests::minimal();
    config.node.labels = BTreeMap::from([("rack".into(), "r1".into())]);
    config
}

pub(in crate::node) fn host(name: &str, lost: bool) -> HostView {
    let resources = v1::Resources {
        cpu_millis: 2500,
        memory_bytes: 4 << 30,
        ephemeral_storage_bytes: 1 << 40,
        pods: 1000,
    };
    HostView {
        name: name.into(),
        ip: "10.90.0.11".parse().unwrap(),
        ip_text: "10.90.0.11".into(),
        connection: if lost {
            Connection::Down
        } else {
            Connection::Synced
        },
        epoch: 1,
        lost,
        down_since: SystemTime::UNIX_EPOCH,
        inventory: Some(std::sync::Arc::new(v1::Inventory {
            host_name: name.into(),
            capacity: Some(resources),
            allocatable: Some(resources),
            architecture: "amd64".into(),
            operating_system: "linux".into(),
            runtime_handlers: vec!["sandman".into(), "runc".into()],
            kernel_version: format!("6.{name}"),
            runtime_version: "containerd://2.0".into(),
            ..Default::default()
        })),
    }
}

fn at(seconds: i64) -> Timestamp {
    Timestamp::from_second(seconds).unwrap()
}

#[test]
fn no_single_host_says_what_the_node_is() {
    let mut liar = host("a", false);
    let inventory = v1::Inventory {
        architecture: "s390x".into(),
        operating_system: "zos".into(),
        ..Default::default()
    };
    liar.inventory = Some(std::sync::Arc::new(inventory));
    let amd64 = ("linux".to_owned(), "amd64".to_owned());
    let hosts = [liar, host("b", false), host("c", false)];
    assert_eq!(platform(&hosts), amd64);
    assert_eq!(platform(&hosts[..1]).1, "s390x", "there is no other");
    assert_eq!(platform(&[]).0, "linux");
}

#[test]
fn registers_with_what_a_node_needs() {
    let node = node(&config(), &[host("a", false), host("b", false)], at(0));
    let labels = node.metadata.labels.unwrap();
    assert_eq!(labels["type"], "virtual-kubelet");
    assert_eq!(labels["kubernetes.io/arch"], "amd64");
    assert_eq!(labels["rack"], "r1");
    let spec = node.spec.unwrap();
    assert_eq!(spec.taints.unwrap()[0].key, "virtual-kubelet.io/provider");
    let status = node.status.unwrap();
    let capacity = status.capacity.unwrap();
    assert_eq!(capacity["cpu"].0, "5");
    assert_eq!(capacity["memory"].0, "8Gi");
    assert_eq!(capacity["pods"].0, "2000");
    let kinds: Vec<_> = status
        .conditions
        .unwrap()
        .into_iter()
        .map(|c| c.type_)
        .collect();
    assert_eq!(
        kinds,
        [
            HOSTS_REACHABLE,
            "MemoryPressure",
            "DiskPressure",
            "PIDPressure",
            "Ready"
        ]
    );
    let info = status.node_info.unwrap();
    assert_eq!(info.kernel_version, "mixed");
    assert_eq!(info.container_runtime_version, "containerd://2.0");
    assert_eq!(info.system_uuid.len(), 36);
    assert_eq!(
        status.declared_features.unwrap(),
        [
            "ExtendWebSocketsToKubelet",
            "InPlacePodLevelResourcesVerticalScaling",
            "InPlacePodVerticalScalingInitContainers",
        ]
    );
    assert_eq!(status.runtime_handlers.unwrap().len(), 2);
}

#[test]
fn a_lost_host_shrinks_the_node_and_is_named() {
    let hosts = [host("a", false), host("b", true)];
    let status = status(&config(), &hosts, &NodeStatus::default(), at(0));
    assert_eq!(status.capacity.unwrap()["cpu"].0, "2500m");
    let conditions = status.conditions.unwrap();
    assert_eq!(conditions[0].status, "False");
    assert_eq!(
        conditions[0].message.as_deref(),
        Some("no connection to b (since 1970-01-01T00:00:00Z)")
    );
    assert_eq!(
        conditions.last().unwrap().status,
        "True",
        "the node stays Ready"
    );
}

#[test]
fn without_any_host_it_is_not_ready() {
    let status = status(&config(), &[host("a", true)], &NodeStatus::default(), at(0));
    let conditions = status.conditions.unwrap();
    let ready = conditions.last().unwrap();
    assert_eq!(
        (ready.type_.as_str(), ready.status.as_str()),
        ("Ready", "False")
    );
}

#[test]
fn transitions_keep_their_time_and_foreign_conditions_stay() {
    let first = status(
        &config(),
        &[host("a", false)],
        &NodeStatus::default(),
        at(10),
    );
    let mut old = first.clone();
    old.conditions.as_mut().unwrap().push(NodeCondition {
        type_: "NetworkUnavailable".into(),
        status: "False".into(),
        ..Default::default()
    });
    let second = status(&config(), &[host("a", false)], &old, at(20));
    assert!(same(
        &old,
        &NodeStatus {
            conditions: reorder(&second),
            ..second.clone()
        }
    ));
    let lost = status(&config(), &[host("a", true)], &old, at(30));
    let time = |status: &NodeStatus, kind: &str| {
        let all = status.conditions.as_ref().unwrap();
        let found = all.iter().find(|c| c.type_ == kind).unwrap();
        found.last_transition_time.as_ref().unwrap().0
    };
    assert_eq!(time(&second, "Ready"), at(10));
    assert_eq!(time(&lost, "Ready"), at(30));
    assert_eq!(time(&lost, "DiskPressure"), at(10));

    fn reorder(status: &NodeStatus) -> Option<Vec<NodeCondition>> {
        let mut all = status.conditions.clone()?;
        all.rotate_left(1);
        Some(all)
    }
}

#[test]
fn lists_the_largest_images_with_few_names() {
    let image = |index: u64| v1::Image {
        names: (0..9).map(|n| format!("image-{index}:{n}")).collect(),
        size_bytes: index,
    };
    let inventory = v1::Inventory {
        images: (0..80).map(image).collect(),
        ..Default::default()
    };
    let images = images(&[&inventory, &inventory]);
    assert_eq!(images.len(), MAX_IMAGES);
    assert_eq!(images[0].size_bytes, Some(79));
    assert_eq!(images[0].names.as_ref().unwrap().len(), MAX_NAMES_PER_IMAGE);
}
