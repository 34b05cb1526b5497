//! Thirty pods over every host of the cluster, and our own processes killed in
//! the middle of an exec and of creations.

use std::collections::BTreeMap;

use anyhow::{Context as _, ensure};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;
use kube::api::{Api, DeleteParams, ListParams};
use sandman_integration::{Component, PodBuilder, Scope, is_ready, variable, wait_gone, wait_pod};
use tokio::io::AsyncReadExt as _;

use crate::identity::{identities, same};

const PODS: usize = 30;

#[test]
fn spread_and_survival() {
    Scope::run(|scope| async move {
        let hosts = usize::try_from(scope.cluster.hosts)?;
        let pods: Api<Pod> = scope.api();
        let name = |index: usize| format!("fleet-{index}");
        for index in 0..PODS {
            scope
                .create_pod(&PodBuilder::sleeper(&scope.cluster, &name(index)).build())
                .await?;
        }
        for index in 0..PODS {
            wait_pod(&pods, &name(index), "ready", is_ready).await?;
        }
        let mut spread = BTreeMap::<String, usize>::new();
        for pod in pods.list(&ListParams::default()).await? {
            let host = pod
                .status
                .and_then(|status| status.host_ip)
                .context("hostIP")?;
            *spread.entry(host).or_default() += 1;
        }
        ensure!(
            spread.len() == hosts,
            "{PODS} pods on {hosts} hosts: {spread:?}"
        );
        ensure!(
            spread.values().all(|&count| count >= PODS / hosts / 2),
            "uneven: {spread:?}"
        );
        let before = identities(&pods).await?;

        // An exec is open, and pods are being made, when both are killed.
        let mut exec = scope.kubectl().spawn(&[
            "exec",
            &name(0),
            "--",
            "sh",
            "-c",
            "echo up; exec sleep 1000",
        ])?;
        let mut first = [0_u8; 3];
        exec.stdout
            .as_mut()
            .context("stdout")?
            .read_exact(&mut first)
            .await?;
        for index in PODS..PODS + 9 {
            scope
                .create_pod(&PodBuilder::sleeper(&scope.cluster, &name(index)).build())
                .await?;
        }
        let killed = [Component::Vnode, Component::RuntimeShim(0)];
        for component in killed {
            scope.cluster.kill(component).await?;
        }
        for component in killed {
            scope.cluster.start(component).await?;
        }
        ensure!(!exec.wait().await?.success(), "the exec reports success");
        for index in 0..PODS + 9 {
            wait_pod(&pods, &name(index), "ready", is_ready).await?;
        }
        let mut after = identities(&pods).await?;
        ensure!(
            after.iter().all(|(_, _, restarts)| *restarts == 0),
            "restarted: {after:#?}"
        );
        after.retain(|(uid, _, _)| before.iter().any(|(old, _, _)| old == uid));
        same(&before, &after)?;
        for index in 0..PODS + 9 {
            scope
                .kubectl()
                .run(&["exec", &name(index), "--", "true"])
                .await?
                .ok()?;
        }

        let all = pods.list(&ListParams::default()).await?.items;
        pods.delete_collection(&DeleteParams::default(), &ListParams::default())
            .await?;
        for pod in &all {
            wait_gone(&pods, &pod.name_any(), pod.uid().context("uid")?.as_str()).await?;
        }
        // What a host still holds of these pods would show up in its cgroups.
        let parent = variable("SANDMAN_CGROUP_PARENT")?;
        for pod in &all {
            let uid = pod.uid().context("uid")?;
            ensure!(
                !cgroup_exists(&parent, &uid)?,
                "a cgroup of {} is left",
                pod.name_any()
            );
        }
        Ok(())
    });
}

/// Whether any hierarchy still has a cgroup of this pod.
fn cgroup_exists(parent: &str, uid: &str) -> anyhow::Result<bool> {
    for hierarchy in std::fs::read_dir("/sys/fs/cgroup")? {
        let top = hierarchy?.path().join(parent.trim_start_matches('/'));
        let Ok(hosts) = std::fs::read_dir(&top) else {
            continue;
        };
        for host in hosts {
            if host?.path().join(format!("pod{uid}")).exists() {
                return Ok(true);
            }
        }
    }
    Ok(false)
}
