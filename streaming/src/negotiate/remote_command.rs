//! Negotiation of exec and attach.
//!
//! Upstream: `cri-streaming/pkg/streaming/remotecommand` for SPDY v1 to v4 and
//! WebSocket up to v4, `apiserver/pkg/util/proxy` for v5.

use http::{HeaderMap, HeaderValue, Method, Response};

use super::{
    Refusal,
    upgrade::{
        Requested, WebSocketKey, first_common, no_websocket_protocol, requested, spdy_protocol,
        switch_to_spdy, switch_to_websocket, websocket_offers,
    },
};
use crate::{status::StatusFormat, websocket::ChannelFormat};

const V5: &str = "v5.channel.k8s.io";
const V4: &str = "v4.channel.k8s.io";
const V4_BASE64: &str = "v4.base64.channel.k8s.io";
const V3: &str = "v3.channel.k8s.io";
const V2: &str = "v2.channel.k8s.io";
const V1: &str = "channel.k8s.io";
const V1_BASE64: &str = "base64.channel.k8s.io";

/// v5 differs from v4 only in the close signal, which SPDY has of its own.
const SPDY_PROTOCOLS: &[&str] = &[V4, V3, V2, V1];

const WEBSOCKET_PROTOCOLS: &[&str] = &[V5, V4, V4_BASE64, V1, V1_BASE64];

/// A request that can be upgraded, and how.
#[derive(Debug, Clone)]
pub struct RemoteCommandUpgrade {
    transport: CommandTransport,
    key: Option<WebSocketKey>,
    /// None for a WebSocket client that offered no subprotocol.
    protocol: Option<&'static str>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CommandTransport {
    Spdy,
    Channels(ChannelFormat),
}

impl RemoteCommandUpgrade {
    /// The 101 with its headers.
    pub fn response(&self) -> Response<()> {
        match &self.key {
            Some(key) => switch_to_websocket(key, self.protocol.map(HeaderValue::from_static)),
            None => switch_to_spdy(self.protocol.unwrap_or(V1)),
        }
    }

    /// Transport and subprotocol, for logs and metrics: `websocket` or `spdy`, and a
    /// name such as `v5.channel.k8s.io` (empty if none was offered).
    pub fn describe(&self) -> (&'static str, &'static str) {
        let transport = if self.key.is_some() {
            "websocket"
        } else {
            "spdy"
        };
        (transport, self.protocol.unwrap_or_default())
    }

    pub(crate) fn transport(&self) -> CommandTransport {
        self.transport
    }

    pub(crate) fn status_format(&self) -> StatusFormat {
        match self.protocol {
            Some(V5 | V4 | V4_BASE64) => StatusFormat::Json,
            _ => StatusFormat::Text,
        }
    }
}

/// Decides transport and subprotocol of an exec or attach from the head of the request.
///
/// # Errors
/// 400 if the request is no upgrade or malformed, 403 if no subprotocol is common.
pub fn negotiate_remote_command(
    method: &Method,
    headers: &HeaderMap,
) -> Result<RemoteCommandUpgrade, Refusal> {
    match requested(method, headers)? {
        Requested::Spdy => Ok(RemoteCommandUpgrade {
            transport: CommandTransport::Spdy,
            key: None,
            protocol: Some(spdy_protocol(headers, SPDY_PROTOCOLS)?),
        }),
        Requested::WebSocket(key) => {
            let protocol = websocket_protocol(headers)?;
            let format = ChannelFormat {
                base64: matches!(protocol, Some(V4_BASE64 | V1_BASE64)),
                close_signal: protocol == Some(V5),
            };
            Ok(RemoteCommandUpgrade {
                transport: CommandTransport::Channels(format),
                key: Some(key),
                protocol,
            })
        }
    }
}

fn websocket_protocol(headers: &HeaderMap) -> Result<Option<&'static str>, Refusal> {
    let mut offers = websocket_offers(headers).peekable();
    if offers.peek().is_none() {
        return Ok(None);
    }
    // Wherever v5 stands in the list: without it, stdin could not be closed.
    if websocket_offers(headers).any(|offer| offer == V5) {
        return Ok(Some(V5));
    }
    first_common(offers, WEBSOCKET_PROTOCOLS)
        .map(Some)
        .ok_or_else(|| no_websocket_protocol(WEBSOCKET_PROTOCOLS))
}

#[cfg(test)]
mod tests {
    use http::StatusCode;

    use super::*;

    fn request(fields: &[(&'static str, &'static str)]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in fields {
            headers.append(*name, HeaderValue::from_static(value));
        }
        headers
    }

