//! Pods that ask for what the node does not do are told so at once.

use anyhow::{Context as _, Result, ensure};
use k8s_openapi::api::apps::v1::DaemonSet;
use k8s_openapi::api::core::v1::{
    Event, HostPathVolumeSource, PersistentVolumeClaimVolumeSource, Pod, ResourceRequirements,
    Toleration, Volume,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use kube::api::{ListParams, PostParams};
use sandman_integration::{PodBuilder, Scope, is_phase, wait_any_event, wait_event, wait_pod};

#[test]
fn a_pod_for_other_nodes_is_refused_as_by_a_kubelet() {
    Scope::run(|scope| async move {
        let pod = PodBuilder::sleeper(&scope.cluster, "elsewhere").spec(|spec| {
            spec.node_selector = Some([("no-such".to_owned(), "label".to_owned())].into());
        });
        rejected(&scope, pod, "didn't match Pod's node affinity/selector").await
    });
}

async fn rejected(scope: &Scope, builder: PodBuilder, field: &str) -> Result<()> {
    // Bound directly: the scheduler would look for volumes and room first.
    let pod = builder
        .spec(|spec| spec.node_name = Some(scope.cluster.node.clone()))
        .build();
    let name = pod.metadata.name.clone().context("name")?;
    scope.create_pod(&pod).await?;
    let pod = wait_pod(&scope.api(), &name, "rejected", |pod: &Pod| {
        is_phase(pod, "Failed")
    })
    .await?;
    let status = pod.status.context("status")?;
    ensure!(
        status
            .reason
            .as_deref()
            .is_some_and(|reason| !reason.is_empty()),
        "{status:?}"
    );
    ensure!(
        status
            .message
            .as_deref()
            .is_some_and(|message| message.contains(field)),
        "{field}: {status:?}"
    );
    let event = wait_event(
        &scope.api::<Event>(),
        &name,
        status.reason.as_deref().unwrap_or(""),
        field,
    )
    .await?;
    ensure!(event.type_.as_deref() == Some("Warning"), "{event:?}");
    Ok(())
}

#[test]
fn a_volume_claim_is_refused_by_name() {
    Scope::run(|scope| async move {
        let builder = PodBuilder::sleeper(&scope.cluster, "claim").volume(Volume {
            name: "disk".to_owned(),
            persistent_volume_claim: Some(PersistentVolumeClaimVolumeSource {
                claim_name: "disk".to_owned(),
                ..Default::default()
            }),
            ..Default::default()
        });
        rejected(&scope, builder, "spec.volumes[0].persistentVolumeClaim").await
    });
}

#[test]
fn a_path_of_the_host_that_nobody_allowed_is_refused() {
    Scope::run(|scope| async move {
        let builder = PodBuilder::sleeper(&scope.cluster, "shadow").volume(Volume {
            name: "etc".to_owned(),
            host_path: Some(HostPathVolumeSource {
                path: "/etc".to_owned(),
                ..Default::default()
            }),
            ..Default::default()
        });
        rejected(&scope, builder, "spec.volumes[0].hostPath.path \"/etc\"").await
    });
}

#[test]
fn a_pod_larger_than_every_host_is_refused() {
    Scope::run(|scope| async move {
        let builder = PodBuilder::sleeper(&scope.cluster, "huge").spec(|spec| {
            spec.containers[0].resources = Some(ResourceRequirements {
                requests: Some([("cpu".to_owned(), Quantity("1M".to_owned()))].into()),
                ..Default::default()
            });
        });
        let pod = builder
            .spec(|spec| spec.node_name = Some(scope.cluster.node.clone()))
            .build();
        scope.create_pod(&pod).await?;
        let pod = wait_pod(&scope.api(), "huge", "rejected", |pod: &Pod| {
            is_phase(pod, "Failed")
        })
        .await?;
        let reason = pod
            .status
            .as_ref()
            .and_then(|status| status.reason.as_deref());
        ensure!(reason == Some("OutOfcpu"), "{:?}", pod.status);
        Ok(())
    });
}

#[test]
fn a_daemon_set_is_held_until_an_administrator_names_it() {
    Scope::run(|scope| async move {
        let template = PodBuilder::sleeper(&scope.cluster, "unused")
            .spec(|spec| {
                spec.tolerations = Some(vec![Toleration {
                    operator: Some("Exists".to_owned()),
                    ..Default::default()
                }]);
            })
            .build();
        let labels = serde_json::json!({"app": "agent"});
        let object: DaemonSet = serde_json::from_value(serde_json::json!({
            "metadata": {"name": "agent"},
            "spec": {
                "selector": {"matchLabels": labels},
                "template": {"metadata": {"labels": labels}, "spec": template.spec},
            },
        }))?;
        scope
            .api::<DaemonSet>()
            .create(&PostParams::default(), &object)
            .await?;
        let event = wait_any_event(&scope.api::<Event>(), "DaemonSetNotAllowed").await?;
        let message = event.message.unwrap_or_default();
        ensure!(
            message.contains(&format!("{}/agent", scope.namespace)),
            "{message}"
        );
        ensure!(message.contains("daemonset_allow"), "{message}");
        let pods = scope.api::<Pod>().list(&ListParams::default()).await?;
        ensure!(!pods.items.is_empty(), "the controller made no pod");
        for pod in pods {
            ensure!(is_phase(&pod, "Pending"), "{:?}", pod.status);
        }
        Ok(())
    });
}
