//! `/exec` and `/attach`: everything that can be refused is refused before the
//! 101, without a side effect, because kubectl repeats a refused WebSocket
//! request over SPDY.

use std::sync::Arc;

use http::{Request, Response, StatusCode};
use hyper::body::Incoming;
use hyper::upgrade::OnUpgrade;
use k8s_openapi::api::core::v1::Pod;
use sandman_protocol::v1;
use sandman_streaming::{
    RemoteCommandUpgrade, StreamOptions, negotiate_remote_command, serve_remote_command,
};
use tokio::time::Instant;
use tracing::Instrument;

use super::api::Api;
use super::bridge::{Bridge, Call};
use super::listener::Peer;
use super::query::Query;
use super::respond::{Body, full, no_stream, text};
use super::route::ContainerRef;
use super::target;
use super::upgrade::{self, Place};

/// Answers an exec or attach request and, if it is accepted, starts its session.
pub(super) async fn respond(
    api: &Arc<Api>,
    peer: &Arc<Peer>,
    call: Call,
    wanted: &ContainerRef,
    request: &mut Request<Incoming>,
) -> Response<Body> {
    let arrived = Instant::now();
    let raw_query = request.uri().query().unwrap_or_default();
    let options = match StreamOptions::from_query(raw_query) {
        Ok(options) => options,
        Err(refusal) => return upgrade::refused(refusal),
    };
    let query = Query::parse(Some(raw_query));
    let command: Vec<String> = match call {
        Call::Exec => query.all("command").map(str::to_owned).collect(),
        Call::Attach => Vec::new(),
    };
    if call == Call::Exec && command.is_empty() {
        return text(
            StatusCode::BAD_REQUEST,
            "query parameter \"command\" is required",
        );
    }
    let found = match call {
        Call::Exec => target::running_container(&*api.node.pods, wanted),
        Call::Attach => target::attached_container(&*api.node.pods, wanted),
    };
    let pod = match found {
        Ok(pod) => pod,
        Err(refused) => return text(refused.status, refused.body),
    };
    let options = match call {
        Call::Exec => options,
        Call::Attach => attach_options(options, &pod, &wanted.container),
    };
    let uid = pod.metadata.uid.clone().unwrap_or_default();
    let accepted = match negotiate_remote_command(request.method(), request.headers()) {
        Ok(accepted) => accepted,
        Err(refusal) => return upgrade::refused(refusal),
    };
    let Some(place) = upgrade::place(api, peer) else {
        return upgrade::crowded();
    };
    let client = match api.node.hosts.client(&uid).await {
        Ok(client) => client,
        Err(error) => return no_stream(&error),
    };

    let (transport, protocol) = accepted.describe();
    upgrade::count(api, call.name(), transport);
    let span = tracing::info_span!(
        "stream",
        call = call.name(),
        pod_uid = %uid,
        container = %wanted.container,
        transport,
        protocol
    );
    let bridge = Bridge {
        call,
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
        meter: api.node.metrics.open_stream(call.name()),
        arrived,
        client_loss_grace: api.config.client_loss_grace,
    };
    let response = accepted.response().map(|()| full(""));
    let session = Session {
        api: Arc::clone(api),
        accepted,
        options,
        bridge,
        _place: place,
    };
    let upgraded = hyper::upgrade::on(request);
    api.tasks.spawn(session.run(upgraded).instrument(span));
    response
}

/// The terminal of an attached container is what its pod says, whatever the
/// client does: a process has one from its start, or never.
fn attach_options(mut options: StreamOptions, pod: &Pod, container: &str) -> StreamOptions {
    options.tty = target::has_terminal(pod, container);
    // A terminal has one output. A client that asks for errors alone gets a
    // stream on which nothing comes.
    options.stderr = options.stderr && (!options.tty || !options.stdout && !options.stdin);
    options
}

/// An accepted exec or attach that waits for its connection.
struct Session {
    api: Arc<Api>,
    accepted: RemoteCommandUpgrade,
    options: StreamOptions,
    bridge: Bridge,
    _place: Place,
}

impl Session {
    async fn run(self, upgraded: OnUpgrade) {
        let Some(io) = upgrade::stream(upgraded).await else {
            return;
        };
        let limits = self.api.config.stream_limits.clone();
        let shutdown = self.api.shutdown.clone();
        let bridge = self.bridge;
        let served = serve_remote_command(
            io,
            self.accepted,
            self.options,
            limits,
            shutdown,
            move |session| bridge.run(session),
        );
        if let Err(error) = Box::pin(served).await {
            tracing::debug!(%error, "session ended early");
        }
    }
}
