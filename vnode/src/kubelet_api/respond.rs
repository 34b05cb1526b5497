//! Response bodies of the kubelet API: plain text for errors, JSON for objects,
//! a stream for logs.

use std::convert::Infallible;
use std::sync::Arc;

use bytes::Bytes;
use http::header::{ALLOW, CONTENT_TYPE, HeaderName, RETRY_AFTER};
use http::{HeaderValue, Response, StatusCode};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::Frame;
use serde::Serialize;

use crate::view::StreamError;

/// An error here ends the connection in the middle of the body, which is how a
/// client learns that what it has is not all.
pub(super) type Body = UnsyncBoxBody<Bytes, BodyError>;

/// Why a body ended early.
#[derive(Debug, thiserror::Error)]
pub(super) enum BodyError {
    #[error("the host ended the log early: {0}")]
    Host(String),
    #[error("the node agent is shutting down")]
    ShuttingDown,
    #[error("encoding JSON: {0}")]
    Json(#[from] serde_json::Error),
}

/// A body that is there at once.
pub(super) fn full(body: impl Into<Bytes>) -> Body {
    Full::new(body.into())
        .map_err(|never: Infallible| match never {})
        .boxed_unsync()
}

/// Plain text; the body is sent exactly as given.
pub(super) fn text(status: StatusCode, body: impl Into<Bytes>) -> Response<Body> {
    typed(status, "text/plain; charset=utf-8", body)
}

/// Anything with its media type.
pub(super) fn typed(
    status: StatusCode,
    media_type: &'static str,
    body: impl Into<Bytes>,
) -> Response<Body> {
    let mut response = Response::new(full(body));
    *response.status_mut() = status;
    set(&mut response, CONTENT_TYPE, media_type);
    // Pods can put bytes of their choice into some bodies.
    set(
        &mut response,
        HeaderName::from_static("x-content-type-options"),
        "nosniff",
    );
    response
}

/// An object as JSON.
pub(super) fn json<T: Serialize>(value: &T) -> Response<Body> {
    match serde_json::to_vec(value) {
        Ok(body) => typed(StatusCode::OK, "application/json", body),
        Err(error) => text(
            StatusCode::INTERNAL_SERVER_ERROR,
            format!("Internal Error: {error}"),
        ),
    }
}

/// Objects in one item of a body. Together they are small enough not to hold up
/// other streams of the thread.
const LIST_CHUNK: usize = 32;

/// A list of objects as JSON, from its head up to the first item. Made piece by
/// piece, no faster than it is read.
pub(super) fn json_list<T>(head: &'static str, items: Vec<Arc<T>>) -> Response<Body>
where
    T: Serialize + Send + Sync + 'static,
{
    let count = items.len();
    let pieces = (0..count.div_ceil(LIST_CHUNK)).map(move |piece| {
        let begin = piece * LIST_CHUNK;
        let mut bytes = Vec::new();
        for (index, item) in items.iter().enumerate().skip(begin).take(LIST_CHUNK) {
            if index > 0 {
                bytes.push(b',');
            }
            serde_json::to_writer(&mut bytes, &**item)?;
        }
        Ok(bytes.into())
    });
    let head = std::iter::once(Ok(Bytes::from_static(head.as_bytes())));
    let tail = std::iter::once(Ok(Bytes::from_static(b"]}")));
    let frames = head
        .chain(pieces)
        .chain(tail)
        .map(|bytes: Result<Bytes, BodyError>| bytes.map(Frame::data));
    let body = StreamBody::new(futures::stream::iter(frames)).boxed_unsync();
    let mut response = Response::new(body);
    set(&mut response, CONTENT_TYPE, "application/json");
    response
}

/// 405 with the methods that there are.
pub(super) fn method_not_allowed(allow: &'static str) -> Response<Body> {
    let mut response = text(StatusCode::METHOD_NOT_ALLOWED, "405: Method Not Allowed");
    set(&mut response, ALLOW, allow);
    response
}

/// A condition that passes by itself; the caller may try again soon.
pub(super) fn later(status: StatusCode, body: impl Into<Bytes>) -> Response<Body> {
    let mut response = text(status, body);
    set(&mut response, RETRY_AFTER, "1");
    response
}

/// Why there is no stream to the pod's host, before anything was started.
pub(super) fn no_stream(error: &StreamError) -> Response<Body> {
    let body = error.to_string();
    match error {
        StreamError::NotPlaced | StreamError::Unreachable(_) => {
            later(StatusCode::SERVICE_UNAVAILABLE, body)
        }
        StreamError::Unsupported(_) => text(StatusCode::NOT_IMPLEMENTED, body),
    }
}

fn set(response: &mut Response<Body>, name: HeaderName, value: &'static str) {
    response
        .headers_mut()
        .insert(name, HeaderValue::from_static(value));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn lists_are_whole_whatever_their_length() {
        for count in [0, 1, LIST_CHUNK, 3 * LIST_CHUNK + 1] {
            let items: Vec<Arc<usize>> = (0..count).map(Arc::new).collect();
            let response = json_list(r#"{"items":["#, items);
            let body = response.into_body().collect().await.expect("a body");
            let list: serde_json::Value =
                serde_json::from_slice(&body.to_bytes()).expect("valid JSON");
            let want: Vec<usize> = (0..count).collect();
            assert_eq!(list, serde_json::json!({"items": want}));
        }
    }
}
