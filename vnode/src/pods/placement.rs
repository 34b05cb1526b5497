//! On which host a pod goes, as a pure function: it must fit, the emptier host
//! wins, and pods of one owner are spread.

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};

use sandman_protocol::v1::Resources;

use super::resources::{add, assumed};
use crate::view::HostName;

/// A host as placement sees it.
#[derive(Debug, Clone)]
pub struct Candidate {
    /// Its name.
    pub name: HostName,
    /// Why no pod goes there now, e.g. "lost"; `None` for a usable host.
    pub unavailable: Option<&'static str>,
    /// What pods may use; `None` if the host was never heard of.
    pub allocatable: Option<Resources>,
    /// Requests of the pods placed there.
    pub used: Resources,
    /// The same, with assumed values for missing requests.
    pub assumed_used: Resources,
    /// Pods placed there that have the same owner.
    pub siblings: u64,
}

/// The outcome.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Decision {
    /// This host.
    Place(HostName),
    /// None at this moment, for the reason given to the user.
    NotNow(String),
    /// None ever: the pod is larger than each host.
    Never {
        /// The kubelet's reason, e.g. `OutOfcpu`.
        reason: &'static str,
        /// The kubelet's message.
        message: String,
    },
}

/// Hosts whose load differs by less than this share are equally good, so that
/// the spread decides.
const LOAD_STEP: f64 = 0.1;

/// Chooses a host for a pod with those `requests`. `uid` breaks ties, so that
/// equal hosts take turns.
pub fn place(uid: &str, requests: Resources, candidates: &[Candidate]) -> Decision {
    if let Some(never) = larger_than_all(requests, candidates) {
        return never;
    }
    let best = candidates
        .iter()
        .filter(|host| obstacle(requests, host).is_none())
        .min_by(|a, b| compare(uid, requests, a, b));
    match best {
        Some(host) => Decision::Place(host.name.clone()),
        None => Decision::NotNow(summary(requests, candidates)),
    }
}

fn compare(uid: &str, requests: Resources, a: &Candidate, b: &Candidate) -> Ordering {
    let load = |host: &Candidate| load_with(requests, host);
    let step = |host: &Candidate| (load(host) / LOAD_STEP).floor();
    step(a)
        .total_cmp(&step(b))
        .then_with(|| a.siblings.cmp(&b.siblings))
        .then_with(|| load(a).total_cmp(&load(b)))
        .then_with(|| a.used.pods.cmp(&b.used.pods))
        .then_with(|| tie_break(uid, &a.name).cmp(&tie_break(uid, &b.name)))
}

/// Fullest dimension of the host once the pod is there, 0 to 1 and above.
fn load_with(requests: Resources, host: &Candidate) -> f64 {
    let Some(allocatable) = host.allocatable else {
        return f64::INFINITY;
    };
    let after = add(host.assumed_used, assumed(requests));
    let share = |used: u64, of: u64| {
        if of == 0 {
            0.0
        } else {
            used as f64 / of as f64
        }
    };
    share(after.cpu_millis, allocatable.cpu_millis)
        .max(share(after.memory_bytes, allocatable.memory_bytes))
        .max(share(after.pods, allocatable.pods))
}

fn tie_break(uid: &str, host: &HostName) -> u64 {
    let mut hasher = DefaultHasher::new();
    (uid, host).hash(&mut hasher);
    hasher.finish()
}

