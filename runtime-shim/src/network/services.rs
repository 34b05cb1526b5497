//! What the virtual node states of the cluster's network, all at once or as a difference from what
//! it stated before; and of that, the Services that this host's sandboxes reach.

use std::collections::BTreeSet;
use std::net::Ipv4Addr;
use std::sync::Arc;

use sandman_protocol::v1;

use super::netlink::Socket;
use super::netlink::conntrack::Flow;
use super::nftables::services::{self, Backends, Content, Port, Services};
use super::policies::StatedPolicies;
use super::{Network, NetworkError, blocking, protocol_number};

const UDP: u8 = 17;
/// Endpoints of one port; more are not in any sensible cluster, and each costs kernel memory.
const MAX_ENDPOINTS: usize = 10_000;
/// Ports of Services.
const MAX_PORTS: usize = 100_000;

/// What was stated last, and what of it the kernel has.
#[derive(Debug, Default)]
pub(super) struct Stated {
    version: Option<String>,
    services: Services,
    pub(super) policies: StatedPolicies,
    /// What the kernel's table of Services holds; of `None` nothing is known.
    installed: Option<Content>,
}

/// Why a statement was not taken.
#[derive(Debug, thiserror::Error)]
pub enum ClusterNetworkError {
    /// It differs from a version that this host does not have.
    #[error("this host has version {has:?} of the cluster's network, not {base:?}; send all of it")]
    Base {
        /// The version it has; empty for none.
        has: String,
        /// The version that was named.
        base: String,
    },
    /// A field is wrong.
    #[error("{0}")]
    Invalid(String),
    /// The kernel refuses.
    #[error(transparent)]
    Network(#[from] NetworkError),
}

impl Network {
    /// Makes what is stated true in the kernel. After an error this host knows no version, and
    /// takes only a whole state.
    ///
    /// # Errors
    /// See [`ClusterNetworkError`].
    pub async fn set_cluster(
        &self,
        request: v1::ClusterNetworkRequest,
    ) -> Result<(), ClusterNetworkError> {
        let network = self.clone();
        let inner = Arc::clone(&self.inner);
        let done = blocking(move || Ok(network.inner.stated().take(&network, &request))).await?;
        inner.news.notify_waiters();
        done
    }
}

impl Stated {
    fn take(
        &mut self,
        network: &Network,
        request: &v1::ClusterNetworkRequest,
    ) -> Result<(), ClusterNetworkError> {
        let has = self.version.take();
        let whole = request.base.is_empty();
        if !whole && has.as_ref() != Some(&request.base) {
            return Err(ClusterNetworkError::Base {
                has: has.unwrap_or_default(),
                base: request.base.clone(),
            });
        }
        // Before a pod can reach more, what it may reach.
        self.policies.take(request, whole)?;
        self.take_services(network, request, whole)?;
        self.version = Some(request.version.clone());
        Ok(())
    }

    fn take_services(
        &mut self,
        network: &Network,
        request: &v1::ClusterNetworkRequest,
        whole: bool,
    ) -> Result<(), ClusterNetworkError> {
        if !request.serve_services {
            self.installed = None;
            self.services.clear();
            let removed = services::remove();
            return Ok(removed.map_err(NetworkError::io("remove the rules of Services"))?);
        }
        let before = std::mem::take(&mut self.services);
        self.services = if whole {
            Services::new()
        } else {
            before.clone()
        };
        for key in &request.removed_services {
            self.services.remove(&port(key)?);
        }
        for service in &request.services {
            let (port, backends) = parse(service)?;
            self.services.insert(port, backends);
        }
        if self.services.len() > MAX_PORTS {
            return Err(invalid(format!(
                "services: {} ports are more than {MAX_PORTS}",
                self.services.len()
            )));
        }
        self.install(network)
            .map_err(NetworkError::io("install the rules of Services"))?;
        if lost_affine_endpoints(&before, &self.services) {
            let forgotten = services::forget_clients(&self.services);
            forgotten.map_err(NetworkError::io("forget clients of removed endpoints"))?;
        }
        let ended = end_stale_flows(&before, &self.services, whole);
        Ok(ended.map_err(NetworkError::io("end flows to removed endpoints"))?)
    }

