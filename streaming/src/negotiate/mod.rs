//! What is decided from a request's head alone, before any byte is streamed: transport,
//! subprotocol, and the answer that switches protocols or refuses to.
//!
//! Nothing here has side effects, because kubectl repeats a refused WebSocket request
//! over SPDY.

mod port_forward;
mod remote_command;
mod upgrade;

use http::{HeaderMap, HeaderValue, StatusCode, header};

pub(crate) use self::{port_forward::ForwardTransport, remote_command::CommandTransport};
pub use self::{
    port_forward::{PortForwardUpgrade, negotiate_port_forward},
    remote_command::{RemoteCommandUpgrade, negotiate_remote_command},
};

/// An answer of 400 or above in place of the upgrade.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{status}: {message}")]
pub struct Refusal {
    /// Status of the answer.
    pub status: StatusCode,
    /// Headers that tell the client what would be accepted.
    pub headers: HeaderMap,
    /// Plain text for the body.
    pub message: Box<str>,
}

impl Refusal {
    pub(crate) fn new(status: StatusCode, message: impl Into<Box<str>>) -> Self {
        Self {
            status,
            headers: HeaderMap::new(),
            message: message.into(),
        }
    }

    pub(crate) fn bad_request(message: impl Into<Box<str>>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, message)
    }

    pub(crate) fn with_header(mut self, name: header::HeaderName, value: &'static str) -> Self {
        self.headers.append(name, HeaderValue::from_static(value));
        self
    }

    /// The whole answer, with its message as body.
    pub fn into_response(self) -> http::Response<String> {
        let mut response = http::Response::new(format!("{}\n", self.message));
        *response.status_mut() = self.status;
        *response.headers_mut() = self.headers;
        response.headers_mut().insert(
            header::CONTENT_TYPE,
            HeaderValue::from_static("text/plain; charset=utf-8"),
        );
        response
    }
}
