//! The RPCs, each as thin as its type conversions allow.

use std::sync::Arc;

use futures::stream::BoxStream;
use jiff::SignedDuration;
use sandman_protocol::v1;
use sandman_protocol::v1::host_server::Host as HostRpc;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status, Streaming};

use super::inventory::InventorySource;
use super::term::Term;
use super::{attach, exec, logs, port_forward, stats, watch};
use crate::network::ClusterNetworkError;
use crate::sandbox::validate::Refusal;
use crate::sandbox::{Sandboxes, WishError};

/// Messages of output that wait for a client: enough to keep the pipe busy, no more.
const STREAM_BUFFER: usize = 8;
const WATCH_BUFFER: usize = 64;

/// `sandman.host.v1.Host`.
pub struct HostService {
    sandboxes: Arc<Sandboxes>,
    inventory: InventorySource,
    term: Arc<Term>,
    shutdown: CancellationToken,
}

impl HostService {
    /// The service of one host. Watches end at `shutdown`; they never would by themselves.
    #[must_use]
    pub fn new(
        sandboxes: Arc<Sandboxes>,
        inventory: InventorySource,
        term: Arc<Term>,
        shutdown: CancellationToken,
    ) -> Self {
        Self {
            sandboxes,
            inventory,
            term,
            shutdown,
        }
    }
}

impl From<WishError> for Status {
    fn from(error: WishError) -> Self {
        let text = error.to_string();
        match error {
            WishError::Refused(Refusal::Invalid(_)) => Self::invalid_argument(text),
            WishError::Refused(Refusal::Unsupported(_)) => Self::unimplemented(text),
            WishError::Removing(_) => Self::already_exists(text),
            WishError::NoRoom(_) => Self::resource_exhausted(text),
            WishError::Store(_) => Self::unavailable(text),
        }
    }
}

impl From<ClusterNetworkError> for Status {
    fn from(error: ClusterNetworkError) -> Self {
        let text = error.to_string();
        match error {
            ClusterNetworkError::Base { .. } => Self::failed_precondition(text),
            ClusterNetworkError::Invalid(_) => Self::invalid_argument(text),
            ClusterNetworkError::Network(_) => Self::unavailable(text),
        }
    }
}

#[tonic::async_trait]
impl HostRpc for HostService {
    type WatchStream = ReceiverStream<Result<v1::WatchResponse, Status>>;
    type ExecStream = ReceiverStream<Result<v1::ExecResponse, Status>>;
    type AttachStream = ReceiverStream<Result<v1::ExecResponse, Status>>;
    type PortForwardStream = ReceiverStream<Result<v1::PortForwardResponse, Status>>;
    type LogsStream = BoxStream<'static, Result<v1::LogsResponse, Status>>;

    async fn get_inventory(
        &self,
        _request: Request<v1::GetInventoryRequest>,
    ) -> Result<Response<v1::Inventory>, Status> {
        Ok(Response::new(
            self.inventory.inventory(self.term.highest()).await,
        ))
    }

    async fn apply(
        &self,
        request: Request<v1::ApplyRequest>,
    ) -> Result<Response<v1::ApplyResponse>, Status> {
        let request = request.into_inner();
        self.term.check(request.term)?;
        let spec = request
            .spec
            .ok_or_else(|| Status::invalid_argument("spec: missing"))?;
        let pod_ip = self.sandboxes.apply(spec)?;
        Ok(Response::new(v1::ApplyResponse { pod_ip }))
    }

    async fn remove(
        &self,
        request: Request<v1::RemoveRequest>,
    ) -> Result<Response<v1::RemoveResponse>, Status> {
        let request = request.into_inner();
        self.term.check(request.term)?;
        let grace = request.grace_period.unwrap_or_default();
        if grace.seconds < 0 || grace.nanos < 0 {
            return Err(Status::invalid_argument(
                "grace_period: must not be negative",
            ));
        }
        let grace = SignedDuration::new(grace.seconds, grace.nanos);
        self.sandboxes.remove(&request.uid, grace, request.reason)?;
        Ok(Response::new(v1::RemoveResponse {}))
    }

