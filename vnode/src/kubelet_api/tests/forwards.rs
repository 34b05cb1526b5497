//! Port-forward from the client's handshake to the host's connection and back.

use super::host::Seen;
use super::server::{As, Server};

const ADMIN: As<'_> = As::Token("token-admin");
const V4: &str = "v4.channel.k8s.io";

#[tokio::test]
async fn data_goes_both_ways() {
    let mut server = Server::start().await;
    let path = "/portForward/ns/pod?port=7";
    let mut forward = server.websocket(ADMIN, path, V4).await.expect("a session");
    let port = 7_u16.to_le_bytes().to_vec();
    assert_eq!(forward.next().await, Some((0, port.clone())));
    assert_eq!(forward.next().await, Some((1, port)));
    forward.write(0, b"hello").await;
    assert_eq!(forward.next().await, Some((0, b"hello".to_vec())));
    drop(forward);
    // Its departure is a half close, or a loss; neither is left open.
    drop(server.shutdown.clone().drop_guard());
    let ended = &mut server.running;
    tokio::time::timeout(super::SOON, ended)
        .await
        .expect("nothing is left open")
        .expect("no panic")
        .expect("no error");
}

#[tokio::test]
async fn much_data_arrives_whole() {
    let server = Server::start().await;
    let path = "/portForward/ns/pod?port=7";
    let mut forward = server.websocket(ADMIN, path, V4).await.expect("a session");
    let sent: Vec<u8> = (0..1_000_000_u32).map(|n| (n % 251) as u8).collect();
    let mut echo = Vec::new();
    for part in sent.chunks(100_000) {
        forward.write(0, part).await;
        while echo.len() < part.len() {
            match forward.next().await.expect("an echo") {
                (0, data) if data != 7_u16.to_le_bytes() => echo.extend(data),
                _ => {}
            }
        }
        assert!(echo == part, "{} bytes", echo.len());
        echo.clear();
    }
}

#[tokio::test]
async fn a_port_that_nobody_listens_on_is_told_in_the_kubelets_words() {
    let server = Server::start().await;
    let path = "/portForward/ns/pod?port=8&port=7";
    let mut forward = server.websocket(ADMIN, path, V4).await.expect("a session");
    let error = loop {
        match forward.next().await.expect("an error") {
            (1, text) if text.len() > 2 => break text,
            _ => {}
        }
    };
    assert_eq!(
        String::from_utf8_lossy(&error),
        "error forwarding port 8 to pod pod, uid uid-1: connect: connection refused"
    );
    // The other port is not concerned.
    forward.write(2, b"still here").await;
    loop {
        match forward.next().await.expect("an echo") {
            (2, data) if data == b"still here" => break,
            _ => {}
        }
    }
}

#[tokio::test]
async fn the_end_of_the_session_ends_the_hosts_connection() {
    let mut server = Server::start().await;
    let path = "/portForward/ns/pod?port=7";
    let mut forward = server.websocket(ADMIN, path, V4).await.expect("a session");
    forward.write(0, b"hello").await;
    while forward.next().await != Some((0, b"hello".to_vec())) {}
    server.shutdown.cancel();
    assert_eq!(server.sees().await, Some(Seen::ForwardEnded));
}
