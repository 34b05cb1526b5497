//! Table tests of the status functions; the cases are those of the kubelet's
//! `kubelet_pods_test.go`, `generate_test.go` and `status_manager_test.go`.

use super::*;
use serde_json::{Value as Json, json};
use v1::container_report::State;

fn at(seconds: i64) -> Timestamp {
    Timestamp::from_second(seconds).unwrap()
}

fn pod(policy: &str, init: &[Json], containers: &[&str]) -> Pod {
    let containers: Vec<_> = containers
        .iter()
        .map(|n| json!({"name": n, "image": "img"}))
        .collect();
    serde_json::from_value(json!({
        "metadata": {"name": "p", "uid": "u", "generation": 2},
        "spec": {"restartPolicy": policy, "initContainers": init, "containers": containers},
        "status": {"phase": "Pending", "conditions": [
            {"type": "PodScheduled", "status": "True", "lastTransitionTime": "1970-01-01T00:00:01Z"},
            {"type": "example.com/gate", "status": "False"},
        ]},
    }))
    .unwrap()
}

fn container(name: &str, state: State) -> v1::ContainerReport {
    let running = matches!(state, State::Running(_));
    v1::ContainerReport {
        name: name.into(),
        image: "img".into(),
        container_id: format!("containerd://{name}-0"),
        started: running,
        ready: running,
        state: Some(state),
        ..Default::default()
    }
}

fn running() -> State {
    State::Running(v1::Running {
        started_at: Some(prost_types::Timestamp {
            seconds: 5,
            nanos: 7,
        }),
    })
}

fn exited(exit_code: i32) -> State {
    State::Terminated(v1::Terminated {
        exit_code,
        ..Default::default()
    })
}

fn waiting(reason: &str) -> State {
    State::Waiting(v1::Waiting {
        reason: reason.into(),
        ..Default::default()
    })
}

fn report(containers: Vec<v1::ContainerReport>) -> v1::SandboxReport {
    v1::SandboxReport {
        uid: "u".into(),
        sandbox_ready: true,
        containers,
        ..Default::default()
    }
}

fn seen(report: &v1::SandboxReport) -> Observation<'_> {
    Observation {
        report: Some(report),
        host_ip: Some("10.90.0.11"),
        ..Default::default()
    }
}

fn condition<'a>(status: &'a PodStatus, kind: &str) -> (&'a str, &'a str) {
    let all = status.conditions.as_ref().unwrap();
    let found = all.iter().find(|c| c.type_ == kind).unwrap();
    (
        found.status.as_str(),
        found.reason.as_deref().unwrap_or_default(),
    )
}

#[test]
fn phases_follow_the_containers() {
    let again = |code| v1::ContainerReport {
        last_termination: Some(v1::Terminated {
            exit_code: code,
            ..Default::default()
        }),
        ..container("a", waiting("CrashLoopBackOff"))
    };
    for (name, policy, containers, ended, phase) in [
        (
            "running",
            "Always",
            vec![container("a", running()), container("b", running())],
            false,
            "Running",
        ),
        (
            "one not started",
            "Always",
            vec![container("a", running()), container("b", waiting(""))],
            false,
            "Pending",
        ),
        (
            "one not reported",
            "Always",
            vec![container("a", running())],
            false,
            "Pending",
        ),
        (
            "exited, restarts",
            "Always",
            vec![container("a", exited(0)), container("b", exited(0))],
            false,
            "Running",
        ),
        (
            "backing off",
            "Always",
            vec![again(1), container("b", running())],
            false,
            "Running",
        ),
        (
            "exited 0 on failure",
            "OnFailure",
            vec![container("a", exited(0)), container("b", exited(0))],
            false,
            "Succeeded",
        ),
        (
            "exited 1 on failure",
            "OnFailure",
            vec![container("a", exited(1)), container("b", exited(0))],
            false,
            "Running",
        ),
        (
            "exited 0 never",
            "Never",
            vec![container("a", exited(0)), container("b", exited(0))],
            false,
            "Succeeded",
        ),
        (
            "exited 1 never",
            "Never",
            vec![container("a", exited(1)), container("b", exited(0))],
            false,
            "Failed",
        ),
        (
            "one left never",
            "Never",
            vec![container("a", exited(1)), container("b", running())],
            false,
            "Running",
        ),
        (
            "deleted, all 0",
            "Always",
            vec![container("a", exited(0)), container("b", exited(0))],
            true,
            "Succeeded",
        ),
        (
            "deleted, killed",
            "Always",
            vec![container("a", exited(137)), container("b", exited(0))],
            true,
            "Failed",
        ),
        ("deleted, unknown", "Always", vec![], true, "Failed"),
    ] {
        let pod = pod(policy, &[], &["a", "b"]);
        let report = report(containers);
        let status = generate(
            &pod,
            Observation {
                ended,
                ..seen(&report)
            },
            at(9),
        );
        assert_eq!(status.phase.as_deref(), Some(phase), "{name}");
    }
}

