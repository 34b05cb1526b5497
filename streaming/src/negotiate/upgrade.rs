//! The parts of an upgrade request and its 101 that exec and port-forward share.

use base64::{Engine as _, engine::general_purpose::STANDARD};
use http::{
    HeaderMap, HeaderName, HeaderValue, Method, Response, StatusCode,
    header::{
        CONNECTION, SEC_WEBSOCKET_ACCEPT, SEC_WEBSOCKET_KEY, SEC_WEBSOCKET_PROTOCOL,
        SEC_WEBSOCKET_VERSION, UPGRADE,
    },
};
use sha1::{Digest as _, Sha1};

use super::Refusal;

/// Subprotocols that a SPDY client offers, and the one that the server chose.
const STREAM_PROTOCOL: HeaderName = HeaderName::from_static("x-stream-protocol-version");

/// Subprotocols that the server would have taken.
const ACCEPTED_PROTOCOLS: HeaderName =
    HeaderName::from_static("x-accepted-stream-protocol-versions");

/// Browsers carry a bearer token as a subprotocol, which is none.
const BEARER_PREFIX: &str = "base64url.bearer.authorization.k8s.io.";

/// Longest list of offered subprotocols that is looked at.
const MAX_OFFERED: usize = 32;

/// GUID of RFC 6455 section 1.3.
const WEBSOCKET_GUID: &[u8] = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11";

/// Which upgrade a request asks for.
pub(super) enum Requested {
    Spdy,
    WebSocket(WebSocketKey),
}

/// The client's nonce, known to be well formed.
#[derive(Debug, Clone)]
pub(super) struct WebSocketKey(HeaderValue);

/// Reads the upgrade that a request asks for.
pub(super) fn requested(method: &Method, headers: &HeaderMap) -> Result<Requested, Refusal> {
    if !list(headers, &CONNECTION).any(|token| token.eq_ignore_ascii_case("upgrade")) {
        return Err(Refusal::bad_request(
            "unable to upgrade: request has no header \"Connection: Upgrade\"",
        ));
    }
    for token in list(headers, &UPGRADE) {
        if token.eq_ignore_ascii_case("websocket") {
            return websocket(method, headers).map(Requested::WebSocket);
        }
        if token.eq_ignore_ascii_case("SPDY/3.1") {
            return Ok(Requested::Spdy);
        }
    }
    Err(Refusal::bad_request(
        "unable to upgrade: header Upgrade must be \"websocket\" or \"SPDY/3.1\"",
    ))
}

fn websocket(method: &Method, headers: &HeaderMap) -> Result<WebSocketKey, Refusal> {
    if method != Method::GET {
        return Err(Refusal::bad_request(
            "unable to upgrade: a WebSocket handshake must be a GET",
        ));
    }
    if headers
        .get(SEC_WEBSOCKET_VERSION)
        .is_none_or(|version| version != "13")
    {
        let refusal = Refusal::bad_request("unable to upgrade: WebSocket version must be 13");
        return Err(refusal.with_header(SEC_WEBSOCKET_VERSION, "13"));
    }
    let key = headers.get(SEC_WEBSOCKET_KEY);
    match key.filter(|key| STANDARD.decode(key).is_ok_and(|nonce| nonce.len() == 16)) {
        Some(key) => Ok(WebSocketKey(key.clone())),
        None => Err(Refusal::bad_request(
            "unable to upgrade: Sec-WebSocket-Key must be 16 bytes in base64",
        )),
    }
}

/// The first subprotocol that the client wants and `supported` has (SPDY upgrades).
pub(super) fn spdy_protocol(
    headers: &HeaderMap,
    supported: &'static [&'static str],
) -> Result<&'static str, Refusal> {
    if !list(headers, &STREAM_PROTOCOL).any(|_| true) {
        return Err(Refusal::bad_request(
            "unable to upgrade: header X-Stream-Protocol-Version is missing or empty",
        ));
    }
    if let Some(chosen) = first_common(list(headers, &STREAM_PROTOCOL), supported) {
        return Ok(chosen);
    }
    let mut refusal = Refusal::new(
        StatusCode::FORBIDDEN,
        format!(
            "unable to upgrade: server accepts only {}",
            supported.join(", ")
        ),
    );
    for protocol in supported {
        refusal = refusal.with_header(ACCEPTED_PROTOCOLS, protocol);
    }
    Err(refusal)
}

/// Subprotocols that a WebSocket client offers, without a bearer token among them.
pub(super) fn websocket_offers(headers: &HeaderMap) -> impl Iterator<Item = &str> {
    list(headers, &SEC_WEBSOCKET_PROTOCOL).filter(|offer| !offer.starts_with(BEARER_PREFIX))
}

pub(super) fn first_common<'a>(
    mut offers: impl Iterator<Item = &'a str>,
    supported: &'static [&'static str],
) -> Option<&'static str> {
    offers.find_map(|offer| supported.iter().copied().find(|known| *known == offer))
}

pub(super) fn no_websocket_protocol(supported: &[&str]) -> Refusal {
    Refusal::new(
        StatusCode::FORBIDDEN,
        format!(
            "unable to upgrade: WebSocket subprotocol must be one of {}",
            supported.join(", ")
        ),
    )
}

/// Items of a header that is repeated or a comma list.
fn list<'a>(headers: &'a HeaderMap, name: &HeaderName) -> impl Iterator<Item = &'a str> {
    headers
        .get_all(name)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .map(str::trim)
        .filter(|item| !item.is_empty())
        .take(MAX_OFFERED)
}

/// 101 to SPDY.
pub(super) fn switch_to_spdy(protocol: &'static str) -> Response<()> {
    let mut response = switching("SPDY/3.1");
    response
        .headers_mut()
        .insert(STREAM_PROTOCOL, HeaderValue::from_static(protocol));
    response
}

/// 101 to WebSocket; no subprotocol is named if the client offered none.
pub(super) fn switch_to_websocket(
    key: &WebSocketKey,
    protocol: Option<HeaderValue>,
) -> Response<()> {
    let mut response = switching("websocket");
    let digest = Sha1::new()
        .chain_update(key.0.as_bytes())
        .chain_update(WEBSOCKET_GUID)
        .finalize();
    if let Ok(accept) = HeaderValue::from_str(&STANDARD.encode(digest)) {
        response.headers_mut().insert(SEC_WEBSOCKET_ACCEPT, accept);
    }
    if let Some(protocol) = protocol {
        response
            .headers_mut()
            .insert(SEC_WEBSOCKET_PROTOCOL, protocol);
    }
    response
}

fn switching(upgrade: &'static str) -> Response<()> {
    let mut response = Response::new(());
    *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
    response
        .headers_mut()
        .insert(CONNECTION, HeaderValue::from_static("Upgrade"));
    response
        .headers_mut()
        .insert(UPGRADE, HeaderValue::from_static(upgrade));
    response
}
