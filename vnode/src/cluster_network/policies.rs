//! NetworkPolicies as `networking.k8s.io/v1` defines them, made into rules of single pods. Pure.
//!
//! A pod that no policy selects in a direction is open in it; one that policies select takes what
//! any of them allows. Peers that are pods become sets of addresses, shared by all rules that name
//! the same peers. IPv4 only, as pods are.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::networking::v1::{
    IPBlock, NetworkPolicy, NetworkPolicyPeer, NetworkPolicyPort,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use kube::ResourceExt as _;
use kube::core::{Selector, SelectorExt as _};
use sandman_protocol::v1;
use sha2::{Digest as _, Sha256};

use super::cluster::Name;

pub(super) type Labels = BTreeMap<String, String>;

/// What is kept of a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct KnownPod {
    uid: String,
    namespace: String,
    labels: Labels,
    /// Its own address; none for pods in a host's network and those that ended.
    address: Option<Ipv4Addr>,
    /// Where it is placed.
    host: Option<IpAddr>,
    own_network: bool,
    ports: Vec<(String, String, u32)>,
}

/// What is kept of a NetworkPolicy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Known {
    namespace: String,
    pods: Selector,
    ingress: Option<Vec<Rule>>,
    egress: Option<Vec<Rule>>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Rule {
    /// None: anyone.
    peers: Option<Vec<Peer>>,
    /// Empty: any port of any protocol.
    ports: Vec<Port>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Peer {
    Pods {
        /// Tells this choice of pods from all others.
        id: String,
        /// None: the policy's own.
        namespaces: Option<Selector>,
        pods: Selector,
    },
    Block {
        id: String,
        ranges: Vec<(u32, u32)>,
    },
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Port {
    Range(String, u32, u32),
    Named(String, String),
}

/// Policies of one host's pods.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct HostPolicies {
    /// By UID; a pod is there even if it is open.
    pub(super) pods: BTreeMap<String, Arc<v1::PodPolicy>>,
    /// By id; those that the pods' rules name.
    pub(super) peers: BTreeMap<String, Arc<v1::PeerSet>>,
}

/// What policies are compiled from.
#[derive(Debug, Clone, Copy)]
pub(super) struct Input<'a> {
    pub(super) pods: &'a HashMap<Name, KnownPod>,
    /// Labels; the namespace of a namespace's name is empty.
    pub(super) namespaces: &'a HashMap<Name, Labels>,
    pub(super) policies: &'a HashMap<Name, Known>,
}

// === impl KnownPod ===

impl KnownPod {
    pub(super) fn of(pod: &Pod) -> Option<Self> {
        let spec = pod.spec.as_ref()?;
        let status = pod.status.clone().unwrap_or_default();
        let own_network = spec.host_network != Some(true);
        let over = matches!(status.phase.as_deref(), Some("Succeeded" | "Failed"));
        let ips = status.pod_ips.iter().flatten().map(|ip| &ip.ip);
        let mut ips = status.pod_ip.iter().chain(ips);
        // Init containers that go on running have ports, too.
        let containers = spec.containers.iter();
        let containers = containers.chain(spec.init_containers.iter().flatten());
        let ports = containers
            .flat_map(|container| container.ports.iter().flatten())
            .filter_map(|port| {
                let protocol = port.protocol.clone().unwrap_or_else(tcp);
                Some((port.name.clone()?, protocol, number(port.container_port)?))
            });
        Some(Self {
            uid: pod.uid()?,
            namespace: pod.namespace()?,
            labels: pod.labels().clone(),
            address: ips
                .find_map(|ip| ip.parse().ok())
                .filter(|_| own_network && !over),
            host: status.host_ip.as_ref().and_then(|ip| ip.parse().ok()),
            own_network,
            ports: ports.collect(),
        })
    }

    fn named(&self, name: &str, protocol: &str) -> Option<u32> {
        let mut ports = self.ports.iter();
        ports
            .find(|(n, p, _)| n == name && p == protocol)
            .map(|(_, _, number)| *number)
    }
}

// === impl Known ===

