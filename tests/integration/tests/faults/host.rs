//! A host lost and found again: its pods say so, the others do not notice.

use anyhow::{Context as _, ensure};
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::api::{Api, ListParams};
use sandman_integration::{Component, PodBuilder, Scope, condition, is_ready, wait_pod};

use crate::identity::{identities, same};

#[test]
fn its_pods_are_not_ready_until_it_returns() {
    Scope::run(|scope| async move {
        let pods: Api<Pod> = scope.api();
        for index in 0..6 {
            let pod = PodBuilder::sleeper(&scope.cluster, &format!("p-{index}")).build();
            scope.create_pod(&pod).await?;
        }
        for index in 0..6 {
            wait_pod(&pods, &format!("p-{index}"), "ready", is_ready).await?;
        }
        let before = identities(&pods).await?;
        let lost = pods
            .get("p-0")
            .await?
            .status
            .and_then(|status| status.host_ip)
            .context("hostIP")?;
        // Hosts have the addresses .11, .12, ...
        let number: u32 = lost.rsplit('.').next().unwrap_or("").parse()?;
        let host = number - 11;
        scope.cluster.kill(Component::RuntimeShim(host)).await?;
        let pod = wait_pod(&pods, "p-0", "not ready", |pod: &Pod| {
            condition(pod, "Ready") == "False"
        })
        .await?;
        ensure!(
            sandman_integration::is_phase(&pod, "Running"),
            "still Running: {:?}",
            pod.status
        );
        let node = Api::<Node>::all(scope.client.clone())
            .get(&scope.cluster.node)
            .await?;
        let conditions = node
            .status
            .and_then(|status| status.conditions)
            .unwrap_or_default();
        ensure!(
            conditions
                .iter()
                .any(|c| c.type_ == "Ready" && c.status == "True"),
            "one lost host must not take the node down: {conditions:?}"
        );
        for pod in pods.list(&ListParams::default()).await? {
            let elsewhere = pod.status.as_ref().and_then(|s| s.host_ip.as_deref()) != Some(&lost);
            if elsewhere {
                ensure!(
                    is_ready(&pod),
                    "a pod of the other host is disturbed: {:?}",
                    pod.status
                );
            }
        }
        // New pods go where a host is.
        let pod = scope
            .ready_pod(&PodBuilder::sleeper(&scope.cluster, "new").build())
            .await?;
        let where_ = pod.status.and_then(|status| status.host_ip);
        ensure!(where_.as_deref() != Some(&lost), "placed on a lost host");
        scope
            .kubectl()
            .run(&["delete", "pod", "new", "--now"])
            .await?
            .ok()?;

        scope.cluster.start(Component::RuntimeShim(host)).await?;
        for index in 0..6 {
            wait_pod(&pods, &format!("p-{index}"), "ready again", is_ready).await?;
        }
        same(&before, &identities(&pods).await?)
    });
}
