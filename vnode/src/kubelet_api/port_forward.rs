//! `/portForward`: connections of a client to ports inside a pod, each a
//! `PortForward` stream of the pod's host.
//!
//! Upstream: `k8s.io/cri-streaming/pkg/streaming/portforward`.

use std::future::pending;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response};
use hyper::body::Incoming;
use hyper::upgrade::OnUpgrade;
use prometheus_client::metrics::counter::Counter;
use sandman_protocol::v1;
use sandman_protocol::v1::port_forward_request::Message as Out;
use sandman_protocol::v1::port_forward_response::Message as In;
use sandman_streaming::{
    ForwardOutcome, ForwardedConnection, Input, Output, PortForwardUpgrade, negotiate_port_forward,
    serve_port_forward,
};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Status, Streaming};
use tracing::Instrument;

use super::api::Api;
use super::listener::Peer;
use super::metrics::StreamMeter;
use super::respond::{Body, full, no_stream, text};
use super::route::PodRef;
use super::target;
use super::upgrade::{self, Place};
use crate::view::HostStreams;

const SUBRESOURCE: &str = "portforward";
/// Longest piece of data in one message: cheap, and fair to other streams.
const MAX_DATA: usize = 64 << 10;
/// Messages that may wait for the HTTP/2 window of the host connection.
const REQUESTS_IN_FLIGHT: usize = 4;
/// Time for the host to say whether the port answers; above the host's own
/// limit for that.
const OPEN_WAIT: Duration = Duration::from_secs(40);

/// Answers a port-forward request and, if it is accepted, starts its session.
pub(super) async fn respond(
    api: &Arc<Api>,
    peer: &Arc<Peer>,
    wanted: &PodRef,
    request: &mut Request<Incoming>,
) -> Response<Body> {
    let pod = match target::forwarded_pod(&*api.node.pods, wanted) {
        Ok(pod) => pod,
        Err(refused) => return text(refused.status, refused.body),
    };
    let query = request.uri().query().unwrap_or_default();
    let accepted = match negotiate_port_forward(request.method(), request.headers(), query) {
        Ok(accepted) => accepted,
        Err(refusal) => return upgrade::refused(refusal),
    };
    let Some(place) = upgrade::place(api, peer) else {
        return upgrade::crowded();
    };
    let uid = pod.metadata.uid.clone().unwrap_or_default();
    if let Err(error) = api.node.hosts.client(&uid).await {
        return no_stream(&error);
    }
    let (transport, protocol) = accepted.describe();
    upgrade::count(api, SUBRESOURCE, transport);
    let span = tracing::info_span!("port-forward", pod_uid = %uid, transport, protocol);
    let meter = api.node.metrics.open_stream(SUBRESOURCE);
    let response = accepted.response().map(|()| full(""));
    let session = Session {
        way: Way {
            hosts: Arc::clone(&api.node.hosts),
            name: wanted.name.clone(),
            uid,
            bytes_in: meter.bytes_in.clone(),
            bytes_out: meter.bytes_out.clone(),
        },
        api: Arc::clone(api),
        accepted,
        meter,
        _place: place,
    };
    let upgraded = hyper::upgrade::on(request);
    api.tasks.spawn(session.run(upgraded).instrument(span));
    response
}

/// An accepted port-forward that waits for its connection.
struct Session {
    api: Arc<Api>,
    accepted: PortForwardUpgrade,
    way: Way,
    meter: StreamMeter,
    _place: Place,
}

impl Session {
    async fn run(mut self, upgraded: OnUpgrade) {
        let Some(io) = upgrade::stream(upgraded).await else {
            return;
        };
        let way = self.way;
        let served = serve_port_forward(
            io,
            self.accepted,
            self.api.config.stream_limits.clone(),
            self.api.shutdown.clone(),
            move |connection| way.clone().carry(connection),
        );
        match Box::pin(served).await {
            Ok(()) => self.meter.finish("completed"),
            Err(error) => tracing::debug!(%error, "port-forward ended early"),
        }
    }
}

/// The way to the ports of one pod.
#[derive(Clone)]
struct Way {
    hosts: Arc<dyn HostStreams>,
    name: String,
    uid: String,
    bytes_in: Counter,
    bytes_out: Counter,
}