/// Name, request, use and size of each resource, in the kubelet's order.
fn dimensions(
    requests: Resources,
    used: Resources,
    size: Resources,
) -> [(&'static str, u64, u64, u64); 4] {
    [
        ("pods", requests.pods, used.pods, size.pods),
        ("cpu", requests.cpu_millis, used.cpu_millis, size.cpu_millis),
        (
            "memory",
            requests.memory_bytes,
            used.memory_bytes,
            size.memory_bytes,
        ),
        (
            "ephemeral-storage",
            requests.ephemeral_storage_bytes,
            used.ephemeral_storage_bytes,
            size.ephemeral_storage_bytes,
        ),
    ]
}

fn obstacle(requests: Resources, host: &Candidate) -> Option<String> {
    if let Some(why) = host.unavailable {
        return Some(why.to_owned());
    }
    let Some(size) = host.allocatable else {
        return Some("never connected".to_owned());
    };
    dimensions(requests, host.used, size)
        .into_iter()
        .find(|(_, requested, used, size)| {
            *requested > 0 && *requested > size.saturating_sub(*used)
        })
        .map(|(name, ..)| format!("insufficient {name}"))
}

/// A pod that no host could take even when empty. Says nothing while a host is
/// unknown, because that one might be large enough.
fn larger_than_all(requests: Resources, candidates: &[Candidate]) -> Option<Decision> {
    let sizes: Vec<Resources> = candidates
        .iter()
        .map(|host| host.allocatable)
        .collect::<Option<_>>()?;
    if sizes.is_empty() {
        return None;
    }
    let empty = Resources::default();
    let fits = |size: &Resources| {
        dimensions(requests, empty, *size)
            .into_iter()
            .all(|(_, requested, _, size)| requested <= size)
    };
    if sizes.iter().any(fits) {
        return None;
    }
    // Report the resource that the most capable host lacks.
    let largest = sizes.iter().max_by_key(|size| {
        let met = |(_, requested, _, size): &(&str, u64, u64, u64)| requested <= size;
        (
            dimensions(requests, empty, **size)
                .iter()
                .filter(|d| met(d))
                .count(),
            size.cpu_millis,
        )
    })?;
    let (name, requested, _, capacity) = dimensions(requests, empty, *largest)
        .into_iter()
        .find(|(_, requested, _, size)| requested > size)?;
    let reason = match name {
        "cpu" => "OutOfcpu",
        "memory" => "OutOfmemory",
        "pods" => "OutOfpods",
        _ => "OutOfephemeral-storage",
    };
    Some(Decision::Never {
        reason,
        message: format!(
            "Node didn't have enough resource: {name}, requested: {requested}, used: 0, capacity: {capacity}"
        ),
    })
}

/// "0/3 hosts can take the pod: 2 insufficient cpu, 1 lost".
fn summary(requests: Resources, candidates: &[Candidate]) -> String {
    let mut counts: BTreeMap<String, usize> = BTreeMap::new();
    for host in candidates {
        if let Some(why) = obstacle(requests, host) {
            *counts.entry(why).or_default() += 1;
        }
    }
    let reasons: Vec<String> = counts
        .iter()
        .map(|(why, count)| format!("{count} {why}"))
        .collect();
    format!(
        "0/{} hosts can take the pod: {}",
        candidates.len(),
        reasons.join(", ")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZE: Resources = Resources {
        cpu_millis: 4000,
        memory_bytes: 8 << 30,
        ephemeral_storage_bytes: 100 << 30,
        pods: 10,
    };

    fn host(name: &str) -> Candidate {
        Candidate {
            name: name.into(),
            unavailable: None,
            allocatable: Some(SIZE),
            used: Resources::default(),
            assumed_used: Resources::default(),
            siblings: 0,
        }
    }

    fn loaded(name: &str, cpu_millis: u64, pods: u64) -> Candidate {
        let used = Resources {
            cpu_millis,
            pods,
            ..Default::default()
        };
        Candidate {
            used,
            assumed_used: used,
            ..host(name)
        }
    }

    fn cpu(cpu_millis: u64) -> Resources {
        Resources {
            cpu_millis,
            pods: 1,
            ..Default::default()
        }
    }

    fn on(name: &str) -> Decision {
        Decision::Place(name.into())
    }

    #[test]
    fn the_emptier_host_wins_when_it_fits() {
        assert_eq!(
            place("u", cpu(500), &[loaded("a", 3000, 3), loaded("b", 1000, 3)]),
            on("b")
        );
        assert_eq!(
            place("u", cpu(500), &[loaded("a", 3800, 3), loaded("b", 3000, 3)]),
            on("b")
        );
    }

    #[test]
    fn siblings_are_spread_over_nearly_equal_hosts() {
        let busy = Candidate {
            siblings: 2,
            ..loaded("a", 0, 2)
        };
        let other = Candidate {
            siblings: 0,
            ..loaded("b", 100, 2)
        };
        assert_eq!(place("u", cpu(10), &[busy, other]), on("b"));
    }

    #[test]
    fn equal_hosts_take_turns() {
        let hosts = [host("a"), host("b"), host("c")];
        let mut counts = BTreeMap::new();
        for index in 0..300 {
            let Decision::Place(name) = place(&format!("uid-{index}"), cpu(0), &hosts) else {
                panic!("empty hosts take every pod");
            };
            *counts.entry(name).or_insert(0) += 1;
        }
        assert!(
            counts.values().all(|count| (60..=140).contains(count)),
            "{counts:?}"
        );
    }

    #[test]
    fn a_pod_without_requests_still_counts() {
        let mut hosts = [host("a"), host("b")];
        for index in 0..10 {
            let Decision::Place(name) = place(&format!("{index}"), cpu(0), &hosts) else {
                panic!("room for all");
            };
            let host = hosts.iter_mut().find(|host| host.name == name).unwrap();
            host.used = add(host.used, cpu(0));
            host.assumed_used = add(host.assumed_used, assumed(cpu(0)));
        }
        assert_eq!(hosts[0].used.pods, 5);
    }

    #[test]
    fn larger_than_every_host_is_refused_in_the_kubelets_words() {
        let decision = place("u", cpu(5000), &[loaded("a", 100, 1), host("b")]);
        assert_eq!(
            decision,
            Decision::Never {
                reason: "OutOfcpu",
                message: "Node didn't have enough resource: cpu, requested: 5000, used: 0, capacity: 4000".into(),
            }
        );
        let memory = Resources {
            memory_bytes: 9 << 30,
            pods: 1,
            ..Default::default()
        };
        assert!(matches!(
            place("u", memory, &[host("a")]),
            Decision::Never {
                reason: "OutOfmemory",
                ..
            }
        ));
    }

    #[test]
    fn never_is_said_only_when_every_host_is_known() {
        let unknown = Candidate {
            allocatable: None,
            ..host("b")
        };
        assert!(matches!(
            place("u", cpu(5000), &[host("a"), unknown]),
            Decision::NotNow(_)
        ));
        assert!(matches!(place("u", cpu(1), &[]), Decision::NotNow(_)));
    }

    #[test]
    fn no_room_now_says_why() {
        let lost = Candidate {
            unavailable: Some("lost"),
            ..host("c")
        };
        assert_eq!(
            place(
                "u",
                cpu(2000),
                &[loaded("a", 3000, 1), loaded("b", 0, 10), lost]
            ),
            Decision::NotNow(
                "0/3 hosts can take the pod: 1 insufficient cpu, 1 insufficient pods, 1 lost"
                    .into()
            )
        );
    }
}
