//! Kubernetes remote-command and port-forward server: SPDY/3.1 and WebSocket, one
//! transport-blind session.
//!
//! The caller owns HTTP, TLS and authorisation. It asks [`negotiate_remote_command`]
//! what to answer, sends that answer, and gives the upgraded connection to
//! [`serve_remote_command`] with a handler that sees plain streams.
//!
//! [`negotiate_port_forward`] and [`serve_port_forward`] are the same for port-forward.
//!
//! The codecs [`spdy`] and [`websocket`] do no I/O and can be used and fuzzed alone.

mod activity;
mod connection;
mod error;
mod limits;
mod negotiate;
mod options;
mod outbound;
mod pipe;
mod port_forward;
mod reader;
mod remote_command;
pub mod spdy;
mod status;
mod terminal;
pub mod websocket;
mod wire;

pub use self::{
    error::SessionError,
    limits::Limits,
    negotiate::{
        PortForwardUpgrade, Refusal, RemoteCommandUpgrade, negotiate_port_forward,
        negotiate_remote_command,
    },
    options::StreamOptions,
    outbound::Output,
    pipe::Input,
    port_forward::{ForwardOutcome, ForwardedConnection, serve_port_forward},
    remote_command::{RemoteCommand, Stdin, serve_remote_command},
    status::Outcome,
    terminal::{ResizeEvents, TerminalSize},
    wire::ProtocolError,
};
