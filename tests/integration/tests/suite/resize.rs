//! In-place resize of processor and memory.

use anyhow::{Result, ensure};
use k8s_openapi::api::core::v1::{ContainerStatus, Node, Pod};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use kube::Api;
use kube::api::{Patch, PatchParams};
use sandman_integration::{PodBuilder, Scope, condition, wait_pod};
use serde_json::{Value, json};

fn main_status(pod: &Pod) -> Option<&ContainerStatus> {
    pod.status.as_ref()?.container_statuses.as_ref()?.first()
}

/// What the container's process has, by its status.
fn limit(pod: &Pod, name: &str) -> Option<String> {
    let resources = main_status(pod)?.resources.as_ref()?;
    let Quantity(text) = resources.limits.as_ref()?.get(name)?;
    Some(text.clone())
}

async fn resize(scope: &Scope, pod: &str, resources: Value) -> Result<()> {
    let patch = json!({"spec": {"containers": [{"name": "main", "resources": resources}]}});
    let params = PatchParams::default();
    scope
        .api::<Pod>()
        .patch_subresource("resize", pod, &params, &Patch::Strategic(patch))
        .await?;
    Ok(())
}

fn sized(scope: &Scope, name: &str) -> Pod {
    let resources = json!({
        "requests": {"cpu": "10m", "memory": "16Mi"}, "limits": {"cpu": "100m", "memory": "64Mi"},
    });
    PodBuilder::sleeper(&scope.cluster, name)
        .spec(|spec| {
            let main = &mut spec.containers[0];
            main.resources = serde_json::from_value(resources).ok();
            main.resize_policy = serde_json::from_value(json!([
                {"resourceName": "cpu", "restartPolicy": "NotRequired"},
                {"resourceName": "memory", "restartPolicy": "RestartContainer"},
            ]))
            .ok();
        })
        .build()
}

#[test]
fn a_container_gets_its_new_size_as_its_policy_says() {
    Scope::run(|scope| async move {
        let pods = scope.api::<Pod>();
        let pod = scope.ready_pod(&sized(&scope, "size")).await?;
        ensure!(
            limit(&pod, "cpu").as_deref() == Some("100m"),
            "{:?}",
            pod.status
        );
        resize(&scope, "size", json!({"limits": {"cpu": "200m"}})).await?;
        let pod = wait_pod(&pods, "size", "resized", |pod| {
            limit(pod, "cpu").as_deref() == Some("200m")
        })
        .await?;
        let main = main_status(&pod);
        ensure!(main.is_some_and(|main| main.restart_count == 0), "{main:?}");
        resize(&scope, "size", json!({"limits": {"memory": "128Mi"}})).await?;
        wait_pod(&pods, "size", "restarted with its new size", |pod| {
            limit(pod, "memory").as_deref() == Some("128Mi")
                && main_status(pod).is_some_and(|main| main.restart_count == 1 && main.ready)
                && condition(pod, "PodResizeInProgress").is_empty()
        })
        .await?;
        Ok(())
    });
}

/// The API server refuses what is more than the node has: this is all of it, with another pod there.
#[test]
fn what_there_is_no_room_for_waits_and_can_be_taken_back() {
    Scope::run(|scope| async move {
        let pods = scope.api::<Pod>();
        scope.ready_pod(&sized(&scope, "neighbour")).await?;
        let pod = scope.ready_pod(&sized(&scope, "large")).await?;
        let nodes: Api<Node> = Api::all(scope.client.clone());
        let name = pod.spec.and_then(|spec| spec.node_name).unwrap_or_default();
        let status = nodes.get(&name).await?.status.unwrap_or_default();
        let Quantity(all) = status.allocatable.unwrap_or_default()["cpu"].clone();
        resize(
            &scope,
            "large",
            json!({"requests": {"cpu": all}, "limits": {"cpu": all}}),
        )
        .await?;
        let pod = wait_pod(&pods, "large", "held back", |pod| {
            condition(pod, "PodResizePending") == "True"
        })
        .await?;
        let conditions = pod.status.clone().unwrap_or_default().conditions;
        let mut conditions = conditions.into_iter().flatten();
        let pending = conditions.find(|condition| condition.type_ == "PodResizePending");
        // Infeasible where no single host has what the node has.
        let reason = pending.and_then(|pending| pending.reason);
        let reasons = [Some("Deferred"), Some("Infeasible")];
        ensure!(reasons.contains(&reason.as_deref()), "{reason:?}");
        ensure!(
            limit(&pod, "cpu").as_deref() == Some("100m"),
            "{:?}",
            pod.status
        );
        let before = json!({"requests": {"cpu": "10m"}, "limits": {"cpu": "100m"}});
        resize(&scope, "large", before).await?;
        wait_pod(&pods, "large", "as it was", |pod| {
            condition(pod, "PodResizePending").is_empty()
        })
        .await?;
        Ok(())
    });
}
