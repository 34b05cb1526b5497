//! Every file of an image is what a plain unpack makes of it.

use anyhow::{Result, ensure};
use k8s_openapi::api::core::v1::{ImageVolumeSource, Volume, VolumeMount};
use sandman_integration::{PodBuilder, Scope, images, variable};

use crate::expected::Tree;
use crate::host::{layers, prune, registry_url, root_of};
use crate::odd;

/// A pod that has each image as a volume: nothing of it is changed, as a container's root is.
fn pod(scope: &Scope, name: &str, images: &[String]) -> PodBuilder {
    let mut pod = PodBuilder::sleeper(&scope.cluster, name);
    for (n, image) in images.iter().enumerate() {
        let volume = Volume {
            name: format!("image-{n}"),
            image: Some(ImageVolumeSource {
                reference: Some(image.clone()),
                pull_policy: Some("IfNotPresent".to_owned()),
            }),
            ..Default::default()
        };
        pod = pod.volume(volume).spec(|spec| {
            for container in &mut spec.containers {
                let mount = VolumeMount {
                    name: format!("image-{n}"),
                    mount_path: format!("/images/{n}"),
                    ..Default::default()
                };
                container.volume_mounts.get_or_insert_default().push(mount);
            }
        });
    }
    pod
}

async fn compare(scope: &Scope, name: &str, images: &[String]) -> Result<()> {
    let made = scope.ready_pod(&pod(scope, name, images).build()).await?;
    let root = root_of(&made)?;
    let registry = registry_url("SANDMAN_REGISTRY_LOCAL")?;
    for (n, image) in images.iter().enumerate() {
        let expected = Tree::of(&registry, image, None).await?;
        let folder = root.join(format!("images/{n}"));
        let found = tokio::task::spawn_blocking(move || Tree::read(&folder)).await??;
        let differences = expected.differences(&found);
        ensure!(differences.is_empty(), "{image}: {differences:#?}");
        ensure!(!expected.nodes.is_empty(), "{image} is empty");
    }
    Ok(())
}

#[test]
fn every_file_is_what_a_plain_unpack_makes_of_it() {
    Scope::run(|scope| async move {
        let [odd, tall] = odd::push(
            &registry_url("SANDMAN_REGISTRY_LOCAL")?,
            &variable("SANDMAN_REGISTRY")?,
        )
        .await?;
        let images = [
            images::python(&scope.cluster),
            images::nonroot(&scope.cluster),
            images::scratch(&scope.cluster),
            odd,
            tall,
        ];
        // At first sight, whole.
        compare(&scope, "whole", &images).await?;
        for image in &images {
            let layers = layers(&scope.cluster, image).await?;
            ensure!(!layers.is_empty(), "{image} is not in the layer store");
        }
        let pods = scope.api::<k8s_openapi::api::core::v1::Pod>();
        let whole = pods.get("whole").await?;
        pods.delete("whole", &Default::default()).await?;
        let uid = whole.metadata.uid.unwrap_or_default();
        sandman_integration::wait_gone(&pods, "whole", &uid).await?;
        // And filled as it is read.
        for image in &images {
            prune(&scope.cluster, image, &["prune"], |left| {
                left.iter().all(|layer| layer.state == "index")
            })
            .await?;
        }
        compare(&scope, "lazy", &images).await
    });
}
