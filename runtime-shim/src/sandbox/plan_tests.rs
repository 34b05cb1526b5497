//! Scenes from the life of a sandbox, each with what is decided in it.

use super::super::facts::{Doom, Ended, Health, Phase, Removal, Termination, VolumePaths};
use super::super::live::Waiting;
use super::*;

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

#[test]
fn network_then_volumes_then_images_then_starts() {
    let spec = spec(&["a", "b"]);
    let (mut facts, mut live) = (Facts::default(), Live::default());
    live.contents_known = true;
    assert_eq!(
        plan(&spec, &facts, &live, at(0)).actions,
        [Action::SetUpNetwork]
    );
    live.network = Step::Done;
    assert_eq!(
        plan(&spec, &facts, &live, at(0)).actions,
        [Action::ApplyVolumes]
    );
    live.volumes = Step::Done;
    facts.volumes = Some(VolumePaths::default());
    assert_eq!(
        plan(&spec, &facts, &live, at(0)).actions,
        [pull("a"), pull("b")]
    );
    image_ready(&mut live, "a");
    live.containers.entry("b".into()).or_default().image.begin();
    assert_eq!(plan(&spec, &facts, &live, at(0)).actions, [start("a")]);
    run(&mut facts, "a");
    run(&mut facts, "b");
    assert_eq!(plan(&spec, &facts, &live, at(0)), Plan::default());
}

#[test]
fn failures_wait_for_their_time() {
    let spec = spec(&["a"]);
    let (facts, mut live) = ready();
    let waiting = Waiting {
        reason: "ErrImagePull".into(),
        message: String::new(),
    };
    live.containers.entry("a".into()).or_default().image.fail(
        at(0),
        SignedDuration::from_secs(60),
        waiting,
    );
    assert_eq!(
        plan(&spec, &facts, &live, at(0)),
        Plan {
            actions: vec![],
            wake: Some(at(1))
        }
    );
    assert_eq!(plan(&spec, &facts, &live, at(1)).actions, [pull("a")]);
}

#[test]
fn our_own_record_has_no_contents_to_write() {
    let spec = spec(&["a"]);
    let (mut facts, mut live) = ready();
    (facts.volumes, live.volumes, live.contents_known) = (None, Step::Todo, false);
    assert_eq!(plan(&spec, &facts, &live, at(0)), Plan::default());
    // With volumes made before, the containers go on.
    facts.volumes = Some(VolumePaths::default());
    assert_eq!(plan(&spec, &facts, &live, at(0)).actions, [pull("a")]);
}

#[test]
fn init_containers_run_one_by_one_and_sidecars_stay() {
    let mut spec = spec(&["main"]);
    spec.init_containers = vec![
        container("one"),
        v1::Container {
            sidecar: true,
            ..container("side")
        },
        container("two"),
    ];
    let (mut facts, mut live) = ready();
    for name in ["one", "side", "two", "main"] {
        image_ready(&mut live, name);
    }
    assert_eq!(plan(&spec, &facts, &live, at(0)).actions, [start("one")]);
    run(&mut facts, "one");
    assert_eq!(plan(&spec, &facts, &live, at(0)).actions, []);
    end(&mut facts, "one", 0, 1);
    assert_eq!(plan(&spec, &facts, &live, at(1)).actions, [start("side")]);
    run(&mut facts, "side");
    assert_eq!(plan(&spec, &facts, &live, at(1)).actions, [start("two")]);
    end(&mut facts, "two", 0, 2);
    assert_eq!(plan(&spec, &facts, &live, at(2)).actions, [start("main")]);
    run(&mut facts, "main");
    assert_eq!(plan(&spec, &facts, &live, at(2)).actions, []);
    // A sidecar that ends comes back, and nobody waits for it.
    end(&mut facts, "side", 0, 3);
    assert_eq!(plan(&spec, &facts, &live, at(3)).actions, [start("side")]);
}

#[test]
fn a_failed_init_container_follows_the_policy() {
    let mut spec = spec(&["main"]);
    spec.init_containers = vec![container("one")];
    let (mut facts, mut live) = ready();
    image_ready(&mut live, "one");
    end(&mut facts, "one", 1, 1);
    assert_eq!(plan(&spec, &facts, &live, at(1)).actions, [start("one")]);
    spec.restart_policy = v1::RestartPolicy::Never as i32;
    assert!(is_finished(&spec, &facts));
    assert_eq!(plan(&spec, &facts, &live, at(1)).actions, []);
}

