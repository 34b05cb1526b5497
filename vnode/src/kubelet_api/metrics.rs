//! Metrics of the kubelet API server. Labels come from fixed vocabularies, so
//! that no caller can grow the number of series.

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;

use crate::metrics::Reason;

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct RequestLabels {
    pub(super) path: Reason,
    pub(super) method: Reason,
    pub(super) code: u16,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct SubresourceLabel {
    pub(super) subresource: Reason,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct BytesLabels {
    pub(super) subresource: Reason,
    /// `in` is towards the container.
    pub(super) direction: Reason,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct FinishLabels {
    pub(super) subresource: Reason,
    pub(super) reason: Reason,
}

/// Handles of the kubelet API's metrics; cheap to clone.
#[derive(Debug, Clone)]
pub struct ApiMetrics {
    pub(super) connections: Gauge,
    pub(super) connections_refused: Counter,
    pub(super) handshake_failures: Counter,
    pub(super) requests: Family<RequestLabels, Counter>,
    /// The kubelet's own name: WebSocket streams that the API server passed
    /// through. Its counterpart there is
    /// `apiserver_websocket_streaming_requests_total`.
    pub(super) websocket_requests: Family<SubresourceLabel, Counter>,
    pub(super) streams_open: Family<SubresourceLabel, Gauge>,
    pub(super) stream_bytes: Family<BytesLabels, Counter>,
    pub(super) streams_finished: Family<FinishLabels, Counter>,
    /// From the request to the host's word that the process runs.
    pub(super) exec_start_seconds: Histogram,
}

impl ApiMetrics {
    /// Creates the metrics in `registry`.
    pub fn register(registry: &mut Registry) -> Self {
        let metrics = Self {
            connections: Gauge::default(),
            connections_refused: Counter::default(),
            handshake_failures: Counter::default(),
            requests: Family::default(),
            websocket_requests: Family::default(),
            streams_open: Family::default(),
            stream_bytes: Family::default(),
            streams_finished: Family::default(),
            exec_start_seconds: Histogram::new(exponential_buckets(0.001, 2.0, 15)),
        };
        let m = metrics.clone();
        registry.register(
            "kubelet_streaming_websocket_requests",
            "WebSocket streaming requests received (exec, attach, portforward)",
            m.websocket_requests,
        );
        let registry = registry.sub_registry_with_prefix("sandman_vnode_kubelet_api");
        registry.register("connections", "Open connections", m.connections);
        registry.register(
            "connections_refused",
            "Connections closed at once because of too many strangers",
            m.connections_refused,
        );
        registry.register(
            "handshake_failures",
            "Connections that did not finish their TLS handshake",
            m.handshake_failures,
        );
        registry.register("requests", "Requests answered", m.requests);
        registry.register("streams_open", "Streams being served", m.streams_open);
        registry.register(
            "stream_bytes",
            "Bytes moved between clients and containers",
            m.stream_bytes,
        );
        registry.register("streams_finished", "Streams that ended", m.streams_finished);
        registry.register(
            "exec_start_seconds",
            "From the request to the running process",
            m.exec_start_seconds,
        );
        metrics
    }

    /// Counts one stream for as long as the returned guard lives.
    pub(super) fn open_stream(&self, subresource: &'static str) -> StreamMeter {
        let subresource = Reason(subresource);
        let open = self
            .streams_open
            .get_or_create(&SubresourceLabel { subresource })
            .clone();
        open.inc();
        let bytes = |direction| {
            self.stream_bytes
                .get_or_create(&BytesLabels {
                    subresource,
                    direction: Reason(direction),
                })
                .clone()
        };
        StreamMeter {
            subresource,
            open,
            bytes_in: bytes("in"),
            bytes_out: bytes("out"),
            finished: self.streams_finished.clone(),
            reason: Reason("aborted"),
        }
    }
}

/// Counts one stream from its start to its end, however it ends.
#[derive(Debug)]
pub(super) struct StreamMeter {
    subresource: Reason,
    open: Gauge,
    pub(super) bytes_in: Counter,
    pub(super) bytes_out: Counter,
    finished: Family<FinishLabels, Counter>,
    reason: Reason,
}

impl StreamMeter {
    /// Notes why the stream ended; without a note it was aborted.
    pub(super) fn finish(&mut self, reason: &'static str) {
        self.reason = Reason(reason);
    }
}

impl Drop for StreamMeter {
    fn drop(&mut self) {
        self.open.dec();
        self.finished
            .get_or_create(&FinishLabels {
                subresource: self.subresource,
                reason: self.reason,
            })
            .inc();
    }
}
