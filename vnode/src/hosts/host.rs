//! What a host is to the rest of the node: a place that takes desired
//! sandboxes, reports facts about them and can be lost. Real hosts and the
//! in-process null hosts stand behind the same trait.

use std::time::Duration;

use async_trait::async_trait;
use futures::stream::BoxStream;
use sandman_protocol::v1;
use sandman_protocol::v1::host_client::HostClient;
use tonic::transport::Channel;
use tonic::{Code, Status};

use crate::view::StreamError;

/// Why a host did not do what it was asked.
#[derive(Debug, thiserror::Error)]
pub enum HostError {
    /// No connection, or no answer in time. Nothing is known about the outcome.
    #[error("cannot be reached: {0}")]
    Unreachable(String),
    /// The sandbox is being removed; a UID never comes back.
    #[error("the sandbox is being removed")]
    Removing,
    /// The sandbox does not fit at this moment.
    #[error("does not fit: {0}")]
    Full(String),
    /// The host will never run this spec; the text names the field or feature.
    #[error("{0}")]
    Refused(String),
    /// A newer leader commands the host.
    #[error("a newer leader is in charge of the host")]
    Superseded,
    /// It was not asked: it answers nothing of what it was asked before.
    #[error("does not answer, {0} commands wait")]
    Silent(usize),
    /// Anything else that went wrong on the host.
    #[error("{0}")]
    Failed(String),
}

/// A host's sandboxes, read as they change.
pub type Updates = BoxStream<'static, Result<v1::WatchResponse, HostError>>;

/// One host.
#[async_trait]
pub trait Host: Send + Sync {
    /// Connects, or connects again, and begins to watch. The commands below use
    /// this connection afterwards.
    async fn connect(&self) -> Result<(v1::Inventory, Updates), HostError>;

    /// States what should be true of one sandbox.
    async fn apply(&self, spec: v1::SandboxSpec) -> Result<(), HostError>;

    /// Starts or hastens the end of a sandbox.
    async fn remove(&self, uid: &str, grace: Duration, reason: &str) -> Result<(), HostError>;

    /// Lets the host drop its record of a removed sandbox.
    async fn forget(&self, uid: &str) -> Result<(), HostError>;

    /// States the Services that the host's sandboxes reach, or what is different of them. After an
    /// error the host knows none of what was stated: all of it is to be stated again.
    async fn set_cluster_network(&self, wish: v1::ClusterNetworkRequest) -> Result<(), HostError>;

    /// Usage of the host and its sandboxes.
    async fn stats(&self) -> Result<v1::Stats, HostError>;

    /// A client on a connection for long streams.
    async fn streams(&self) -> Result<HostClient<Channel>, StreamError>;
}

impl From<Status> for HostError {
    fn from(status: Status) -> Self {
        let text = || status.message().chars().take(MAX_TEXT).collect::<String>();
        match status.code() {
            Code::Aborted => Self::Superseded,
            Code::AlreadyExists => Self::Removing,
            Code::ResourceExhausted => Self::Full(text()),
            Code::InvalidArgument | Code::Unimplemented => Self::Refused(text()),
            Code::Unavailable | Code::DeadlineExceeded | Code::Cancelled => {
                Self::Unreachable(text())
            }
            _ => Self::Failed(text()),
        }
    }
}

/// Longest text of a host that is passed on, in characters.
const MAX_TEXT: usize = 1024;
