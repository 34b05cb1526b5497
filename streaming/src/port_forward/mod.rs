//! Port-forward: many forwarded connections over one upgraded connection.
//!
//! Upstream: `k8s.io/cri-streaming/pkg/streaming/portforward`. Each forwarded
//! connection has a data and an error stream; text on the error stream makes client-go
//! give up all of them, so it is sent only when the port could not be reached at all.

mod channels;
mod inbound;
mod pairs;
mod session;
mod table;

use std::future::Future;

use tokio::io::{AsyncRead, AsyncWrite};
use tokio_util::sync::CancellationToken;

use crate::{
    error::SessionError,
    limits::Limits,
    negotiate::{ForwardTransport, PortForwardUpgrade},
    outbound::{Framing, Output},
    pipe::Input,
    websocket::ChannelFormat,
    wire::Wire,
};

/// One connection that a client made to a forwarded port.
pub struct ForwardedConnection {
    /// Port in the pod.
    pub port: u16,
    /// From the client. Its end is a half close: answers are still awaited.
    pub input: Input,
    /// To the client. Dropping it ends this direction.
    pub output: Output,
    /// Cancelled once the client dropped the connection: both directions are over.
    pub closed: CancellationToken,
}

/// How a forwarded connection ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ForwardOutcome {
    /// The connection to the port existed and is over, in whatever way.
    Closed,
    /// The port could not be reached. The client shows the message, and a Go client
    /// ends the whole session.
    Failed {
        /// For example `error forwarding port 80 to pod x, uid : connection refused`.
        message: String,
    },
}

/// Runs a port-forward session on an upgraded connection, calling `handler` for each
/// forwarded connection. Returns when the client has gone, or, over WebSocket channels,
/// when the connections to all ports are over.
///
/// On `shutdown` handlers are aborted and the connection is closed. A handler that
/// panics counts as [`ForwardOutcome::Closed`]. Dropping the returned future drops
/// everything at once.
///
/// # Errors
/// [`SessionError`] unless the session ended as its client wanted.
pub async fn serve_port_forward<IO, H, F>(
    io: IO,
    upgrade: PortForwardUpgrade,
    limits: Limits,
    shutdown: CancellationToken,
    handler: H,
) -> Result<(), SessionError>
where
    IO: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    H: FnMut(ForwardedConnection) -> F + Send,
    F: Future<Output = ForwardOutcome> + Send + 'static,
{
    match upgrade.into_transport() {
        ForwardTransport::Spdy => {
            let (wire, framing) = (Wire::spdy(), Framing::spdy());
            session::Session::spdy(io, wire, framing, limits)
                .run(shutdown, handler)
                .await
        }
        ForwardTransport::Tunnel => {
            let (wire, framing) = (Wire::tunnel(), Framing::tunnel());
            session::Session::spdy(io, wire, framing, limits)
                .run(shutdown, handler)
                .await
        }
        ForwardTransport::Channels { base64, ports } => {
            let format = ChannelFormat {
                base64,
                close_signal: false,
            };
            session::Session::channels(io, format, &ports, limits)
                .run(shutdown, handler)
                .await
        }
    }
}
