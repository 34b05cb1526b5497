//! NetworkPolicies: what pods of this host may send and take. A table of its own.
//!
//! Pods are told apart by their link, which no other pod ever has, and looked up in two maps, so
//! that pods without policies cost one miss. A pod that policies select has a chain in each
//! direction that they isolate it in: it accepts what they allow, and drops the rest. Replies and
//! what the host itself sends to its pods (probes) are never looked at.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::Ipv4Addr;

use super::super::netlink::Socket;
use super::message::{Batch, Chain, Expressions, Field, Hook, Register, Verdict};
use super::sets::{Data, Kind, Leads, Set};
use super::{LINK_PREFIX, NFPROTO_IPV4};

const TABLE: &str = "sandman-policies";

const EGRESS: Chain = Chain {
    name: "egress",
    kind: "filter",
    hook: Hook::Forward,
    priority: 0,
};
/// What pods send to the host itself.
const EGRESS_LOCAL: Chain = Chain {
    name: "egress-local",
    kind: "filter",
    hook: Hook::LocalIn,
    priority: 0,
};
/// After the other: that the one accepts does not spare a packet this one.
const INGRESS: Chain = Chain {
    name: "ingress",
    kind: "filter",
    hook: Hook::Forward,
    priority: 1,
};

/// Chain of pods whose policies are not known yet.
const UNKNOWN: &str = "unknown";

/// By the link's name.
const SENDERS: Set<'static> = Set {
    name: "senders",
    key: &[Kind::Link],
    leads: Leads::Verdict,
    learns: None,
};
/// See [`SENDERS`].
const TAKERS: Set<'static> = Set {
    name: "takers",
    ..SENDERS
};

const KEY: Register = Register(0);

/// Bytes of a link's name, as the kernel loads it.
type Link = [u8; 16];

/// Peers as rules name them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(in crate::network) struct Peers {
    pub(in crate::network) addresses: BTreeSet<Ipv4Addr>,
    /// First and last address; they do not overlap.
    pub(in crate::network) ranges: BTreeSet<(Ipv4Addr, Ipv4Addr)>,
}

/// What a pod may send, or take.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::network) struct Rule {
    /// Ids of peers; `None` is anyone.
    pub(in crate::network) peers: Option<Vec<String>>,
    /// `IPPROTO_*`, first and last port; none is any port of any protocol.
    pub(in crate::network) ports: Vec<(u8, u16, u16)>,
}

/// What is true of one pod; `None` in a direction is open.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(in crate::network) struct Policy {
    pub(in crate::network) ingress: Option<Vec<Rule>>,
    pub(in crate::network) egress: Option<Vec<Rule>>,
}

/// Everything stated of policies.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(in crate::network) struct Policies {
    /// By the name of the pod's link.
    pub(in crate::network) pods: BTreeMap<String, Policy>,
    pub(in crate::network) peers: BTreeMap<String, Peers>,
    /// Links of pods whose policies are not known yet: nothing goes in or out.
    pub(in crate::network) unknown: BTreeSet<String>,
}

/// What the table holds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(in crate::network) struct Content {
    addresses: BTreeMap<String, BTreeSet<[u8; 4]>>,
    ranges: BTreeMap<String, BTreeSet<(Ipv4Addr, Ipv4Addr)>>,
    chains: BTreeMap<String, Vec<Allow>>,
    senders: BTreeMap<Link, String>,
    takers: BTreeMap<Link, String>,
}

/// One rule of the kernel: packets like this are accepted.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Allow {
    /// The link that it goes to or comes from, and no other field.
    own: Option<String>,
    egress: bool,
    /// Set of the other end's address.
    peers: Option<String>,
    port: Option<(u8, u16, u16)>,
}

// === impl Content ===

impl Content {
    /// What the table must hold.
    pub(in crate::network) fn of(policies: &Policies) -> Self {
        let mut content = Self::default();
        for (link, policy) in &policies.pods {
            for (egress, rules) in [(false, &policy.ingress), (true, &policy.egress)] {
                let Some(rules) = rules else { continue };
                let chain = format!("{}-{link}", if egress { "out" } else { "in" });
                // A pod reaches itself, whatever the policies say.
                let mut allowed = vec![Allow {
                    own: Some(link.clone()),
                    egress,
                    peers: None,
                    port: None,
                }];
                for rule in rules {
                    content.allow(policies, rule, egress, &mut allowed);
                }
                content.chains.insert(chain.clone(), allowed);
                content.map(egress).insert(self::link(link), chain);
            }
        }
        for link in policies
            .unknown
            .iter()
            .filter(|link| !policies.pods.contains_key(*link))
        {
            for egress in [false, true] {
                content
                    .map(egress)
                    .insert(self::link(link), UNKNOWN.to_owned());
            }
        }
        content
    }

