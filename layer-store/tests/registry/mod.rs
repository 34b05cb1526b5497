//! A registry that misbehaves as told.
#![allow(clippy::unwrap_used)]
// Each test crate uses some of it.
#![allow(dead_code)]

use std::collections::VecDeque;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use futures::StreamExt as _;
use http::header::{
    ACCEPT_RANGES, AUTHORIZATION, CONTENT_LENGTH, CONTENT_RANGE, LOCATION, RANGE, RETRY_AFTER,
    WWW_AUTHENTICATE,
};
use http::{HeaderMap, HeaderValue, Request, Response, StatusCode};
use http_body_util::{BodyExt, Full, StreamBody, combinators::BoxBody};
use hyper::body::{Frame, Incoming};
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use sandman_layer_store::origin::Authorize;
use tokio::net::TcpListener;

/// What goes wrong with one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    Status(u16),
    RetryAfter(u64),
    /// The whole blob in place of a range.
    IgnoreRange,
    /// Half of the body, and then the end of the connection.
    Truncate,
    /// Half of the body, announced as such.
    Short,
    WrongContentRange,
    FlipBit,
    /// The head of an answer never comes.
    Hang,
    /// The body never comes.
    HangInBody,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Seen {
    pub(crate) path: String,
    pub(crate) authorization: Option<String>,
}

#[derive(Default)]
pub(crate) struct State {
    /// Used up one after the other by requests for blobs.
    pub(crate) faults: VecDeque<Fault>,
    /// For each request, once the others are used up.
    pub(crate) always: Option<Fault>,
    pub(crate) seen: Vec<Seen>,
    /// Needed at `/v2/`, refused with this status otherwise.
    pub(crate) token: Option<(String, u16)>,
    /// Whether `/v2/` sends to `/signed/N`, where only the newest N is served.
    pub(crate) redirects: bool,
    pub(crate) signature: usize,
}

/// A running registry with one blob.
pub(crate) struct Registry {
    pub(crate) address: SocketAddr,
    pub(crate) state: Arc<Mutex<State>>,
    task: tokio::task::JoinHandle<()>,
}

type Body = BoxBody<Bytes, std::io::Error>;

impl Registry {
    pub(crate) async fn start(blob: Vec<u8>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let state = Arc::new(Mutex::new(State::default()));
        let (blob, shared) = (Bytes::from(blob), Arc::clone(&state));
        let task = tokio::spawn(async move {
            let mut connections = tokio::task::JoinSet::new();
            while let Ok((socket, _)) = listener.accept().await {
                let (blob, state) = (blob.clone(), Arc::clone(&shared));
                connections.spawn(async move {
                    let service = service_fn(move |request: Request<Incoming>| {
                        let (blob, state) = (blob.clone(), Arc::clone(&state));
                        async move { Ok::<_, Infallible>(serve(&blob, &state, &request).await) }
                    });
                    let connection = hyper::server::conn::http1::Builder::new();
                    // Broken connections are what the tests are about.
                    let _ = connection
                        .serve_connection(TokioIo::new(socket), service)
                        .await;
                });
            }
        });
        Self {
            address,
            state,
            task,
        }
    }

    pub(crate) fn blob_url(&self) -> reqwest::Url {
        format!("http://{}/v2/a/blobs/x", self.address)
            .parse()
            .unwrap()
    }

    pub(crate) fn with(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.state.lock().unwrap());
    }

    pub(crate) fn seen(&self) -> Vec<Seen> {
        self.state.lock().unwrap().seen.clone()
    }
}

