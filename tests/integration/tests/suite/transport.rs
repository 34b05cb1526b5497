//! Which way a stream takes through the API server: since Kubernetes 1.36 it
//! passes WebSockets to a node that says it understands them.

use anyhow::{Result, ensure};
use sandman_integration::{PodBuilder, Scope, Transport};

const METRIC: &str = "apiserver_websocket_streaming_requests_total";

/// Streaming requests that the API server handed to kubelets as WebSockets.
async fn proxied_to_kubelet(scope: &Scope) -> Result<f64> {
    let metrics = scope
        .kubectl()
        .run(&["get", "--raw", "/metrics"])
        .await?
        .ok()?
        .text();
    let mut sum = 0.0;
    for line in metrics.lines() {
        if line.starts_with(METRIC) && line.contains("proxy_type=\"proxied_to_kubelet\"") {
            sum += line.rsplit(' ').next().unwrap_or("0").parse::<f64>()?;
        }
    }
    Ok(sum)
}

#[test]
fn websockets_reach_the_node_untranslated() {
    Scope::run(|scope| async move {
        scope
            .ready_pod(&PodBuilder::sleeper(&scope.cluster, "box").build())
            .await?;
        let before = proxied_to_kubelet(&scope).await?;
        let exec = ["exec", "box", "--", "true"];
        scope
            .kubectl_over(Transport::WebSocket)
            .run(&exec)
            .await?
            .ok()?;
        ensure!(
            proxied_to_kubelet(&scope).await? > before,
            "{METRIC} did not count the exec"
        );
        Ok(())
    });
}
