//! Two replicas of the virtual node: one leads, the other takes over.

use std::fmt::Debug;

use anyhow::{Context as _, Result, bail, ensure};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::Client;
use kube::api::Api;
use kube::runtime::wait::await_condition;
use sandman_integration::{
    Cluster, Component, DEADLINE, PodBuilder, Scope, is_ready, variable, wait_pod,
};
use serde::de::DeserializeOwned;

use crate::identity::{identities, same};

/// Puts back what every other test expects, whatever happened: the first replica alone.
async fn with_standby(scope: &Scope, test: impl AsyncFnOnce() -> Result<()>) -> Result<()> {
    let cluster = &scope.cluster;
    cluster.start(Component::StandbyVnode).await?;
    let result = test().await;
    cluster.dev(&["stop", "vnode-standby"]).await?;
    cluster.start(Component::Vnode).await?;
    leads(cluster, "vnode").await?;
    result
}

/// Waits until an object is as wanted.
async fn wait<K>(api: Api<K>, name: &str, what: &str, is: impl Fn(&K) -> bool + Send) -> Result<K>
where
    K: kube::Resource + Clone + Debug + Send + DeserializeOwned + 'static,
{
    let met = |object: Option<&K>| object.is_some_and(&is);
    match tokio::time::timeout(DEADLINE, await_condition(api.clone(), name, met)).await {
        Ok(object) => object?.with_context(|| format!("{name} is gone")),
        Err(_) => bail!("{what}: not yet in {:#?}", api.get_opt(name).await),
    }
}

/// Waits until this replica holds the Lease and is where the API server finds the node.
async fn leads(cluster: &Cluster, replica: &str) -> Result<()> {
    let client: Client = cluster.client().await?;
    let leases = Api::<Lease>::namespaced(client.clone(), "sandman-system");
    wait(leases, "sandman-vnode", "the leader", |lease| {
        let holder = lease.spec.as_ref().and_then(|s| s.holder_identity.as_ref());
        holder.is_some_and(|holder| holder == replica)
    })
    .await?;
    let first: std::net::SocketAddr = variable("SANDMAN_KUBELET")?.parse()?;
    let first = first.ip().to_string();
    wait(Api::<Node>::all(client), &cluster.node, "address", |node| {
        let addresses = node.status.as_ref().and_then(|s| s.addresses.as_ref());
        let at_first = addresses.is_some_and(|all| all.iter().any(|a| a.address == first));
        at_first == (replica == "vnode")
    })
    .await
    .map(drop)
}

#[test]
fn a_standby_takes_over_from_a_dead_leader() {
    Scope::run(|scope| async move {
        let pods: Api<Pod> = scope.api();
        scope
            .ready_pod(&PodBuilder::sleeper(&scope.cluster, "before").build())
            .await?;
        let before = identities(&pods).await?;
        with_standby(&scope, async || {
            let standby = scope.cluster.log_tail("vnode-standby").await;
            ensure!(!standby.contains("registered the node"), "{standby}");
            scope.cluster.kill(Component::Vnode).await?;
            leads(&scope.cluster, "vnode-standby").await?;
            let exec = ["exec", "before", "--", "echo", "hi"];
            scope.kubectl().run(&exec).await?.ok()?;
            same(&before, &identities(&pods).await?)?;
            scope
                .ready_pod(&PodBuilder::sleeper(&scope.cluster, "after").build())
                .await
                .map(drop)
        })
        .await?;
        // And back, by the orderly end of the second one.
        for name in ["before", "after"] {
            let exec = ["exec", name, "--", "true"];
            scope.kubectl().run(&exec).await?.ok()?;
        }
        wait_pod(&pods, "after", "ready", is_ready).await.map(drop)
    });
}

#[test]
fn a_leader_that_slept_through_its_reign_steps_down() {
    Scope::run(|scope| async move {
        let pods: Api<Pod> = scope.api();
        scope
            .ready_pod(&PodBuilder::sleeper(&scope.cluster, "before").build())
            .await?;
        let before = identities(&pods).await?;
        with_standby(&scope, async || {
            scope.cluster.signal(Component::Vnode, "STOP").await?;
            leads(&scope.cluster, "vnode-standby").await?;
            scope.cluster.signal(Component::Vnode, "CONT").await?;
            // It says so as it goes, and the other one still leads.
            let gone = async {
                loop {
                    let log = scope.cluster.log_tail("vnode").await;
                    if log.contains("does not lead any more") {
                        return;
                    }
                    tokio::time::sleep(std::time::Duration::from_millis(200)).await;
                }
            };
            let late = "the first replica did not step down";
            tokio::time::timeout(DEADLINE, gone).await.context(late)?;
            leads(&scope.cluster, "vnode-standby").await?;
            let exec = ["exec", "before", "--", "true"];
            scope.kubectl().run(&exec).await?.ok()?;
            same(&before, &identities(&pods).await?)
        })
        .await
    });
}