impl Known {
    /// `None` for what the API server would not have taken.
    pub(super) fn of(policy: &NetworkPolicy) -> Option<Self> {
        let namespace = policy.namespace()?;
        let spec = policy.spec.as_ref()?;
        let types = spec.policy_types.as_deref().unwrap_or_default();
        let typed = |name: &str| types.iter().any(|own| own == name);
        let ingress = types.is_empty() || typed("Ingress");
        let egress = typed("Egress") || (types.is_empty() && spec.egress.is_some());
        let rule = |peers: &Option<Vec<NetworkPolicyPeer>>, ports: &Option<Vec<_>>| Rule {
            // An empty list of peers is as none: anyone.
            peers: peers.as_ref().filter(|peers| !peers.is_empty()).map(|all| {
                all.iter()
                    .filter_map(|peer| Peer::of(peer, &namespace))
                    .collect()
            }),
            ports: ports.iter().flatten().filter_map(Port::of).collect(),
        };
        let from = spec.ingress.iter().flatten();
        let to = spec.egress.iter().flatten();
        Some(Self {
            pods: selector(spec.pod_selector.as_ref())?,
            ingress: ingress.then(|| from.map(|r| rule(&r.from, &r.ports)).collect()),
            egress: egress.then(|| to.map(|r| rule(&r.to, &r.ports)).collect()),
            namespace,
        })
    }

    fn selects(&self, pod: &KnownPod) -> bool {
        self.namespace == pod.namespace && self.pods.matches(&pod.labels)
    }
}

impl Peer {
    fn of(peer: &NetworkPolicyPeer, namespace: &str) -> Option<Self> {
        if let Some(block) = &peer.ip_block {
            let ranges = ranges(block);
            return Some(Self::Block {
                id: id(&("block", &ranges)),
                ranges,
            });
        }
        let namespaces = match &peer.namespace_selector {
            Some(namespaces) => Some(selector(Some(namespaces))?),
            None => None,
        };
        let own = namespaces.is_none().then_some(namespace);
        Some(Self::Pods {
            id: id(&("pods", own, &peer.namespace_selector, &peer.pod_selector)),
            namespaces,
            pods: selector(peer.pod_selector.as_ref())?,
        })
    }

    fn id(&self) -> &str {
        match self {
            Self::Pods { id, .. } | Self::Block { id, .. } => id,
        }
    }
}

impl Port {
    fn of(port: &NetworkPolicyPort) -> Option<Self> {
        let protocol = port.protocol.clone().unwrap_or_else(tcp);
        match &port.port {
            None => Some(Self::Range(protocol, 0, u32::from(u16::MAX))),
            Some(IntOrString::String(name)) => Some(Self::Named(protocol, name.clone())),
            Some(IntOrString::Int(first)) => {
                let first = number(*first)?;
                let last = port.end_port.and_then(number).unwrap_or(first);
                Some(Self::Range(protocol, first, last.max(first)))
            }
        }
    }
}

/// No selector, like an empty one, selects everything. `None` if it cannot be read.
fn selector(selector: Option<&LabelSelector>) -> Option<Selector> {
    selector.cloned().unwrap_or_default().try_into().ok()
}

fn id(of: &impl serde::Serialize) -> String {
    let text = serde_json::to_vec(of).unwrap_or_default();
    hex::encode(&Sha256::digest(text)[..8])
}

fn tcp() -> String {
    "TCP".to_owned()
}

fn number(port: i32) -> Option<u32> {
    u16::try_from(port)
        .ok()
        .filter(|&port| port > 0)
        .map(u32::from)
}

/// The block without its exceptions, first and last address of each part. IPv6 has no part.
fn ranges(block: &IPBlock) -> Vec<(u32, u32)> {
    let Some((first, last)) = range(&block.cidr) else {
        return Vec::new();
    };
    let mut except: Vec<_> = block
        .except
        .iter()
        .flatten()
        .filter_map(|c| range(c))
        .collect();
    except.sort_unstable();
    let mut parts = Vec::new();
    // Beyond the last address there is none, so that the next one needs more bits.
    let mut next = u64::from(first);
    for (from, to) in except {
        if u64::from(from) > next {
            parts.push((next, u64::from(from) - 1));
        }
        next = next.max(u64::from(to) + 1);
    }
    if next <= u64::from(last) {
        parts.push((next, u64::from(last)));
    }
    parts
        .into_iter()
        .filter_map(|(from, to)| Some((u32::try_from(from).ok()?, u32::try_from(to).ok()?)))
        .filter(|(from, _)| *from <= last)
        .map(|(from, to)| (from, to.min(last)))
        .collect()
}

