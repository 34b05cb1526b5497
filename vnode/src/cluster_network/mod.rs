//! What hosts know of the cluster's network beyond addresses: the Services that their sandboxes
//! reach, and the NetworkPolicies that they are under. Read with an identity of its own, compiled by
//! pure functions, and stated to each host whenever it differs from what the host was told last.
//!
//! * `services.rs`: Services and EndpointSlices to ports and endpoints; pure.
//! * `policies.rs`: NetworkPolicies to rules of single pods; pure.
//! * `state.rs`: all of it at one moment, and what differs between two; pure.
//! * `cluster.rs`: what is kept of the cluster between two changes; pure.
//! * `watch.rs`: reads the cluster and publishes the newest state.
//! * `deliver.rs`: brings it to one host, for ever.

mod cluster;
mod deliver;
mod policies;
#[cfg(test)]
mod policies_tests;
mod services;
mod state;
mod watch;

use std::sync::Arc;

use anyhow::Context;
use kube::Client;
use tokio::sync::watch as channel;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use self::cluster::Scope;
use self::state::State;
use crate::config;
use crate::hosts::Hosts;

/// Keeps every host up to date until `shutdown`. Hosts are told also when everything is off: what
/// an earlier configuration brought there must go.
///
/// # Errors
/// Something is on, and there are no credentials to read it with.
pub async fn start(
    config: &config::Config,
    hosts: &Arc<Hosts>,
    tasks: &TaskTracker,
    shutdown: &CancellationToken,
) -> anyhow::Result<()> {
    let (newest, state) = channel::channel(None);
    if config.cluster_network.any() {
        let client = client(&config.cluster_network).await?;
        let addresses = hosts.views().into_iter().map(|view| view.ip);
        let scope = Scope {
            services: config.cluster_network.services,
            policies: config.cluster_network.policies.then(|| addresses.collect()),
        };
        let reading = watch::run(client, config.node_name.clone(), scope, newest);
        spawn(tasks, shutdown, reading);
    } else {
        newest.send_replace(Some(Arc::new(State::off())));
    }
    for view in hosts.views() {
        let delivery = deliver::run(view.name, Arc::clone(hosts), state.clone());
        spawn(tasks, shutdown, delivery);
    }
    Ok(())
}

async fn client(config: &config::ClusterNetwork) -> anyhow::Result<Client> {
    match &config.kubeconfig {
        Some(file) => crate::run::client_of(file).await,
        None => {
            let config = kube::Config::incluster().context(
                "kubeconfig is not set, and this process is not in a pod of ServiceAccount \
                 sandman-vnode",
            )?;
            Ok(Client::try_from(config)?)
        }
    }
}

fn spawn(
    tasks: &TaskTracker,
    shutdown: &CancellationToken,
    work: impl Future<Output = ()> + Send + 'static,
) {
    let shutdown = shutdown.clone();
    tasks.spawn(async move {
        let _ = shutdown.run_until_cancelled(work).await;
    });
}
