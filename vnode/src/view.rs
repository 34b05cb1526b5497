//! What the kubelet API may ask of the rest of the node: which pods there are,
//! and a way to the host of one of them. The pod and host controllers implement
//! these traits; the API server knows nothing else about either.

use std::borrow::Borrow;
use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;
use k8s_openapi::api::core::v1::Pod;
use sandman_protocol::v1;
use sandman_protocol::v1::host_client::HostClient;
use tonic::transport::Channel;

/// Name of a host in the fleet, as in the configuration and in the host's
/// certificate. Cheap to clone.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HostName(Arc<str>);

/// Why no stream to a pod's host can be had right now.
#[derive(Debug, thiserror::Error)]
pub enum StreamError {
    /// No pod of this UID has a place on a host.
    #[error("pod is not placed on a host yet")]
    NotPlaced,
    /// The host is known, but there is no connection to it.
    #[error("host {0} cannot be reached")]
    Unreachable(HostName),
    /// The host has no streams at all, as an in-process null host.
    #[error("host {0} does not run processes")]
    Unsupported(HostName),
}

/// The node's pods, read from memory.
///
/// Every pod carries the newest status that this node computed, which may be
/// ahead of the API server's copy but never behind what a client can have seen.
pub trait PodView: Send + Sync {
    /// All pods bound to this node, also terminal ones, in no order.
    fn pods(&self) -> Vec<Arc<Pod>>;

    /// The pod of that name. Where a successor already exists beside a pod that
    /// is still being removed, the newest one that is not terminal wins.
    fn find(&self, namespace: &str, name: &str) -> Option<Arc<Pod>>;

    /// The pod with that UID.
    fn find_by_uid(&self, uid: &str) -> Option<Arc<Pod>>;

    /// The host that a pod is placed on.
    fn host_of(&self, uid: &str) -> Option<HostName>;

    /// Pods that have a sandbox on a host at this moment.
    fn running_pods(&self) -> Vec<Arc<Pod>>;
}

/// Ways to the hosts for traffic that does not belong on the control connection.
#[async_trait]
pub trait HostStreams: Send + Sync {
    /// A client on the stream connection (`Exec`, `Logs`) of the pod's host.
    async fn client(&self, uid: &str) -> Result<HostClient<Channel>, StreamError>;

    /// Usage as every reachable host reports it now; a host that does not answer
    /// in time is left out.
    async fn stats(&self) -> Vec<(HostName, v1::Stats)>;
}

// === impl HostName ===

impl HostName {
    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl From<&str> for HostName {
    fn from(name: &str) -> Self {
        Self(name.into())
    }
}

impl Borrow<str> for HostName {
    fn borrow(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for HostName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for HostName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&*self.0, f)
    }
}
