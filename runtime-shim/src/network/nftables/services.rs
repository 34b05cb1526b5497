//! Services: connections to a ClusterIP go to one of its endpoints. A table of its own.
//!
//! Ports of Services and their endpoints are elements of maps, so that a packet's way does not
//! depend on how many there are, and a change costs what it changes. The map `services` sends a
//! packet to the chain for its number of endpoints; that chain draws one of them from `endpoints`.
//! With session affinity, `clients` remembers what was drawn.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::Ipv4Addr;

use super::super::netlink::Socket;
use super::message::{Batch, Chain, Expressions, Field, Hook, Register};
use super::sets::{Data, Kind, Leads, Learn, Set};
use super::{LINK_PREFIX, NFPROTO_IPV4};

const TABLE: &str = "sandman-services";

/// What pods send. Others have rules of their own: a host is no router to Services.
const ARRIVING: Chain = Chain {
    name: "arriving",
    kind: "nat",
    hook: Hook::Prerouting,
    priority: -100,
};
/// What the host itself sends, pods in its network among it.
const LOCAL: Chain = Chain {
    name: "local",
    kind: "nat",
    hook: Hook::LocalOut,
    priority: -100,
};
/// A pod that reaches itself must not see its own address as the source: it would answer past the
/// translation.
const HAIRPIN: Chain = Chain {
    name: "hairpin",
    kind: "nat",
    hook: Hook::Postrouting,
    priority: 99,
};
/// What still goes to a ClusterIP after the translation has nowhere to go. Before routing, because
/// the host need not have a route there.
const REFUSE_ARRIVING: Chain = Chain {
    name: "refuse-arriving",
    kind: "filter",
    hook: Hook::Prerouting,
    priority: -99,
};
/// The same of what the host sends.
const REFUSE_LOCAL: Chain = Chain {
    name: "refuse-local",
    kind: "filter",
    hook: Hook::LocalOut,
    priority: 0,
};

/// Protocol, ClusterIP and port.
const SERVICE: [Kind; 3] = [Kind::Protocol, Kind::Address, Kind::Port];
const SERVICES: Set<'static> = Set {
    name: "services",
    key: &SERVICE,
    leads: Leads::Verdict,
    learns: None,
};
/// By service and number.
const ENDPOINTS: Set<'static> = Set {
    name: "endpoints",
    key: &[Kind::Protocol, Kind::Address, Kind::Port, Kind::Mark],
    leads: Leads::Fields(&[Kind::Address, Kind::Port]),
    learns: None,
};
const CLUSTER_IPS: Set<'static> = Set {
    name: "cluster-ips",
    key: &[Kind::Address],
    leads: Leads::Nowhere,
    learns: None,
};
/// Source and destination: endpoints that are pods, each with itself.
const SELF: Set<'static> = Set {
    name: "self",
    key: &[Kind::Address, Kind::Address],
    leads: Leads::Nowhere,
    learns: None,
};
/// By service and client: the endpoint that a client stays with.
const CLIENTS: Set<'static> = Set {
    name: "clients",
    key: &[Kind::Protocol, Kind::Address, Kind::Port, Kind::Address],
    leads: Leads::Fields(&[Kind::Address, Kind::Port]),
    learns: Some(CLIENTS_LIMIT),
};
/// Clients beyond it are balanced as if there were no affinity.
const CLIENTS_LIMIT: u32 = 1 << 18;
const SETS: [&Set<'static>; 5] = [&SERVICES, &ENDPOINTS, &CLUSTER_IPS, &SELF, &CLIENTS];

/// First register of a service's key; the fourth field follows it.
const KEY: Register = Register(0);
const KEY_FOURTH: Register = Register(3);
/// Where a chosen endpoint is loaded.
const ENDPOINT: Register = Register(4);
const ENDPOINT_PORT: Register = Register(5);

/// One port of a Service.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::network) struct Port {
    /// ClusterIP.
    pub(in crate::network) address: Ipv4Addr,
    /// `IPPROTO_*`.
    pub(in crate::network) protocol: u8,
    pub(in crate::network) port: u16,
}

/// Where a port leads.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(in crate::network) struct Backends {
    pub(in crate::network) endpoints: Vec<(Ipv4Addr, u16)>,
    /// Seconds that a client stays with its endpoint; 0 is no affinity.
    pub(in crate::network) affinity_seconds: u32,
}

/// All ports of all Services.
pub(in crate::network) type Services = BTreeMap<Port, Backends>;

/// What the table holds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(in crate::network) struct Content {
    chains: BTreeSet<Choice>,
    services: BTreeMap<[u8; 12], Choice>,
    endpoints: BTreeMap<[u8; 16], [u8; 8]>,
    cluster_ips: BTreeSet<[u8; 4]>,
    own: BTreeSet<[u8; 8]>,
}

/// How an endpoint is chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Choice {
    of: u32,
    affinity_seconds: u32,
}

// === impl Port ===

