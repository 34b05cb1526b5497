//! What hosts are to know at one moment, and what of it is news to a host. Pure.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use sandman_protocol::v1;

use super::policies::HostPolicies;
use super::services::Key;

/// What hosts are to know. Cheap to compare with an earlier one: what did not change is shared.
#[derive(Debug, Clone, Default)]
pub(super) struct State {
    /// Number of this state in this process.
    pub(super) number: u64,
    /// `None`: Services are not served.
    pub(super) services: Option<BTreeMap<Key, Arc<v1::ServicePort>>>,
    /// By the host's address; `None`: policies are not enforced.
    pub(super) policies: Option<BTreeMap<IpAddr, Arc<HostPolicies>>>,
}

impl State {
    /// Nothing of the cluster's network is served.
    pub(super) fn off() -> Self {
        Self::default()
    }

    /// Whether nothing is served, so that a host that knows nothing of it is as good.
    pub(super) fn is_off(&self) -> bool {
        self.services.is_none() && self.policies.is_none()
    }

    /// Whether a host that has `before` has this as well.
    pub(super) fn is_same_for(&self, before: &Self, host: IpAddr) -> bool {
        self.services == before.services && self.of(host) == before.of(host)
    }

    fn of(&self, host: IpAddr) -> Option<&HostPolicies> {
        self.policies.as_ref()?.get(&host).map(|of| &**of)
    }

    /// What to tell a host that has taken `before`, or nothing yet. `name` makes a version of a
    /// state's number that no other process makes.
    pub(super) fn since(
        &self,
        before: Option<&Self>,
        host: IpAddr,
        name: impl Fn(u64) -> String,
    ) -> v1::ClusterNetworkRequest {
        let nobody = HostPolicies::default();
        let known = before.and_then(|before| before.of(host)).unwrap_or(&nobody);
        let wanted = self.of(host).unwrap_or(&nobody);
        let none = BTreeMap::new();
        let old = before.and_then(|before| before.services.as_ref());
        let (old, new) = (
            old.unwrap_or(&none),
            self.services.as_ref().unwrap_or(&none),
        );
        let (services, gone) = difference(old, new);
        let (policies, removed_policies) = difference(&known.pods, &wanted.pods);
        let (peers, removed_peers) = difference(&known.peers, &wanted.peers);
        v1::ClusterNetworkRequest {
            term: 0,
            base: before.map(|before| name(before.number)).unwrap_or_default(),
            version: name(self.number),
            serve_services: self.services.is_some(),
            services,
            removed_services: gone
                .filter_map(|key| old.get(key).and_then(|service| service.key.clone()))
                .collect(),
            enforce_policies: self.policies.is_some(),
            policies,
            removed_policies: removed_policies.cloned().collect(),
            peers,
            removed_peers: removed_peers.cloned().collect(),
        }
    }
}

/// What is new or different, and the keys of what is gone.
fn difference<'a, K: Ord, V: Clone + PartialEq>(
    old: &'a BTreeMap<K, Arc<V>>,
    new: &'a BTreeMap<K, Arc<V>>,
) -> (Vec<V>, impl Iterator<Item = &'a K>) {
    let changed = new.iter().filter(|(key, value)| {
        let old = old.get(*key);
        old.is_none_or(|old| !Arc::ptr_eq(old, value) && old != *value)
    });
    let changed = changed.map(|(_, value)| (**value).clone()).collect();
    (changed, old.keys().filter(|key| !new.contains_key(*key)))
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOST: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 1));
    const OTHER: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 2));

    fn state(number: u64, services: &[(u32, u32)]) -> State {
        let services = services.iter().map(|&(port, endpoint)| {
            let key = (std::net::Ipv4Addr::LOCALHOST, port, "TCP".to_owned());
            let service = v1::ServicePort {
                key: Some(v1::ServiceKey {
                    address: 1,
                    port,
                    protocol: "TCP".to_owned(),
                }),
                endpoints: vec![v1::Endpoint {
                    address: endpoint,
                    port,
                }],
                affinity_seconds: 0,
            };
            (key, Arc::new(service))
        });
        State {
            number,
            services: Some(services.collect()),
            policies: None,
        }
    }

    fn with_pods(number: u64, pods: &[(IpAddr, &str)]) -> State {
        let mut policies: BTreeMap<IpAddr, HostPolicies> = BTreeMap::new();
        for (host, uid) in pods {
            let policy = v1::PodPolicy {
                uid: (*uid).to_owned(),
                ..Default::default()
            };
            let of_host = policies.entry(*host).or_default();
            of_host.pods.insert((*uid).to_owned(), Arc::new(policy));
        }
        State {
            number,
            services: None,
            policies: Some(
                policies
                    .into_iter()
                    .map(|(h, p)| (h, Arc::new(p)))
                    .collect(),
            ),
        }
    }

    fn name(number: u64) -> String {
        format!("a-{number}")
    }

    #[test]
    fn a_host_that_knows_nothing_is_told_everything() {
        let told = state(3, &[(1, 1), (2, 2)]).since(None, HOST, name);
        assert_eq!((told.base.as_str(), told.version.as_str()), ("", "a-3"));
        assert_eq!(told.services.len(), 2);
        assert!(told.serve_services && told.removed_services.is_empty());
        assert!(!told.enforce_policies);
        let off = State::off().since(None, HOST, name);
        assert!(!off.serve_services && off.services.is_empty());
    }

    #[test]
    fn others_are_told_what_differs() {
        let before = state(3, &[(1, 1), (2, 2), (3, 3)]);
        let told = state(5, &[(1, 1), (2, 9), (4, 4)]).since(Some(&before), HOST, name);
        assert_eq!((told.base.as_str(), told.version.as_str()), ("a-3", "a-5"));
        let ports = |keys: Vec<Option<v1::ServiceKey>>| {
            keys.into_iter()
                .flatten()
                .map(|key| key.port)
                .collect::<Vec<_>>()
        };
        let changed = told.services.into_iter().map(|service| service.key);
        assert_eq!(ports(changed.collect()), [2, 4]);
        let removed = told.removed_services.into_iter().map(Some);
        assert_eq!(ports(removed.collect()), [3]);
    }

    #[test]
    fn a_host_is_told_of_its_own_pods() {
        let before = with_pods(1, &[(HOST, "a"), (OTHER, "b")]);
        let now = with_pods(2, &[(HOST, "c"), (OTHER, "b")]);
        let told = now.since(Some(&before), HOST, name);
        assert!(told.enforce_policies);
        assert_eq!(told.policies.len(), 1);
        assert_eq!(told.policies[0].uid, "c");
        assert_eq!(told.removed_policies, ["a"]);
        assert!(now.is_same_for(&before, OTHER) && !now.is_same_for(&before, HOST));
        assert_eq!(now.since(None, OTHER, name).policies[0].uid, "b");
    }
}
