//! What is kept of the cluster, and the state that follows from it. Pure: the watches feed it.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;
use std::sync::Arc;

use sandman_protocol::v1;

use super::policies::{self, HostPolicies, Input, KnownPod, Labels};
use super::services::{self, Key, Known, Slice};
use super::state::State;

/// Namespace and name.
pub(super) type Name = (String, String);

/// The cluster as it was read. A change of one Service compiles that one.
#[derive(Debug, Default)]
pub(super) struct Cluster {
    /// This node's name.
    node: String,
    services: HashMap<Name, Known>,
    slices: HashMap<Name, Owned>,
    /// Slices of a Service, by its name.
    owned: HashMap<Name, BTreeSet<Name>>,
    compiled: BTreeMap<Name, BTreeMap<Key, Arc<v1::ServicePort>>>,
    changed: BTreeSet<Name>,
    pods: HashMap<Name, KnownPod>,
    namespaces: HashMap<Name, Labels>,
    policies: HashMap<Name, policies::Known>,
    by_host: BTreeMap<IpAddr, Arc<HostPolicies>>,
    /// Something that policies are made from changed.
    policies_changed: bool,
    number: u64,
}

/// What of it hosts are told.
#[derive(Debug, Clone, Default)]
pub(super) struct Scope {
    pub(super) services: bool,
    /// Addresses of the hosts whose pods are under policies; none enforces them.
    pub(super) policies: Option<BTreeSet<IpAddr>>,
}

/// A slice of a Service.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Owned {
    /// Name of the Service.
    pub(super) service: Name,
    pub(super) slice: Slice,
}

impl Cluster {
    pub(super) fn new(node: &str) -> Self {
        Self {
            node: node.to_owned(),
            ..Self::default()
        }
    }

    /// A Service is like this now, or is none of ours any more.
    pub(super) fn service(&mut self, name: Name, service: Option<Known>) {
        let old = match service.clone() {
            Some(service) => self.services.insert(name.clone(), service),
            None => self.services.remove(&name),
        };
        if old != service {
            self.changed.insert(name);
        }
    }

    /// An EndpointSlice is like this now, or is none of ours any more.
    pub(super) fn slice(&mut self, name: Name, slice: Option<Owned>) {
        let old = match slice.clone() {
            Some(slice) => self.slices.insert(name.clone(), slice),
            None => self.slices.remove(&name),
        };
        if old == slice {
            return;
        }
        if let Some(Owned { service, .. }) = old {
            if let Some(owned) = self.owned.get_mut(&service) {
                owned.remove(&name);
                if owned.is_empty() {
                    self.owned.remove(&service);
                }
            }
            self.changed.insert(service);
        }
        if let Some(Owned { service, .. }) = slice {
            self.owned.entry(service.clone()).or_default().insert(name);
            self.changed.insert(service);
        }
    }

    /// These are all Services.
    pub(super) fn all_services(&mut self, all: HashMap<Name, Known>) {
        let gone: Vec<Name> = missing(&self.services, &all);
        gone.into_iter().for_each(|name| self.service(name, None));
        all.into_iter()
            .for_each(|(name, service)| self.service(name, Some(service)));
    }

    /// These are all EndpointSlices.
    pub(super) fn all_slices(&mut self, all: HashMap<Name, Owned>) {
        let gone: Vec<Name> = missing(&self.slices, &all);
        gone.into_iter().for_each(|name| self.slice(name, None));
        all.into_iter()
            .for_each(|(name, slice)| self.slice(name, Some(slice)));
    }

    /// A pod is like this now, or is no more.
    pub(super) fn pod(&mut self, name: Name, pod: Option<KnownPod>) {
        self.policies_changed |= put(&mut self.pods, name, pod);
    }

    /// A namespace has these labels now, or is no more.
    pub(super) fn namespace(&mut self, name: Name, labels: Option<Labels>) {
        self.policies_changed |= put(&mut self.namespaces, name, labels);
    }

    /// A NetworkPolicy is like this now, or is no more.
    pub(super) fn policy(&mut self, name: Name, policy: Option<policies::Known>) {
        self.policies_changed |= put(&mut self.policies, name, policy);
    }

    /// These are all pods.
    pub(super) fn all_pods(&mut self, all: HashMap<Name, KnownPod>) {
        self.policies_changed |= self.pods != all;
        self.pods = all;
    }

    /// These are all namespaces.
    pub(super) fn all_namespaces(&mut self, all: HashMap<Name, Labels>) {
        self.policies_changed |= self.namespaces != all;
        self.namespaces = all;
    }

    /// These are all NetworkPolicies.
    pub(super) fn all_policies(&mut self, all: HashMap<Name, policies::Known>) {
        self.policies_changed |= self.policies != all;
        self.policies = all;
    }

    /// Whether [`Self::state`] would give another state than before.
    pub(super) fn is_changed(&self) -> bool {
        !self.changed.is_empty() || self.policies_changed
    }