    fn map(&mut self, egress: bool) -> &mut BTreeMap<Link, String> {
        match egress {
            true => &mut self.senders,
            false => &mut self.takers,
        }
    }

    fn allow(&mut self, policies: &Policies, rule: &Rule, egress: bool, allowed: &mut Vec<Allow>) {
        let mut sets = Vec::new();
        match &rule.peers {
            None => sets.push(None),
            Some(ids) => {
                for id in ids {
                    // Peers that nobody stated are nobody.
                    let Some(peers) = policies.peers.get(id) else {
                        continue;
                    };
                    if !peers.addresses.is_empty() || peers.ranges.is_empty() {
                        let name = format!("a-{id}");
                        let addresses = peers.addresses.iter().map(Ipv4Addr::octets);
                        self.addresses
                            .entry(name.clone())
                            .or_insert_with(|| addresses.collect());
                        sets.push(Some(name));
                    }
                    if !peers.ranges.is_empty() {
                        let name = format!("r-{id}");
                        self.ranges
                            .entry(name.clone())
                            .or_insert_with(|| peers.ranges.clone());
                        sets.push(Some(name));
                    }
                }
            }
        }
        for peers in sets {
            let any = rule.ports.is_empty().then_some(None);
            let ports = rule.ports.iter().copied().map(Some);
            for port in any.into_iter().chain(ports) {
                allowed.push(Allow {
                    own: None,
                    egress,
                    peers: peers.clone(),
                    port,
                });
            }
        }
    }

    /// Makes the kernel's table hold this instead of `before`; of `None` nothing is known, and the
    /// table is made anew.
    pub(in crate::network) fn install(&self, before: Option<&Self>) -> io::Result<()> {
        let mut socket = Socket::netfilter()?;
        let (datagram, last) = self.encode(before, socket.next_sequence());
        socket.transact(&datagram, last)
    }

    fn encode(&self, before: Option<&Self>, sequence: u32) -> (Vec<u8>, u32) {
        let mut batch = Batch::begin(sequence);
        let nothing = Self::default();
        let before = match before {
            Some(before) => before,
            None => {
                // Made first, so that the deletion always has something to delete.
                batch.new_table(TABLE);
                batch.delete_table(TABLE);
                batch.new_table(TABLE);
                frame(&mut batch);
                &nothing
            }
        };
        for (name, addresses) in &self.addresses {
            let empty = BTreeSet::new();
            let known = before.addresses.get(name);
            let set = address_set(name);
            if known.is_none() {
                batch.new_set(TABLE, &set);
            }
            let known = known.unwrap_or(&empty);
            let gone = known.difference(addresses).map(|key| &key[..]);
            batch.delete_elements(TABLE, &set, gone);
            let new = addresses
                .difference(known)
                .map(|key| (&key[..], Data::None));
            batch.add_elements(TABLE, &set, new);
        }
        for (name, ranges) in &self.ranges {
            // Named by what is in it: it is the same for ever.
            if !before.ranges.contains_key(name) {
                batch.new_ranges(TABLE, name);
                batch.add_ranges(TABLE, name, ranges);
            }
        }
        // A pod is dropped from the maps, or led to another chain, before its chain goes.
        for (map, old, new) in [
            (&SENDERS, &before.senders, &self.senders),
            (&TAKERS, &before.takers, &self.takers),
        ] {
            let gone = old
                .iter()
                .filter(|(link, chain)| new.get(*link) != Some(chain));
            batch.delete_elements(TABLE, map, gone.map(|(link, _)| &link[..]));
        }
        for (chain, allowed) in &self.chains {
            match before.chains.get(chain) {
                Some(known) if known == allowed => continue,
                Some(_) => batch.clear_chain(TABLE, chain),
                None => batch.new_inner_chain(TABLE, chain),
            }
            for allow in allowed {
                batch.new_rule_in(TABLE, chain, |rule| allow.write(rule));
            }
            batch.new_rule_in(TABLE, chain, |rule| rule.verdict(Verdict::Drop));
        }
        for (map, old, new) in [
            (&SENDERS, &before.senders, &self.senders),
            (&TAKERS, &before.takers, &self.takers),
        ] {
            let added = new
                .iter()
                .filter(|(link, chain)| old.get(*link) != Some(chain));
            let added = added.map(|(link, chain)| (&link[..], Data::Goto(chain)));
            batch.add_elements(TABLE, map, added);
        }
        for chain in before.chains.keys() {
            if !self.chains.contains_key(chain) {
                batch.clear_chain(TABLE, chain);
                batch.delete_chain(TABLE, chain);
            }
        }
        let sets = before
            .addresses
            .keys()
            .filter(|n| !self.addresses.contains_key(*n));
        let ranges = before
            .ranges
            .keys()
            .filter(|n| !self.ranges.contains_key(*n));
        for name in sets.chain(ranges) {
            batch.delete_set(TABLE, name);
        }
        batch.end()
    }
}

