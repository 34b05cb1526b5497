//! Parts of a host killed under readers of layers that are not complete.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context as _, Result, ensure};
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::{LocalObjectReference, Secret};
use kube::api::{ObjectMeta, PostParams};
use sandman_integration::{Component, Scope, images, variable};
use sha2::{Digest as _, Sha256};

use crate::expected::{Kind, Tree};
use crate::host::{empty, prune, python, python_pod, registry_url, root_of, settled};

/// Files of an image with their digests, large ones first: they take more than one span.
fn files(tree: &Tree) -> Vec<(PathBuf, String)> {
    let mut files: Vec<_> = tree
        .nodes
        .iter()
        .filter_map(|(path, node)| match &node.kind {
            Kind::File { size, sha256 } => Some((*size, path.clone(), sha256.clone())),
            _ => None,
        })
        .filter(|(_, path, _)| path.starts_with("usr"))
        .collect();
    files.sort_by_key(|(size, ..)| std::cmp::Reverse(*size));
    files
        .into_iter()
        .map(|(_, path, sha256)| (path, sha256))
        .collect()
}

/// What a reader saw.
#[derive(Debug, Default)]
struct Seen {
    right: usize,
    /// The reason of each read that failed: allowed while parts are dead, never to be believed.
    errors: BTreeMap<String, usize>,
    wrong: Vec<PathBuf>,
}

/// Reads all files until none is left or it is told to stop.
fn read_all(root: &std::path::Path, files: &[(PathBuf, String)], stop: &AtomicBool) -> Seen {
    let mut seen = Seen::default();
    for (path, expected) in files {
        if stop.load(Ordering::Relaxed) {
            break;
        }
        match std::fs::read(root.join(path)) {
            Ok(bytes) if hex::encode(Sha256::digest(&bytes)) == *expected => seen.right += 1,
            Ok(_) => seen.wrong.push(path.clone()),
            Err(error) => *seen.errors.entry(error.to_string()).or_default() += 1,
        }
    }
    seen
}

#[test]
fn no_byte_is_wrong_when_parts_are_killed() {
    Scope::run(|scope| async move {
        let image = images::python(&scope.cluster);
        empty(&scope, &image).await?;
        let expected = Tree::of(&registry_url("SANDMAN_REGISTRY_LOCAL")?, &image, None).await?;
        let pod = scope
            .ready_pod(&python_pod("reader", &image).build())
            .await?;
        let root = root_of(&pod)?;
        let files = Arc::new(files(&expected));
        let stop = Arc::new(AtomicBool::new(false));
        let readers: Vec<_> = (0..3)
            .map(|n| {
                let (root, files, stop) = (root.clone(), Arc::clone(&files), Arc::clone(&stop));
                tokio::task::spawn_blocking(move || {
                    let mut mine = files.to_vec();
                    let count = mine.len();
                    mine.rotate_left(n * count / 3);
                    read_all(&root, &mine, &stop)
                })
            })
            .collect();
        let parts = [Component::LayerKeeper(0), Component::RuntimeShim(0)];
        let kills = async {
            for _ in 0..3 {
                for part in parts {
                    scope.cluster.kill(part).await?;
                    scope.cluster.start(part).await?;
                    settled(&scope.cluster).await?;
                }
            }
            scope.cluster.kill(Component::Registry).await?;
            scope.cluster.start(Component::Registry).await
        };
        let killed = kills.await;
        let mut seen = Vec::new();
        for reader in readers {
            seen.push(reader.await?);
        }
        killed?;
        ensure!(seen.iter().all(|seen| seen.wrong.is_empty()), "{seen:?}");
        // And once more in peace: nothing that went wrong stays.
        let root = root_of(&pod)?;
        let calm = tokio::task::spawn_blocking(move || read_all(&root, &files, &stop)).await?;
        ensure!(
            calm.wrong.is_empty() && calm.errors.is_empty(),
            "{calm:?}, after {seen:?}"
        );
        ensure!(calm.right > 100, "{calm:?}");
        Ok(())
    });
}