#[test]
fn crashes_back_off_and_success_may_be_final() {
    let mut spec = spec(&["a"]);
    let (mut facts, mut live) = ready();
    image_ready(&mut live, "a");
    end(&mut facts, "a", 1, 5);
    assert_eq!(plan(&spec, &facts, &live, at(5)).actions, [start("a")]);
    facts
        .containers
        .get_mut("a")
        .unwrap()
        .crash
        .advance(at(5), at(5));
    end(&mut facts, "a", 1, 6);
    let wait = Plan {
        actions: vec![],
        wake: Some(at(16)),
    };
    assert_eq!(plan(&spec, &facts, &live, at(6)), wait);
    assert_eq!(plan(&spec, &facts, &live, at(16)).actions, [start("a")]);
    spec.restart_policy = v1::RestartPolicy::OnFailure as i32;
    end(&mut facts, "a", 0, 20);
    assert!(is_finished(&spec, &facts));
    assert_eq!(plan(&spec, &facts, &live, at(20)), Plan::default());
}

#[test]
fn a_finished_sandbox_ends_its_sidecars_in_reverse() {
    let mut spec = spec(&["main"]);
    spec.restart_policy = v1::RestartPolicy::Never as i32;
    spec.init_containers = ["s1", "s2"]
        .map(|name| v1::Container {
            sidecar: true,
            ..container(name)
        })
        .to_vec();
    let (mut facts, mut live) = ready();
    run(&mut facts, "s1");
    run(&mut facts, "s2");
    end(&mut facts, "main", 0, 10);
    let first = plan(&spec, &facts, &live, at(10));
    assert_eq!(
        first,
        Plan {
            actions: vec![ask("s2")],
            wake: Some(at(40))
        }
    );
    live.containers.entry("s2".into()).or_default().asked_at = Some(at(10));
    assert_eq!(plan(&spec, &facts, &live, at(11)).actions, []);
    end(&mut facts, "s2", 0, 12);
    assert_eq!(plan(&spec, &facts, &live, at(12)).actions, [ask("s1")]);
    let late = plan(&spec, &facts, &live, at(40)).actions;
    assert_eq!(late, [ask("s1"), Action::Kill("s1".into())]);
}

#[test]
fn a_failed_init_container_ends_the_sidecars_before_it_in_time() {
    let mut spec = spec(&["main"]);
    spec.restart_policy = v1::RestartPolicy::Never as i32;
    spec.init_containers = vec![
        v1::Container {
            sidecar: true,
            ..container("side")
        },
        container("one"),
    ];
    let (mut facts, mut live) = ready();
    run(&mut facts, "side");
    end(&mut facts, "one", 1, 10);
    let kill = Action::Kill("side".into());
    for (second, asked, actions, wake) in [
        (10, false, vec![ask("side")], Some(at(40))),
        (39, true, vec![], Some(at(40))),
        (40, true, vec![kill.clone()], None),
        (90, false, vec![ask("side"), kill], None),
    ] {
        live.containers.entry("side".into()).or_default().asked_at = asked.then(|| at(10));
        assert_eq!(
            plan(&spec, &facts, &live, at(second)),
            Plan { actions, wake },
            "at {second}"
        );
    }
}

#[test]
fn the_active_deadline_ends_a_sandbox() {
    let mut spec = spec(&["a"]);
    spec.active_deadline = Some(prost_types::Duration {
        seconds: 60,
        nanos: 0,
    });
    let (mut facts, live) = ready();
    run(&mut facts, "a");
    assert_eq!(plan(&spec, &facts, &live, at(59)).wake, Some(at(60)));
    let actions = plan(&spec, &facts, &live, at(60)).actions;
    assert!(matches!(
        actions[..],
        [Action::End {
            reason: "DeadlineExceeded",
            ..
        }]
    ));
    facts.ended = Some(Ended {
        reason: "DeadlineExceeded".into(),
        message: String::new(),
        deadline: at(90),
    });
    assert_eq!(plan(&spec, &facts, &live, at(61)).actions, [ask("a")]);
    end(&mut facts, "a", 143, 62);
    // Over, but nobody asked for its removal: only its room is given back.
    assert_eq!(
        plan(&spec, &facts, &live, at(63)).actions,
        [Action::Release]
    );
}

