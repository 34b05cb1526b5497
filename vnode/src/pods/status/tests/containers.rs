//! The statuses of containers.

use super::*;

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