impl Drop for Registry {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn serve(blob: &Bytes, state: &Mutex<State>, request: &Request<Incoming>) -> Response<Body> {
    let authorization = request.headers().get(AUTHORIZATION);
    let authorization = authorization.map(|value| value.to_str().unwrap().to_owned());
    let path = request.uri().path().to_owned();
    let fault = {
        let mut state = state.lock().unwrap();
        state.seen.push(Seen {
            path: path.clone(),
            authorization: authorization.clone(),
        });
        if path.starts_with("/v2/") {
            if let Some((token, status)) = &state.token
                && authorization.as_deref() != Some(&format!("Bearer {token}"))
            {
                let mut response = empty(*status);
                let challenge = HeaderValue::from_static("Bearer realm=\"https://auth/token\"");
                response.headers_mut().insert(WWW_AUTHENTICATE, challenge);
                return response;
            }
            if state.redirects {
                let mut response = empty(307);
                let location = format!("/signed/{}", state.signature).parse().unwrap();
                response.headers_mut().insert(LOCATION, location);
                return response;
            }
        } else if path != format!("/signed/{}", state.signature) {
            return empty(403);
        }
        state.faults.pop_front().or(state.always)
    };
    answer(blob, request.headers(), fault).await
}

async fn answer(blob: &Bytes, headers: &HeaderMap, fault: Option<Fault>) -> Response<Body> {
    let range = headers
        .get(RANGE)
        .and_then(|value| value.to_str().ok()?.strip_prefix("bytes="));
    let (first, last) = range.unwrap().split_once('-').unwrap();
    let (first, last): (usize, usize) = (first.parse().unwrap(), last.parse().unwrap());
    let mut body = blob.slice(first..=last).to_vec();
    let mut named = format!("bytes {first}-{last}/{}", blob.len());
    match fault {
        Some(Fault::Status(status)) => return empty(status),
        Some(Fault::RetryAfter(seconds)) => {
            let mut response = empty(429);
            response.headers_mut().insert(RETRY_AFTER, seconds.into());
            return response;
        }
        Some(Fault::IgnoreRange) => {
            return Response::new(full(blob.to_vec()));
        }
        Some(Fault::Hang) => std::future::pending().await,
        Some(Fault::WrongContentRange) => {
            named = format!("bytes 0-{}/{}", last - first, blob.len())
        }
        Some(Fault::FlipBit) => body[0] ^= 1,
        _ => {}
    }
    let length = body.len();
    let half = Bytes::from(body[..length / 2].to_vec());
    let body = match fault {
        Some(Fault::Short) => full(half.to_vec()),
        Some(Fault::Truncate) => {
            let broken = Err(std::io::Error::other("broken"));
            let parts = futures::stream::iter([Ok(Frame::data(half)), broken]);
            BodyExt::boxed(StreamBody::new(parts))
        }
        Some(Fault::HangInBody) => {
            let first = futures::stream::iter([Ok(Frame::data(half))]);
            BodyExt::boxed(StreamBody::new(first.chain(futures::stream::pending())))
        }
        _ => full(body),
    };
    let response = Response::builder()
        .status(StatusCode::PARTIAL_CONTENT)
        .header(ACCEPT_RANGES, "bytes")
        .header(CONTENT_RANGE, named);
    match fault {
        Some(Fault::Truncate | Fault::HangInBody) => response.header(CONTENT_LENGTH, length),
        _ => response,
    }
    .body(body)
    .unwrap()
}

fn full(bytes: Vec<u8>) -> Body {
    Full::new(Bytes::from(bytes))
        .map_err(|never| match never {})
        .boxed()
}

fn empty(status: u16) -> Response<Body> {
    let mut response = Response::new(full(Vec::new()));
    *response.status_mut() = StatusCode::from_u16(status).unwrap();
    response
}

/// Client that follows no redirect by itself.
pub(crate) fn client() -> reqwest::Client {
    // Another test was first.
    let _ = rustls::crypto::ring::default_provider().install_default();
    reqwest::Client::builder()
        .redirect(reqwest::redirect::Policy::none())
        .build()
        .unwrap()
}

/// Tokens that are handed out one after the other.
pub(crate) struct Tokens(pub(crate) Mutex<VecDeque<&'static str>>);

#[async_trait::async_trait]
impl Authorize for Tokens {
    async fn header(&self) -> Option<HeaderValue> {
        let tokens = self.0.lock().unwrap();
        tokens
            .front()
            .map(|token| format!("Bearer {token}").parse().unwrap())
    }

    async fn refused(&self, _: Option<&HeaderValue>, headers: &HeaderMap) -> Result<bool, String> {
        assert!(headers.contains_key(WWW_AUTHENTICATE));
        let mut tokens = self.0.lock().unwrap();
        tokens.pop_front();
        match tokens.is_empty() {
            true => Err("the token service refuses".to_owned()),
            false => Ok(true),
        }
    }
}
