//! Ports of the host that lead to a pod (`hostPort`): a table of its own, replaced as a whole
//! whenever one is added or goes, so that none outlives its pod.

use std::collections::BTreeMap;
use std::io;
use std::net::Ipv4Addr;

use super::super::netlink::Socket;
use super::message::{Batch, Chain, Field, Hook};

const TABLE: &str = "sandman-ports";

/// What arrives from elsewhere, pods of this host among it.
const ARRIVING: Chain = Chain {
    name: "arriving",
    kind: "nat",
    hook: Hook::Prerouting,
    priority: -100,
};
/// What the host itself sends.
const LOCAL: Chain = Chain {
    name: "local",
    kind: "nat",
    hook: Hook::LocalOut,
    priority: -100,
};
/// A pod that reaches itself by the host's port must not see its own address as the source: it
/// would answer past the translation.
const HAIRPIN: Chain = Chain {
    name: "hairpin",
    kind: "nat",
    hook: Hook::Postrouting,
    priority: 99,
};

/// A port of the host that belongs to a pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::network) struct Forward {
    /// Address of the host; `None` is any of its own.
    pub(in crate::network) host_ip: Option<Ipv4Addr>,
    /// `IPPROTO_*`.
    pub(in crate::network) protocol: u8,
    /// Port of the host.
    pub(in crate::network) host_port: u16,
    /// Port of the pod.
    pub(in crate::network) port: u16,
}

/// By pod UID: its address and its ports.
pub(in crate::network) type Forwards = BTreeMap<String, (Ipv4Addr, Vec<Forward>)>;

/// Makes the kernel's table what `forwards` says; without any there is no table.
pub(in crate::network) fn install(forwards: &Forwards) -> io::Result<()> {
    let mut socket = Socket::netfilter()?;
    let (datagram, last) = encode(forwards, socket.next_sequence());
    socket.transact(&datagram, last)
}

fn encode(forwards: &Forwards, sequence: u32) -> (Vec<u8>, u32) {
    let mut batch = Batch::begin(sequence);
    // Made first, so that the deletion always has something to delete.
    batch.new_table(TABLE);
    batch.delete_table(TABLE);
    if forwards.is_empty() {
        return batch.end();
    }
    batch.new_table(TABLE);
    for chain in [ARRIVING, LOCAL, HAIRPIN] {
        batch.new_chain(TABLE, &chain);
    }
    for (address, ports) in forwards.values() {
        for forward in ports {
            for chain in [ARRIVING, LOCAL] {
                batch.new_rule(TABLE, &chain, |rule| {
                    rule.equals(Field::NetworkProtocol, &[super::NFPROTO_IPV4]);
                    match forward.host_ip {
                        Some(ip) => rule.equals(Field::Ipv4Destination, &ip.octets()),
                        None => rule.equals(Field::DestinationKind, &super::LOCAL_ADDRESS),
                    }
                    rule.equals(Field::TransportProtocol, &[forward.protocol]);
                    rule.equals(Field::DestinationPort, &forward.host_port.to_be_bytes());
                    rule.destination(*address, forward.port);
                });
            }
        }
        batch.new_rule(TABLE, &HAIRPIN, |rule| {
            rule.equals(Field::NetworkProtocol, &[super::NFPROTO_IPV4]);
            rule.equals(Field::Ipv4Source, &address.octets());
            rule.equals(Field::Ipv4Destination, &address.octets());
            rule.masquerade();
        });
    }
    batch.end()
}