#[test]
fn what_the_host_ended_gives_its_room_back() {
    let spec = spec(&["a"]);
    let (mut facts, mut live) = ready();
    run(&mut facts, "a");
    facts.ended = Some(Ended {
        reason: "Evicted".into(),
        message: String::new(),
        deadline: at(2),
    });
    assert_eq!(plan(&spec, &facts, &live, at(0)).actions, [ask("a")]);
    end(&mut facts, "a", 137, 2);
    assert_eq!(plan(&spec, &facts, &live, at(3)).actions, [Action::Release]);
    live.release.begin();
    facts.removal = Some(Removal {
        deadline: at(4),
        reason: String::new(),
    });
    assert_eq!(plan(&spec, &facts, &live, at(4)).actions, []);
    live.release = Step::Done;
    facts.volumes = None;
    assert_eq!(
        plan(&spec, &facts, &live, at(4)).actions,
        [Action::TearDown]
    );
    facts.removal = None;
    assert_eq!(plan(&spec, &facts, &live, at(5)), Plan::default());
}

#[test]
fn removal_asks_waits_kills_and_tears_down() {
    let spec = spec(&["a"]);
    let (mut facts, mut live) = ready();
    run(&mut facts, "a");
    facts.removal = Some(Removal {
        deadline: at(30),
        reason: String::new(),
    });
    assert_eq!(
        plan(&spec, &facts, &live, at(0)),
        Plan {
            actions: vec![ask("a")],
            wake: Some(at(30))
        }
    );
    live.containers.entry("a".into()).or_default().asked_at = Some(at(0));
    assert_eq!(
        plan(&spec, &facts, &live, at(30)).actions,
        [Action::Kill("a".into())]
    );
    live.containers.get_mut("a").unwrap().killed_at = Some(at(30));
    assert_eq!(
        plan(&spec, &facts, &live, at(31)),
        Plan {
            actions: vec![],
            wake: Some(at(35))
        }
    );
    end(&mut facts, "a", 137, 31);
    assert_eq!(
        plan(&spec, &facts, &live, at(31)).actions,
        [Action::TearDown]
    );
    facts.removed = true;
    assert_eq!(plan(&spec, &facts, &live, at(31)), Plan::default());
}

#[test]
fn removal_interrupts_a_pull_and_waits_for_a_start() {
    let spec = spec(&["a", "b"]);
    let (mut facts, mut live) = ready();
    live.containers.entry("a".into()).or_default().image.begin();
    live.containers.entry("b".into()).or_default().start.begin();
    facts.removal = Some(Removal {
        deadline: at(30),
        reason: String::new(),
    });
    assert_eq!(
        plan(&spec, &facts, &live, at(0)).actions,
        [Action::AbandonImage("a".into())]
    );
}

#[test]
fn a_changed_image_replaces_the_container() {
    let mut spec = spec(&["a"]);
    let (mut facts, live) = ready();
    run(&mut facts, "a");
    spec.containers[0].image = "busybox:2".into();
    assert_eq!(
        plan(&spec, &facts, &live, at(0)).actions,
        [Action::Ask {
            container: "a".into(),
            why: Why::Changed,
            hook: false,
        }]
    );
}

#[test]
fn a_replaced_container_runs_again_whatever_the_policy() {
    for policy in [v1::RestartPolicy::Never, v1::RestartPolicy::OnFailure] {
        let mut spec = spec(&["a"]);
        spec.restart_policy = policy as i32;
        let (mut facts, mut live) = ready();
        image_ready(&mut live, "a");
        end(&mut facts, "a", 0, 5);
        assert!(is_finished(&spec, &facts));
        let attempt = facts.containers.get_mut("a").unwrap().current.as_mut();
        attempt.unwrap().replaced = true;
        assert!(!is_finished(&spec, &facts));
        assert_eq!(plan(&spec, &facts, &live, at(5)).actions, [start("a")]);
    }
}

#[test]
fn only_another_image_counts_as_changed() {
    let old = spec(&["a", "b"]);
    let mut new = old.clone();
    new.containers[0].tty = true;
    assert!(changed_images(&old, &new).is_empty());
    new.containers[1].image = "busybox:2".into();
    new.containers.push(container("c"));
    assert_eq!(changed_images(&old, &new), ["b"]);
}

