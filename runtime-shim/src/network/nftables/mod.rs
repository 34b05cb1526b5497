//! The packet filter around this host's sandboxes: which of their packets get
//! where, and under which address. One table, replaced as a whole.

use std::io;

use super::Ipv4Cidr;
use super::netlink::Socket;

mod message;
pub(super) mod policies;
pub(super) mod ports;
pub(super) mod services;
mod sets;

use self::message::{Batch, Chain, Expressions, Field, Hook, Verdict};

const TABLE: &str = "sandman";
/// Host ends of the pods' links begin with this.
pub(super) const LINK_PREFIX: &str = "sm";

const NFPROTO_IPV4: u8 = 2;
const NFPROTO_IPV6: u8 = 10;
const IPPROTO_TCP: u8 = 6;
/// `RTN_LOCAL`, in the byte order of the machine as the kernel loads it.
const LOCAL_ADDRESS: [u8; 4] = 2_u32.to_ne_bytes();

/// Before connection tracking: what is dropped here costs no entry.
const FROM_POD: Chain = Chain {
    name: "from-pod",
    kind: "filter",
    hook: Hook::Prerouting,
    priority: -300,
};
const TO_HOST: Chain = Chain {
    name: "to-host",
    kind: "filter",
    hook: Hook::LocalIn,
    priority: 0,
};
const EGRESS: Chain = Chain {
    name: "egress",
    kind: "nat",
    hook: Hook::Postrouting,
    priority: 100,
};

/// What the rules are made from.
#[derive(Clone, Debug)]
pub(super) struct Ruleset<'a> {
    pub(super) pod_cidr: Ipv4Cidr,
    /// Destinations that see the pod's own address.
    pub(super) cluster_cidrs: &'a [Ipv4Cidr],
    /// TCP ports of the host that pods may not reach.
    pub(super) closed_ports: &'a [u16],
}

impl Ruleset<'_> {
    /// Puts the table in place of any earlier one, in one transaction.
    pub(super) fn install(&self) -> io::Result<()> {
        let mut socket = Socket::netfilter()?;
        let (datagram, last) = self.encode(socket.next_sequence());
        socket.transact(&datagram, last)
    }

    fn encode(&self, sequence: u32) -> (Vec<u8>, u32) {
        let mut batch = Batch::begin(sequence);
        // Made first, so that the deletion always has something to delete.
        batch.new_table(TABLE);
        batch.delete_table(TABLE);
        batch.new_table(TABLE);
        for chain in [FROM_POD, TO_HOST, EGRESS] {
            batch.new_chain(TABLE, &chain);
        }
        keep_honest(&mut batch);
        self.to_host(&mut batch);
        self.egress(&mut batch);
        batch.end()
    }

    fn to_host(&self, batch: &mut Batch) {
        for port in self.closed_ports {
            batch.new_rule(TABLE, &TO_HOST, |rule| {
                rule.equals(Field::IncomingLink, LINK_PREFIX.as_bytes());
                rule.equals(Field::TransportProtocol, &[IPPROTO_TCP]);
                rule.equals(Field::DestinationPort, &port.to_be_bytes());
                rule.verdict(Verdict::Drop);
            });
        }
    }

    fn egress(&self, batch: &mut Batch) {
        let from_pods = |rule: &mut Expressions<'_>| {
            rule.equals(Field::NetworkProtocol, &[NFPROTO_IPV4]);
            rule.within(Field::Ipv4Source, self.pod_cidr);
        };
        for range in self.cluster_cidrs.iter().chain([&self.pod_cidr]) {
            batch.new_rule(TABLE, &EGRESS, |rule| {
                from_pods(rule);
                rule.within(Field::Ipv4Destination, *range);
                rule.verdict(Verdict::Return);
            });
        }
        batch.new_rule(TABLE, &EGRESS, |rule| {
            from_pods(rule);
            rule.masquerade();
        });
    }
}

/// Pods have IPv4 only, and only their own address.
fn keep_honest(batch: &mut Batch) {
    batch.new_rule(TABLE, &FROM_POD, |rule| {
        rule.equals(Field::IncomingLink, LINK_PREFIX.as_bytes());
        rule.equals(Field::NetworkProtocol, &[NFPROTO_IPV6]);
        rule.verdict(Verdict::Drop);
    });
    batch.new_rule(TABLE, &FROM_POD, |rule| {
        rule.equals(Field::IncomingLink, LINK_PREFIX.as_bytes());
        rule.equals(Field::ReversePathLink, &[0; 4]);
        rule.verdict(Verdict::Drop);
    });
}
