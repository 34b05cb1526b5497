//! How streams end: the client goes, the node goes, the log ends.

use std::time::Duration;

use http::Method;
use http_body_util::BodyExt;
use tokio::time::timeout;

use super::SOON;
use super::host::Seen;
use super::server::{As, Server};

const ADMIN: As<'_> = As::Token("token-admin");

#[tokio::test]
async fn a_process_is_ended_when_its_client_vanished() {
    let grace = |config: &mut crate::kubelet_api::Config| {
        config.client_loss_grace = Some(Duration::from_millis(50));
    };
    let mut server = Server::start_with(grace).await;
    let query = "command=hang&input=1&output=1";
    let mut exec = server.exec(ADMIN, query).await.expect("a session");
    exec.started().await;
    drop(exec);
    assert_eq!(server.sees().await, Some(Seen::Cancelled));
}

#[tokio::test]
async fn shutdown_tells_every_client() {
    let mut server = Server::start().await;
    let query = "command=hang&input=1&output=1";
    let mut exec = server.exec(ADMIN, query).await.expect("a session");
    exec.started().await;
    let follow = "/containerLogs/ns/pod/main?follow=true";
    let mut log = server.open(ADMIN, Method::GET, follow).await.into_body();
    for _ in 0..2 {
        log.frame().await.expect("a line").expect("a frame");
    }
    server.shutdown.cancel();
    let status = exec.finish().await.status;
    assert_eq!(status["status"], "Failure");
    let end = timeout(SOON, log.frame()).await.expect("in time");
    assert!(
        end.is_some_and(|end| end.is_err()),
        "a cut log must not look whole"
    );
    let served = timeout(SOON, &mut server.running).await.expect("in time");
    served.expect("no panic").expect("no error");
}

#[tokio::test]
async fn a_log_is_read_to_its_end() {
    let server = Server::start().await;
    assert_eq!(
        server.get(ADMIN, "/containerLogs/ns/pod/main").await,
        (200, "one\ntwo\n".into())
    );
    assert_eq!(
        server.get_http2(ADMIN, "/containerLogs/ns/pod/main").await,
        (200, "one\ntwo\n".into())
    );
}

#[tokio::test]
async fn a_followed_log_ends_with_its_reader() {
    let mut server = Server::start().await;
    let path = "/containerLogs/ns/pod/main?follow=true";
    let mut response = server.open(ADMIN, Method::GET, path).await;
    assert_eq!(response.status(), 200);
    let first = response.body_mut().frame().await.expect("a line");
    let data = first.expect("a frame").into_data().expect("data");
    assert!(data.starts_with(b"one\n"), "{data:?}");
    drop(response);
    assert_eq!(server.sees().await, Some(Seen::LogDropped));
}

#[tokio::test]
async fn logs_that_are_not_there() {
    let server = Server::start().await;
    for (path, code, body) in [
        (
            "/containerLogs/ns/none/main",
            404,
            r#"pod "none" does not exist"#,
        ),
        (
            "/containerLogs/ns/pod/x",
            404,
            r#"container "x" not found in pod "pod""#,
        ),
        (
            "/containerLogs/ns/pod/late",
            400,
            r#"container "late" in pod "pod" is waiting to start: ContainerCreating"#,
        ),
        (
            "/containerLogs/ns/pod/main?previous=true",
            400,
            r#"previous terminated container "main" in pod "pod" not found"#,
        ),
        (
            "/containerLogs/ns/pod/main?tailLines=x",
            400,
            r#"{"message": "Unable to decode query."}"#,
        ),
        (
            "/containerLogs/ns/pod/main?limitBytes=0",
            422,
            r#"{"message": "Invalid request."}"#,
        ),
    ] {
        assert_eq!(server.get(ADMIN, path).await, (code, body.into()), "{path}");
    }
}

#[tokio::test]
async fn more_streams_than_allowed_are_told_to_come_back() {
    let server = Server::start_with(|config| config.max_streams = 1).await;
    let query = "command=hang&input=1&output=1";
    let _first = server.exec(ADMIN, query).await.expect("a session");
    let second = server.exec(ADMIN, query).await.err();
    assert_eq!(second.map(|(code, _)| code), Some(429));
    assert_eq!(server.get(ADMIN, "/healthz").await.0, 200);
}