impl Port {
    /// What [`key`] writes, at the beginning of a longer one.
    fn read(key: &[u8]) -> Option<Self> {
        let [protocol, _, _, _, a, b, c, d, high, low, ..] = *key.first_chunk::<12>()?;
        Some(Self {
            address: Ipv4Addr::new(a, b, c, d),
            protocol,
            port: u16::from_be_bytes([high, low]),
        })
    }
}

// === impl Choice ===

impl Choice {
    fn chain(self) -> String {
        match self.affinity_seconds {
            0 => format!("one-of-{}", self.of),
            seconds => format!("one-of-{}-for-{seconds}", self.of),
        }
    }
}

// === impl Content ===

impl Content {
    /// What the table must hold for these Services.
    pub(in crate::network) fn of(services: &Services, pods: super::Ipv4Cidr) -> Self {
        let mut content = Self::default();
        for (port, backends) in services {
            content.cluster_ips.insert(port.address.octets());
            let Ok(of) = u32::try_from(backends.endpoints.len()) else {
                continue;
            };
            if of == 0 {
                continue;
            }
            let choice = Choice {
                of,
                affinity_seconds: backends.affinity_seconds,
            };
            content.chains.insert(choice);
            let key = key(port);
            content.services.insert(key, choice);
            for (index, (address, port)) in (0_u32..).zip(&backends.endpoints) {
                let endpoint = endpoint(*address, *port);
                let numbered = joined(&key, &index.to_ne_bytes());
                content.endpoints.insert(numbered, endpoint);
                if pods.contains(*address) {
                    let address = address.octets();
                    content.own.insert(joined(&address, &address));
                }
            }
        }
        content
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
        // A chain that is out of use costs nothing and is soon used again.
        for choice in self.chains.difference(&before.chains) {
            choose(&mut batch, *choice);
        }
        let names: BTreeMap<Choice, String> = self
            .chains
            .iter()
            .map(|choice| (*choice, choice.chain()))
            .collect();
        replace(
            &mut batch,
            &SERVICES,
            &before.services,
            &self.services,
            |choice| Data::Goto(names.get(choice).map_or("", String::as_str)),
        );
        replace(
            &mut batch,
            &ENDPOINTS,
            &before.endpoints,
            &self.endpoints,
            |endpoint| Data::Bytes(endpoint),
        );
        replace_keys(
            &mut batch,
            &CLUSTER_IPS,
            &before.cluster_ips,
            &self.cluster_ips,
        );
        replace_keys(&mut batch, &SELF, &before.own, &self.own);
        batch.end()
    }

    /// Chains are never removed: what was made before is still there.
    pub(in crate::network) fn keep_chains(&mut self, before: &Self) {
        self.chains.extend(&before.chains);
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

/// Forgets the clients of Services whose endpoint is none of theirs any more. To be called after
/// the endpoints were replaced, so that none is drawn again.
pub(in crate::network) fn forget_clients(services: &Services) -> io::Result<()> {
    let mut socket = Socket::netfilter()?;
    let stale = |key: &[u8], endpoint: &[u8]| {
        let Some((port, endpoint)) = Port::read(key).zip(read_endpoint(endpoint)) else {
            return false;
        };
        let backends = services.get(&port);
        !backends.is_some_and(|backends| backends.endpoints.contains(&endpoint))
    };
    let mut keys = Vec::new();
    socket.elements(TABLE, CLIENTS.name, |key, endpoint| {
        if stale(key, endpoint) {
            keys.push(key.to_vec());
        }
    })?;
    if keys.is_empty() {
        return Ok(());
    }
    for key in keys {
        // One by one: those that expire meanwhile are no reason to keep the others.
        let mut batch = Batch::begin(socket.next_sequence());
        batch.delete_elements(TABLE, &CLIENTS, [&key[..]]);
        let (datagram, last) = batch.end();
        match socket.transact(&datagram, last) {
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => {}
            done => done?,
        }
    }
    Ok(())
}

/// Sets, hooks, and the rules that do not depend on any Service.
fn frame(batch: &mut Batch) {
    for set in SETS {
        batch.new_set(TABLE, set);
    }
    for chain in [ARRIVING, LOCAL, HAIRPIN, REFUSE_ARRIVING, REFUSE_LOCAL] {
        batch.new_chain(TABLE, &chain);
    }
    for (chain, refuse, from_pods) in [
        (ARRIVING, REFUSE_ARRIVING, true),
        (LOCAL, REFUSE_LOCAL, false),
    ] {
        let of_interest = |rule: &mut Expressions<'_>| {
            if from_pods {
                rule.equals(Field::IncomingLink, LINK_PREFIX.as_bytes());
            }
            rule.equals(Field::NetworkProtocol, &[NFPROTO_IPV4]);
        };
        batch.new_rule(TABLE, &chain, |rule| {
            of_interest(rule);
            load_service(rule, KEY);
            rule.verdict_of(&SERVICES, KEY);
        });
        batch.new_rule(TABLE, &refuse, |rule| {
            of_interest(rule);
            rule.load_all(&[Field::Ipv4Destination], KEY);
            rule.is_in(&CLUSTER_IPS, KEY);
            rule.reject();
        });
    }
    batch.new_rule(TABLE, &HAIRPIN, |rule| {
        rule.equals(Field::NetworkProtocol, &[NFPROTO_IPV4]);
        rule.load_all(&[Field::Ipv4Source, Field::Ipv4Destination], KEY);
        rule.is_in(&SELF, KEY);
        rule.masquerade();
    });
}

/// The chain that chooses an endpoint of so many.
fn choose(batch: &mut Batch, choice: Choice) {
    let chain = choice.chain();
    batch.new_inner_chain(TABLE, &chain);
    let draw = |rule: &mut Expressions<'_>| {
        load_service(rule, KEY);
        rule.load_random(choice.of, KEY_FOURTH);
        rule.load_from(&ENDPOINTS, KEY, ENDPOINT);
    };
    if choice.affinity_seconds == 0 {
        batch.new_rule_in(TABLE, &chain, |rule| {
            draw(rule);
            rule.destination_in(ENDPOINT, ENDPOINT_PORT);
        });
        return;
    }
    let milliseconds = 1000 * u64::from(choice.affinity_seconds);
    let load_client = |rule: &mut Expressions<'_>| {
        load_service(rule, KEY);
        rule.load_all(&[Field::Ipv4Source], KEY_FOURTH);
    };
    // Endpoints that are no more are none of a client's either: see `forget_clients`.
    batch.new_rule_in(TABLE, &chain, |rule| {
        load_client(rule);
        rule.load_from(&CLIENTS, KEY, ENDPOINT);
        rule.learn(&CLIENTS, Learn::Renew, KEY, ENDPOINT, milliseconds);
        rule.destination_in(ENDPOINT, ENDPOINT_PORT);
    });
    batch.new_rule_in(TABLE, &chain, |rule| {
        draw(rule);
        // The draw's number is where the client belongs.
        rule.load_all(&[Field::Ipv4Source], KEY_FOURTH);
        rule.learn(&CLIENTS, Learn::Add, KEY, ENDPOINT, milliseconds);
        rule.destination_in(ENDPOINT, ENDPOINT_PORT);
    });
    // Too many clients to remember one more.
    batch.new_rule_in(TABLE, &chain, |rule| {
        draw(rule);
        rule.destination_in(ENDPOINT, ENDPOINT_PORT);
    });
}

