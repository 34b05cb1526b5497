//! The registry gone, and one that wants credentials.

use anyhow::{Context as _, ensure};
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::{Container, Event, LocalObjectReference, Pod, Secret};
use kube::api::{ObjectMeta, PostParams};
use sandman_integration::{
    Component, PodBuilder, Scope, container_state, is_ready, variable, wait_event, wait_pod,
};

fn always(image: String) -> Container {
    Container {
        name: "main".to_owned(),
        image: Some(image),
        image_pull_policy: Some("Always".to_owned()),
        command: Some(vec!["/bin/sleep".to_owned(), "1000000".to_owned()]),
        ..Default::default()
    }
}

fn waits_for_its_image(pod: &Pod) -> bool {
    container_state(pod, "main")
        .and_then(|state| state.waiting.as_ref())
        .and_then(|waiting| waiting.reason.as_deref())
        .is_some_and(|reason| matches!(reason, "ErrImagePull" | "ImagePullBackOff"))
}

#[test]
fn a_pull_waits_for_the_registry() {
    Scope::run(|scope| async move {
        scope.cluster.kill(Component::Registry).await?;
        let image = format!("{}/busybox:1", scope.cluster.images);
        let pod = PodBuilder::new("patient").container(always(image)).build();
        let waited = async {
            scope.create_pod(&pod).await?;
            wait_pod(
                &scope.api(),
                "patient",
                "waiting for its image",
                waits_for_its_image,
            )
            .await?;
            wait_event(&scope.api::<Event>(), "patient", "Failed", "connect").await
        }
        .await;
        scope.cluster.start(Component::Registry).await?;
        waited?;
        wait_pod(&scope.api(), "patient", "ready", is_ready)
            .await
            .map(drop)
    });
}

#[test]
fn wrong_credentials_are_named_and_right_ones_work() {
    Scope::run(|scope| async move {
        let (registry, user, password) = (
            format!("{}/sandman", variable("SANDMAN_PRIVATE_REGISTRY")?),
            variable("SANDMAN_PRIVATE_REGISTRY_USER")?,
            variable("SANDMAN_PRIVATE_REGISTRY_PASSWORD")?,
        );
        let host = registry
            .split('/')
            .next()
            .context("registry host")?
            .to_owned();
        let image = format!("{registry}/busybox:1");
        let pull_secret = |name: &str, password: &str| {
            Secret {
            metadata: ObjectMeta { name: Some(name.to_owned()), ..Default::default() },
            type_: Some("kubernetes.io/dockerconfigjson".to_owned()),
            data: Some(
                [(
                    ".dockerconfigjson".to_owned(),
                    ByteString(
                        serde_json::json!({"auths": {&host: {"username": user, "password": password}}})
                            .to_string()
                            .into_bytes(),
                    ),
                )]
                .into(),
            ),
            ..Default::default()
        }
        };
        let secrets = scope.api::<Secret>();
        secrets
            .create(&PostParams::default(), &pull_secret("wrong", "nonsense"))
            .await?;
        secrets
            .create(&PostParams::default(), &pull_secret("right", &password))
            .await?;
        let with = |name: &str, secret: &str| {
            PodBuilder::new(name)
                .container(always(image.clone()))
                .spec(|spec| {
                    spec.image_pull_secrets = Some(vec![LocalObjectReference {
                        name: secret.to_owned(),
                    }]);
                })
                .build()
        };
        scope.create_pod(&with("refused", "wrong")).await?;
        let pod = wait_pod(&scope.api(), "refused", "waiting", waits_for_its_image).await?;
        ensure!(
            sandman_integration::is_phase(&pod, "Pending"),
            "{:?}",
            pod.status
        );
        wait_event(&scope.api::<Event>(), "refused", "Failed", "401").await?;
        scope.ready_pod(&with("allowed", "right")).await?;
        // The image is on a host now; a pod without credentials still may not use it.
        let mut cached = always(image.clone());
        cached.image_pull_policy = Some("IfNotPresent".to_owned());
        scope
            .create_pod(&PodBuilder::new("stranger").container(cached).build())
            .await?;
        wait_pod(&scope.api(), "stranger", "waiting", waits_for_its_image)
            .await
            .map(drop)
    });
}
