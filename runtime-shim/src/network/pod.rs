//! A pod's link to its host: a routed veth pair. The pod sends everything to a
//! link-local gateway, the host has one route a pod; neither asks by ARP, and
//! no bridge limits how many pods there are.

use std::io;
use std::net::Ipv4Addr;

use sha2::{Digest as _, Sha256};

use super::Ipv4Cidr;
use super::namespace::Inside;
use super::netlink::Socket;
use super::netlink::route::{Route, VethPair};
use super::nftables::LINK_PREFIX;

const POD_LINK: &str = "eth0";
/// The same in every pod: it exists on no wire.
const GATEWAY: Ipv4Addr = Ipv4Addr::new(169, 254, 1, 1);
/// Locally administered; each pair is a wire of its own, so all may share it.
const HOST_MAC: [u8; 6] = [0x02, 0x73, 0x6d, 0, 0, 1];
/// `RTPROT_STATIC`: an administrator's route, as opposed to the kernel's own.
const PROTOCOL: u8 = 4;

/// Name of the host's end, at most 15 characters for the kernel.
pub(super) fn link_name(uid: &str) -> String {
    let digest = hex::encode(Sha256::digest(uid));
    format!("{LINK_PREFIX}{}", &digest[..13])
}

fn pod_mac(address: Ipv4Addr) -> [u8; 6] {
    let [a, b, c, d] = address.octets();
    [0x02, 0x73, a, b, c, d]
}

/// Connects the new namespace to the host. The host's route comes last: it is
/// the mark of a pod that is complete.
pub(super) fn connect(inside: Inside<'_>, uid: &str, address: Ipv4Addr) -> io::Result<()> {
    let Inside {
        mut host,
        mut pod,
        namespace,
    } = inside;
    let name = link_name(uid);
    host.create_veth(&VethPair {
        name: &name,
        mac: HOST_MAC,
        peer_name: POD_LINK,
        peer_mac: pod_mac(address),
        peer_namespace: namespace,
    })?;
    pod_end(&mut pod, address)?;
    host_end(&mut host, &name, uid, address)
}

fn pod_end(pod: &mut Socket, address: Ipv4Addr) -> io::Result<()> {
    let link = pod
        .link(POD_LINK)?
        .ok_or_else(|| io::Error::other("no eth0 in the pod"))?;
    pod.set_up(link.index)?;
    pod.add_address(link.index, address)?;
    pod.add_neighbour(link.index, GATEWAY, HOST_MAC)?;
    let anywhere = Ipv4Cidr::ANY;
    pod.put_route(&Route {
        destination: anywhere,
        via: Some(GATEWAY),
        link: Some(link.index),
        protocol: PROTOCOL,
    })
}

/// The host's end, with the one route to the pod. May be repeated.
pub(super) fn host_end(
    host: &mut Socket,
    name: &str,
    uid: &str,
    address: Ipv4Addr,
) -> io::Result<()> {
    let link = host
        .link(name)?
        .ok_or_else(|| io::Error::other(format!("link {name} vanished")))?;
    host.mark(link.index, uid)?;
    host.set_up(link.index)?;
    host.add_neighbour(link.index, address, pod_mac(address))?;
    host.put_route(&Route {
        destination: Ipv4Cidr::host(address),
        via: None,
        link: Some(link.index),
        protocol: PROTOCOL,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn link_names_fit_the_kernel_and_differ() {
        let name = link_name("0a1b2c3d-0000-4000-8000-000000000001");
        assert_eq!(name.len(), 15);
        assert!(name.starts_with(LINK_PREFIX));
        assert_ne!(name, link_name("0a1b2c3d-0000-4000-8000-000000000002"));
    }
}
