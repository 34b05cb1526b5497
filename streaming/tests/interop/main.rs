//! client-go's own executors and port-forwarders against this server over loopback TCP.
//!
//! `client.go` beside this file holds the cases; it needs Go and its module cache, and
//! a machine without them fails the tests instead of skipping them.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod server;

use std::{path::Path, process::Stdio};

use tokio::{process::Command, sync::OnceCell};

use self::server::Server;

/// Builds the client once for all tests of this run.
async fn client() -> &'static str {
    static CLIENT: OnceCell<String> = OnceCell::const_new();
    CLIENT
        .get_or_init(async || {
            let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/interop");
            let binary = Path::new(env!("CARGO_TARGET_TMPDIR")).join("streaming-interop-client");
            let status = Command::new("go")
                .args(["build", "-o"])
                .arg(&binary)
                .arg(".")
                .current_dir(source)
                .status()
                .await
                .expect("these tests need the Go toolchain in PATH");
            assert!(status.success(), "go build failed");
            binary.into_os_string().into_string().unwrap()
        })
        .await
}

async fn cases_of(suite: &str) {
    let server = Server::start().await;
    let output = Command::new(client().await)
        .arg(suite)
        .arg(server.address.to_string())
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output()
        .await
        .unwrap();
    let (stdout, stderr) = (
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr),
    );
    assert!(output.status.success(), "{suite}:\n{stdout}\n{stderr}");
    assert!(stdout.contains("ok "), "no case ran: {stdout}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn spdy_executor() {
    cases_of("spdy").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn websocket_executor() {
    cases_of("websocket").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn old_protocol_versions() {
    cases_of("versions").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn port_forward_over_spdy() {
    cases_of("forward-spdy").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn port_forward_over_websocket_tunnel() {
    cases_of("forward-tunnel").await;
}
