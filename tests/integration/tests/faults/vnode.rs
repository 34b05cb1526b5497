//! vnode killed: sandboxes run on, and the next vnode takes up where it ended.

use anyhow::{Context as _, ensure};
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, DeleteParams};
use sandman_integration::{
    Component, PodBuilder, Scope, Transport, container, wait_gone, wait_pod,
};

use crate::identity::{identities, same};

#[test]
fn running_pods_keep_their_containers() {
    Scope::run(|scope| async move {
        let pods: Api<Pod> = scope.api();
        for index in 0..4 {
            let pod = PodBuilder::sleeper(&scope.cluster, &format!("keep-{index}")).build();
            scope.create_pod(&pod).await?;
        }
        for index in 0..4 {
            wait_pod(
                &pods,
                &format!("keep-{index}"),
                "ready",
                sandman_integration::is_ready,
            )
            .await?;
        }
        let before = identities(&pods).await?;
        scope.cluster.kill(Component::Vnode).await?;
        // A pod made and one deleted while nobody looks.
        scope
            .create_pod(&PodBuilder::sleeper(&scope.cluster, "meanwhile").build())
            .await?;
        scope.cluster.start(Component::Vnode).await?;
        wait_pod(&pods, "meanwhile", "ready", sandman_integration::is_ready).await?;
        pods.delete("meanwhile", &DeleteParams::default().grace_period(0))
            .await?;
        let uid = pods
            .get("meanwhile")
            .await
            .ok()
            .and_then(|pod| pod.metadata.uid);
        wait_gone(&pods, "meanwhile", uid.as_deref().unwrap_or("")).await?;
        for index in 0..4 {
            let name = format!("keep-{index}");
            wait_pod(&pods, &name, "ready again", sandman_integration::is_ready).await?;
            scope
                .kubectl()
                .run(&["exec", &name, "--", "true"])
                .await?
                .ok()?;
        }
        same(&before, &identities(&pods).await?)
    });
}

#[test]
fn an_exec_that_loses_its_node_does_not_succeed() {
    Scope::run(|scope| async move {
        scope
            .ready_pod(&PodBuilder::sleeper(&scope.cluster, "box").build())
            .await?;
        for transport in Transport::ALL {
            let mut exec = scope.kubectl_over(transport).spawn(&[
                "exec",
                "box",
                "--",
                "sh",
                "-c",
                "echo up; exec sleep 1000",
            ])?;
            let mut first = [0_u8; 3];
            let stdout = exec.stdout.as_mut().context("stdout")?;
            tokio::io::AsyncReadExt::read_exact(stdout, &mut first).await?;
            scope.cluster.kill(Component::Vnode).await?;
            scope.cluster.start(Component::Vnode).await?;
            let status = tokio::time::timeout(sandman_integration::DEADLINE, exec.wait()).await??;
            // SPDY clients take a stream that ends without a status for a success:
            // only a node that still lives could tell them otherwise.
            if transport == Transport::WebSocket {
                ensure!(
                    !status.success(),
                    "{transport:?}: exec of a dead node reports success"
                );
            }
        }
        wait_pod(&scope.api(), "box", "ready", sandman_integration::is_ready)
            .await
            .map(drop)
    });
}

#[test]
fn a_container_that_ends_meanwhile_is_reported() {
    Scope::run(|scope| async move {
        let pod = PodBuilder::new("ends")
            .restart_policy("Never")
            .container(container(
                &scope.cluster,
                "main",
                "while [ ! -e /tmp/go ]; do sleep 0.1; done; sleep 1; exit 4",
            ))
            .build();
        scope.ready_pod(&pod).await?;
        scope
            .kubectl()
            .run(&["exec", "ends", "--", "touch", "/tmp/go"])
            .await?
            .ok()?;
        scope.cluster.kill(Component::Vnode).await?;
        scope.cluster.start(Component::Vnode).await?;
        let pod = wait_pod(&scope.api(), "ends", "failed", |pod: &Pod| {
            sandman_integration::is_phase(pod, "Failed")
        })
        .await?;
        let code = sandman_integration::container_state(&pod, "main")
            .and_then(|state| Some(state.terminated.as_ref()?.exit_code));
        ensure!(code == Some(4), "{:?}", pod.status);
        Ok(())
    });
}
