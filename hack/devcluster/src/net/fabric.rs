//! Makes the namespaces and joins them: a bridge, a veth a member, and routes to every host's pods.
//! Each step looks before it acts, so that a half-made network is completed.

use std::net::Ipv4Addr;
use std::os::fd::AsRawFd;

use anyhow::Context;
use futures::TryStreamExt;
use netlink_packet_route::link::{InfoData, InfoVeth, LinkAttribute, LinkMessage};
use rtnetlink::{Handle, LinkBridge, LinkUnspec, LinkVeth, RouteMessageBuilder};

use super::{FABRIC_PREFIX, Member, NetNs, POD_PREFIX};
use crate::layout::Layout;

const BRIDGE: &str = "bridge";
/// The end of the veth inside a member's namespace.
const UPLINK: &str = "eth0";

/// Makes the network of a cluster with this many hosts, or completes it.
pub(crate) fn ensure(layout: &Layout, hosts: u8) -> anyhow::Result<()> {
    let members = Member::all(hosts);
    let fabric = NetNs::named(&layout.netns_name(Member::Fabric));
    fabric.ensure()?;
    with_netlink(&fabric, async |netlink| {
        loopback_up(&netlink).await?;
        ensure_bridge(&netlink).await
    })?;
    for &member in &members {
        let Some(address) = member.address() else {
            continue;
        };
        let namespace = NetNs::named(&layout.netns_name(member));
        namespace.ensure()?;
        join(&namespace, &fabric, member, address, &members)
            .with_context(|| format!("cannot join {member} to the fabric"))?;
    }
    Ok(())
}

/// Puts one member on the bridge.
fn join(
    namespace: &NetNs,
    fabric: &NetNs,
    member: Member,
    address: Ipv4Addr,
    members: &[Member],
) -> anyhow::Result<()> {
    let fabric_fd = fabric.open()?;
    with_netlink(namespace, async |netlink| {
        loopback_up(&netlink).await?;
        if find_link(&netlink, UPLINK).await?.is_none() {
            // Born in two namespaces at once: there is no moment in which a crash leaves an end
            // where it does not belong.
            let port = LinkUnspec::new_with_name(&member.to_string())
                .setns_by_fd(fabric_fd.as_raw_fd())
                .build();
            let pair = LinkVeth::new(UPLINK, "unused")
                .set_info_data(InfoData::Veth(InfoVeth::Peer(port)))
                .build();
            netlink.link().add(pair).execute().await.context("veth")?;
        }
        let uplink = link_index(&netlink, UPLINK).await?;
        netlink
            .address()
            .add(uplink, address.into(), FABRIC_PREFIX)
            .replace()
            .execute()
            .await
            .context("address")?;
        link_up(&netlink, uplink).await?;
        route_to_pods(&netlink, member, members).await
    })?;
    if matches!(member, Member::Host(_) | Member::Kubelet) {
        namespace.run(|| Ok(std::fs::write("/proc/sys/net/ipv4/ip_forward", "1")?))?;
    }
    with_netlink(fabric, async |netlink| {
        let bridge = link_index(&netlink, BRIDGE).await?;
        let port = link_index(&netlink, &member.to_string()).await?;
        let enslaved = LinkUnspec::new_with_index(port)
            .controller(bridge)
            .up()
            .build();
        netlink
            .link()
            .set(enslaved)
            .execute()
            .await
            .context("bridge port")
    })
}

/// Routes the pods of every other machine through that machine.
async fn route_to_pods(netlink: &Handle, member: Member, members: &[Member]) -> anyhow::Result<()> {
    for &other in members.iter().filter(|&&other| other != member) {
        let (Some(network), Some(gateway)) = (other.pod_network(), other.address()) else {
            continue;
        };
        let route = RouteMessageBuilder::<Ipv4Addr>::new()
            .destination_prefix(network, POD_PREFIX)
            .gateway(gateway)
            .build();
        netlink
            .route()
            .add(route)
            .replace()
            .execute()
            .await
            .with_context(|| format!("route to the pods of {other}"))?;
    }
    Ok(())
}

