//! Hooks and probes.

use super::*;

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
