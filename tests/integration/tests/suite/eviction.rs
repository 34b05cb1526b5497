//! Pods that store more than they may are ended, and what they stored is given back.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result, ensure};
use k8s_openapi::api::core::v1::{
    EmptyDirVolumeSource, Event, Pod, ResourceRequirements, Volume, VolumeMount,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use sandman_integration::{PodBuilder, Scope, container, is_phase, wait_event, wait_pod};

const FILL: &str = "head -c 20971520 /dev/zero > /data/file; exec sleep 1000000";

fn filler(scope: &Scope, name: &str, size_limit: Option<&str>) -> PodBuilder {
    PodBuilder::new(name)
        .container(container(&scope.cluster, "main", FILL))
        .volume(Volume {
            name: "data".to_owned(),
            empty_dir: Some(EmptyDirVolumeSource {
                size_limit: size_limit.map(|limit| Quantity(limit.to_owned())),
                ..Default::default()
            }),
            ..Default::default()
        })
        .spec(|spec| {
            spec.containers[0].volume_mounts = Some(vec![VolumeMount {
                name: "data".to_owned(),
                mount_path: "/data".to_owned(),
                ..Default::default()
            }]);
        })
}

async fn evicted(scope: &Scope, name: &str, message: &str) -> Result<()> {
    let pod = wait_pod(&scope.api(), name, "evicted", |pod: &Pod| {
        is_phase(pod, "Failed")
    })
    .await?;
    let status = pod.status.context("status")?;
    ensure!(status.reason.as_deref() == Some("Evicted"), "{status:?}");
    ensure!(status.message.as_deref() == Some(message), "{status:?}");
    // It broke its own limit: no disruption that somebody else caused.
    let mut conditions = status.conditions.iter().flatten();
    ensure!(
        conditions.all(|condition| condition.type_ != "DisruptionTarget"),
        "{status:?}"
    );
    let event = wait_event(&scope.api::<Event>(), name, "Evicted", message.trim_end()).await?;
    ensure!(event.type_.as_deref() == Some("Warning"), "{event:?}");
    Ok(())
}

#[test]
fn an_empty_dir_beyond_its_limit_ends_the_pod() {
    Scope::run(|scope| async move {
        scope
            .create_pod(&filler(&scope, "over", Some("10Mi")).build())
            .await?;
        let within = filler(&scope, "within", Some("40Mi")).build();
        scope.ready_pod(&within).await?;
        let message = "Usage of EmptyDir volume \"data\" exceeds the limit \"10Mi\". ";
        evicted(&scope, "over", message).await?;
        let pod = scope.api::<Pod>().get("within").await?;
        ensure!(is_phase(&pod, "Running"), "{:?}", pod.status);
        Ok(())
    });
}

#[test]
fn storage_beyond_the_pods_limit_ends_it() {
    Scope::run(|scope| async move {
        let limits = |limit: &str| ResourceRequirements {
            limits: Some(BTreeMap::from([(
                "ephemeral-storage".to_owned(),
                Quantity(limit.to_owned()),
            )])),
            ..Default::default()
        };
        let pod = filler(&scope, "over", None)
            .spec(|spec| spec.containers[0].resources = Some(limits("10Mi")))
            .build();
        scope.create_pod(&pod).await?;
        let message =
            "Pod ephemeral local storage usage exceeds the total limit of containers 10Mi. ";
        evicted(&scope, "over", message).await
    });
}
