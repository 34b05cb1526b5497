//! Table tests of the status functions; the cases are those of the kubelet's
//! `kubelet_pods_test.go`, `generate_test.go` and `status_manager_test.go`.

use super::*;
use serde_json::{Value as Json, json};
use v1::container_report::State;

mod containers;
mod phases;
mod pods;

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