async fn ensure_bridge(netlink: &Handle) -> anyhow::Result<()> {
    if find_link(netlink, BRIDGE).await?.is_none() {
        netlink
            .link()
            .add(LinkBridge::new(BRIDGE).build())
            .execute()
            .await
            .context("bridge")?;
    }
    link_up(netlink, link_index(netlink, BRIDGE).await?).await
}

async fn loopback_up(netlink: &Handle) -> anyhow::Result<()> {
    link_up(netlink, link_index(netlink, "lo").await?).await
}

async fn link_up(netlink: &Handle, index: u32) -> anyhow::Result<()> {
    let up = LinkUnspec::new_with_index(index).up().build();
    netlink
        .link()
        .set(up)
        .execute()
        .await
        .context("cannot set a link up")
}

async fn link_index(netlink: &Handle, name: &str) -> anyhow::Result<u32> {
    find_link(netlink, name)
        .await?
        .with_context(|| format!("link {name} is not there"))
}

/// Lists rather than asks for one: a kernel's answer to an unknown name is an error like others.
async fn find_link(netlink: &Handle, name: &str) -> anyhow::Result<Option<u32>> {
    let links: Vec<LinkMessage> = netlink.link().get().execute().try_collect().await?;
    Ok(links
        .iter()
        .find(|link| {
            link.attributes
                .iter()
                .any(|attribute| matches!(attribute, LinkAttribute::IfName(n) if n == name))
        })
        .map(|link| link.header.index))
}

/// Runs netlink work inside a namespace: the socket belongs to the one its thread was in.
fn with_netlink<T: Send>(
    namespace: &NetNs,
    work: impl AsyncFnOnce(Handle) -> anyhow::Result<T> + Send,
) -> anyhow::Result<T> {
    namespace.run(move || {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        runtime.block_on(async {
            let (connection, handle, _) = rtnetlink::new_connection()?;
            let driver = tokio::spawn(connection);
            let result = work(handle).await;
            driver.abort();
            result
        })
    })
}

#[cfg(test)]
mod tests {
    use std::net::{SocketAddr, TcpListener, TcpStream};
    use std::time::Duration;

    use super::*;
    use crate::net::endpoint;

    /// Removes the namespaces also when the test fails.
    struct Removed(Layout);

    impl Drop for Removed {
        fn drop(&mut self) {
            for member in Member::all(3) {
                // A second failure would hide the first.
                let _ = NetNs::named(&self.0.netns_name(member)).remove();
            }
        }
    }

    /// Needs root.
    #[test]
    fn members_reach_each_other_and_a_second_pass_changes_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout::open(dir.path(), &dir.path().join("state")).unwrap();
        let removed = Removed(layout.clone());
        let namespace = |member| NetNs::named(&layout.netns_name(member));
        ensure(&layout, 2).unwrap();
        let before = namespace(Member::Host(0)).inode().unwrap();
        // More hosts join a network that is there.
        ensure(&layout, 3).unwrap();
        assert_eq!(namespace(Member::Host(0)).inode(), Some(before));

        let address: SocketAddr = endpoint(Member::Host(0), 4000).into();
        let listener = namespace(Member::Host(0))
            .run(|| Ok(TcpListener::bind(address)?))
            .unwrap();
        for member in [Member::Control, Member::Vnode, Member::Host(2)] {
            let connect =
                || Ok(TcpStream::connect_timeout(&address, Duration::from_secs(5))?.peer_addr()?);
            assert_eq!(
                namespace(member).run(connect).unwrap(),
                address,
                "from {member}"
            );
        }
        drop(listener);
        drop(removed);
        assert!(!namespace(Member::Fabric).exists());
    }
}
