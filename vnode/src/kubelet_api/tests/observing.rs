//! What monitoring reads.

use http::Method;
use serde_json::Value;

use super::server::{As, Server};

const ADMIN: As<'_> = As::Token("token-admin");

#[tokio::test]
async fn pods_and_stats() {
    let server = Server::start().await;
    let (code, body) = server.get(ADMIN, "/pods").await;
    assert_eq!(code, 200);
    let list: Value = serde_json::from_str(&body).expect("JSON");
    assert_eq!(list["kind"], "PodList");
    assert_eq!(list["items"][0]["metadata"]["uid"], "uid-1");

    let (code, body) = server.get(ADMIN, "/runningpods/").await;
    assert_eq!(code, 200);
    let list: Value = serde_json::from_str(&body).expect("JSON");
    assert_eq!(list["items"], serde_json::json!([]));

    let path = "/stats/summary?only_cpu_and_memory=true";
    let (code, body) = server.send(ADMIN, Method::POST, path).await;
    assert_eq!(code, 200);
    let summary: Value = serde_json::from_str(&body).expect("JSON");
    assert_eq!(summary["node"]["nodeName"], "node-1");
    assert_eq!(summary["pods"][0]["podRef"]["uid"], "uid-1");
    assert_eq!(summary["pods"][0]["containers"][0]["name"], "main");
}

#[tokio::test]
async fn metrics() {
    let server = Server::start().await;
    let (code, body) = server.get(ADMIN, "/metrics/resource").await;
    assert_eq!(code, 200);
    let sample = r#"container_cpu_usage_seconds_total{container="main",namespace="ns",pod="pod"}"#;
    assert!(body.contains(sample), "{body}");

    let (code, body) = server.get(ADMIN, "/metrics/cadvisor").await;
    assert_eq!(code, 200);
    let sample = r#"container_memory_working_set_bytes{container="main",id="/poduid-1/","#;
    assert!(body.contains(sample), "{body}");

    let exec = server.exec(ADMIN, "command=exit&output=1").await;
    exec.expect("a session").finish().await;
    let (code, body) = server.get(ADMIN, "/metrics").await;
    assert_eq!(code, 200);
    for sample in [
        r#"kubelet_streaming_websocket_requests_total{subresource="exec"} 1"#,
        r#"sandman_vnode_kubelet_api_streams_finished_total{subresource="exec",reason="exited"} 1"#,
        r#"sandman_vnode_kubelet_api_requests_total{path="metrics/resource",method="GET",code="200"} 1"#,
    ] {
        assert!(body.contains(sample), "{sample} in\n{body}");
    }
}

#[tokio::test]
async fn configuration_and_what_there_is_not() {
    let server = Server::start_with(|config| {
        config.configz = serde_json::json!({"fleet": "dev", "token": "t"});
    })
    .await;
    let (code, body) = server.get(ADMIN, "/configz").await;
    assert_eq!(code, 200);
    assert_eq!(
        serde_json::from_str::<Value>(&body).expect("JSON"),
        serde_json::json!({"sandman-vnode": {"fleet": "dev", "token": "<redacted>"}})
    );
    for (method, path, code, body) in [
        (Method::GET, "/nothing", 404, "404: Page Not Found"),
        (Method::DELETE, "/pods", 405, "405: Method Not Allowed"),
        (
            Method::POST,
            "/checkpoint/ns/none/main",
            404,
            "pod does not exist",
        ),
        (
            Method::POST,
            "/checkpoint/ns/pod/x",
            404,
            "container x does not exist",
        ),
        (
            Method::POST,
            "/checkpoint/ns/pod/main",
            405,
            "checkpoint is not supported by this node: no runtime of it can save a container\n",
        ),
        (Method::GET, "/logs/", 405, "logs endpoint is disabled.\n"),
        (
            Method::GET,
            "/metrics/probes",
            405,
            "probes are counted by the hosts that run them: see sandman_host_probes_total there.\n",
        ),
        (Method::GET, "/%00", 400, "400: Bad Request"),
    ] {
        let answer = server.send(ADMIN, method, path).await;
        assert_eq!(answer, (code, body.into()), "{path}");
    }
}

#[tokio::test]
async fn debugging_handlers_off() {
    let server = Server::start_with(|config| config.debugging_handlers = false).await;
    for path in ["/exec/ns/pod/main?output=1", "/containerLogs/ns/pod/main"] {
        assert_eq!(
            server.get(ADMIN, path).await,
            (405, "Debug endpoints are disabled.\n".into())
        );
    }
    assert_eq!(server.get(ADMIN, "/pods").await.0, 200);
}
