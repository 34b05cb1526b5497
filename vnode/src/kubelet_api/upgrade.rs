//! What all upgraded connections (exec, attach, port-forward) have in common:
//! their place among the streams, and the step from request to stream.

use std::sync::Arc;
use std::time::Duration;

use http::{Response, StatusCode};
use hyper::upgrade::{OnUpgrade, Upgraded};
use hyper_util::rt::TokioIo;
use sandman_streaming::Refusal;
use tokio::sync::OwnedSemaphorePermit;

use super::api::Api;
use super::listener::Peer;
use super::metrics::SubresourceLabel;
use super::respond::{Body, full, later};
use crate::metrics::Reason;

/// Time for the connection to become a stream after the 101 was written.
const UPGRADE_WAIT: Duration = Duration::from_secs(30);

/// What a stream holds as long as it lives.
pub(super) struct Place {
    /// Keeps the connection counted.
    _peer: Arc<Peer>,
    _slot: OwnedSemaphorePermit,
}

/// A place among the streams, if there is one left; otherwise see [`crowded`].
pub(super) fn place(api: &Api, peer: &Arc<Peer>) -> Option<Place> {
    let slot = Arc::clone(&api.streams).try_acquire_owned().ok()?;
    Some(Place {
        _peer: Arc::clone(peer),
        _slot: slot,
    })
}

/// The answer when there is no place.
pub(super) fn crowded() -> Response<Body> {
    later(
        StatusCode::TOO_MANY_REQUESTS,
        "maximum number of in-flight requests exceeded",
    )
}

/// Counts a stream that came as WebSocket, as the kubelet does.
pub(super) fn count(api: &Api, subresource: &'static str, transport: &str) {
    if transport == "websocket" {
        let label = SubresourceLabel {
            subresource: Reason(subresource),
        };
        api.node
            .metrics
            .websocket_requests
            .get_or_create(&label)
            .inc();
    }
}

/// The connection, once the 101 is written; `None` if that never happens.
pub(super) async fn stream(upgraded: OnUpgrade) -> Option<TokioIo<Upgraded>> {
    match tokio::time::timeout(UPGRADE_WAIT, upgraded).await {
        Ok(Ok(io)) => Some(TokioIo::new(io)),
        Ok(Err(error)) => {
            tracing::debug!(%error, "connection ended before it became a stream");
            None
        }
        Err(_) => {
            tracing::debug!("connection did not become a stream in time");
            None
        }
    }
}

/// The answer to a handshake that is refused.
pub(super) fn refused(refusal: Refusal) -> Response<Body> {
    refusal.into_response().map(full)
}
