//! Starts that read what they need, and no more.

use anyhow::{Context as _, Result, ensure};
use k8s_openapi::api::core::v1::{Event, Pod};
use kube::api::{Api, DeleteParams};
use sandman_integration::{Component, Scope, images, wait_event, wait_gone};

use crate::host::{cache, empty, layers, prune, python, python_pod};

async fn delete(scope: &Scope, name: &str) -> Result<()> {
    let pods: Api<Pod> = scope.api();
    let pod = pods.get(name).await?;
    pods.delete(name, &DeleteParams::default()).await?;
    wait_gone(&pods, name, &pod.metadata.uid.context("uid")?).await
}

#[test]
fn a_known_image_starts_with_what_it_reads() {
    Scope::run(|scope| async move {
        let image = images::python(&scope.cluster);
        prune(&scope.cluster, &image, &["prune", "--all"], <[_]>::is_empty).await?;
        // First sight: whole, verified, and described.
        let first = python_pod("first", &image).build();
        scope.ready_pod(&first).await?;
        let text = python(&scope, "first", "print(6 * 7)").await?;
        ensure!(text == "42\n", "{text:?}");
        let seen = layers(&scope.cluster, &image).await?;
        let whole: u64 = seen.iter().map(|layer| layer.bytes).sum();
        ensure!(seen.len() > 1, "{seen:?}");
        delete(&scope, "first").await?;

        empty(&scope, &image).await?;
        let second = python_pod("second", &image).build();
        scope.ready_pod(&second).await?;
        let events: Api<Event> = scope.api();
        wait_event(&events, "second", "Pulled", "already present on machine").await?;
        let text = python(&scope, "second", "print(7 * 6)").await?;
        ensure!(text == "42\n", "{text:?}");
        let read = layers(&scope.cluster, &image).await?;
        let bytes: u64 = read.iter().map(|layer| layer.bytes).sum();
        ensure!(
            read.iter().any(|layer| layer.state == "partial"),
            "nothing was filled as it was read: {read:?}"
        );
        ensure!(bytes < whole / 2, "{bytes} of {whole} bytes: {read:?}");
        Ok(())
    });
}

#[test]
fn what_is_used_or_pinned_stays() {
    Scope::run(|scope| async move {
        let image = images::busybox(&scope.cluster);
        scope
            .ready_pod(&sandman_integration::PodBuilder::sleeper(&scope.cluster, "user").build())
            .await?;
        cache(&scope.cluster, &["prune", "--all"]).await?;
        let used = layers(&scope.cluster, &image).await?;
        ensure!(
            !used.is_empty() && used.iter().all(|layer| layer.state == "complete"),
            "{used:?}"
        );
        scope
            .kubectl()
            .run(&["exec", "user", "--", "ls", "/bin"])
            .await?
            .ok()?;
        cache(&scope.cluster, &["pin", &image]).await?;
        delete(&scope, "user").await?;
        cache(&scope.cluster, &["prune", "--all"]).await?;
        let pinned = layers(&scope.cluster, &image).await?;
        ensure!(
            !pinned.is_empty() && pinned.iter().all(|layer| layer.pinned),
            "{pinned:?}"
        );
        cache(&scope.cluster, &["unpin", &image]).await?;
        prune(&scope.cluster, &image, &["prune", "--all"], <[_]>::is_empty).await?;
        let error = cache(&scope.cluster, &["pin", &image]).await.unwrap_err();
        ensure!(error.to_string().contains("prefetch"), "{error}");
        Ok(())
    });
}

#[test]
fn a_cached_image_starts_without_its_registry() {
    Scope::run(|scope| async move {
        let image = images::python(&scope.cluster);
        prune(&scope.cluster, &image, &["prune", "--all"], <[_]>::is_empty).await?;
        cache(&scope.cluster, &["prefetch", &image]).await?;
        scope.cluster.kill(Component::Registry).await?;
        let started = async {
            scope
                .ready_pod(&python_pod("offline", &image).build())
                .await?;
            python(&scope, "offline", "import json; print(json.dumps(1))").await
        }
        .await;
        scope.cluster.start(Component::Registry).await?;
        let text = started?;
        ensure!(text == "1\n", "{text:?}");
        Ok(())
    });
}
