//! What every handler of the kubelet API shares.

use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use jiff::Timestamp;
use prometheus_client::registry::Registry;
use sandman_streaming::Limits;
use tokio::sync::{Semaphore, watch};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::admission::Admission;
use super::authn::Authenticator;
use super::authz::Authorizer;
use super::health::SyncLoopCheck;
use super::metrics::ApiMetrics;
use super::review::Reviews;
use super::stats::NodeCounter;
use crate::view::{HostStreams, PodView};

/// Settings of the server.
#[derive(Debug, Clone)]
pub struct Config {
    /// Name of the Node; policies are asked about it.
    pub node_name: String,
    /// Authorities that sign client certificates, PEM; read again on change.
    pub client_ca: PathBuf,
    /// The kubelet's `enableDebuggingHandlers`: without them exec, attach, run,
    /// portForward, containerLogs and runningpods answer 405.
    pub debugging_handlers: bool,
    /// Exec, attach, run and portForward need the verb `create` also by GET,
    /// which a WebSocket handshake is. The kubelet is content with `get`.
    pub streams_need_create: bool,
    /// Most connections; more wait to be accepted.
    pub max_connections: usize,
    /// Most streams (exec, logs); more are told to come back (429). Below
    /// `max_connections`, so that health checks are answered at the limit.
    pub max_streams: usize,
    /// How long a process without a terminal may go on after its client has gone
    /// and has no input left for it; `None` leaves it alone, as a kubelet does.
    pub client_loss_grace: Option<Duration>,
    /// Bounds of one stream.
    pub stream_limits: Limits,
    /// The node's configuration, for `/configz`; values under keys that sound
    /// like a secret are blanked.
    pub configz: serde_json::Value,
}

impl Config {
    /// The defaults, for a node and its client CA.
    pub fn new(node_name: impl Into<String>, client_ca: impl Into<PathBuf>) -> Self {
        Self {
            node_name: node_name.into(),
            client_ca: client_ca.into(),
            debugging_handlers: true,
            streams_need_create: true,
            max_connections: 10_000,
            max_streams: 8_000,
            client_loss_grace: Some(Duration::from_secs(30)),
            stream_limits: Limits::default(),
            configz: serde_json::Value::Null,
        }
    }
}

/// The parts of the node that the server uses.
#[derive(Clone)]
pub struct Node {
    /// Which pods there are.
    pub pods: Arc<dyn PodView>,
    /// Whether all of them are known yet.
    pub listed: watch::Receiver<bool>,
    /// Ways to their hosts.
    pub hosts: Arc<dyn HostStreams>,
    /// Who and whether they may.
    pub reviews: Arc<dyn Reviews>,
    /// Whether the node's own loop makes progress.
    pub syncloop: Arc<SyncLoopCheck>,
    /// Everything that `/metrics` shows.
    pub registry: Arc<Registry>,
    /// The server's own metrics, registered there.
    pub metrics: ApiMetrics,
}

/// Shared by all handlers.
pub(super) struct Api {
    pub(super) config: Config,
    pub(super) node: Node,
    pub(super) authenticator: Authenticator,
    pub(super) authorizer: Authorizer,
    pub(super) node_counter: Mutex<NodeCounter>,
    pub(super) admission: Arc<Admission>,
    /// One permit a stream.
    pub(super) streams: Arc<Semaphore>,
    /// Connections and sessions, waited for at the end.
    pub(super) tasks: TaskTracker,
    pub(super) shutdown: CancellationToken,
    pub(super) started: Timestamp,
}
