use jiff::Timestamp;

use super::*;
use crate::sandbox::facts::{Attempt, ContainerFacts, Phase};
use crate::sandbox::identity::{Identity, Kind};

fn cpu(millis: u64) -> v1::Resources {
    v1::Resources {
        cpu_millis: millis,
        ..Default::default()
    }
}

fn sized(name: &str, millis: u64, memory: u64) -> v1::Container {
    v1::Container {
        name: name.into(),
        resources: Some(v1::ContainerResources {
            cpu_request_millis: millis,
            memory_limit_bytes: memory,
            ..Default::default()
        }),
        ..Default::default()
    }
}

fn spec(containers: Vec<v1::Container>) -> v1::SandboxSpec {
    v1::SandboxSpec {
        schema: 1,
        requests: Some(cpu(100)),
        containers,
        ..Default::default()
    }
}

fn running(spec: &v1::SandboxSpec) -> Facts {
    let mut facts = Facts {
        bounds: pod_limits(spec),
        ..Default::default()
    };
    for container in &spec.containers {
        let identity = Identity {
            uid: "u".into(),
            namespace: "n".into(),
            pod: "p".into(),
            container: container.name.clone(),
            attempt: 3,
            kind: Kind::Regular,
            spec_hash: String::new(),
            image: String::new(),
            image_id: String::new(),
            stop_signal: 15,
        };
        let mut attempt = Attempt::running(&identity, Timestamp::UNIX_EPOCH);
        attempt.size = Some(Size::of(spec, container));
        let history = ContainerFacts {
            current: Some(attempt),
            ..Default::default()
        };
        facts.containers.insert(container.name.clone(), history);
    }
    facts
}

#[test]
fn room_is_given_deferred_or_never() {
    use v1::resize::Pending::{Deferred, Infeasible};
    for (asked, has, others, expected) in [
        (500, 100, 500, None),
        (600, 100, 500, Some(Deferred)),
        (1001, 100, 0, Some(Infeasible)),
        // Shrinking helps, even on a host that has too much already.
        (100, 200, 2000, None),
    ] {
        let found = fits(cpu(asked), cpu(has), cpu(others), cpu(1000));
        assert_eq!(found.err().map(|why| why.kind()), expected, "{asked}");
    }
    let Err(why) = fits(cpu(600), cpu(1), cpu(500), cpu(1000)) else {
        panic!("no room")
    };
    assert_eq!(
        why.message(),
        "Node didn't have enough resource: cpu, requested: 600, used: 500, capacity: 1000"
    );
}

#[test]
fn what_is_not_given_keeps_its_size_and_nothing_else() {
    let (old, mut new) = (
        spec(vec![sized("c", 100, 1)]),
        spec(vec![sized("c", 300, 1)]),
    );
    new.generation = 7;
    new.containers[0].image = "other".into();
    new.requests = Some(cpu(300));
    new.pod_resources = sized("p", 1, 1).resources;
    assert!(is_resize(&old, &new) && !is_resize(&old, &old));
    let kept = keep_sizes(&old, new);
    assert!(!is_resize(&old, &kept));
    assert_eq!(
        (kept.requests, kept.pod_resources),
        (old.requests, old.pod_resources)
    );
    assert_eq!((kept.generation, &*kept.containers[0].image), (7, "other"));
}

#[test]
fn a_limit_of_the_pod_is_a_size_of_its_containers() {
    let old = spec(vec![sized("c", 100, 0)]);
    let mut new = old.clone();
    new.pod_resources = sized("p", 0, 50).resources;
    assert!(is_resize(&old, &new));
    let size = Size::of(&new, &new.containers[0]);
    assert_eq!(size.memory_limit_bytes, 50);
    let told = size.put_into(new.containers[0].resources.unwrap());
    assert_eq!(told.memory_limit_bytes, 0);
}

#[test]
fn a_sandbox_known_from_labels_is_not_resized() {
    let mut old = spec(vec![sized("c", 100, 0)]);
    old.schema = 0;
    assert!(!is_resize(&old, &spec(vec![sized("c", 200, 0)])));
}

#[test]
fn shrinking_comes_first_and_the_pod_has_room_for_both() {
    let old = spec(vec![sized("a", 100, 10), sized("b", 100, 40)]);
    let new = spec(vec![sized("a", 100, 30), sized("b", 100, 10)]);
    let facts = running(&old);
    assert_eq!(change(&old, &facts), None);
    assert!(!is_in_progress(&old, &facts) && is_in_progress(&new, &facts));
    let change = change(&new, &facts).unwrap();
    let names: Vec<_> = change.updates.iter().map(|u| &*u.container).collect();
    assert_eq!(names, ["b", "a"]);
    assert_eq!(change.updates[0].lower_limit(), Some(10));
    assert_eq!(change.updates[1].lower_limit(), None);
    let bounds = change.bounds.unwrap();
    assert_eq!(
        (bounds.through.memory, bounds.to.memory),
        (Some(50), Some(40))
    );
    assert_eq!(bounds.lower_limit(), Some(40));
}

#[test]
fn the_policy_of_what_changed_decides() {
    let old = spec(vec![sized("c", 100, 10)]);
    let facts = running(&old);
    let mut new = spec(vec![sized("c", 200, 10)]);
    new.containers[0].restart_on_memory_resize = true;
    assert!(!must_restart(&new, &facts, &new.containers[0]));
    new.containers[0].restart_on_cpu_resize = true;
    assert!(must_restart(&new, &facts, &new.containers[0]));
    // The new process gets the size; nothing is left for this one.
    assert_eq!(change(&new, &facts), None);
    assert!(is_in_progress(&new, &facts));
    // Nor is it done while there is none.
    let mut between = facts.clone();
    let current = &mut between.containers.get_mut("c").unwrap().current;
    let attempt = current.as_mut().unwrap();
    attempt.replaced = true;
    attempt.phase = Phase::Exited {
        since: Timestamp::UNIX_EPOCH,
        code: 143,
        at: Timestamp::UNIX_EPOCH,
        lost: false,
    };
    assert!(is_in_progress(&new, &between));
}

#[test]
fn the_pod_keeps_its_room_until_its_container_has_restarted() {
    let old = spec(vec![sized("c", 100, 40)]);
    let facts = running(&old);
    let mut new = spec(vec![sized("c", 100, 10)]);
    new.containers[0].restart_on_memory_resize = true;
    assert_eq!(change(&new, &facts), None);
    let mut restarted = running(&new);
    restarted.bounds = facts.bounds;
    let change = change(&new, &restarted).unwrap();
    assert!(change.updates.is_empty());
    assert_eq!(change.bounds.unwrap().to.memory, Some(10));
}

#[test]
fn an_attempt_of_unknown_size_gets_one_without_a_restart() {
    let mut spec = spec(vec![sized("c", 100, 10)]);
    spec.containers[0].restart_on_cpu_resize = true;
    let mut facts = running(&spec);
    let current = &mut facts.containers.get_mut("c").unwrap().current;
    current.as_mut().unwrap().size = None;
    assert_eq!(change(&spec, &facts).unwrap().updates.len(), 1);
    assert!(!is_in_progress(&spec, &facts));
}