fn range(cidr: &str) -> Option<(u32, u32)> {
    let (address, prefix) = cidr.split_once('/')?;
    let address: Ipv4Addr = address.parse().ok()?;
    let prefix: u32 = prefix.parse().ok().filter(|&prefix| prefix <= 32)?;
    let rest = u32::MAX.checked_shr(prefix).unwrap_or(0);
    let first = address.to_bits() & !rest;
    Some((first, first | rest))
}

// === compiling ===

/// The policies of the pods of each of these hosts.
pub(super) fn compile(
    input: Input<'_>,
    hosts: &BTreeSet<IpAddr>,
) -> BTreeMap<IpAddr, HostPolicies> {
    let mut compiler = Compiler {
        input,
        sets: BTreeMap::new(),
    };
    let mut all: BTreeMap<IpAddr, HostPolicies> = BTreeMap::new();
    for host in hosts {
        all.entry(*host).or_default();
    }
    for pod in input.pods.values().filter(|pod| pod.own_network) {
        let Some(of_host) = pod.host.and_then(|host| all.get_mut(&host)) else {
            continue;
        };
        let policy = compiler.policy(pod);
        for isolation in [&policy.ingress, &policy.egress].into_iter().flatten() {
            for id in isolation.rules.iter().flat_map(|rule| &rule.peers) {
                if let Some(set) = compiler.sets.get(id) {
                    of_host
                        .peers
                        .entry(id.clone())
                        .or_insert_with(|| Arc::clone(set));
                }
            }
        }
        of_host.pods.insert(pod.uid.clone(), Arc::new(policy));
    }
    all
}

struct Compiler<'a> {
    input: Input<'a>,
    /// Made when first named.
    sets: BTreeMap<String, Arc<v1::PeerSet>>,
}

