//! What is told in each stage of a container's life.

use std::collections::BTreeMap;

use jiff::SignedDuration;
use v1::container_report::State;

use super::super::facts::{Attempt, Ended, Health, Removal};
use super::super::live::{Step, Waiting};
use super::*;

fn at(second: i64) -> Timestamp {
    Timestamp::from_second(1_700_000_000 + second).unwrap()
}

fn spec() -> v1::SandboxSpec {
    v1::SandboxSpec {
        schema: 1,
        uid: "u".into(),
        name: "p".into(),
        namespace: "ns".into(),
        restart_policy: v1::RestartPolicy::Always as i32,
        containers: vec![v1::Container {
            name: "c".into(),
            ..Default::default()
        }],
        ..Default::default()
    }
}

fn attempt(number: u32, phase: Phase) -> Attempt {
    Attempt {
        number,
        id: format!("u-c-{number}"),
        image: "busybox".into(),
        image_id: "busybox@sha256:1".into(),
        spec_hash: String::new(),
        stop_signal: 15,
        replaced: false,
        health: Health::default(),
        doom: None,
        size: None,
        user: None,
        phase,
    }
}

fn ended(exit_code: i32, second: i64) -> Phase {
    Phase::Ended(Termination {
        exit_code,
        reason: "Error".into(),
        message: "last words".into(),
        started_at: Some(at(0)),
        finished_at: at(second),
        container_id: "u-c-0".into(),
    })
}

fn facts(phase: Option<Phase>) -> Facts {
    let current = phase.map(|phase| attempt(0, phase));
    let container = ContainerFacts {
        current,
        ..Default::default()
    };
    Facts {
        started_at: Some(at(0)),
        containers: BTreeMap::from([("c".into(), container)]),
        ..Default::default()
    }
}

fn only(spec: &v1::SandboxSpec, facts: &Facts, live: &Live, second: i64) -> v1::ContainerReport {
    report(spec, facts, live, at(second)).containers.remove(0)
}

fn wait_of(report: &v1::ContainerReport) -> (&str, &str) {
    match &report.state {
        Some(State::Waiting(waiting)) => (&waiting.reason, &waiting.message),
        other => panic!("not waiting: {other:?}"),
    }
}

#[test]
fn a_new_container_waits_with_the_kubelets_word() {
    let (mut spec, live) = (spec(), Live::default());
    assert_eq!(
        wait_of(&only(&spec, &facts(None), &live, 0)),
        ("ContainerCreating", "")
    );
    spec.init_containers = vec![v1::Container {
        name: "i".into(),
        ..Default::default()
    }];
    assert_eq!(
        wait_of(&only(&spec, &facts(None), &live, 0)),
        ("PodInitializing", "")
    );
}

#[test]
fn trouble_shows_until_it_is_over() {
    let (spec, mut live) = (spec(), Live::default());
    let container = live.containers.entry("c".into()).or_default();
    let trouble = Waiting {
        reason: "ErrImagePull".into(),
        message: "no such host".into(),
    };
    container
        .image
        .fail(at(0), SignedDuration::from_secs(10), trouble);
    assert_eq!(
        wait_of(&only(&spec, &facts(None), &live, 0)),
        ("ErrImagePull", "no such host")
    );
    live.containers.get_mut("c").unwrap().image.begin();
    assert_eq!(
        wait_of(&only(&spec, &facts(None), &live, 0)).0,
        "ErrImagePull"
    );
}

#[test]
fn an_image_that_is_a_volume_keeps_containers_waiting() {
    let (spec, mut live) = (spec(), Live::default());
    for (reason, shown) in [
        ("ErrImagePull", "ErrImagePull"),
        ("ContainerCreating", "ContainerCreating"),
    ] {
        let trouble = Waiting {
            reason: reason.into(),
            message: "why".into(),
        };
        live.volumes
            .fail(at(0), SignedDuration::from_secs(10), trouble);
        let report = only(&spec, &facts(None), &live, 0);
        assert_eq!(wait_of(&report).0, shown);
    }
}

#[test]
fn a_running_container_is_started_and_ready() {
    let report = only(
        &spec(),
        &facts(Some(Phase::Running { since: at(3) })),
        &Live::default(),
        4,
    );
    assert!(report.started && report.ready);
    assert_eq!(report.container_id, "containerd://u-c-0");
    assert_eq!(report.image_id, "busybox@sha256:1");
    assert!(
        matches!(report.state, Some(State::Running(r)) if r.started_at == Some(wire_time(at(3))))
    );
}

#[test]
fn a_crash_loop_names_its_delay() {
    let spec = spec();
    let mut facts = facts(Some(ended(1, 5)));
    // The first restart is due at once: the end itself shows.
    assert!(matches!(
        only(&spec, &facts, &Live::default(), 5).state,
        Some(State::Terminated(t)) if t.exit_code == 1
    ));
    let container = facts.containers.get_mut("c").unwrap();
    container.crash.advance(at(5), at(5));
    container.current = Some(attempt(1, ended(1, 7)));
    let report = only(&spec, &facts, &Live::default(), 8);
    assert_eq!(
        wait_of(&report),
        (
            "CrashLoopBackOff",
            "back-off 10s restarting failed container=c pod=p_ns(u)"
        )
    );
    assert_eq!(report.restart_count, 1);
    assert_eq!(report.last_termination.unwrap().message, "last words");
}