fn load_service(rule: &mut Expressions<'_>, first: Register) {
    let fields = [
        Field::TransportProtocol,
        Field::Ipv4Destination,
        Field::DestinationPort,
    ];
    rule.load_all(&fields, first);
}

fn replace<'a, const N: usize, V: PartialEq>(
    batch: &mut Batch,
    set: &Set<'_>,
    before: &'a BTreeMap<[u8; N], V>,
    after: &'a BTreeMap<[u8; N], V>,
    data: impl Fn(&'a V) -> Data<'a>,
) {
    let gone = before
        .iter()
        .filter(|(key, value)| after.get(*key) != Some(value));
    batch.delete_elements(TABLE, set, gone.map(|(key, _)| &key[..]));
    let new = after
        .iter()
        .filter(|(key, value)| before.get(*key) != Some(value));
    batch.add_elements(TABLE, set, new.map(|(key, value)| (&key[..], data(value))));
}

fn replace_keys<const N: usize>(
    batch: &mut Batch,
    set: &Set<'_>,
    before: &BTreeSet<[u8; N]>,
    after: &BTreeSet<[u8; N]>,
) {
    let gone = before.difference(after);
    batch.delete_elements(TABLE, set, gone.map(|key| &key[..]));
    let new = after.difference(before);
    batch.add_elements(TABLE, set, new.map(|key| (&key[..], Data::None)));
}

/// The fields as registers hold them: each begins with its bytes, the rest of its 4 is zero.
fn key(port: &Port) -> [u8; 12] {
    let [a, b, c, d] = port.address.octets();
    let [high, low] = port.port.to_be_bytes();
    [port.protocol, 0, 0, 0, a, b, c, d, high, low, 0, 0]
}

fn endpoint(address: Ipv4Addr, port: u16) -> [u8; 8] {
    let [a, b, c, d] = address.octets();
    let [high, low] = port.to_be_bytes();
    [a, b, c, d, high, low, 0, 0]
}

/// What [`endpoint`] writes.
fn read_endpoint(bytes: &[u8]) -> Option<(Ipv4Addr, u16)> {
    let [a, b, c, d, high, low, ..] = *bytes.first_chunk::<8>()?;
    Some((Ipv4Addr::new(a, b, c, d), u16::from_be_bytes([high, low])))
}

/// Both, one after the other; they must be of that length.
fn joined<const N: usize>(first: &[u8], second: &[u8]) -> [u8; N] {
    let mut both = [0; N];
    for (to, from) in both.iter_mut().zip(first.iter().chain(second)) {
        *to = *from;
    }
    both
}
