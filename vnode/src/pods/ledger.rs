//! Which pod is placed where and what it takes there. Kept in memory and built
//! again after a restart from the pods' statuses.

use std::collections::HashMap;

use sandman_protocol::v1::Resources;

use super::placement::Candidate;
use super::resources::{add, assumed, subtract};
use crate::hosts::Uid;
use crate::view::HostName;

/// The book of placements.
#[derive(Debug, Default)]
pub(super) struct Ledger {
    pods: HashMap<Uid, Placed>,
    loads: HashMap<HostName, Load>,
}

#[derive(Debug)]
struct Placed {
    host: HostName,
    requests: Resources,
    owner: Option<Uid>,
}

#[derive(Debug, Default)]
struct Load {
    used: Resources,
    assumed_used: Resources,
    owners: HashMap<Uid, u64>,
}

// === impl Ledger ===

impl Ledger {
    /// Books a pod on a host; an earlier booking of the pod is replaced.
    pub(super) fn book(
        &mut self,
        uid: &Uid,
        host: &HostName,
        requests: Resources,
        owner: Option<&str>,
    ) {
        if self
            .pods
            .get(uid)
            .is_some_and(|p| p.host == *host && p.requests == requests)
        {
            return;
        }
        self.release(uid);
        let owner: Option<Uid> = owner.map(Uid::from);
        let load = self.loads.entry(host.clone()).or_default();
        load.used = add(load.used, requests);
        load.assumed_used = add(load.assumed_used, assumed(requests));
        if let Some(owner) = &owner {
            *load.owners.entry(Uid::clone(owner)).or_default() += 1;
        }
        self.pods.insert(
            Uid::clone(uid),
            Placed {
                host: host.clone(),
                requests,
                owner,
            },
        );
    }

    /// Frees what a pod takes. Returns the host that it was on.
    pub(super) fn release(&mut self, uid: &str) -> Option<HostName> {
        let placed = self.pods.remove(uid)?;
        if let Some(load) = self.loads.get_mut(&placed.host) {
            load.used = subtract(load.used, placed.requests);
            load.assumed_used = subtract(load.assumed_used, assumed(placed.requests));
            if let Some(owner) = placed.owner
                && let Some(count) = load.owners.get_mut(&owner)
            {
                *count -= 1;
                if *count == 0 {
                    load.owners.remove(&owner);
                }
            }
        }
        Some(placed.host)
    }

    /// Fills in what the book knows about a candidate.
    pub(super) fn fill(&self, candidate: &mut Candidate, owner: Option<&str>) {
        if let Some(load) = self.loads.get(&candidate.name) {
            candidate.used = load.used;
            candidate.assumed_used = load.assumed_used;
            candidate.siblings = owner.and_then(|o| load.owners.get(o)).copied().unwrap_or(0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_booked_is_released() {
        let mut ledger = Ledger::default();
        let (a, b) = (HostName::from("a"), HostName::from("b"));
        let requests = Resources {
            cpu_millis: 100,
            pods: 1,
            ..Default::default()
        };
        let candidate = |ledger: &Ledger, name: &HostName| {
            let mut candidate = Candidate {
                name: name.clone(),
                unavailable: None,
                allocatable: None,
                used: Resources::default(),
                assumed_used: Resources::default(),
                siblings: 0,
            };
            ledger.fill(&mut candidate, Some("owner"));
            (
                candidate.used.cpu_millis,
                candidate.used.pods,
                candidate.siblings,
            )
        };
        ledger.book(&"u1".into(), &a, requests, Some("owner"));
        ledger.book(&"u1".into(), &a, requests, Some("owner"));
        ledger.book(&"u2".into(), &a, requests, None);
        assert_eq!(candidate(&ledger, &a), (200, 2, 1));
        ledger.book(&"u1".into(), &b, requests, Some("owner"));
        assert_eq!(candidate(&ledger, &a), (100, 1, 0));
        assert_eq!(candidate(&ledger, &b), (100, 1, 1));
        assert_eq!(ledger.release("u1"), Some(b.clone()));
        assert_eq!(ledger.release("u1"), None);
        assert_eq!(candidate(&ledger, &b), (0, 0, 0));
    }
}
