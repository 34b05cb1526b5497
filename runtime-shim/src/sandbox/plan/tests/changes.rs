//! What a changed pod does to what runs.

use super::*;

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

#[test]
fn another_size_is_given_in_place_or_by_a_new_process() {
    let mut spec = spec(&["a"]);
    let (mut facts, mut live) = ready();
    run(&mut facts, "a");
    let actions = |spec: &v1::SandboxSpec, facts: &Facts, live: &Live| {
        plan(spec, facts, live, at(10)).actions
    };
    assert_eq!(actions(&spec, &facts, &live), []);
    spec.containers[0].resources = Some(v1::ContainerResources {
        cpu_request_millis: 100,
        ..Default::default()
    });
    assert_eq!(actions(&spec, &facts, &live), [Action::Resize]);
    live.resize.begin();
    assert_eq!(actions(&spec, &facts, &live), []);
    live.resize = Step::Todo;
    spec.containers[0].restart_on_cpu_resize = true;
    facts.bounds = crate::spec::resources::pod_limits(&spec);
    let ask = Action::Ask {
        container: "a".into(),
        why: Why::Resized,
        hook: false,
    };
    assert_eq!(actions(&spec, &facts, &live), [ask]);
}