#[test]
fn a_private_layer_is_read_with_the_pods_credentials_also_later() {
    Scope::run(|scope| async move {
        let registry = variable("SANDMAN_PRIVATE_REGISTRY")?;
        let image = format!("{registry}/sandman/python-swe:1");
        let pod = |name: &str| {
            python_pod(name, &image)
                .spec(|spec| {
                    spec.image_pull_secrets = Some(vec![LocalObjectReference {
                        name: "pull".to_owned(),
                    }]);
                })
                .build()
        };
        make_secret(&scope, &registry).await?;
        scope.ready_pod(&pod("first")).await?;
        // Indexes only: what is read from here on is fetched with a credential.
        let pods = scope.api::<k8s_openapi::api::core::v1::Pod>();
        let first = pods.get("first").await?;
        pods.delete("first", &Default::default()).await?;
        let uid = first.metadata.uid.context("uid")?;
        sandman_integration::wait_gone(&pods, "first", &uid).await?;
        prune(&scope.cluster, &image, &["prune"], |left| {
            left.iter().all(|layer| layer.state == "index")
        })
        .await?;

        scope.ready_pod(&pod("second")).await?;
        let text = python(&scope, "second", "print('read')").await?;
        ensure!(text == "read\n", "{text:?}");
        // A restarted service was not told the credential again.
        scope.cluster.kill(Component::RuntimeShim(0)).await?;
        scope.cluster.start(Component::RuntimeShim(0)).await?;
        settled(&scope.cluster).await?;
        let code = "import ssl, sqlite3, xml.dom, asyncio; print('more')";
        let text = python(&scope, "second", code).await?;
        ensure!(text == "more\n", "{text:?}");
        // Nobody else may have it for that.
        let mut stranger = python_pod("stranger", &image).build();
        stranger.metadata.name = Some("stranger".to_owned());
        scope.create_pod(&stranger).await?;
        sandman_integration::wait_pod(&pods, "stranger", "refused its image", |pod| {
            sandman_integration::container_state(pod, "main")
                .and_then(|state| state.waiting.as_ref())
                .and_then(|waiting| waiting.reason.as_deref())
                .is_some_and(|reason| matches!(reason, "ErrImagePull" | "ImagePullBackOff"))
        })
        .await
        .map(drop)
    });
}

#[test]
fn sandboxes_that_may_have_read_zeros_end() {
    Scope::run(|scope| async move {
        let image = images::python(&scope.cluster);
        empty(&scope, &image).await?;
        scope.ready_pod(&python_pod("lost", &image).build()).await?;
        let whole = sandman_integration::PodBuilder::sleeper(&scope.cluster, "whole").build();
        scope.ready_pod(&whole).await?;
        // With both, the last copy of what watches readers is gone.
        scope.cluster.kill(Component::RuntimeShim(0)).await?;
        scope.cluster.kill(Component::LayerKeeper(0)).await?;
        scope.cluster.start(Component::LayerKeeper(0)).await?;
        scope.cluster.start(Component::RuntimeShim(0)).await?;
        settled(&scope.cluster).await?;
        let pods = scope.api::<k8s_openapi::api::core::v1::Pod>();
        let pod = sandman_integration::wait_pod(&pods, "lost", "failed", |pod| {
            sandman_integration::is_phase(pod, "Failed")
        })
        .await?;
        let message = pod.status.and_then(|status| status.message);
        let message = message.context("no message")?;
        ensure!(message.contains("zeros"), "{message}");
        // What runs on complete layers goes on, and what starts now reads what is true.
        let whole = pods.get("whole").await?;
        ensure!(sandman_integration::is_ready(&whole), "{:?}", whole.status);
        scope.ready_pod(&python_pod("next", &image).build()).await?;
        let text = python(&scope, "next", "print('true')").await?;
        ensure!(text == "true\n", "{text:?}");
        Ok(())
    });
}

async fn make_secret(scope: &Scope, registry: &str) -> Result<()> {
    let auths = serde_json::json!({"auths": {registry: {
        "username": variable("SANDMAN_PRIVATE_REGISTRY_USER")?,
        "password": variable("SANDMAN_PRIVATE_REGISTRY_PASSWORD")?,
    }}});
    let secret = Secret {
        metadata: ObjectMeta {
            name: Some("pull".to_owned()),
            ..Default::default()
        },
        type_: Some("kubernetes.io/dockerconfigjson".to_owned()),
        data: Some(
            [(
                ".dockerconfigjson".to_owned(),
                ByteString(auths.to_string().into_bytes()),
            )]
            .into(),
        ),
        ..Default::default()
    };
    scope
        .api::<Secret>()
        .create(&PostParams::default(), &secret)
        .await?;
    Ok(())
}
