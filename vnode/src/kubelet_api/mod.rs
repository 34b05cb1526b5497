//! The kubelet API of the node, port 10250: exec, logs, stats and the other calls
//! that the API server, metrics-server and Prometheus make of a kubelet.
//!
//! A request goes through `listener` (TLS, limits), `dispatch` (who, may they,
//! what), and one handler. An exec or attach goes on in `remote_command`
//! (refusals, 101) and `bridge` (client ↔ host), a port-forward in
//! `port_forward`; the client's protocol is the business of `sandman_streaming`.
//! Upstream: `pkg/kubelet/server` of Kubernetes 1.36.

mod admission;
mod api;
mod authn;
mod authz;
mod bridge;
mod client_ca;
mod configz;
mod dispatch;
mod health;
mod listener;
mod log_query;
mod logs;
mod metrics;
mod port_forward;
mod query;
mod remote_command;
mod respond;
mod review;
mod review_cache;
mod route;
mod run;
mod stats;
mod target;
#[cfg(test)]
mod tests;
mod tls;
mod upgrade;
mod zpages;

use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use rustls::server::ResolvesServerCert;
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use self::api::Api;
use self::authn::Authenticator;
use self::authz::Authorizer;
use self::client_ca::ClientCa;
/// Whether a raw query of `/containerLogs` is understood; else the HTTP status of
/// the refusal. For tests that make queries up.
///
/// # Errors
/// The status code.
pub fn check_log_query(raw: &str) -> Result<(), u16> {
    let query = query::Query::parse(Some(raw));
    let options = log_query::LogOptions::parse(&query, Timestamp::UNIX_EPOCH);
    options.map(drop).map_err(|bad| bad.status.as_u16())
}

pub use self::{
    api::{Config, Node},
    client_ca::ClientCaError,
    health::SyncLoopCheck,
    metrics::ApiMetrics,
    review::{ClusterReviews, ReviewError, Reviews},
};

/// Time for streams to tell their clients that the node goes down and for the
/// clients to close. Above the linger of one stream.
const DRAIN: Duration = Duration::from_secs(15);

/// Why the server cannot start.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The client CA cannot be used.
    #[error("client CA: {0}")]
    ClientCa(#[from] ClientCaError),
    /// TLS cannot be set up.
    #[error("TLS: {0}")]
    Tls(#[from] rustls::Error),
}

/// Serves the kubelet API on `listener` until `shutdown`, then lets what is open
/// end: every live stream gets a Failure status, no new connection is taken.
///
/// # Errors
/// When the client CA or TLS cannot be set up, before the first connection.
pub async fn serve(
    config: Config,
    node: Node,
    listener: TcpListener,
    serving: Arc<dyn ResolvesServerCert>,
    shutdown: CancellationToken,
) -> Result<(), ServeError> {
    let client_ca = ClientCa::load(&config.client_ca).await?;
    let tls = TlsAcceptor::from(Arc::new(tls::server_config(serving)?));
    let api = Arc::new(Api {
        authenticator: Authenticator::new(client_ca, Arc::clone(&node.reviews)),
        authorizer: Authorizer::new(config.node_name.clone(), Arc::clone(&node.reviews)),
        node_counter: Default::default(),
        admission: Arc::default(),
        streams: Arc::new(Semaphore::new(config.max_streams)),
        tasks: TaskTracker::new(),
        shutdown,
        started: Timestamp::now(),
        config,
        node,
    });
    listener::run(Arc::clone(&api), listener, tls).await;
    api.tasks.close();
    if tokio::time::timeout(DRAIN, api.tasks.wait()).await.is_err() {
        tracing::warn!(
            open = api.tasks.len(),
            "kubelet API streams still open at the end"
        );
    }
    Ok(())
}
