//! Negotiation of port-forward.
//!
//! Upstream: `cri-streaming/pkg/streaming/portforward` and, for SPDY tunnelled in
//! WebSocket, `apiserver/pkg/util/proxy/streamtunnel.go`.

use http::{HeaderMap, HeaderValue, Method, Response};

use super::{
    Refusal,
    upgrade::{
        Requested, WebSocketKey, first_common, no_websocket_protocol, requested, spdy_protocol,
        switch_to_spdy, switch_to_websocket, websocket_offers,
    },
};
use crate::options::forwarded_ports;

const PORT_FORWARD: &str = "portforward.k8s.io";
const TUNNEL: &str = "SPDY/3.1+portforward.k8s.io";
const V4: &str = "v4.channel.k8s.io";
const V4_BASE64: &str = "v4.base64.channel.k8s.io";

const CHANNEL_PROTOCOLS: &[&str] = &[V4, V4_BASE64];

/// A request that can be upgraded, and how.
#[derive(Debug, Clone)]
pub struct PortForwardUpgrade {
    transport: ForwardTransport,
    key: Option<WebSocketKey>,
    /// None for a WebSocket client that offered no subprotocol.
    protocol: Option<&'static str>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ForwardTransport {
    Spdy,
    Tunnel,
    Channels { base64: bool, ports: Vec<u16> },
}

impl PortForwardUpgrade {
    /// The 101 with its headers.
    pub fn response(&self) -> Response<()> {
        match &self.key {
            Some(key) => switch_to_websocket(key, self.protocol.map(HeaderValue::from_static)),
            None => switch_to_spdy(PORT_FORWARD),
        }
    }

    /// Transport and subprotocol, for logs and metrics.
    pub fn describe(&self) -> (&'static str, &'static str) {
        let transport = if self.key.is_some() {
            "websocket"
        } else {
            "spdy"
        };
        (transport, self.protocol.unwrap_or_default())
    }

    pub(crate) fn into_transport(self) -> ForwardTransport {
        self.transport
    }
}

/// Decides transport and subprotocol of a port-forward from the head of the request.
///
/// The query matters to WebSocket channels only: they name their ports in it.
///
/// # Errors
/// 400 if the request is no upgrade, malformed, or lacks its ports; 403 if no
/// subprotocol is common.
pub fn negotiate_port_forward(
    method: &Method,
    headers: &HeaderMap,
    query: &str,
) -> Result<PortForwardUpgrade, Refusal> {
    let key = match requested(method, headers)? {
        Requested::Spdy => {
            let protocol = Some(spdy_protocol(headers, &[PORT_FORWARD])?);
            return Ok(PortForwardUpgrade {
                transport: ForwardTransport::Spdy,
                key: None,
                protocol,
            });
        }
        Requested::WebSocket(key) => Some(key),
    };
    let mut offers = websocket_offers(headers).peekable();
    if websocket_offers(headers).any(|offer| offer == TUNNEL) {
        let protocol = Some(TUNNEL);
        return Ok(PortForwardUpgrade {
            transport: ForwardTransport::Tunnel,
            key,
            protocol,
        });
    }
    let protocol = match offers.peek() {
        None => None,
        Some(_) => Some(
            first_common(offers, CHANNEL_PROTOCOLS)
                .ok_or_else(|| no_websocket_protocol(&[TUNNEL, V4, V4_BASE64]))?,
        ),
    };
    let base64 = protocol == Some(V4_BASE64);
    let ports = forwarded_ports(query)?;
    Ok(PortForwardUpgrade {
        transport: ForwardTransport::Channels { base64, ports },
        key,
        protocol,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn negotiate(
        protocol: Option<&'static str>,
        query: &str,
    ) -> Result<PortForwardUpgrade, Refusal> {
        let mut headers = HeaderMap::new();
        for (name, value) in [
            ("connection", "Upgrade"),
            ("upgrade", "websocket"),
            ("sec-websocket-version", "13"),
            ("sec-websocket-key", "dGhlIHNhbXBsZSBub25jZQ=="),
        ] {
            headers.insert(name, HeaderValue::from_static(value));
        }
        if let Some(protocol) = protocol {
            headers.insert("sec-websocket-protocol", HeaderValue::from_static(protocol));
        }
        negotiate_port_forward(&Method::GET, &headers, query)
    }

    #[test]
    fn websocket_kinds() {
        let tunnel = negotiate(Some("v4.channel.k8s.io, SPDY/3.1+portforward.k8s.io"), "").unwrap();
        assert_eq!(tunnel.describe(), ("websocket", TUNNEL));
        assert_eq!(tunnel.into_transport(), ForwardTransport::Tunnel);

        // kube-rs offers v5 here as well.
        let v4 = negotiate(Some("v5.channel.k8s.io, v4.channel.k8s.io"), "port=80").unwrap();
        assert_eq!(v4.response().headers()["sec-websocket-protocol"], V4);
        let ports = vec![80];
        assert_eq!(
            v4.into_transport(),
            ForwardTransport::Channels {
                base64: false,
                ports
            }
        );

        let none = negotiate(None, "port=80,81").unwrap();
        assert!(
            !none
                .response()
                .headers()
                .contains_key("sec-websocket-protocol")
        );

        assert_eq!(negotiate(Some(V4), "").unwrap_err().status, 400);
        assert_eq!(negotiate(Some("v9"), "port=80").unwrap_err().status, 403);
    }

    #[test]
    fn spdy() {
        let mut headers = HeaderMap::new();
        headers.insert("connection", HeaderValue::from_static("Upgrade"));
        headers.insert("upgrade", HeaderValue::from_static("SPDY/3.1"));
        headers.insert(
            "x-stream-protocol-version",
            HeaderValue::from_static(PORT_FORWARD),
        );
        let upgrade = negotiate_port_forward(&Method::POST, &headers, "").unwrap();
        assert_eq!(upgrade.describe(), ("spdy", PORT_FORWARD));
        headers.insert("x-stream-protocol-version", HeaderValue::from_static(V4));
        assert_eq!(
            negotiate_port_forward(&Method::POST, &headers, "")
                .unwrap_err()
                .status,
            403
        );
    }
}