impl Way {
    /// Carries one connection to its end.
    async fn carry(self, connection: ForwardedConnection) -> ForwardOutcome {
        let ForwardedConnection {
            port,
            input,
            output,
            closed,
        } = connection;
        tokio::select! {
            outcome = self.carry_open(port, input, output) => outcome,
            // Dropping the stream tells the host.
            () = closed.cancelled() => ForwardOutcome::Closed,
        }
    }

    async fn carry_open(&self, port: u16, input: Input, output: Output) -> ForwardOutcome {
        let (requests, receiver) = mpsc::channel(REQUESTS_IN_FLIGHT);
        let opened = tokio::time::timeout(OPEN_WAIT, self.open(port, &requests, receiver)).await;
        let responses = match opened {
            Ok(Ok(responses)) => responses,
            Ok(Err(reason)) => return self.failed(port, &reason),
            Err(_) => return self.failed(port, "the host did not answer in time"),
        };
        tokio::select! {
            () = self.output(responses, output) => {}
            () = self.input(input, requests) => {}
        }
        // What breaks later is the end of the connection and no more: text for
        // it would make client-go drop every other connection as well.
        ForwardOutcome::Closed
    }

    /// Opens the connection; its host's answers, or why there are none.
    async fn open(
        &self,
        port: u16,
        requests: &mpsc::Sender<v1::PortForwardRequest>,
        receiver: mpsc::Receiver<v1::PortForwardRequest>,
    ) -> Result<Streaming<v1::PortForwardResponse>, String> {
        let mut client = self
            .hosts
            .client(&self.uid)
            .await
            .map_err(|error| error.to_string())?;
        let start = v1::PortForwardStart {
            uid: self.uid.clone(),
            port: port.into(),
        };
        // The channel is new and its receiver is in scope: there is room.
        let _ = requests.send(message(Out::Start(start))).await;
        let failed = |status: Status| format!("the host failed: {}", status.message());
        let mut responses = client
            .port_forward(ReceiverStream::new(receiver))
            .await
            .map_err(failed)?
            .into_inner();
        match responses.message().await.map_err(failed)? {
            Some(v1::PortForwardResponse {
                message: Some(In::Opened(_)),
            }) => Ok(responses),
            Some(v1::PortForwardResponse {
                message: Some(In::Failed(failed)),
            }) => Err(failed.message),
            _ => Err("the host did not open the connection".to_owned()),
        }
    }

    /// Host to client. Returns when the connection is over.
    async fn output(&self, mut responses: Streaming<v1::PortForwardResponse>, output: Output) {
        let mut output = Some(output);
        // An error is the loss of the host: the connection is over as well.
        while let Ok(Some(response)) = responses.message().await {
            match response.message {
                Some(In::Data(data)) => {
                    let length = data.len() as u64;
                    if let Some(open) = &mut output
                        && open.write_chunk(data).await.is_ok()
                    {
                        self.bytes_out.inc_by(length);
                    } else {
                        return;
                    }
                }
                Some(In::OutputEnded(_)) => output = None,
                Some(In::Opened(_) | In::Failed(_)) | None => {}
            }
        }
    }

    /// Client to host, then a half close; never finishes, because the answer to
    /// the last word is still to come.
    async fn input(&self, mut input: Input, requests: mpsc::Sender<v1::PortForwardRequest>) {
        while let Some(mut chunk) = input.read_chunk().await {
            while !chunk.is_empty() {
                let piece: Bytes = chunk.split_to(chunk.len().min(MAX_DATA));
                self.bytes_in.inc_by(piece.len() as u64);
                // When the host's end is gone the output side knows.
                let _ = requests.send(message(Out::Data(piece))).await;
            }
        }
        drop(requests);
        pending().await
    }

    fn failed(&self, port: u16, reason: &str) -> ForwardOutcome {
        let Self { name, uid, .. } = self;
        ForwardOutcome::Failed {
            message: format!("error forwarding port {port} to pod {name}, uid {uid}: {reason}"),
        }
    }
}

fn message(message: Out) -> v1::PortForwardRequest {
    v1::PortForwardRequest {
        message: Some(message),
    }
}
