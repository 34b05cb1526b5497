//! `/containerLogs`: the host reads the log, this passes it on as it comes. The
//! head is sent at once, also when there is nothing to read yet.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::stream;
use http::header::CONTENT_TYPE;
use http::{HeaderValue, Response, StatusCode};
use http_body_util::{BodyExt, StreamBody};
use hyper::body::Frame;
use jiff::Timestamp;
use sandman_protocol::v1::LogsResponse;
use tokio::sync::OwnedSemaphorePermit;
use tokio_util::sync::CancellationToken;
use tonic::{Code, Status, Streaming};

use super::api::Api;
use super::log_query::LogOptions;
use super::metrics::StreamMeter;
use super::query::Query;
use super::respond::{Body, BodyError, later, no_stream, text};
use super::route::ContainerRef;
use super::target;

/// Time for the host to find the log; reading it may take as long as it likes.
const OPEN_WAIT: Duration = Duration::from_secs(10);

/// Answers a log request.
pub(super) async fn respond(
    api: &Arc<Api>,
    wanted: &ContainerRef,
    query: &Query,
) -> Response<Body> {
    let options = match LogOptions::parse(query, Timestamp::now()) {
        Ok(options) => options,
        Err(bad) => return text(bad.status, bad.body),
    };
    let pod = match target::logged_container(&*api.node.pods, wanted, options.previous) {
        Ok(pod) => pod,
        Err(refused) => return text(refused.status, refused.body),
    };
    let uid = pod.metadata.uid.as_deref().unwrap_or_default();
    let Ok(slot) = Arc::clone(&api.streams).try_acquire_owned() else {
        return later(
            StatusCode::TOO_MANY_REQUESTS,
            "maximum number of in-flight requests exceeded",
        );
    };
    let mut client = match api.node.hosts.client(uid).await {
        Ok(client) => client,
        Err(error) => return no_stream(&error),
    };
    let opening = client.logs(options.request(uid, &wanted.container));
    let chunks = match tokio::time::timeout(OPEN_WAIT, opening).await {
        Ok(Ok(chunks)) => chunks.into_inner(),
        Ok(Err(status)) => return not_opened(&status),
        Err(_) => {
            return later(
                StatusCode::SERVICE_UNAVAILABLE,
                "the host did not open the log in time",
            );
        }
    };
    let log = Log {
        chunks,
        shutdown: api.shutdown.clone(),
        meter: api.node.metrics.open_stream("log"),
        _slot: slot,
    };
    let mut response = Response::new(log.into_body());
    response
        .headers_mut()
        .insert(CONTENT_TYPE, HeaderValue::from_static("text/plain"));
    response
}

/// A log that is being read. Dropping it, as when the client goes away, ends the
/// reading on the host.
struct Log {
    chunks: Streaming<LogsResponse>,
    shutdown: CancellationToken,
    meter: StreamMeter,
    _slot: OwnedSemaphorePermit,
}

impl Log {
    fn into_body(self) -> Body {
        let frames = stream::try_unfold(self, |mut log| async move {
            let chunk = log.next().await?;
            Ok(chunk.map(|chunk| (Frame::data(chunk), log)))
        });
        StreamBody::new(frames).boxed_unsync()
    }

    async fn next(&mut self) -> Result<Option<Bytes>, BodyError> {
        loop {
            let message = tokio::select! {
                message = self.chunks.message() => message,
                () = self.shutdown.cancelled() => {
                    self.meter.finish("shutdown");
                    return Err(BodyError::ShuttingDown);
                }
            };
            match message {
                Ok(Some(message)) if message.data.is_empty() => {}
                Ok(Some(message)) => {
                    self.meter.bytes_out.inc_by(message.data.len() as u64);
                    return Ok(Some(message.data));
                }
                Ok(None) => {
                    self.meter.finish("completed");
                    return Ok(None);
                }
                Err(status) => {
                    self.meter.finish("host_lost");
                    return Err(BodyError::Host(status.message().to_owned()));
                }
            }
        }
    }
}

/// The kubelet answers 400 for a log that it knows nothing of.
fn not_opened(status: &Status) -> Response<Body> {
    let message = status.message().to_owned();
    match status.code() {
        Code::NotFound | Code::InvalidArgument | Code::FailedPrecondition => {
            text(StatusCode::BAD_REQUEST, message)
        }
        Code::Unimplemented => text(StatusCode::NOT_IMPLEMENTED, message),
        Code::Unavailable | Code::ResourceExhausted | Code::DeadlineExceeded => {
            later(StatusCode::SERVICE_UNAVAILABLE, message)
        }
        _ => text(StatusCode::INTERNAL_SERVER_ERROR, message),
    }
}
