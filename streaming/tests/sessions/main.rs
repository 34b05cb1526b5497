//! Sessions against clients that behave in ways no library does: slow, vanishing,
//! malformed, silent. Time is paused, so waits of minutes take none.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod client;
mod spdy;
mod websocket;

use std::{future::Future, time::Duration};

use sandman_streaming::{
    Limits, Outcome, RemoteCommand, RemoteCommandUpgrade, SessionError, StreamOptions,
    serve_remote_command,
};
use tokio::{io::DuplexStream, task::JoinHandle};
use tokio_util::sync::CancellationToken;

const ALL: StreamOptions = StreamOptions {
    stdin: true,
    stdout: true,
    stderr: true,
    tty: false,
};
const OUTPUT: StreamOptions = StreamOptions {
    stdin: false,
    stdout: true,
    stderr: false,
    tty: false,
};

const SUCCESS: &[u8] = br#"{"status":"Success"}"#;

/// A session under test.
struct Served {
    result: JoinHandle<Result<(), SessionError>>,
    shutdown: CancellationToken,
}

/// Serves one session over a connection that holds `buffer` bytes each way.
fn serve<F>(
    upgrade: RemoteCommandUpgrade,
    options: StreamOptions,
    limits: Limits,
    buffer: usize,
    handler: impl FnOnce(RemoteCommand) -> F + Send + 'static,
) -> (DuplexStream, Served)
where
    F: Future<Output = Outcome> + Send + 'static,
{
    let (client, server) = tokio::io::duplex(buffer);
    let shutdown = CancellationToken::new();
    let session = serve_remote_command(server, upgrade, options, limits, shutdown.clone(), handler);
    (
        client,
        Served {
            result: tokio::spawn(session),
            shutdown,
        },
    )
}

/// Limits without pings, which would only be noise.
fn quiet() -> Limits {
    Limits {
        ping: None,
        ..Limits::default()
    }
}

fn seconds(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}
