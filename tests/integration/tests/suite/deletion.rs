//! Deletion with and without grace.

use anyhow::{Context as _, ensure};
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, DeleteParams};
use sandman_integration::{PodBuilder, Scope, container, wait_gone};
use tokio::io::AsyncReadExt as _;

/// A pod that takes no notice of SIGTERM.
fn deaf(scope: &Scope, name: &str, grace_seconds: i64) -> Pod {
    let script = "trap '' TERM; while true; do sleep 1; done";
    PodBuilder::new(name)
        .container(container(&scope.cluster, "main", script))
        .spec(|spec| spec.termination_grace_period_seconds = Some(grace_seconds))
        .build()
}

#[test]
fn a_container_may_use_its_grace() {
    Scope::run(|scope| async move {
        let script = "trap 'echo caught; sleep 1; echo done; exit 0' TERM; echo up; while true; do sleep 0.1; done";
        let pod = PodBuilder::new("polite")
            .container(container(&scope.cluster, "main", script))
            .spec(|spec| spec.termination_grace_period_seconds = Some(30))
            .build();
        let pod = scope.ready_pod(&pod).await?;
        let mut follow = scope.kubectl().spawn(&["logs", "-f", "polite"])?;
        let mut stdout = follow.stdout.take().context("stdout")?;
        let mut seen = [0_u8; 3];
        stdout.read_exact(&mut seen).await?;
        ensure!(&seen == b"up\n", "{seen:?}");
        let pods: Api<Pod> = scope.api();
        pods.delete("polite", &DeleteParams::default()).await?;
        wait_gone(&pods, "polite", pod.metadata.uid.as_deref().context("uid")?).await?;
        let mut rest = String::new();
        stdout.read_to_string(&mut rest).await?;
        ensure!(rest == "caught\ndone\n", "{rest:?}");
        Ok(())
    });
}

#[test]
fn a_deaf_container_is_killed_when_its_grace_ends() {
    Scope::run(|scope| async move {
        let pod = deaf(&scope, "deaf", 2);
        let pod = scope.ready_pod(&pod).await?;
        let pods: Api<Pod> = scope.api();
        pods.delete("deaf", &DeleteParams::default()).await?;
        wait_gone(&pods, "deaf", pod.metadata.uid.as_deref().context("uid")?).await
    });
}

#[test]
fn without_grace_it_goes_at_once() {
    Scope::run(|scope| async move {
        let pod = deaf(&scope, "now", 3600);
        let pod = scope.ready_pod(&pod).await?;
        let pods: Api<Pod> = scope.api();
        pods.delete("now", &DeleteParams::default().grace_period(0))
            .await?;
        wait_gone(&pods, "now", pod.metadata.uid.as_deref().context("uid")?).await
    });
}

#[test]
fn grace_can_only_shrink() {
    Scope::run(|scope| async move {
        let pod = deaf(&scope, "shrink", 3600);
        let pod = scope.ready_pod(&pod).await?;
        let pods: Api<Pod> = scope.api();
        pods.delete("shrink", &DeleteParams::default()).await?;
        pods.delete("shrink", &DeleteParams::default().grace_period(1))
            .await?;
        wait_gone(&pods, "shrink", pod.metadata.uid.as_deref().context("uid")?).await
    });
}

#[test]
fn a_successor_of_the_same_name_runs() {
    Scope::run(|scope| async move {
        let pods: Api<Pod> = scope.api();
        let sleeper = PodBuilder::sleeper(&scope.cluster, "same").build();
        let first = scope.ready_pod(&sleeper).await?;
        pods.delete("same", &DeleteParams::default().grace_period(0))
            .await?;
        wait_gone(&pods, "same", first.metadata.uid.as_deref().context("uid")?).await?;
        let second = scope.ready_pod(&sleeper).await?;
        ensure!(first.metadata.uid != second.metadata.uid, "a new UID");
        Ok(())
    });
}