    /// What hosts are to know now.
    pub(super) fn state(&mut self, scope: &Scope) -> State {
        if let Some(hosts) = &scope.policies
            && std::mem::take(&mut self.policies_changed)
        {
            self.compile_policies(hosts);
        }
        for name in std::mem::take(&mut self.changed) {
            let old = self.compiled.remove(&name).unwrap_or_default();
            let Some(service) = self.services.get(&name) else {
                continue;
            };
            let slices = self.owned.get(&name).into_iter().flatten();
            let slices = slices.filter_map(|slice| Some(&self.slices.get(slice)?.slice));
            let ports = services::compile(service, slices, &self.node);
            let shared = ports.into_iter().map(|(key, port)| {
                let same = old.get(&key).filter(|old| ***old == port).cloned();
                (key, same.unwrap_or_else(|| Arc::new(port)))
            });
            self.compiled.insert(name, shared.collect());
        }
        self.number += 1;
        // Two Services have the same address only while one takes over from the other.
        let all = self.compiled.values().flatten();
        let all = all.map(|(key, port)| (key.clone(), Arc::clone(port)));
        State {
            number: self.number,
            services: scope.services.then(|| all.collect()),
            policies: scope.policies.as_ref().map(|_| self.by_host.clone()),
        }
    }

    /// Whatever is as it was stays shared with the states before.
    fn compile_policies(&mut self, hosts: &BTreeSet<IpAddr>) {
        let input = Input {
            pods: &self.pods,
            namespaces: &self.namespaces,
            policies: &self.policies,
        };
        let old = std::mem::take(&mut self.by_host);
        for (host, policies) in policies::compile(input, hosts) {
            let same = old.get(&host).filter(|old| ***old == policies).cloned();
            self.by_host
                .insert(host, same.unwrap_or_else(|| Arc::new(policies)));
        }
    }
}

/// Whether that changes anything.
fn put<T: Clone + PartialEq>(all: &mut HashMap<Name, T>, name: Name, new: Option<T>) -> bool {
    let old = match new.clone() {
        Some(new) => all.insert(name, new),
        None => all.remove(&name),
    };
    old != new
}

fn missing<T>(before: &HashMap<Name, T>, after: &HashMap<Name, T>) -> Vec<Name> {
    let gone = before.keys().filter(|name| !after.contains_key(*name));
    gone.cloned().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn name(name: &str) -> Name {
        ("ns".to_owned(), name.to_owned())
    }

    fn service(address: &str) -> Known {
        let service = json!({"metadata": {"name": "s"},
            "spec": {"clusterIP": address, "ports": [{"port": 80}]}});
        Known::of(&serde_json::from_value(service).unwrap()).unwrap()
    }

    fn slice(of: &str, endpoint: &str) -> Owned {
        let slice = json!({"metadata": {"name": "x"}, "addressType": "IPv4",
            "ports": [{"port": 8080}], "endpoints": [{"addresses": [endpoint]}]});
        Owned {
            service: name(of),
            slice: Slice::of(&serde_json::from_value(slice).unwrap()).unwrap(),
        }
    }

    fn services() -> Scope {
        Scope {
            services: true,
            policies: None,
        }
    }

    fn told(state: &State, before: Option<&State>) -> Vec<(u32, Vec<u32>)> {
        let host = IpAddr::from([192, 0, 2, 1]);
        let told = state.since(before, host, |number| number.to_string());
        let last = |address: u32| address & 0xff;
        let services = told.services.iter().map(|service| {
            let endpoints = service.endpoints.iter().map(|e| last(e.address));
            (
                last(service.key.as_ref().unwrap().address),
                endpoints.collect(),
            )
        });
        services.collect()
    }

    #[test]
    fn slices_make_up_their_service_in_any_order() {
        let mut cluster = Cluster::new("here");
        cluster.slice(name("a-1"), Some(slice("a", "10.0.0.1")));
        cluster.service(name("a"), Some(service("10.96.0.1")));
        cluster.slice(name("a-2"), Some(slice("a", "10.0.0.2")));
        let first = cluster.state(&services());
        assert_eq!(told(&first, None), [(1, vec![1, 2])]);
        assert!(!cluster.is_changed());

        cluster.slice(name("a-1"), Some(slice("a", "10.0.0.1")));
        assert!(!cluster.is_changed(), "the same again is no news");
        cluster.slice(name("a-1"), Some(slice("b", "10.0.0.1")));
        cluster.service(name("b"), Some(service("10.96.0.2")));
        let second = cluster.state(&services());
        assert_eq!(told(&second, Some(&first)), [(1, vec![2]), (2, vec![1])]);
        cluster.slice(name("a-2"), None);
        cluster.service(name("b"), None);
        let third = cluster.state(&services());
        assert_eq!(told(&third, Some(&second)), [(1, vec![])]);
        let host = IpAddr::from([192, 0, 2, 1]);
        let gone = third.since(Some(&second), host, |number| number.to_string());
        assert_eq!(gone.removed_services.len(), 1);
    }

    #[test]
    fn a_new_list_replaces_what_was_known() {
        let mut cluster = Cluster::new("here");
        cluster.all_services(HashMap::from([
            (name("a"), service("10.96.0.1")),
            (name("b"), service("10.96.0.2")),
        ]));
        cluster.all_slices(HashMap::from([(name("a-1"), slice("a", "10.0.0.1"))]));
        let first = cluster.state(&services());
        cluster.all_services(HashMap::from([(name("a"), service("10.96.0.1"))]));
        cluster.all_slices(HashMap::from([(name("a-2"), slice("a", "10.0.0.2"))]));
        let second = cluster.state(&services());
        assert_eq!(told(&second, Some(&first)), [(1, vec![2])]);
        assert_eq!(told(&second, None).len(), 1);
    }
}
