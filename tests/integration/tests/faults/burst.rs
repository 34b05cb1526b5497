//! Many pods at once: none fails, all are used, nothing stays behind.

use std::collections::BTreeMap;

use anyhow::{Context as _, ensure};
use futures::{StreamExt as _, TryStreamExt as _};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;
use kube::api::{Api, DeleteParams, ListParams};
use sandman_integration::{PodBuilder, Scope, is_phase, is_ready, wait_gone, wait_pod};

const PODS: usize = 200;

#[test]
fn two_hundred_pods_at_once() {
    Scope::run(|scope| async move {
        let pods: Api<Pod> = scope.api();
        let names: Vec<String> = (0..PODS).map(|index| format!("burst-{index}")).collect();
        futures::stream::iter(&names)
            .map(|name| async {
                scope
                    .create_pod(&PodBuilder::sleeper(&scope.cluster, name).build())
                    .await
            })
            .buffer_unordered(16)
            .try_collect::<Vec<_>>()
            .await?;
        for name in &names {
            wait_pod(&pods, name, "ready", is_ready).await?;
        }
        let all = pods.list(&ListParams::default()).await?.items;
        ensure!(all.len() == PODS, "{} pods", all.len());
        let mut hosts = BTreeMap::<String, usize>::new();
        for pod in &all {
            ensure!(
                is_phase(pod, "Running"),
                "{}: {:?}",
                pod.name_any(),
                pod.status
            );
            let status = pod.status.as_ref().context("status")?;
            ensure!(
                status
                    .container_statuses
                    .iter()
                    .flatten()
                    .all(|c| c.restart_count == 0),
                "{} restarted",
                pod.name_any()
            );
            *hosts
                .entry(status.host_ip.clone().context("hostIP")?)
                .or_default() += 1;
        }
        let expected = usize::try_from(scope.cluster.hosts)?;
        ensure!(hosts.len() == expected, "on {hosts:?}");
        ensure!(
            hosts.values().all(|&count| count >= PODS / expected / 2),
            "uneven: {hosts:?}"
        );
        let addresses: std::collections::BTreeSet<_> = all
            .iter()
            .filter_map(|pod| pod.status.as_ref()?.pod_ip.clone())
            .collect();
        ensure!(addresses.len() == PODS, "addresses are shared");
        let params = DeleteParams::default().grace_period(0);
        pods.delete_collection(&params, &ListParams::default())
            .await?;
        for pod in &all {
            wait_gone(&pods, &pod.name_any(), pod.uid().context("uid")?.as_str()).await?;
        }
        Ok(())
    });
}
