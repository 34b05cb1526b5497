//! Links, addresses, routes and neighbours: the few operations that a pod's
//! network is made of, each idempotent.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::{AsRawFd as _, BorrowedFd};

use netlink_packet_core::{
    NLM_F_ACK, NLM_F_CREATE, NLM_F_DUMP, NLM_F_EXCL, NLM_F_REPLACE, NLM_F_REQUEST,
    NetlinkDeserializable as _, NetlinkHeader, NetlinkMessage, NetlinkPayload,
};
use netlink_packet_route::address::{AddressAttribute, AddressMessage, AddressScope};
use netlink_packet_route::link::{
    AfSpecInet6, AfSpecUnspec, In6AddrGenMode, InfoData, InfoKind, InfoVeth, LinkAttribute,
    LinkFlags, LinkInfo, LinkMessage, Stats64,
};
use netlink_packet_route::neighbour::{
    NeighbourAddress, NeighbourAttribute, NeighbourMessage, NeighbourState,
};
use netlink_packet_route::route::{
    RouteAddress, RouteAttribute, RouteFlags, RouteHeader, RouteMessage, RouteProtocol, RouteScope,
    RouteType,
};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};

use super::Socket;
use crate::network::Ipv4Cidr;

/// A link of this namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::network) struct Link {
    pub(in crate::network) index: u32,
    pub(in crate::network) name: String,
    /// Free text; of ours, the pod's UID.
    pub(in crate::network) alias: Option<String>,
    /// What went over it since it was made.
    pub(in crate::network) counters: Stats64,
}

/// A veth pair whose far end is born in another namespace.
pub(in crate::network) struct VethPair<'a> {
    pub(in crate::network) name: &'a str,
    pub(in crate::network) mac: [u8; 6],
    pub(in crate::network) peer_name: &'a str,
    pub(in crate::network) peer_mac: [u8; 6],
    pub(in crate::network) peer_namespace: BorrowedFd<'a>,
}

/// An IPv4 route of the main table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(in crate::network) struct Route {
    pub(in crate::network) destination: Ipv4Cidr,
    pub(in crate::network) via: Option<Ipv4Addr>,
    /// `None` lets the kernel find the link of the gateway.
    pub(in crate::network) link: Option<u32>,
    /// Number of the routing daemon, by which one's own routes are known.
    pub(in crate::network) protocol: u8,
}

impl Socket {
    /// Makes the pair; fails if the name is taken.
    pub(in crate::network) fn create_veth(&mut self, pair: &VethPair<'_>) -> io::Result<()> {
        let mut peer = LinkMessage::default();
        peer.attributes = vec![
            LinkAttribute::IfName(pair.peer_name.to_owned()),
            LinkAttribute::Address(pair.peer_mac.to_vec()),
            LinkAttribute::NetNsFd(pair.peer_namespace.as_raw_fd()),
        ];
        let mut message = LinkMessage::default();
        message.attributes = vec![
            LinkAttribute::IfName(pair.name.to_owned()),
            LinkAttribute::Address(pair.mac.to_vec()),
            LinkAttribute::LinkInfo(vec![
                LinkInfo::Kind(InfoKind::Veth),
                LinkInfo::Data(InfoData::Veth(InfoVeth::Peer(peer))),
            ]),
        ];
        self.call(
            RouteNetlinkMessage::NewLink(message),
            NLM_F_CREATE | NLM_F_EXCL,
        )
    }

    /// Names the pod that a link is for, and keeps IPv6 addresses from coming
    /// by themselves. Before [`Self::set_up`], which would give one.
    pub(in crate::network) fn mark(&mut self, index: u32, alias: &str) -> io::Result<()> {
        let mut message = LinkMessage::default();
        message.header.index = index;
        message.attributes = vec![LinkAttribute::IfAlias(alias.to_owned())];
        let plain = RouteNetlinkMessage::SetLink(message.clone());
        let mode = AfSpecInet6::AddrGenMode(In6AddrGenMode::None);
        let no_ipv6 = vec![AfSpecUnspec::Inet6(vec![mode])];
        message
            .attributes
            .push(LinkAttribute::AfSpecUnspec(no_ipv6));
        match self.call(RouteNetlinkMessage::SetLink(message), 0) {
            // A kernel without IPv6 has nothing to be kept from.
            Err(error) if error.raw_os_error() == Some(libc::EAFNOSUPPORT) => self.call(plain, 0),
            other => other,
        }
    }

