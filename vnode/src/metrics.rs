//! Prometheus metrics of the node, and the small plain-HTTP server that an
//! operator scrapes. One registry for the whole process; the kubelet API adds
//! its own metrics to it.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{Method, Request, Response, StatusCode, header};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{EncodeLabelSet, EncodeLabelValue, LabelValueEncoder};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;

/// Content type of what [`render`] returns.
pub const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
/// Scrapes served at once; more wait.
const MAX_SCRAPES: usize = 8;
/// A scraper that sends its request slower than this is cut off.
const HEADER_TIMEOUT: Duration = Duration::from_secs(5);

/// Label set of metrics kept per host.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct HostLabel {
    /// Name of the host.
    pub host: String,
}

/// Label set of metrics kept per outcome or kind.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct ReasonLabel {
    /// A word of a fixed, small vocabulary.
    pub reason: Reason,
}

/// A label value that is known at compile time, so that no input can grow the
/// number of series.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Reason(pub &'static str);

impl EncodeLabelValue for Reason {
    fn encode(&self, encoder: &mut LabelValueEncoder<'_>) -> Result<(), std::fmt::Error> {
        EncodeLabelValue::encode(&self.0, encoder)
    }
}

/// Handles of the node's own metrics; cheap to clone.
#[derive(Debug, Clone)]
pub struct Metrics {
    /// Whether the control connection to a host is up and in sync: 1 or 0.
    pub host_connected: Family<HostLabel, Gauge>,
    /// Connection attempts to a host that failed.
    pub host_connect_failures: Family<HostLabel, Counter>,
    /// Reports about sandboxes that were not placed on the reporting host.
    pub foreign_reports: Family<HostLabel, Counter>,
    /// Pods bound to the node, as last listed.
    pub pods: Gauge,
    /// Pods held back on purpose, by reason.
    pub pods_held: Family<ReasonLabel, Gauge>,
    /// Pods refused, by reason.
    pub rejections: Family<ReasonLabel, Counter>,
    /// Status patches sent.
    pub status_patches: Counter,
    /// Runs of the per-pod worker that failed and will be retried.
    pub sync_failures: Counter,
    /// Time of one run of the per-pod worker, in seconds.
    pub sync_seconds: Histogram,
    /// Pods that wait for a worker.
    pub queue_depth: Gauge,
    /// Cluster events that were not sent, by reason.
    pub events_dropped: Family<ReasonLabel, Counter>,
    /// Lease renewals that failed.
    pub lease_failures: Counter,
}

impl Metrics {
    /// Creates the metrics in `registry`.
    pub fn register(registry: &mut Registry) -> Self {
        let registry = registry.sub_registry_with_prefix("sandman_vnode");
        let metrics = Self {
            host_connected: Family::default(),
            host_connect_failures: Family::default(),
            foreign_reports: Family::default(),
            pods: Gauge::default(),
            pods_held: Family::default(),
            rejections: Family::default(),
            status_patches: Counter::default(),
            sync_failures: Counter::default(),
            sync_seconds: Histogram::new(exponential_buckets(0.0005, 2.0, 16)),
            queue_depth: Gauge::default(),
            events_dropped: Family::default(),
            lease_failures: Counter::default(),
        };
        let m = metrics.clone();
        registry.register(
            "host_connected",
            "Control connection up and in sync",
            m.host_connected,
        );
        registry.register(
            "host_connect_failures",
            "Failed connection attempts",
            m.host_connect_failures,
        );
        registry.register(
            "foreign_reports",
            "Reports about sandboxes placed elsewhere, dropped",
            m.foreign_reports,
        );
        registry.register("pods", "Pods bound to the node", m.pods);
        registry.register("pods_held", "Pods held back on purpose", m.pods_held);
        registry.register("rejections", "Pods refused", m.rejections);
        registry.register(
            "status_patches",
            "Pod status patches sent",
            m.status_patches,
        );
        registry.register(
            "sync_failures",
            "Failed runs of a pod worker",
            m.sync_failures,
        );
        registry.register(
            "sync_seconds",
            "Time of one run of a pod worker",
            m.sync_seconds,
        );
        registry.register("queue_depth", "Pods waiting for a worker", m.queue_depth);
        registry.register(
            "events_dropped",
            "Cluster events not sent",
            m.events_dropped,
        );
        registry.register("lease_failures", "Failed lease renewals", m.lease_failures);
        metrics
    }
}

/// All metrics of the process as text.
pub fn render(registry: &Registry) -> String {
    let mut text = String::new();
    if let Err(error) = encode(&mut text, registry) {
        // Only an encoder of our own could fail here.
        tracing::error!(%error, "cannot encode metrics");
    }
    text
}

/// Serves `/metrics` and `/healthz` until `shutdown`.
///
/// # Errors
/// When `address` cannot be bound.
pub async fn serve(
    address: SocketAddr,
    registry: Arc<Registry>,
    shutdown: CancellationToken,
) -> std::io::Result<()> {
    let listener = TcpListener::bind(address).await?;
    let slots = Arc::new(Semaphore::new(MAX_SCRAPES));
    loop {
        // The semaphore is never closed.
        let Ok(slot) = Arc::clone(&slots).acquire_owned().await else {
            return Ok(());
        };
        let stream = tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => stream,
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a metrics connection");
                    tokio::time::sleep(Duration::from_millis(100)).await;
                    continue;
                }
            },
            () = shutdown.cancelled() => return Ok(()),
        };
        let registry = Arc::clone(&registry);
        let shutdown = shutdown.clone();
        tokio::spawn(async move {
            let _slot = slot;
            let service = service_fn(|request| {
                let response = respond(&request, &registry);
                async move { Ok::<_, Infallible>(response) }
            });
            let connection = hyper::server::conn::http1::Builder::new()
                .timer(TokioTimer::new())
                .header_read_timeout(HEADER_TIMEOUT)
                .serve_connection(TokioIo::new(stream), service);
            tokio::select! {
                // A scraper that goes away is no event worth a line.
                _ = connection => {}
                () = shutdown.cancelled() => {}
            }
        });
    }
}

fn respond(request: &Request<Incoming>, registry: &Registry) -> Response<Full<Bytes>> {
    let (status, content_type, body) = match (request.method(), request.uri().path()) {
        (&Method::GET, "/metrics") => (StatusCode::OK, CONTENT_TYPE, render(registry)),
        (&Method::GET, "/healthz") => (StatusCode::OK, "text/plain", "ok".to_owned()),
        (_, "/metrics" | "/healthz") => (
            StatusCode::METHOD_NOT_ALLOWED,
            "text/plain",
            "use GET\n".to_owned(),
        ),
        _ => (
            StatusCode::NOT_FOUND,
            "text/plain",
            "see /metrics and /healthz\n".to_owned(),
        ),
    };
    let mut response = Response::new(Full::new(Bytes::from(body)));
    *response.status_mut() = status;
    response.headers_mut().insert(
        header::CONTENT_TYPE,
        http::HeaderValue::from_static(content_type),
    );
    response
}
