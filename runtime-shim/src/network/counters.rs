//! What every pod of this host has sent and received, in one look at the links.

use std::collections::HashMap;

use netlink_packet_route::link::Stats64;
use sandman_protocol::v1::NetworkUsage;

use super::netlink::Socket;
use super::nftables::LINK_PREFIX;
use super::{Network, NetworkError};

impl Network {
    /// Counters by pod UID. Blocks for as long as the kernel takes to list its links.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn counters(&self) -> Result<HashMap<String, NetworkUsage>, NetworkError> {
        let links = Socket::route()
            .and_then(|mut socket| socket.links())
            .map_err(NetworkError::io("read links"))?;
        let ours = links
            .into_iter()
            .filter(|link| link.name.starts_with(LINK_PREFIX));
        Ok(ours
            .filter_map(|link| Some((link.alias?, seen_from_inside(&link.counters))))
            .collect())
    }
}

/// What the host's end receives, the pod has sent.
fn seen_from_inside(host: &Stats64) -> NetworkUsage {
    NetworkUsage {
        rx_bytes: host.tx_bytes,
        rx_packets: host.tx_packets,
        rx_errors: host.tx_errors,
        rx_dropped: host.tx_dropped,
        tx_bytes: host.rx_bytes,
        tx_packets: host.rx_packets,
        tx_errors: host.rx_errors,
        tx_dropped: host.rx_dropped,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pod_sees_the_other_side() {
        let mut host = Stats64::default();
        (host.rx_bytes, host.tx_bytes) = (10, 2000);
        (host.rx_dropped, host.tx_errors) = (3, 4);
        let usage = seen_from_inside(&host);
        assert_eq!((usage.tx_bytes, usage.rx_bytes), (10, 2000));
        assert_eq!((usage.tx_dropped, usage.rx_errors), (3, 4));
    }
}