    /// Sets a link up.
    pub(in crate::network) fn set_up(&mut self, index: u32) -> io::Result<()> {
        let mut message = LinkMessage::default();
        message.header.index = index;
        message.header.flags = LinkFlags::Up;
        message.header.change_mask = LinkFlags::Up;
        self.call(RouteNetlinkMessage::SetLink(message), 0)
    }

    /// Deletes a link by name; one that does not exist is deleted already.
    pub(in crate::network) fn delete_link(&mut self, name: &str) -> io::Result<()> {
        let mut message = LinkMessage::default();
        message.attributes = vec![LinkAttribute::IfName(name.to_owned())];
        match self.call(RouteNetlinkMessage::DelLink(message), 0) {
            Err(error) if error.raw_os_error() == Some(libc::ENODEV) => Ok(()),
            other => other,
        }
    }

    /// The link of this name.
    pub(in crate::network) fn link(&mut self, name: &str) -> io::Result<Option<Link>> {
        let mut message = LinkMessage::default();
        message.attributes = vec![LinkAttribute::IfName(name.to_owned())];
        // Asked by name, not by dump: a host has one link a pod.
        let request = RouteNetlinkMessage::GetLink(message);
        match self.collect(&request, NLM_F_ACK, decode_link) {
            Err(error) if error.raw_os_error() == Some(libc::ENODEV) => Ok(None),
            other => other.map(|mut found| found.pop()),
        }
    }

    /// All links of the namespace.
    pub(in crate::network) fn links(&mut self) -> io::Result<Vec<Link>> {
        let request = RouteNetlinkMessage::GetLink(LinkMessage::default());
        self.collect(&request, NLM_F_DUMP, decode_link)
    }

    /// Gives a link a single address.
    pub(in crate::network) fn add_address(
        &mut self,
        index: u32,
        address: Ipv4Addr,
    ) -> io::Result<()> {
        let mut message = AddressMessage::default();
        message.header.family = AddressFamily::Inet;
        message.header.prefix_len = 32;
        message.header.index = index;
        message.header.scope = AddressScope::Universe;
        message.attributes = vec![
            AddressAttribute::Local(IpAddr::V4(address)),
            AddressAttribute::Address(IpAddr::V4(address)),
        ];
        self.call(
            RouteNetlinkMessage::NewAddress(message),
            NLM_F_CREATE | NLM_F_REPLACE,
        )
    }

    /// Fixes the hardware address behind an IPv4 address: no ARP in either direction.
    pub(in crate::network) fn add_neighbour(
        &mut self,
        index: u32,
        address: Ipv4Addr,
        mac: [u8; 6],
    ) -> io::Result<()> {
        let mut message = NeighbourMessage::default();
        message.header.family = AddressFamily::Inet;
        message.header.ifindex = index;
        message.header.state = NeighbourState::Permanent;
        message.attributes = vec![
            NeighbourAttribute::Destination(NeighbourAddress::Inet(address)),
            NeighbourAttribute::LinkLayerAddress(mac.to_vec()),
        ];
        self.call(
            RouteNetlinkMessage::NewNeighbour(message),
            NLM_F_CREATE | NLM_F_REPLACE,
        )
    }

    /// Sets a route, in place of one to the same destination.
    pub(in crate::network) fn put_route(&mut self, route: &Route) -> io::Result<()> {
        self.call(
            RouteNetlinkMessage::NewRoute(encode(route)),
            NLM_F_CREATE | NLM_F_REPLACE,
        )
    }

    /// IPv4 routes of the main table.
    pub(in crate::network) fn routes(&mut self) -> io::Result<Vec<Route>> {
        let mut filter = RouteMessage::default();
        filter.header.address_family = AddressFamily::Inet;
        self.collect(
            &RouteNetlinkMessage::GetRoute(filter),
            NLM_F_DUMP,
            |answer| match answer {
                RouteNetlinkMessage::NewRoute(message) => decode(&message),
                _ => None,
            },
        )
    }

    fn call(&mut self, message: RouteNetlinkMessage, flags: u16) -> io::Result<()> {
        let sequence = self.next_sequence();
        let bytes = serialize(message, flags | NLM_F_REQUEST | NLM_F_ACK, sequence);
        self.transact(&bytes, sequence)
    }

