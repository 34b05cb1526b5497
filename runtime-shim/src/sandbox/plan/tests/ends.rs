//! How sandboxes end.

use super::*;

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