#[test]
fn ends_are_final_when_the_policy_or_the_pod_says_so() {
    let mut spec = spec();
    spec.restart_policy = v1::RestartPolicy::Never as i32;
    let done = facts(Some(ended(3, 5)));
    let report = report(&spec, &done, &Live::default(), at(6));
    assert_eq!(report.lifecycle(), v1::Lifecycle::Finished);
    assert!(matches!(&report.containers[0].state, Some(State::Terminated(t)) if t.exit_code == 3));

    let mut removing = facts(Some(Phase::Running { since: at(0) }));
    removing.removal = Some(Removal {
        deadline: at(30),
        reason: String::new(),
    });
    let report = super::report(&spec, &removing, &Live::default(), at(6));
    assert_eq!(report.lifecycle(), v1::Lifecycle::Terminating);
    assert!(report.containers[0].ready);
}

#[test]
fn the_hosts_verdict_is_finished_when_nothing_runs() {
    let mut ended_facts = facts(Some(Phase::Running { since: at(0) }));
    ended_facts.ended = Some(Ended {
        reason: "DeadlineExceeded".into(),
        message: "m".into(),
        deadline: at(30),
    });
    let spec = spec();
    let report = report(&spec, &ended_facts, &Live::default(), at(6));
    assert_eq!(report.lifecycle(), v1::Lifecycle::Active);
    ended_facts.containers.get_mut("c").unwrap().current = Some(attempt(0, ended(143, 7)));
    let report = super::report(&spec, &ended_facts, &Live::default(), at(8));
    assert_eq!(report.lifecycle(), v1::Lifecycle::Finished);
    assert_eq!(report.reason, "DeadlineExceeded");
    assert!(matches!(
        report.containers[0].state,
        Some(State::Terminated(_))
    ));
}

#[test]
fn a_removed_sandbox_keeps_its_story() {
    let mut gone = facts(None);
    gone.removed = true;
    let report = report(&spec(), &gone, &Live::default(), at(6));
    assert_eq!(report.lifecycle(), v1::Lifecycle::Removed);
    assert!(!report.sandbox_ready);
    assert!(matches!(
        &report.containers[0].state,
        Some(State::Terminated(t)) if t.reason == "ContainerStatusUnknown" && t.exit_code == 137
    ));
}

#[test]
fn the_sandbox_itself_may_wait() {
    let mut live = Live {
        network: Step::Todo,
        ..Default::default()
    };
    let trouble = Waiting {
        reason: "FailedCreatePodSandBox".into(),
        message: "no address".into(),
    };
    live.network
        .fail(at(0), SignedDuration::from_secs(10), trouble);
    let report = report(&spec(), &Facts::default(), &live, at(0));
    assert_eq!(report.waiting_reason, "FailedCreatePodSandBox");
    assert!(!report.sandbox_ready);
}

#[test]
fn durations_print_as_in_go() {
    for (seconds, text) in [(10, "10s"), (80, "1m20s"), (300, "5m0s")] {
        assert_eq!(go_duration(SignedDuration::from_secs(seconds)), text);
    }
}

#[test]
fn a_replaced_container_is_no_end_of_its_pod() {
    let (mut spec, live) = (spec(), Live::default());
    spec.restart_policy = v1::RestartPolicy::Never as i32;
    let mut facts = facts(Some(ended(143, 5)));
    let container = facts.containers.get_mut("c").unwrap();
    container.current.as_mut().unwrap().replaced = true;
    let told = report(&spec, &facts, &live, at(6));
    assert_eq!(told.lifecycle(), v1::Lifecycle::Active);
    assert!(matches!(told.containers[0].state, Some(State::Running(_))));
    assert!(told.containers[0].ready, "the next takes its place");
    assert_eq!(told.containers[0].last_termination, None);
    // Until the new image turns out not to be there.
    let mut trouble = Live::default();
    let waiting = Waiting {
        reason: "ErrImagePull".into(),
        message: String::new(),
    };
    let container = trouble.containers.entry("c".into()).or_default();
    container
        .image
        .fail(at(6), SignedDuration::from_secs(10), waiting);
    let told = only(&spec, &facts, &trouble, 6);
    assert_eq!(wait_of(&told).0, "ErrImagePull");
    assert!(!told.ready && !told.started);
    // Its own removal ends it all the same.
    facts.removal = Some(Removal {
        deadline: at(30),
        reason: String::new(),
    });
    let told = only(&spec, &facts, &live, 6);
    assert!(matches!(told.state, Some(State::Terminated(_))));
}

#[test]
fn hook_and_probes_decide_what_is_started_and_ready() {
    let mut spec = spec();
    spec.containers[0] = v1::Container {
        post_start: Some(v1::Handler::default()),
        startup_probe: Some(v1::Probe::default()),
        readiness_probe: Some(v1::Probe::default()),
        ..spec.containers[0].clone()
    };
    let mut facts = facts(Some(Phase::Running { since: at(0) }));
    let live = Live::default();
    let told = only(&spec, &facts, &live, 1);
    assert_eq!(wait_of(&told).0, "ContainerCreating");
    for (hooked, started, ready, expected) in [
        (true, false, true, (false, false)),
        (true, true, false, (true, false)),
        (true, true, true, (true, true)),
    ] {
        let container = facts.containers.get_mut("c").unwrap();
        container.current.as_mut().unwrap().health = Health {
            hooked,
            started,
            ready,
        };
        let told = only(&spec, &facts, &live, 1);
        assert!(matches!(told.state, Some(State::Running(_))));
        assert_eq!((told.started, told.ready), expected);
    }
}