    fn collect<T>(
        &mut self,
        request: &RouteNetlinkMessage,
        flags: u16,
        keep: impl Fn(RouteNetlinkMessage) -> Option<T>,
    ) -> io::Result<Vec<T>> {
        loop {
            let sequence = self.next_sequence();
            let bytes = serialize(request.clone(), NLM_F_REQUEST | flags, sequence);
            let mut found = Vec::new();
            let consistent = self.dump(&bytes, sequence, |kind, payload| {
                let mut header = NetlinkHeader::default();
                header.message_type = kind;
                let message = RouteNetlinkMessage::deserialize(&header, payload)
                    .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
                found.extend(keep(message));
                Ok(())
            })?;
            // A torn dump may miss an entry; the kernel says so and one asks again.
            if consistent {
                return Ok(found);
            }
        }
    }
}

fn decode_link(answer: RouteNetlinkMessage) -> Option<Link> {
    let RouteNetlinkMessage::NewLink(message) = answer else {
        return None;
    };
    let (mut name, mut alias, mut counters) = (None, None, Stats64::default());
    for attribute in message.attributes {
        match attribute {
            LinkAttribute::IfName(text) => name = Some(text),
            LinkAttribute::IfAlias(text) => alias = Some(text),
            LinkAttribute::Stats64(stats) => counters = stats,
            _ => {}
        }
    }
    Some(Link {
        index: message.header.index,
        name: name?,
        alias,
        counters,
    })
}

fn serialize(message: RouteNetlinkMessage, flags: u16, sequence: u32) -> Vec<u8> {
    let mut header = NetlinkHeader::default();
    header.flags = flags;
    header.sequence_number = sequence;
    let mut message = NetlinkMessage::new(header, NetlinkPayload::InnerMessage(message));
    message.finalize();
    let mut bytes = vec![0; message.buffer_len()];
    message.serialize(&mut bytes);
    bytes
}

fn encode(route: &Route) -> RouteMessage {
    let mut message = RouteMessage::default();
    message.header.address_family = AddressFamily::Inet;
    message.header.table = RouteHeader::RT_TABLE_MAIN;
    message.header.protocol = RouteProtocol::from(route.protocol);
    message.header.kind = RouteType::Unicast;
    message.header.destination_prefix_length = route.destination.prefix();
    message.header.scope = if route.via.is_some() {
        RouteScope::Universe
    } else {
        RouteScope::Link
    };
    if route.destination.prefix() > 0 {
        let destination = RouteAddress::Inet(route.destination.network());
        message
            .attributes
            .push(RouteAttribute::Destination(destination));
    }
    if let Some(via) = route.via {
        message
            .attributes
            .push(RouteAttribute::Gateway(RouteAddress::Inet(via)));
        // A gateway named together with its link need not be within an address of it.
        if route.link.is_some() {
            message.header.flags = RouteFlags::Onlink;
        }
    }
    message
        .attributes
        .extend(route.link.map(RouteAttribute::Oif));
    message
}

fn decode(message: &RouteMessage) -> Option<Route> {
    if message.header.table != RouteHeader::RT_TABLE_MAIN
        || message.header.kind != RouteType::Unicast
    {
        return None;
    }
    let mut network = Ipv4Addr::UNSPECIFIED;
    let (mut via, mut link) = (None, None);
    for attribute in &message.attributes {
        match attribute {
            RouteAttribute::Destination(RouteAddress::Inet(address)) => network = *address,
            RouteAttribute::Gateway(RouteAddress::Inet(address)) => via = Some(*address),
            RouteAttribute::Oif(index) => link = Some(*index),
            _ => {}
        }
    }
    let destination = Ipv4Cidr::new(network, message.header.destination_prefix_length).ok()?;
    Some(Route {
        destination,
        via,
        link,
        protocol: message.header.protocol.into(),
    })
}

/// All links by index.
pub(in crate::network) fn by_index(links: Vec<Link>) -> HashMap<u32, Link> {
    links.into_iter().map(|link| (link.index, link)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn routes_survive_encoding() {
        for (destination, via, link) in [
            ("10.64.0.7/32", None, Some(4)),
            ("10.64.64.0/18", Some(Ipv4Addr::new(10, 90, 0, 12)), None),
            ("0.0.0.0/0", Some(Ipv4Addr::new(169, 254, 1, 1)), Some(2)),
        ] {
            let route = Route {
                destination: destination.parse().unwrap(),
                via,
                link,
                protocol: 4,
            };
            assert_eq!(decode(&encode(&route)), Some(route));
        }
    }
}