#[test]
fn init_containers_come_first() {
    let init = json!({"name": "i", "image": "img"});
    let sidecar = json!({"name": "s", "image": "img", "restartPolicy": "Always"});
    let run = |policy, states: Vec<v1::ContainerReport>, main: State| {
        let pod = pod(policy, &[init.clone(), sidecar.clone()], &["a"]);
        let report = v1::SandboxReport {
            init_containers: states,
            ..report(vec![container("a", main)])
        };
        generate(&pod, seen(&report), at(9))
    };
    let status = run("Always", vec![container("i", running())], waiting(""));
    assert_eq!(status.phase.as_deref(), Some("Pending"));
    assert_eq!(
        condition(&status, "Initialized"),
        ("False", "ContainersNotInitialized")
    );
    let main = &status.container_statuses.as_ref().unwrap()[0];
    let reason = main
        .state
        .as_ref()
        .unwrap()
        .waiting
        .as_ref()
        .unwrap()
        .reason
        .as_deref();
    assert_eq!(reason, Some("PodInitializing"));

    let status = run("Never", vec![container("i", exited(1))], waiting(""));
    assert_eq!(status.phase.as_deref(), Some("Failed"));
    let status = run("OnFailure", vec![container("i", exited(1))], waiting(""));
    assert_eq!(status.phase.as_deref(), Some("Pending"));

    let done = vec![container("i", exited(0)), container("s", running())];
    let status = run("Always", done, running());
    assert_eq!(status.phase.as_deref(), Some("Running"));
    assert_eq!(condition(&status, "Initialized"), ("True", ""));
    assert_eq!(condition(&status, "Ready"), ("True", ""));

    // A failed init container ends the pod only when the sidecar is down too.
    let failed = vec![container("i", exited(1)), container("s", running())];
    assert_eq!(
        run("Never", failed, waiting("")).phase.as_deref(),
        Some("Pending")
    );
}

#[test]
fn a_failed_init_container_is_named_and_those_before_it_stay_ready() {
    let init = |name: &str| json!({"name": name, "image": "img"});
    let pod = pod("Never", &[init("one"), init("two")], &["a"]);
    let report = v1::SandboxReport {
        init_containers: vec![container("one", exited(0)), container("two", exited(1))],
        ..report(vec![container("a", waiting(""))])
    };
    let status = generate(&pod, seen(&report), at(9));
    assert_eq!(status.phase.as_deref(), Some("Failed"));
    let ready: Vec<bool> = status
        .init_container_statuses
        .as_ref()
        .unwrap()
        .iter()
        .map(|s| s.ready)
        .collect();
    assert_eq!(ready, [true, false]);
    let conditions = status.conditions.as_ref().unwrap();
    let initialized = conditions
        .iter()
        .find(|c| c.type_ == "Initialized")
        .unwrap();
    assert_eq!(initialized.status, "False");
    assert_eq!(
        initialized.message.as_deref(),
        Some("containers with incomplete status: [two]")
    );
}

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
fn a_terminal_phase_is_never_left() {
    let mut pod = pod("Never", &[], &["a"]);
    let done = report(vec![container("a", exited(0))]);
    pod.status = Some(generate(&pod, seen(&done), at(9)));
    assert_eq!(
        pod.status.as_ref().unwrap().phase.as_deref(),
        Some("Succeeded")
    );
    let alive = report(vec![container("a", running())]);
    let status = generate(&pod, seen(&alive), at(10));
    assert_eq!(status.phase.as_deref(), Some("Succeeded"));
    assert_eq!(condition(&status, "Ready"), ("False", "PodCompleted"));
}

