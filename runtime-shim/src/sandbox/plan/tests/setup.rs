//! From nothing to running: order, failures, restarts.

use super::*;

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
