//! Who is let in, and to what.

use std::sync::atomic::Ordering;

use http::Method;
use rcgen::ExtendedKeyUsagePurpose;

use super::pki::Authority;
use super::server::{As, Server};

const UNAUTHORIZED: (u16, &str) = (401, "Unauthorized");

fn own((code, body): (u16, &str)) -> (u16, String) {
    (code, body.to_owned())
}

#[tokio::test]
async fn strangers_get_401() {
    let server = Server::start().await;
    let foreign = Authority::new("foreign").client("admin", &["system:masters"]);
    let wrong_use = server
        .clients
        .issue("admin", &[], ExtendedKeyUsagePurpose::ServerAuth);
    for who in [
        As::Nobody,
        As::Token("stolen"),
        As::Certificate(&foreign),
        As::Certificate(&wrong_use),
    ] {
        assert_eq!(server.get(who, "/healthz").await, own(UNAUTHORIZED));
        assert_eq!(server.get(who, "/no/such/path").await, own(UNAUTHORIZED));
        let exec = server.exec(who, "command=cat&output=1").await;
        assert_eq!(exec.err(), Some(own(UNAUTHORIZED)));
    }
}

#[tokio::test]
async fn certificates_and_tokens_are_let_in() {
    let server = Server::start().await;
    let admin = server.clients.client("admin", &["team-a", "team-b"]);
    assert_eq!(
        server.get(As::Certificate(&admin), "/healthz").await,
        (200, "ok".into())
    );
    let asked = server.policy.last.lock().expect("not poisoned").clone();
    let asked = asked.expect("a review was asked for");
    assert_eq!(
        asked.groups,
        Some(vec![
            "team-a".into(),
            "team-b".into(),
            "system:authenticated".into()
        ])
    );
    let attributes = asked.resource_attributes.expect("attributes");
    assert_eq!(attributes.name.as_deref(), Some("node-1"));
    assert_eq!(attributes.resource.as_deref(), Some("nodes"));
    assert_eq!(attributes.subresource.as_deref(), Some("healthz"));

    for _ in 0..3 {
        let answer = server.get(As::Token("token-admin"), "/healthz").await;
        assert_eq!(answer, (200, "ok".into()));
    }
    assert_eq!(server.policy.token_reviews.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn http2_is_spoken_to_those_who_ask() {
    let server = Server::start().await;
    let answer = server
        .get_http2(As::Token("token-admin"), "/healthz/ping")
        .await;
    assert_eq!(answer, (200, "ok".into()));
    let exec = server
        .get_http2(
            As::Token("token-admin"),
            "/exec/ns/pod/main?command=cat&output=1",
        )
        .await;
    assert_eq!(exec.0, 400, "{}", exec.1);
}

#[tokio::test]
async fn policy_decides() {
    let server = Server::start().await;
    let viewer = As::Token("token-viewer");
    assert_eq!(server.get(viewer, "/pods").await.0, 200);
    let forbidden = |verb: &str, subresources: &str, user: &str| {
        let text = format!(
            "Forbidden (user={user}, verb={verb}, resource=nodes, \
             subresource(s)=[{subresources}])\n"
        );
        (403, text)
    };
    assert_eq!(
        server.get(As::Token("token-bob"), "/pods").await,
        forbidden("get", "pods proxy", "bob")
    );
    assert_eq!(
        server.send(viewer, Method::POST, "/stats/summary").await,
        forbidden("create", "stats", "viewer")
    );
    // A WebSocket handshake is a GET; `get nodes/proxy` must not be enough.
    let exec = server.exec(viewer, "command=cat&output=1").await;
    assert_eq!(exec.err(), Some(forbidden("create", "proxy", "viewer")));
    // Refused before it is looked for.
    assert_eq!(
        server.get(viewer, "/attach/ns/none/main?output=1").await,
        forbidden("create", "proxy", "viewer")
    );
    assert_eq!(
        server.get(As::Token("token-broken"), "/metrics").await,
        (
            500,
            "Authorization error (user=broken, verb=get, resource=nodes, subresource=metrics)"
                .into()
        )
    );
}

#[tokio::test]
async fn exec_by_get_can_be_allowed_as_on_a_kubelet() {
    let server = Server::start_with(|config| config.streams_need_create = false).await;
    let exec = server
        .exec(As::Token("token-viewer"), "command=exit&output=1")
        .await;
    assert_eq!(
        exec.expect("a session").finish().await.status["status"],
        "Success"
    );
}

#[tokio::test]
async fn a_new_client_ca_is_taken_up() {
    let server = Server::start().await;
    let next = Authority::new("next");
    let late = next.client("admin", &[]);
    assert_eq!(
        server.get(As::Certificate(&late), "/healthz").await,
        own(UNAUTHORIZED)
    );
    let both = format!("{}{}", server.clients.pem, next.pem);
    std::fs::write(server.folder.path().join("ca.crt"), both).expect("a new bundle");
    // The file is looked at no more than once a second.
    let deadline = tokio::time::Instant::now() + super::SOON;
    while server.get(As::Certificate(&late), "/healthz").await.0 != 200 {
        assert!(
            tokio::time::Instant::now() < deadline,
            "the bundle is not read"
        );
    }
    let first = server.clients.client("admin", &[]);
    assert_eq!(server.get(As::Certificate(&first), "/healthz").await.0, 200);
}
