//! Exec and attach: one session a connection, whatever the transport.
//!
//! Upstream: `k8s.io/cri-streaming/pkg/streaming/remotecommand`. The kubelet passes
//! bytes on to a server of that kind; this one is at the end of the line itself.

mod inbound;
mod session;
mod streams;

use std::future::Future;

use tokio::io::{AsyncRead, AsyncWrite};
use tokio_util::sync::CancellationToken;

use crate::{
    error::SessionError, limits::Limits, negotiate::RemoteCommandUpgrade, options::StreamOptions,
    outbound::Output, pipe::Input, status::Outcome, terminal::ResizeEvents,
};

/// Input of a process; end of file is what the client sent as such, or its departure.
pub type Stdin = Input;

/// The streams of one exec or attach, as the handler gets them.
pub struct RemoteCommand {
    /// Present if asked for.
    pub stdin: Option<Stdin>,
    /// Present if asked for.
    pub stdout: Option<Output>,
    /// Present if asked for and there is no terminal.
    pub stderr: Option<Output>,
    /// Terminal sizes; none ever come without a terminal.
    pub resize: ResizeEvents,
    /// Cancelled once nobody will see output or outcome any more. That is a while after
    /// stdin ended, so a process that works off its last input can finish. The handler
    /// should then return soon: the session waits for it.
    pub client_gone: CancellationToken,
}

/// Runs one exec or attach session on an upgraded connection.
///
/// `handler` is called once all streams that `options` names exist. Its outcome is sent
/// behind all output, and the call returns when the client has closed its side (or
/// `limits.linger` ran out).
///
/// A Failure status is sent if the handler panics, on `shutdown`, when the session was
/// idle for too long and when streams are missing: clients take silence for success.
/// `shutdown` aborts the handler. Dropping the returned future drops everything at once.
///
/// # Errors
/// [`SessionError`] if the outcome did not reach the client; nothing is left to do then.
pub async fn serve_remote_command<IO, H, F>(
    io: IO,
    upgrade: RemoteCommandUpgrade,
    options: StreamOptions,
    limits: Limits,
    shutdown: CancellationToken,
    handler: H,
) -> Result<(), SessionError>
where
    IO: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    H: FnOnce(RemoteCommand) -> F + Send,
    F: Future<Output = Outcome> + Send + 'static,
{
    session::Session::new(io, &upgrade, options, limits)
        .run(shutdown, handler)
        .await
}