    async fn forget(
        &self,
        request: Request<v1::ForgetRequest>,
    ) -> Result<Response<v1::ForgetResponse>, Status> {
        let request = request.into_inner();
        self.term.check(request.term)?;
        self.sandboxes
            .forget(&request.uid)
            .map_err(|error| match error {
                WishError::Removing(uid) => {
                    Status::failed_precondition(format!("sandbox {uid} is not removed yet"))
                }
                other => other.into(),
            })?;
        Ok(Response::new(v1::ForgetResponse {}))
    }

    async fn watch(
        &self,
        request: Request<v1::WatchRequest>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        let term = request.into_inner().term;
        self.term.check(term)?;
        let (sender, receiver) = mpsc::channel(WATCH_BUFFER);
        tokio::spawn(watch::serve(
            self.sandboxes.host().board.clone(),
            self.inventory.clone(),
            self.term.clone(),
            term,
            self.shutdown.clone(),
            sender,
        ));
        Ok(Response::new(ReceiverStream::new(receiver)))
    }

    async fn exec(
        &self,
        request: Request<Streaming<v1::ExecRequest>>,
    ) -> Result<Response<Self::ExecStream>, Status> {
        let (sender, receiver) = mpsc::channel(STREAM_BUFFER);
        tokio::spawn(exec::serve(
            self.sandboxes.clone(),
            request.into_inner(),
            sender,
        ));
        Ok(Response::new(ReceiverStream::new(receiver)))
    }

    async fn attach(
        &self,
        request: Request<Streaming<v1::ExecRequest>>,
    ) -> Result<Response<Self::AttachStream>, Status> {
        let (sender, receiver) = mpsc::channel(STREAM_BUFFER);
        tokio::spawn(attach::serve(
            self.sandboxes.clone(),
            request.into_inner(),
            sender,
        ));
        Ok(Response::new(ReceiverStream::new(receiver)))
    }

    async fn port_forward(
        &self,
        request: Request<Streaming<v1::PortForwardRequest>>,
    ) -> Result<Response<Self::PortForwardStream>, Status> {
        let (sender, receiver) = mpsc::channel(STREAM_BUFFER);
        tokio::spawn(port_forward::serve(
            self.sandboxes.host().clone(),
            request.into_inner(),
            sender,
        ));
        Ok(Response::new(ReceiverStream::new(receiver)))
    }

    async fn logs(
        &self,
        request: Request<v1::LogsRequest>,
    ) -> Result<Response<Self::LogsStream>, Status> {
        let request = request.into_inner();
        let view = self
            .sandboxes
            .view(&request.uid)
            .ok_or_else(|| Status::not_found(format!("no sandbox {:?}", request.uid)))?;
        let stream = logs::open(&self.sandboxes.host().logs, &view, &request)?;
        Ok(Response::new(stream))
    }

    async fn set_cluster_network(
        &self,
        request: Request<v1::ClusterNetworkRequest>,
    ) -> Result<Response<v1::ClusterNetworkResponse>, Status> {
        let request = request.into_inner();
        self.term.check(request.term)?;
        let network = &self.sandboxes.host().network;
        network.set_cluster(request).await?;
        Ok(Response::new(v1::ClusterNetworkResponse {}))
    }

    async fn get_stats(
        &self,
        _request: Request<v1::GetStatsRequest>,
    ) -> Result<Response<v1::Stats>, Status> {
        let sandboxes = self.sandboxes.clone();
        // Thousands of small files: not on a thread that serves streams.
        let stats = tokio::task::spawn_blocking(move || stats::collect(&sandboxes))
            .await
            .map_err(|error| Status::internal(error.to_string()))?;
        Ok(Response::new(stats))
    }
}