impl Allow {
    fn write(&self, rule: &mut Expressions<'_>) {
        if let Some(own) = &self.own {
            let field = match self.egress {
                true => Field::OutgoingLink,
                false => Field::IncomingLink,
            };
            rule.equals(field, &link(own));
        }
        if let Some(peers) = &self.peers {
            let field = match self.egress {
                true => Field::Ipv4Destination,
                false => Field::Ipv4Source,
            };
            rule.equals(Field::NetworkProtocol, &[NFPROTO_IPV4]);
            rule.load_all(&[field], KEY);
            rule.is_in(&address_set(peers), KEY);
        }
        if let Some((protocol, first, last)) = self.port {
            rule.equals(Field::TransportProtocol, &[protocol]);
            if first == last {
                rule.equals(Field::DestinationPort, &first.to_be_bytes());
            } else if (first, last) != (0, u16::MAX) {
                rule.between(
                    Field::DestinationPort,
                    &first.to_be_bytes(),
                    &last.to_be_bytes(),
                );
            }
        }
        rule.verdict(Verdict::Accept);
    }
}

/// Removes the table, if there is one.
pub(in crate::network) fn remove() -> io::Result<()> {
    let mut socket = Socket::netfilter()?;
    let mut batch = Batch::begin(socket.next_sequence());
    batch.new_table(TABLE);
    batch.delete_table(TABLE);
    let (datagram, last) = batch.end();
    socket.transact(&datagram, last)
}

/// Closes a link without knowing what the table holds, or whether there is one. A link that is in
/// the maps already is left as it is.
pub(in crate::network) fn close(name: &str) -> io::Result<()> {
    let mut socket = Socket::netfilter()?;
    let mut batch = Batch::begin(socket.next_sequence());
    batch.new_table(TABLE);
    frame(&mut batch);
    let link = link(name);
    for map in [&SENDERS, &TAKERS] {
        batch.add_elements(TABLE, map, [(&link[..], Data::Goto(UNKNOWN))]);
    }
    let (datagram, last) = batch.end();
    match socket.transact(&datagram, last) {
        Err(error) if error.raw_os_error() == Some(libc::EEXIST) => Ok(()),
        done => done,
    }
}

/// Maps, hooks, and the rules that do not depend on any policy.
fn frame(batch: &mut Batch) {
    for map in [&SENDERS, &TAKERS] {
        batch.new_set(TABLE, map);
    }
    // Rules are no part of what may be stated twice.
    batch.new_inner_chain(TABLE, UNKNOWN);
    batch.clear_chain(TABLE, UNKNOWN);
    batch.new_rule_in(TABLE, UNKNOWN, |rule| rule.verdict(Verdict::Drop));
    for (chain, field, map) in [
        (EGRESS, Field::IncomingLink, &SENDERS),
        (EGRESS_LOCAL, Field::IncomingLink, &SENDERS),
        (INGRESS, Field::OutgoingLink, &TAKERS),
    ] {
        batch.new_chain(TABLE, &chain);
        batch.clear_chain(TABLE, chain.name);
        batch.new_rule(TABLE, &chain, |rule| {
            rule.is_reply();
            rule.verdict(Verdict::Accept);
        });
        batch.new_rule(TABLE, &chain, |rule| {
            rule.equals(field, LINK_PREFIX.as_bytes());
            rule.load_all(&[field], KEY);
            rule.verdict_of(map, KEY);
        });
    }
}

fn address_set(name: &str) -> Set<'_> {
    Set {
        name,
        key: &[Kind::Address],
        leads: Leads::Nowhere,
        learns: None,
    }
}

fn link(name: &str) -> Link {
    let mut link = Link::default();
    for (to, from) in link.iter_mut().zip(name.bytes()) {
        *to = from;
    }
    link
}
