//! The phase, and when a pod is over.

use super::*;

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
