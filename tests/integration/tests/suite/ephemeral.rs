//! Ephemeral containers: added to a pod that runs, as `kubectl debug` does.

use anyhow::{Context as _, Result, ensure};
use k8s_openapi::api::core::v1::{ContainerStatus, Event, Pod};
use kube::api::{Patch, PatchParams};
use sandman_integration::{
    PodBuilder, Scope, container, images, is_phase, is_ready, wait_event, wait_pod,
};
use serde_json::json;

fn debugger<'a>(pod: &'a Pod, name: &str) -> Option<&'a ContainerStatus> {
    let statuses = pod.status.as_ref()?.ephemeral_container_statuses.as_ref()?;
    statuses.iter().find(|status| status.name == name)
}

fn runs(pod: &Pod, name: &str) -> bool {
    debugger(pod, name)
        .and_then(|status| status.state.as_ref())
        .is_some_and(|state| state.running.is_some())
}

async fn debug(scope: &Scope, pod: &str, name: &str, target: Option<&str>) -> Result<Pod> {
    let pods = scope.api::<Pod>();
    let patch = json!({"spec": {"ephemeralContainers": [{
        "name": name,
        "image": images::busybox(&scope.cluster),
        "command": ["sleep", "2000000"],
        "targetContainerName": target,
    }]}});
    let params = PatchParams::default();
    pods.patch_subresource(
        "ephemeralcontainers",
        pod,
        &params,
        &Patch::Strategic(patch),
    )
    .await?;
    wait_pod(&pods, pod, "being debugged", |pod| runs(pod, name)).await
}

/// Command lines that a container sees.
async fn processes(scope: &Scope, pod: &str, container: &str) -> Result<String> {
    let script = "cat /proc/[0-9]*/cmdline | tr '\\0' ' '";
    let command = ["exec", pod, "-c", container, "--", "sh", "-c", script];
    Ok(scope.kubectl().run(&command).await?.ok()?.text())
}

#[test]
fn one_is_added_to_a_pod_that_runs() {
    Scope::run(|scope| async move {
        let pod = PodBuilder::sleeper(&scope.cluster, "debug").build();
        let before = scope.ready_pod(&pod).await?;
        let pod = debug(&scope, "debug", "shell", None).await?;
        ensure!(is_ready(&pod), "still ready: {:?}", pod.status);
        let main = |pod: &Pod| {
            let statuses = pod.status.as_ref()?.container_statuses.as_ref()?;
            statuses[0].container_id.clone()
        };
        ensure!(
            main(&before) == main(&pod),
            "the pod's own container goes on"
        );
        let events = scope.api::<Event>();
        wait_event(&events, "debug", "Started", "").await?;
        // Its own processes, but the pod's address.
        let seen = processes(&scope, "debug", "shell").await?;
        ensure!(
            seen.contains("2000000") && !seen.contains("1000000"),
            "{seen}"
        );
        let address = "ip -o addr show dev eth0 2>/dev/null || cat /proc/net/fib_trie";
        let kubectl = scope.kubectl();
        let command = ["exec", "debug", "-c", "shell", "--", "sh", "-c", address];
        let shown = kubectl.run(&command).await?.ok()?.text();
        let status = pod.status.context("status")?;
        let ip = status.pod_ip.context("podIP")?;
        ensure!(shown.contains(&ip), "{ip} in {shown}");
        Ok(())
    });
}

#[test]
fn one_with_a_target_sees_its_processes() {
    Scope::run(|scope| async move {
        let pod = PodBuilder::sleeper(&scope.cluster, "target").build();
        scope.ready_pod(&pod).await?;
        debug(&scope, "target", "shell", Some("main")).await?;
        let seen = processes(&scope, "target", "shell").await?;
        ensure!(seen.contains("1000000"), "{seen}");
        Ok(())
    });
}

#[test]
fn one_ends_with_its_pod() {
    Scope::run(|scope| async move {
        let script = "while [ ! -e /tmp/go ]; do sleep 0.1; done";
        let pod = PodBuilder::new("ends")
            .restart_policy("Never")
            .container(container(&scope.cluster, "main", script))
            .build();
        scope.ready_pod(&pod).await?;
        debug(&scope, "ends", "shell", None).await?;
        let command = ["exec", "ends", "-c", "main", "--", "touch", "/tmp/go"];
        scope.kubectl().run(&command).await?.ok()?;
        let pod = wait_pod(&scope.api(), "ends", "over", |pod| {
            is_phase(pod, "Succeeded")
        })
        .await?;
        let shell = debugger(&pod, "shell").context("status")?;
        let state = shell.state.as_ref().context("state")?;
        ensure!(state.terminated.is_some(), "{state:?}");
        Ok(())
    });
}
