//! `/exec`: everything that can be refused is refused before the 101, without a
//! side effect, because kubectl repeats a refused WebSocket request over SPDY.

use std::sync::Arc;
use std::time::Duration;

use http::{Request, Response, StatusCode};
use hyper::body::Incoming;
use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use sandman_protocol::v1;
use sandman_streaming::{
    Refusal, RemoteCommandUpgrade, StreamOptions, negotiate_remote_command, serve_remote_command,
};
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::Instant;
use tracing::Instrument;

use super::api::Api;
use super::bridge::Bridge;
use super::listener::Peer;
use super::metrics::SubresourceLabel;
use super::query::Query;
use super::respond::{Body, full, later, no_stream, text};
use super::route::ContainerRef;
use super::target;
use crate::metrics::Reason;

const SUBRESOURCE: &str = "exec";
/// Time for the connection to become a stream after the 101 was written.
const UPGRADE_WAIT: Duration = Duration::from_secs(30);

/// Answers an exec request and, if it is accepted, starts its session.
pub(super) async fn respond(
    api: &Arc<Api>,
    peer: &Arc<Peer>,
    wanted: &ContainerRef,
    request: &mut Request<Incoming>,
) -> Response<Body> {
    let arrived = Instant::now();
    let raw_query = request.uri().query().unwrap_or_default();
    let options = match StreamOptions::from_query(raw_query) {
        Ok(options) => options,
        Err(refusal) => return refused(refusal),
    };
    let query = Query::parse(Some(raw_query));
    let command: Vec<String> = query.all("command").map(str::to_owned).collect();
    if command.is_empty() {
        return text(
            StatusCode::BAD_REQUEST,
            "query parameter \"command\" is required",
        );
    }
    let pod = match target::running_container(&*api.node.pods, wanted) {
        Ok(pod) => pod,
        Err(refused) => return text(refused.status, refused.body),
    };
    let uid = pod.metadata.uid.clone().unwrap_or_default();
    let upgrade = match negotiate_remote_command(request.method(), request.headers()) {
        Ok(upgrade) => upgrade,
        Err(refusal) => return refused(refusal),
    };
    let Ok(slot) = Arc::clone(&api.streams).try_acquire_owned() else {
        return later(
            StatusCode::TOO_MANY_REQUESTS,
            "maximum number of in-flight requests exceeded",
        );
    };
    let client = match api.node.hosts.client(&uid).await {
        Ok(client) => client,
        Err(error) => return no_stream(&error),
    };

    let (transport, protocol) = upgrade.describe();
    if transport == "websocket" {
        let label = SubresourceLabel {
            subresource: Reason(SUBRESOURCE),
        };
        api.node
            .metrics
            .websocket_requests
            .get_or_create(&label)
            .inc();
    }
    let span = tracing::info_span!(
        "exec",
        pod_uid = %uid,
        container = %wanted.container,
        transport,
        protocol
    );
    let bridge = Bridge {
        client,
        start: v1::ExecStart {
            uid,
            container: wanted.container.clone(),
            command,
            stdin: options.stdin,
            stdout: options.stdout,
            stderr: options.stderr,
            tty: options.tty,
            size: None,
        },
        metrics: api.node.metrics.clone(),
        meter: api.node.metrics.open_stream(SUBRESOURCE),
        arrived,
        client_loss_grace: api.config.client_loss_grace,
    };
    let response = upgrade.response().map(|()| full(""));
    let session = Session {
        api: Arc::clone(api),
        upgrade,
        options,
        bridge,
        _peer: Arc::clone(peer),
        _slot: slot,
    };
    let upgraded = hyper::upgrade::on(request);
    api.tasks.spawn(session.run(upgraded).instrument(span));
    response
}

/// An accepted exec that waits for its connection.
struct Session {
    api: Arc<Api>,
    upgrade: RemoteCommandUpgrade,
    options: StreamOptions,
    bridge: Bridge,
    /// Keeps the connection counted while it is a stream.
    _peer: Arc<Peer>,
    _slot: OwnedSemaphorePermit,
}

impl Session {
    async fn run(self, upgraded: OnUpgrade) {
        let io = match tokio::time::timeout(UPGRADE_WAIT, upgraded).await {
            Ok(Ok(io)) => TokioIo::new(io),
            Ok(Err(error)) => {
                tracing::debug!(%error, "connection ended before it became a stream");
                return;
            }
            Err(_) => {
                tracing::debug!("connection did not become a stream in time");
                return;
            }
        };
        let limits = self.api.config.stream_limits.clone();
        let shutdown = self.api.shutdown.clone();
        let bridge = self.bridge;
        let served = serve_remote_command(
            io,
            self.upgrade,
            self.options,
            limits,
            shutdown,
            move |session| bridge.run(session),
        );
        if let Err(error) = Box::pin(served).await {
            tracing::debug!(%error, "exec session ended early");
        }
    }
}

fn refused(refusal: Refusal) -> Response<Body> {
    refusal.into_response().map(full)
}