#[test]
fn a_pod_is_not_over_while_a_debug_container_runs() {
    let mut pod = pod("Never", &[], &["a"]);
    let shell = k8s_openapi::api::core::v1::EphemeralContainer {
        name: "shell".to_owned(),
        ..Default::default()
    };
    pod.spec.as_mut().unwrap().ephemeral_containers = Some(vec![shell]);
    for (main, debugger, phase) in [
        (running(), running(), "Running"),
        (exited(0), running(), "Running"),
        (exited(0), exited(137), "Succeeded"),
    ] {
        let mut report = report(vec![container("a", main)]);
        report.ephemeral_containers = vec![container("shell", debugger)];
        pod.status = Some(generate(&pod, seen(&report), at(9)));
        assert_eq!(pod.status.as_ref().unwrap().phase.as_deref(), Some(phase));
    }
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
fn what_nobody_knows_counts_as_failed() {
    let mut pod = pod("Never", &[], &["a"]);
    let alive = report(vec![container("a", running())]);
    pod.status = Some(generate(&pod, seen(&alive), at(9)));
    let gone = Observation {
        host_ip: Some("10.90.0.11"),
        ended: true,
        ..Default::default()
    };
    let status = generate(&pod, gone, at(20));
    assert_eq!(status.phase.as_deref(), Some("Failed"));
    let state = status.container_statuses.as_ref().unwrap()[0]
        .state
        .clone()
        .unwrap();
    let terminated = state.terminated.unwrap();
    assert_eq!(terminated.exit_code, 137);
    assert_eq!(terminated.reason.as_deref(), Some("ContainerStatusUnknown"));
}

#[test]
fn a_refused_pod_fails_with_the_reason() {
    let pod = pod("Always", &[], &["a"]);
    let rejection = Rejection {
        reason: "OutOfcpu",
        message: "no room".into(),
    };
    let refused = Observation {
        rejection: Some(&rejection),
        ..Default::default()
    };
    let status = generate(&pod, refused, at(9));
    assert_eq!(status.phase.as_deref(), Some("Failed"));
    assert_eq!(status.reason.as_deref(), Some("OutOfcpu"));
    assert_eq!(status.message.as_deref(), Some("Pod was rejected: no room"));
    assert_eq!(condition(&status, "Ready"), ("False", "PodFailed"));
    assert_eq!(status.host_ip, None);
}

#[test]
fn the_host_may_end_a_pod() {
    let pod = pod("Always", &[], &["a"]);
    let report = v1::SandboxReport {
        reason: "DeadlineExceeded".into(),
        message: "Pod was active on the node longer than the specified deadline".into(),
        ..report(vec![container("a", exited(137))])
    };
    let status = generate(
        &pod,
        Observation {
            ended: true,
            ..seen(&report)
        },
        at(9),
    );
    assert_eq!(status.phase.as_deref(), Some("Failed"));
    assert_eq!(status.reason.as_deref(), Some("DeadlineExceeded"));
}

#[test]
fn only_the_nodes_own_need_is_a_disruption() {
    let evicted = |message: &str| {
        let report = v1::SandboxReport {
            reason: "Evicted".into(),
            message: message.into(),
            ..report(vec![container("a", exited(137))])
        };
        let ended = Observation {
            ended: true,
            ..seen(&report)
        };
        let status = generate(&pod("Always", &[], &["a"]), ended, at(9));
        assert_eq!(status.phase.as_deref(), Some("Failed"));
        let mut conditions = status.conditions.into_iter().flatten();
        conditions.find(|c| c.type_ == "DisruptionTarget")
    };
    let low = "The node was low on resource: memory. ";
    let disruption = evicted(low).unwrap();
    assert_eq!(disruption.status, "True");
    assert_eq!(disruption.reason.as_deref(), Some("TerminationByKubelet"));
    assert_eq!(disruption.message.as_deref(), Some(low));
    assert!(evicted("Usage of EmptyDir volume \"v\" exceeds the limit").is_none());
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
fn restart_counts_never_go_back() {
    let mut pod = pod("Always", &[], &["a"]);
    let with = |count: u32, id: &str| {
        report(vec![v1::ContainerReport {
            restart_count: count,
            container_id: id.into(),
            ..container("a", running())
        }])
    };
    for (count, id, expected) in [
        (4, "c-4", 4),
        (0, "d-0", 5),
        (0, "d-0", 5),
        (1, "d-1", 6),
        (9, "e-9", 9),
    ] {
        let report = with(count, id);
        let status = generate(&pod, seen(&report), at(9));
        assert_eq!(
            status.container_statuses.as_ref().unwrap()[0].restart_count,
            expected,
            "{id}"
        );
        pod.status = Some(status);
    }
}

#[test]
fn reasons_to_wait_reach_the_containers() {
    let pod = pod("Always", &[], &["a", "b"]);
    let reason = |status: &PodStatus, index: usize| {
        let container = &status.container_statuses.as_ref().unwrap()[index];
        container
            .state
            .as_ref()
            .unwrap()
            .waiting
            .as_ref()
            .unwrap()
            .reason
            .clone()
            .unwrap()
    };
    let config = Waiting {
        container: Some("a".into()),
        reason: "CreateContainerConfigError",
        message: "secret \"x\" not found".into(),
        whole_pod: false,
    };
    let held = Observation {
        waiting: Some(&config),
        ..Default::default()
    };
    let status = generate(&pod, held, at(9));
    assert_eq!(reason(&status, 0), "CreateContainerConfigError");
    assert_eq!(reason(&status, 1), "ContainerCreating");

    let no_room = Waiting {
        container: None,
        reason: "HostsFull",
        message: "m".into(),
        whole_pod: true,
    };
    let held = Observation {
        waiting: Some(&no_room),
        ..Default::default()
    };
    let status = generate(&pod, held, at(9));
    assert_eq!(status.reason.as_deref(), Some("HostsFull"));
    assert_eq!(status.start_time, None, "not accepted by a host yet");

    let mut report = report(vec![]);
    report.waiting_reason = "FailedCreatePodSandBox".into();
    assert_eq!(
        reason(&generate(&pod, seen(&report), at(9)), 1),
        "FailedCreatePodSandBox"
    );
}

#[test]
fn texts_of_a_host_are_cut() {
    let pod = pod("Never", &[], &["a"]);
    let long = "ä".repeat(20_000);
    let mut terminated = v1::Terminated {
        message: long.clone(),
        ..Default::default()
    };
    terminated.reason = long.clone();
    let mut report = report(vec![container("a", State::Terminated(terminated))]);
    report.reason = long.clone();
    report.message = long;
    let status = generate(
        &pod,
        Observation {
            ended: true,
            ..seen(&report)
        },
        at(9),
    );
    assert!(serde_json::to_string(&status).unwrap().len() < 20_000);
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
