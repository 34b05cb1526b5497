//! Who is on the fabric and at which address. The addresses exist only inside the cluster's own
//! network namespaces, so every dev cluster uses the same ones.

use std::fmt;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::str::FromStr;

/// Most hosts that one dev cluster may have.
pub(crate) const MAX_HOSTS: u8 = 32;
/// Prefix length of the fabric, 10.90.0.0/16.
pub(crate) const FABRIC_PREFIX: u8 = 16;
/// Virtual addresses of Services.
pub(crate) const SERVICE_CIDR: &str = "10.96.0.0/16";
/// Prefix length of a host's pod network.
pub(crate) const POD_PREFIX: u8 = 18;

/// A network namespace of the dev cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Member {
    /// The bridge between all others; no process lives here.
    Fabric,
    /// etcd, API server, controller manager, scheduler and approver.
    Control,
    /// The virtual node.
    Vnode,
    /// The image registries.
    Registry,
    /// A second virtual node, for tests of take-over and for comparisons without hosts.
    SecondVnode,
    /// A real kubelet, for comparisons.
    Kubelet,
    /// A dedicated host, counted from 0.
    Host(u8),
}

impl Member {
    /// All members of a cluster with this many hosts, the fabric first.
    pub(crate) fn all(hosts: u8) -> Vec<Self> {
        let mut members = vec![
            Self::Fabric,
            Self::Control,
            Self::Vnode,
            Self::Registry,
            Self::SecondVnode,
            Self::Kubelet,
        ];
        members.extend(Self::hosts(hosts));
        members
    }

    /// The hosts of a cluster with this many.
    pub(crate) fn hosts(hosts: u8) -> impl Iterator<Item = Self> {
        (0..hosts).map(Self::Host)
    }

    /// Address on the fabric; the fabric itself has none.
    pub(crate) fn address(self) -> Option<Ipv4Addr> {
        let last = match self {
            Self::Fabric => return None,
            Self::Control => 2,
            Self::Vnode => 3,
            Self::Registry => 4,
            Self::SecondVnode => 5,
            Self::Kubelet => 6,
            Self::Host(index) => 11 + index,
        };
        Some(Ipv4Addr::new(10, 90, 0, last))
    }

    /// Network of the pods that run here.
    pub(crate) fn pod_network(self) -> Option<Ipv4Addr> {
        // The kubelet's pods sit above the last host's.
        let slot = match self {
            Self::Host(index) => index,
            Self::Kubelet => MAX_HOSTS,
            _ => return None,
        };
        let base = u32::from(Ipv4Addr::new(10, 64, 0, 0));
        Some(Ipv4Addr::from(
            base + (u32::from(slot) << (32 - u32::from(POD_PREFIX))),
        ))
    }

    /// Network of the pods that run here, in CIDR notation.
    pub(crate) fn pod_cidr(self) -> Option<String> {
        self.pod_network()
            .map(|network| format!("{network}/{POD_PREFIX}"))
    }
}

impl fmt::Display for Member {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fabric => f.write_str("fabric"),
            Self::Control => f.write_str("control"),
            Self::Vnode => f.write_str("vnode"),
            Self::Registry => f.write_str("registry"),
            Self::SecondVnode => f.write_str("vnode-2"),
            Self::Kubelet => f.write_str("kubelet"),
            Self::Host(index) => write!(f, "host-{index}"),
        }
    }
}

impl FromStr for Member {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        Self::all(MAX_HOSTS)
            .into_iter()
            .find(|member| member.to_string() == name)
            .ok_or_else(|| {
                format!(
                    "{name:?} is not a namespace of the dev cluster; there are fabric, control, \
                     vnode, vnode-2, registry, kubelet and host-0 to host-{}",
                    MAX_HOSTS - 1
                )
            })
    }
}

/// A port of a member.
pub(crate) fn endpoint(member: Member, port: u16) -> SocketAddrV4 {
    SocketAddrV4::new(member.address().unwrap_or(Ipv4Addr::LOCALHOST), port)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn addresses_and_pod_networks_are_unique() {
        let members = Member::all(MAX_HOSTS);
        let addresses: BTreeSet<_> = members.iter().filter_map(|m| m.address()).collect();
        assert_eq!(addresses.len(), members.len() - 1);
        let networks: BTreeSet<_> = members.iter().filter_map(|m| m.pod_network()).collect();
        assert_eq!(networks.len(), usize::from(MAX_HOSTS) + 1);
    }

    #[test]
    fn pod_networks_follow_each_other() {
        assert_eq!(Member::Host(0).pod_cidr().as_deref(), Some("10.64.0.0/18"));
        assert_eq!(Member::Host(1).pod_cidr().as_deref(), Some("10.64.64.0/18"));
        assert_eq!(Member::Host(4).pod_cidr().as_deref(), Some("10.65.0.0/18"));
        assert_eq!(Member::Control.pod_cidr(), None);
    }

    #[test]
    fn names_read_back() {
        for member in Member::all(MAX_HOSTS) {
            assert_eq!(member.to_string().parse(), Ok(member));
        }
        assert!("host-99".parse::<Member>().is_err());
    }

    #[test]
    fn port_names_fit_the_kernel() {
        for member in Member::all(MAX_HOSTS) {
            assert!(member.to_string().len() < 16, "{member}");
        }
    }
}