    fn websocket(protocols: &[&'static str]) -> HeaderMap {
        let mut headers = request(&[
            ("connection", "keep-alive, Upgrade"),
            ("upgrade", "WebSocket"),
            ("sec-websocket-version", "13"),
            ("sec-websocket-key", "dGhlIHNhbXBsZSBub25jZQ=="),
        ]);
        for protocol in protocols {
            headers.append("sec-websocket-protocol", HeaderValue::from_static(protocol));
        }
        headers
    }

    fn spdy(protocols: &[&'static str]) -> HeaderMap {
        let mut headers = request(&[("connection", "Upgrade"), ("upgrade", "SPDY/3.1")]);
        for protocol in protocols {
            headers.append(
                "x-stream-protocol-version",
                HeaderValue::from_static(protocol),
            );
        }
        headers
    }

    #[test]
    fn websocket_subprotocols() {
        let cases: [(&[&str], &str); 8] = [
            (&["v5.channel.k8s.io"], V5),
            (&["v4.channel.k8s.io, v5.channel.k8s.io"], V5),
            (&["v4.channel.k8s.io", "channel.k8s.io"], V4),
            (&["channel.k8s.io,v4.channel.k8s.io"], V1),
            (&["unknown", "v4.base64.channel.k8s.io"], V4_BASE64),
            (&["base64.channel.k8s.io"], V1_BASE64),
            (&[], ""),
            (
                &[
                    "base64url.bearer.authorization.k8s.io.dG9rZW4",
                    "v4.channel.k8s.io",
                ],
                V4,
            ),
        ];
        for (offered, chosen) in cases {
            let upgrade = negotiate_remote_command(&Method::GET, &websocket(offered)).unwrap();
            assert_eq!(upgrade.describe(), ("websocket", chosen), "{offered:?}");
            let response = upgrade.response();
            assert_eq!(response.status(), StatusCode::SWITCHING_PROTOCOLS);
            // The example of RFC 6455 section 1.3.
            assert_eq!(
                response.headers()["sec-websocket-accept"],
                "s3pPLMBiTxaQ9kYGzzhZRbK+xOo="
            );
            let named = response.headers().get("sec-websocket-protocol");
            assert_eq!(named.map_or("", |name| name.to_str().unwrap()), chosen);
        }
    }

    #[test]
    fn spdy_takes_the_clients_first_choice() {
        let cases: [(&[&str], &str); 3] = [
            (
                &[
                    "v5.channel.k8s.io",
                    "v4.channel.k8s.io",
                    "v3.channel.k8s.io",
                ],
                V4,
            ),
            (&["v2.channel.k8s.io, v4.channel.k8s.io"], V2),
            (&["channel.k8s.io"], V1),
        ];
        for (offered, chosen) in cases {
            let upgrade = negotiate_remote_command(&Method::POST, &spdy(offered)).unwrap();
            assert_eq!(upgrade.describe(), ("spdy", chosen));
            let response = upgrade.response();
            assert_eq!(response.headers()["x-stream-protocol-version"], chosen);
            assert_eq!(response.headers()["upgrade"], "SPDY/3.1");
            assert_eq!(response.headers()["connection"], "Upgrade");
        }
    }

    #[test]
    fn status_is_json_from_v4_on() {
        let json = negotiate_remote_command(&Method::GET, &websocket(&[V4_BASE64])).unwrap();
        assert_eq!(json.status_format(), StatusFormat::Json);
        let text = negotiate_remote_command(&Method::POST, &spdy(&[V3])).unwrap();
        assert_eq!(text.status_format(), StatusFormat::Text);
    }

    #[test]
    fn refusals_name_what_would_be_accepted() {
        let refusal = negotiate_remote_command(&Method::POST, &spdy(&["v9"])).unwrap_err();
        assert_eq!(refusal.status, StatusCode::FORBIDDEN);
        let accepted: Vec<_> = refusal
            .headers
            .get_all("x-accepted-stream-protocol-versions")
            .iter()
            .collect();
        assert_eq!(accepted, SPDY_PROTOCOLS);

        let mut old = websocket(&[V4]);
        old.insert("sec-websocket-version", HeaderValue::from_static("8"));
        let mut bad_key = websocket(&[V4]);
        bad_key.insert("sec-websocket-key", HeaderValue::from_static("short"));
        let cases = [
            (Method::POST, spdy(&[]), StatusCode::BAD_REQUEST),
            (Method::GET, websocket(&["v9"]), StatusCode::FORBIDDEN),
            (Method::POST, websocket(&[V4]), StatusCode::BAD_REQUEST),
            (Method::GET, old, StatusCode::BAD_REQUEST),
            (Method::GET, bad_key, StatusCode::BAD_REQUEST),
            (Method::GET, request(&[]), StatusCode::BAD_REQUEST),
            (
                Method::GET,
                request(&[("connection", "upgrade"), ("upgrade", "h2c")]),
                StatusCode::BAD_REQUEST,
            ),
        ];
        for (method, headers, status) in cases {
            let refusal = negotiate_remote_command(&method, &headers).unwrap_err();
            assert_eq!(refusal.status, status, "{headers:?}");
        }
    }
}