#[test]
fn nothing_is_decided_for_an_unknown_sandbox_but_its_removal() {
    let mut spec = spec(&["a"]);
    spec.schema = 0;
    let (mut facts, live) = ready();
    end(&mut facts, "a", 137, 0);
    assert_eq!(plan(&spec, &facts, &live, at(1)), Plan::default());
    facts.removal = Some(Removal {
        deadline: at(1),
        reason: String::new(),
    });
    assert_eq!(
        plan(&spec, &facts, &live, at(1)).actions,
        [Action::TearDown]
    );
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

#[test]
fn the_startup_probe_holds_the_others_back() {
    let mut spec = probed(probe::Kind::Startup);
    spec.containers[0].liveness_probe = Some(v1::Probe::default());
    spec.containers[0].readiness_probe = Some(v1::Probe::default());
    let (mut facts, mut live) = ready();
    run(&mut facts, "a");
    let action = |kind| Action::Probe("a".into(), kind);
    assert_eq!(
        plan(&spec, &facts, &live, at(0)).actions,
        [action(probe::Kind::Startup)]
    );
    let probe = spec.containers[0].startup_probe.clone().unwrap();
    let state = live.containers.entry("a".into()).or_default();
    state.probe_mut(probe::Kind::Startup).begin(&probe, at(0));
    assert_eq!(plan(&spec, &facts, &live, at(3)), Plan::default());
    current(&mut facts, "a").health.started = true;
    assert_eq!(
        plan(&spec, &facts, &live, at(3)).actions,
        [
            action(probe::Kind::Liveness),
            action(probe::Kind::Readiness)
        ]
    );
}

#[test]
fn a_hook_comes_before_all_probes() {
    let mut spec = probed(probe::Kind::Startup);
    spec.containers[0].post_start = Some(v1::Handler::default());
    let (mut facts, mut live) = ready();
    run(&mut facts, "a");
    assert_eq!(
        plan(&spec, &facts, &live, at(0)).actions,
        [Action::PostStart("a".into())]
    );
    live.containers
        .entry("a".into())
        .or_default()
        .post_start
        .begin();
    assert_eq!(plan(&spec, &facts, &live, at(0)), Plan::default());
    current(&mut facts, "a").health.hooked = true;
    assert_eq!(
        plan(&spec, &facts, &live, at(0)).actions,
        [Action::Probe("a".into(), probe::Kind::Startup)]
    );
}

#[test]
fn a_doomed_container_gets_the_grace_of_its_probe() {
    let spec = probed(probe::Kind::Liveness);
    for (own, kill_at) in [(None, 130), (Some(5), 105), (Some(0), 102)] {
        let (mut facts, mut live) = ready();
        run(&mut facts, "a");
        current(&mut facts, "a").doom = Some(Doom {
            since: at(100),
            message: String::new(),
            grace_seconds: own,
        });
        let asked = plan(&spec, &facts, &live, at(100));
        assert_eq!(
            asked,
            Plan {
                actions: vec![Action::Ask {
                    container: "a".into(),
                    why: Why::Doomed,
                    hook: false
                }],
                wake: Some(at(kill_at))
            }
        );
        live.containers.entry("a".into()).or_default().asked_at = Some(at(100));
        assert_eq!(
            plan(&spec, &facts, &live, at(kill_at)).actions,
            [Action::Kill("a".into())]
        );
    }
}

#[test]
fn a_hook_runs_before_the_signal_within_the_grace() {
    let mut spec = spec(&["a"]);
    spec.containers[0].pre_stop = Some(v1::Handler::default());
    let (mut facts, mut live) = ready();
    run(&mut facts, "a");
    facts.removal = Some(Removal {
        deadline: at(30),
        reason: String::new(),
    });
    assert_eq!(
        plan(&spec, &facts, &live, at(0)),
        Plan {
            actions: vec![Action::Ask {
                container: "a".into(),
                why: Why::Stopping,
                hook: true
            }],
            wake: Some(at(30))
        }
    );
    let a = live.containers.entry("a".into()).or_default();
    a.asked_at = Some(at(0));
    a.pre_stop.begin();
    let signal = Action::Signal("a".into());
    assert_eq!(plan(&spec, &facts, &live, at(29)).actions, []);
    let late = plan(&spec, &facts, &live, at(30));
    assert_eq!(
        (late.actions, late.wake),
        (vec![signal.clone()], Some(at(32)))
    );
    let a = live.containers.get_mut("a").unwrap();
    a.pre_stop = Step::Done;
    assert_eq!(plan(&spec, &facts, &live, at(3)).actions, [signal]);
    live.containers.get_mut("a").unwrap().signalled_at = Some(at(29));
    assert_eq!(plan(&spec, &facts, &live, at(30)).wake, Some(at(31)));
    assert_eq!(
        plan(&spec, &facts, &live, at(31)).actions,
        [Action::Kill("a".into())]
    );
}

#[test]
fn sidecars_run_their_hooks_early_and_end_late() {
    let mut spec = spec(&["a"]);
    spec.init_containers = vec![v1::Container {
        sidecar: true,
        pre_stop: Some(v1::Handler::default()),
        ..container("side")
    }];
    let (mut facts, mut live) = ready();
    run(&mut facts, "a");
    run(&mut facts, "side");
    facts.removal = Some(Removal {
        deadline: at(30),
        reason: String::new(),
    });
    let side = Action::Ask {
        container: "side".into(),
        why: Why::Stopping,
        hook: true,
    };
    assert_eq!(plan(&spec, &facts, &live, at(0)).actions, [ask("a"), side]);
    for name in ["a", "side"] {
        live.containers.entry(name.into()).or_default().asked_at = Some(at(0));
    }
    live.containers.get_mut("side").unwrap().pre_stop = Step::Done;
    assert_eq!(plan(&spec, &facts, &live, at(1)).actions, []);
    end(&mut facts, "a", 0, 2);
    assert_eq!(
        plan(&spec, &facts, &live, at(2)).actions,
        [Action::Signal("side".into())]
    );
}

#[test]
fn a_sidecar_that_has_not_started_holds_up_the_next() {
    let mut spec = spec(&["main"]);
    spec.init_containers = vec![
        v1::Container {
            sidecar: true,
            startup_probe: Some(v1::Probe::default()),
            ..container("side")
        },
        container("one"),
    ];
    let (mut facts, mut live) = ready();
    image_ready(&mut live, "side");
    image_ready(&mut live, "one");
    run(&mut facts, "side");
    let probe = Action::Probe("side".into(), probe::Kind::Startup);
    assert_eq!(plan(&spec, &facts, &live, at(0)).actions, [probe]);
    current(&mut facts, "side").health.started = true;
    assert_eq!(plan(&spec, &facts, &live, at(0)).actions, [start("one")]);
    // Once the next has begun, one that comes back holds up nobody.
    end(&mut facts, "one", 1, 1);
    end(&mut facts, "side", 1, 1);
    assert_eq!(
        plan(&spec, &facts, &live, at(1)).actions,
        [start("side"), start("one")]
    );
}

#[test]
fn readiness_is_asked_until_the_end() {
    let (mut facts, mut live) = ready();
    run(&mut facts, "a");
    facts.removal = Some(Removal {
        deadline: at(30),
        reason: String::new(),
    });
    live.containers.entry("a".into()).or_default().asked_at = Some(at(0));
    for (kind, asked) in [
        (probe::Kind::Readiness, true),
        (probe::Kind::Liveness, false),
        (probe::Kind::Startup, false),
    ] {
        let actions = plan(&probed(kind), &facts, &live, at(1)).actions;
        assert_eq!(!actions.is_empty(), asked, "{kind:?}");
    }
}

#[test]
fn an_ephemeral_container_runs_once_beside_the_others() {
    let mut spec = spec(&["main"]);
    spec.init_containers = vec![container("one")];
    spec.ephemeral_containers = vec![container("debug")];
    let (mut facts, mut live) = ready();
    for name in ["one", "debug"] {
        image_ready(&mut live, name);
    }
    assert_eq!(
        plan(&spec, &facts, &live, at(0)).actions,
        [start("debug"), start("one")]
    );
    end(&mut facts, "debug", 1, 1);
    run(&mut facts, "one");
    assert_eq!(plan(&spec, &facts, &live, at(1)), Plan::default());
    // It neither keeps its sandbox from its end nor is the end of it.
    spec.init_containers.clear();
    spec.restart_policy = v1::RestartPolicy::Never as i32;
    assert!(!is_finished(&spec, &facts));
    end(&mut facts, "main", 0, 2);
    run(&mut facts, "debug");
    assert!(is_finished(&spec, &facts));
    assert_eq!(plan(&spec, &facts, &live, at(2)).actions, [ask("debug")]);
}
