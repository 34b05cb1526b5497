//! What the pod as a whole says: addresses, conditions, what is urgent.

use super::*;

#[test]
fn the_first_status_places_the_pod() {
    let pod = pod("Always", &[], &["a"]);
    let placed = Observation {
        host_ip: Some("10.90.0.11"),
        ..Default::default()
    };
    let status = generate(&pod, placed, at(9));
    assert_eq!(status.phase.as_deref(), Some("Pending"));
    assert_eq!(status.host_ip.as_deref(), Some("10.90.0.11"));
    assert_eq!(status.start_time, Some(Time(at(9))));
    assert_eq!(status.observed_generation, Some(2));
    assert_eq!(status.qos_class.as_deref(), Some("BestEffort"));
    assert_eq!(
        condition(&status, "PodReadyToStartContainers"),
        ("False", "")
    );
    assert_eq!(condition(&status, "Initialized"), ("True", ""));
    assert_eq!(
        condition(&status, "ContainersReady"),
        ("False", "ContainersNotReady")
    );
    assert_eq!(condition(&status, "PodScheduled"), ("True", ""));
    assert_eq!(
        condition(&status, "example.com/gate"),
        ("False", ""),
        "foreign ones stay"
    );
    let scheduled = status
        .conditions
        .as_ref()
        .unwrap()
        .iter()
        .find(|c| c.type_ == "PodScheduled");
    assert_eq!(scheduled.unwrap().last_transition_time, Some(Time(at(1))));
}

#[test]
fn the_same_facts_make_the_same_status() {
    let mut pod = pod("Always", &[], &["b", "a"]);
    let report = report(vec![container("a", running()), container("b", running())]);
    let first = generate(&pod, seen(&report), at(9));
    pod.status = Some(first.clone());
    assert_eq!(generate(&pod, seen(&report), at(20)), first);
    let names: Vec<_> = first
        .container_statuses
        .iter()
        .flatten()
        .map(|c| c.name.as_str())
        .collect();
    assert_eq!(names, ["a", "b"]);
}

#[test]
fn a_lost_host_makes_its_pods_unready_and_keeps_the_rest() {
    let mut pod = pod("Always", &[], &["a"]);
    let report = report(vec![container("a", running())]);
    pod.status = Some(generate(
        &pod,
        Observation {
            pod_ip: Some("10.64.0.9"),
            ..seen(&report)
        },
        at(9),
    ));
    let host = HostName::from("host-0");
    let lost = Observation {
        host_ip: Some("10.90.0.11"),
        lost: Some(&host),
        ..Default::default()
    };
    let status = generate(&pod, lost, at(60));
    assert_eq!(status.phase.as_deref(), Some("Running"));
    assert_eq!(status.pod_ip.as_deref(), Some("10.64.0.9"));
    assert_eq!(condition(&status, "Ready"), ("False", "HostLost"));
    assert_eq!(
        condition(&status, "PodReadyToStartContainers"),
        ("True", "")
    );
    assert!(
        status.container_statuses.as_ref().unwrap()[0]
            .state
            .as_ref()
            .unwrap()
            .running
            .is_some()
    );

    pod.status = Some(status);
    let back = generate(&pod, seen(&report), at(90));
    assert_eq!(condition(&back, "Ready"), ("True", ""));
}

#[test]
fn a_pod_in_the_hosts_network_has_the_hosts_address() {
    let mut pod = pod("Always", &[], &["a"]);
    pod.spec.as_mut().unwrap().host_network = Some(true);
    let report = report(vec![container("a", running())]);
    let status = generate(&pod, seen(&report), at(9));
    assert_eq!(status.pod_ip, status.host_ip);
    assert_eq!(status.pod_ip.as_deref(), Some("10.90.0.11"));
}

#[test]
fn only_what_readers_wait_for_is_urgent() {
    let mut pod = pod("Always", &[], &["a"]);
    let placed = Observation {
        host_ip: Some("10.90.0.11"),
        ..Default::default()
    };
    let first = generate(&pod, placed, at(9));
    assert!(
        is_urgent(pod.status.as_ref().unwrap(), &first),
        "the placement"
    );
    pod.status = Some(first.clone());
    let networked = report(vec![]);
    let second = generate(
        &pod,
        Observation {
            pod_ip: Some("10.64.0.2"),
            ..seen(&networked)
        },
        at(10),
    );
    assert_ne!(first, second);
    assert!(!is_urgent(&first, &second), "an address alone can wait");
    let pulling = report(vec![container("a", waiting("ErrImagePull"))]);
    assert!(is_urgent(&second, &generate(&pod, seen(&pulling), at(11))));
    let alive = report(vec![container("a", running())]);
    assert!(is_urgent(&second, &generate(&pod, seen(&alive), at(11))));
}

#[test]
fn readiness_gates_hold_back_ready() {
    let mut pod = pod("Always", &[], &["a"]);
    let gates: Vec<_> =
        vec![serde_json::from_value(json!({"conditionType": "example.com/gate"})).unwrap()];
    pod.spec.as_mut().unwrap().readiness_gates = Some(gates);
    let report = report(vec![container("a", running())]);
    let status = generate(&pod, seen(&report), at(9));
    assert_eq!(condition(&status, "ContainersReady"), ("True", ""));
    assert_eq!(
        condition(&status, "Ready"),
        ("False", "ReadinessGatesNotReady")
    );
}

#[test]
fn what_the_host_has_not_taken_in_is_not_observed() {
    let pod = pod("Always", &[], &["c"]);
    let observed = |generation: i64, lifecycle: v1::Lifecycle, ended: bool| {
        let mut report = report(vec![container("c", running())]);
        report.observed_generation = generation;
        report.lifecycle = lifecycle.into();
        let seen = Observation {
            ended,
            ..seen(&report)
        };
        generate(&pod, seen, at(1)).observed_generation
    };
    assert_eq!(observed(1, v1::Lifecycle::Active, false), Some(1));
    assert_eq!(observed(2, v1::Lifecycle::Active, false), Some(2));
    // A host does not make generations up.
    assert_eq!(observed(9, v1::Lifecycle::Active, false), Some(2));
    assert_eq!(observed(1, v1::Lifecycle::Finished, true), Some(2));
}