    fn install(&mut self, network: &Network) -> std::io::Result<()> {
        let mut wanted = Content::of(&self.services, network.inner.config.pod_cidr);
        if let Some(installed) = self.installed.take() {
            wanted.keep_chains(&installed);
            if wanted == installed {
                self.installed = Some(wanted);
                return Ok(());
            }
            match wanted.install(Some(&installed)) {
                Ok(()) => {
                    self.installed = Some(wanted);
                    return Ok(());
                }
                // Somebody changed the table: it is made anew.
                Err(error) => tracing::warn!(%error, "rules of Services cannot be changed"),
            }
        }
        let wanted = Content::of(&self.services, network.inner.config.pod_cidr);
        wanted.install(None)?;
        self.installed = Some(wanted);
        Ok(())
    }
}

/// Whether clients may stay with an endpoint that is no more.
fn lost_affine_endpoints(before: &Services, after: &Services) -> bool {
    before.iter().any(|(port, old)| {
        let left = after.get(port).map_or(&[][..], |new| &new.endpoints);
        old.affinity_seconds > 0
            && old
                .endpoints
                .iter()
                .any(|endpoint| !left.contains(endpoint))
    })
}

/// Ends flows of datagrams to a Service that would go on to where none of its endpoints is.
fn end_stale_flows(before: &Services, after: &Services, all: bool) -> std::io::Result<()> {
    let changed: BTreeSet<&Port> = before
        .keys()
        .chain(after.keys())
        .filter(|port| port.protocol == UDP)
        .filter(|port| all || before.get(port) != after.get(port))
        .collect();
    if changed.is_empty() {
        return Ok(());
    }
    let stale = |flow: &Flow| {
        let (address, number) = flow.destination;
        let port = Port {
            address,
            protocol: flow.protocol,
            port: number,
        };
        let endpoints = after.get(&port).map(|backends| &backends.endpoints);
        changed.contains(&port)
            && !endpoints.is_some_and(|endpoints| endpoints.contains(&flow.answers))
    };
    let ended = Socket::netfilter()?.end_flows(stale)?;
    if ended > 0 {
        tracing::info!(ended, "ended flows to removed endpoints of Services");
    }
    Ok(())
}

pub(super) fn invalid(text: String) -> ClusterNetworkError {
    ClusterNetworkError::Invalid(text)
}

fn parse(service: &v1::ServicePort) -> Result<(Port, Backends), ClusterNetworkError> {
    let key = service.key.clone().unwrap_or_default();
    let port = port(&key)?;
    if service.endpoints.len() > MAX_ENDPOINTS {
        return Err(invalid(format!(
            "services.endpoints: {} are more than {MAX_ENDPOINTS}",
            service.endpoints.len()
        )));
    }
    let endpoints = service.endpoints.iter().map(|endpoint| {
        let port = number("services.endpoints.port", endpoint.port)?;
        Ok((Ipv4Addr::from_bits(endpoint.address), port))
    });
    let backends = Backends {
        endpoints: endpoints.collect::<Result<_, ClusterNetworkError>>()?,
        affinity_seconds: service.affinity_seconds,
    };
    Ok((port, backends))
}

fn port(key: &v1::ServiceKey) -> Result<Port, ClusterNetworkError> {
    let protocol = protocol_number(&key.protocol).ok_or_else(|| {
        invalid(format!(
            "services.key.protocol: {:?} is none of TCP, UDP, SCTP",
            key.protocol
        ))
    })?;
    Ok(Port {
        address: Ipv4Addr::from_bits(key.address),
        protocol,
        port: number("services.key.port", key.port)?,
    })
}

fn number(field: &str, port: u32) -> Result<u16, ClusterNetworkError> {
    match u16::try_from(port) {
        Ok(port) if port > 0 => Ok(port),
        _ => Err(invalid(format!(
            "{field}: {port} is not between 1 and 65535"
        ))),
    }
}
