//! How a session can end other than by its outcome reaching the client.

use std::{io, time::Duration};

use crate::wire::ProtocolError;

/// Why a session did not end with its outcome delivered.
#[derive(Debug, thiserror::Error)]
pub enum SessionError {
    /// The client closed or vanished first; ordinary for interactive sessions.
    #[error("client left before the session ended")]
    ClientGone(#[source] Option<io::Error>),
    /// The client broke the protocol.
    #[error("client broke the protocol: {0}")]
    Protocol(#[from] ProtocolError),
    /// The client did not open the streams that its request named.
    #[error("client did not open its streams within {0:?}")]
    StreamCreation(Duration),
    /// No data moved for the idle time.
    #[error("no data moved for {0:?}")]
    Idle(Duration),
    /// The node agent stopped.
    #[error("node agent is shutting down")]
    Shutdown,
    /// The handler panicked or was aborted.
    #[error("session handler failed")]
    Handler(#[source] tokio::task::JoinError),
}
