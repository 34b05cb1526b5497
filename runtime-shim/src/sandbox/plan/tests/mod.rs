//! Scenes from the life of a sandbox, each with what is decided in it.

use super::*;
use crate::sandbox::facts::{Doom, Ended, Health, Phase, Removal, Termination, VolumePaths};
use crate::sandbox::live::Waiting;

mod changes;
mod ends;
mod health;
mod setup;

fn at(second: i64) -> Timestamp {
    Timestamp::from_second(1_700_000_000 + second).unwrap()
}

fn container(name: &str) -> v1::Container {
    v1::Container {
        name: name.into(),
        image: "busybox".into(),
        ..Default::default()
    }
}

fn spec(containers: &[&str]) -> v1::SandboxSpec {
    v1::SandboxSpec {
        schema: 1,
        uid: "u".into(),
        restart_policy: v1::RestartPolicy::Always as i32,
        containers: containers.iter().map(|name| container(name)).collect(),
        ..Default::default()
    }
}

fn ready() -> (Facts, Live) {
    let facts = Facts {
        started_at: Some(at(0)),
        volumes: Some(VolumePaths::default()),
        ..Default::default()
    };
    let live = Live {
        network: Step::Done,
        volumes: Step::Done,
        contents_known: true,
        ..Default::default()
    };
    (facts, live)
}

fn attempt(name: &str, phase: Phase) -> Attempt {
    Attempt {
        number: 0,
        id: format!("u-{name}-0"),
        image: "busybox".into(),
        image_id: String::new(),
        spec_hash: spec_hash(&container(name)),
        stop_signal: 15,
        replaced: false,
        health: Health::default(),
        doom: None,
        size: Some(resize::Size::default()),
        user: None,
        phase,
    }
}

fn run(facts: &mut Facts, name: &str) {
    facts.containers.entry(name.into()).or_default().current =
        Some(attempt(name, Phase::Running { since: at(0) }));
}

fn end(facts: &mut Facts, name: &str, exit_code: i32, second: i64) {
    let termination = Termination {
        exit_code,
        reason: String::new(),
        message: String::new(),
        started_at: Some(at(0)),
        finished_at: at(second),
        container_id: String::new(),
    };
    facts.containers.entry(name.into()).or_default().current =
        Some(attempt(name, Phase::Ended(termination)));
}

fn image_ready(live: &mut Live, name: &str) {
    live.containers.entry(name.into()).or_default().image = Step::Done;
}

fn start(name: &str) -> Action {
    Action::Start(name.into())
}

fn pull(name: &str) -> Action {
    Action::EnsureImage(name.into())
}

fn ask(name: &str) -> Action {
    Action::Ask {
        container: name.into(),
        why: Why::Stopping,
        hook: false,
    }
}

fn probed(kind: probe::Kind) -> v1::SandboxSpec {
    let mut spec = spec(&["a"]);
    let probe = Some(v1::Probe {
        period_seconds: 5,
        ..Default::default()
    });
    match kind {
        probe::Kind::Startup => spec.containers[0].startup_probe = probe,
        probe::Kind::Liveness => spec.containers[0].liveness_probe = probe,
        probe::Kind::Readiness => spec.containers[0].readiness_probe = probe,
    }
    spec
}

fn current<'a>(facts: &'a mut Facts, name: &str) -> &'a mut Attempt {
    let facts = facts.containers.get_mut(name).unwrap();
    facts.current.as_mut().unwrap()
}