impl Compiler<'_> {
    fn policy(&mut self, pod: &KnownPod) -> v1::PodPolicy {
        let mut policy = v1::PodPolicy {
            uid: pod.uid.clone(),
            ingress: None,
            egress: None,
        };
        let selecting = self
            .input
            .policies
            .iter()
            .filter(|(_, own)| own.selects(pod));
        // In a fixed order, so that the same policies make the same rules.
        for known in selecting.collect::<BTreeMap<_, _>>().into_values() {
            for rule in known.ingress.iter().flatten() {
                let rules = self.ingress(pod, known, rule);
                policy.ingress.get_or_insert_default().rules.extend(rules);
            }
            for rule in known.egress.iter().flatten() {
                let rules = self.egress(known, rule);
                policy.egress.get_or_insert_default().rules.extend(rules);
            }
            if known.ingress.is_some() {
                policy.ingress.get_or_insert_default();
            }
            if known.egress.is_some() {
                policy.egress.get_or_insert_default();
            }
        }
        policy
    }

    /// Named ports are the pod's own.
    fn ingress(&mut self, pod: &KnownPod, policy: &Known, rule: &Rule) -> Option<v1::PolicyRule> {
        let ports = rule.ports.iter().filter_map(|port| match port {
            Port::Range(protocol, first, last) => Some(port_range(protocol, *first, *last)),
            Port::Named(protocol, name) => {
                let number = pod.named(name, protocol)?;
                Some(port_range(protocol, number, number))
            }
        });
        let ports: Vec<_> = ports.collect();
        // None of the ports is one of this pod: it allows nothing, rather than everything.
        if ports.is_empty() && !rule.ports.is_empty() {
            return None;
        }
        self.rule(policy, rule, ports)
    }

    /// Named ports are the peers', each its own.
    fn egress(&mut self, policy: &Known, rule: &Rule) -> Vec<v1::PolicyRule> {
        let numbered: Vec<_> = rule
            .ports
            .iter()
            .filter_map(|port| match port {
                Port::Range(protocol, first, last) => Some(port_range(protocol, *first, *last)),
                Port::Named(..) => None,
            })
            .collect();
        let mut rules = Vec::new();
        if !numbered.is_empty() || rule.ports.is_empty() {
            rules.extend(self.rule(policy, rule, numbered));
        }
        for port in &rule.ports {
            if let Port::Named(protocol, name) = port {
                rules.extend(self.named(policy, rule, protocol, name));
            }
        }
        rules
    }

    /// A rule for each number that peers have under a name.
    fn named(
        &mut self,
        policy: &Known,
        rule: &Rule,
        protocol: &str,
        name: &str,
    ) -> Vec<v1::PolicyRule> {
        let mut by_number: BTreeMap<u32, BTreeSet<Ipv4Addr>> = BTreeMap::new();
        for pod in self.input.pods.values() {
            let (Some(address), Some(number)) = (pod.address, pod.named(name, protocol)) else {
                continue;
            };
            let is_peer = |peer: &Peer| match peer {
                Peer::Pods {
                    namespaces, pods, ..
                } => self.selects(policy, namespaces.as_ref(), pods, pod),
                Peer::Block { ranges, .. } => ranges
                    .iter()
                    .any(|(first, last)| (*first..=*last).contains(&address.to_bits())),
            };
            if rule
                .peers
                .as_ref()
                .is_none_or(|peers| peers.iter().any(is_peer))
            {
                by_number.entry(number).or_default().insert(address);
            }
        }
        let ids: Vec<&str> = rule.peers.iter().flatten().map(Peer::id).collect();
        let rules = by_number.into_iter().map(|(number, addresses)| {
            let id = id(&("named", &ids, protocol, name, number));
            let set = v1::PeerSet {
                id: id.clone(),
                addresses: addresses.into_iter().map(Ipv4Addr::to_bits).collect(),
                ranges: Vec::new(),
            };
            self.sets.entry(id.clone()).or_insert_with(|| Arc::new(set));
            v1::PolicyRule {
                anyone: false,
                peers: vec![id],
                ports: vec![port_range(protocol, number, number)],
            }
        });
        rules.collect()
    }

    fn rule(
        &mut self,
        policy: &Known,
        rule: &Rule,
        ports: Vec<v1::PortRange>,
    ) -> Option<v1::PolicyRule> {
        let Some(peers) = &rule.peers else {
            return Some(v1::PolicyRule {
                anyone: true,
                peers: Vec::new(),
                ports,
            });
        };
        for peer in peers {
            if !self.sets.contains_key(peer.id()) {
                let set = Arc::new(self.set(policy, peer));
                self.sets.insert(peer.id().to_owned(), set);
            }
        }
        Some(v1::PolicyRule {
            anyone: false,
            peers: peers.iter().map(|peer| peer.id().to_owned()).collect(),
            ports,
        })
    }

    fn set(&self, policy: &Known, peer: &Peer) -> v1::PeerSet {
        match peer {
            Peer::Block { id, ranges } => v1::PeerSet {
                id: id.clone(),
                addresses: Vec::new(),
                ranges: ranges
                    .iter()
                    .map(|&(first, last)| v1::AddressRange { first, last })
                    .collect(),
            },
            Peer::Pods {
                id,
                namespaces,
                pods,
            } => {
                let chosen = self.input.pods.values();
                let chosen = chosen
                    .filter(|pod| self.selects(policy, namespaces.as_ref(), pods, pod))
                    .filter_map(|pod| pod.address);
                let addresses: BTreeSet<u32> = chosen.map(Ipv4Addr::to_bits).collect();
                v1::PeerSet {
                    id: id.clone(),
                    addresses: addresses.into_iter().collect(),
                    ranges: Vec::new(),
                }
            }
        }
    }

    fn selects(
        &self,
        policy: &Known,
        namespaces: Option<&Selector>,
        pods: &Selector,
        pod: &KnownPod,
    ) -> bool {
        let there = match namespaces {
            None => pod.namespace == policy.namespace,
            Some(namespaces) => {
                let name = (String::new(), pod.namespace.clone());
                let labels = self.input.namespaces.get(&name);
                labels.is_some_and(|labels| namespaces.matches(labels))
            }
        };
        there && pods.matches(&pod.labels)
    }
}

fn port_range(protocol: &str, first: u32, last: u32) -> v1::PortRange {
    v1::PortRange {
        protocol: protocol.to_owned(),
        first,
        last,
    }
}
