//! Puts the parts of the node together, runs them, and ends them in order.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use kube::Client;
use kube::config::{KubeConfigOptions, Kubeconfig};
use prometheus_client::registry::Registry;
use sandman_protocol::transport::FleetTls;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::config::Config;
use crate::events;
use crate::hosts::{Hosts, Observer};
use crate::kubelet_api;
use crate::metrics::{self, Metrics};
use crate::node::NodeController;
use crate::node::lease::LeaseController;
use crate::node::serving::CsrController;
use crate::pods::PodController;

/// The term that hosts are told by a node that has no rival.
const ONLY_LEADER: u64 = 1;
/// How long the Node waits for hosts to connect before it is registered or
/// written, so that a restart does not empty it for a moment.
const HOSTS_SETTLE: Duration = Duration::from_secs(10);
/// A connection to the API server that takes longer is tried again.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Time for the controllers to end what they are at, and for the last writes.
const STOP_LIMIT: Duration = Duration::from_secs(10);
const FLUSH_LIMIT: Duration = Duration::from_secs(5);

/// Runs the node until SIGTERM or SIGINT.
///
/// # Errors
/// When something that it cannot run without is missing at the start, or a part
/// of it ends by itself.
pub async fn run(config: Config, null_hosts: bool) -> anyhow::Result<()> {
    let config = Arc::new(config);
    let client = client(&config).await?;
    let tls = match &config.fleet_tls {
        Some(dir) if !null_hosts => Some(FleetTls::load(dir, &config.fleet).context("fleet_tls")?),
        _ => None,
    };
    let mut registry = Registry::default();
    let metrics = Metrics::register(&mut registry);
    let api_metrics = kubelet_api::ApiMetrics::register(&mut registry);
    let registry = Arc::new(registry);

    let (events, poster) = events::channel(client.clone(), &config.node_name, &metrics);
    let hosts = Arc::new(Hosts::new(
        &config.hosts,
        tls.as_ref(),
        ONLY_LEADER,
        &metrics,
    ));
    let pods = PodController::new(
        Arc::clone(&config),
        client.clone(),
        Arc::clone(&hosts),
        events.clone(),
        metrics.clone(),
    );
    let node = Arc::new(NodeController::new(
        Arc::clone(&config),
        Arc::clone(&hosts),
        client.clone(),
        events,
    ));
    let lease = LeaseController::new(
        &config.node_name,
        client.clone(),
        node.subscribe(),
        metrics.clone(),
    );
    let (serving, csr) =
        CsrController::for_config(&config, client.clone()).context("kubelet_api.cert_file")?;
    let listener = TcpListener::bind(config.kubelet_api.listen)
        .await
        .with_context(|| format!("kubelet_api.listen: {}", config.kubelet_api.listen))?;

    let stop = CancellationToken::new();
    let stop_api = CancellationToken::new();
    let tasks = TaskTracker::new();
    let until_stop = |part: futures::future::BoxFuture<'static, ()>| {
        let stop = stop.clone();
        tasks.spawn(async move {
            let _ = stop.run_until_cancelled(part).await;
        });
    };
    let observer: Arc<dyn Observer> = Arc::clone(&pods) as _;
    hosts.start(&observer, config.host_lost_after, &tasks, &stop);
    pods.start(&tasks, &stop);
    let (settling, registering) = (Arc::clone(&hosts), Arc::clone(&node));
    until_stop(Box::pin(async move {
        settling.settled(HOSTS_SETTLE).await;
        registering.run().await;
    }));
    until_stop(Box::pin(lease.run()));
    until_stop(Box::pin(poster.run()));
    if let Some(csr) = csr {
        until_stop(Box::pin(csr.run()));
    }

    let checked = Arc::clone(&pods);
    let api_node = kubelet_api::Node {
        pods: Arc::clone(&pods) as _,
        hosts: Arc::clone(&pods) as _,
        reviews: Arc::new(kubelet_api::ClusterReviews::new(client)),
        listed: pods.listed(),
        syncloop: Arc::new(move || checked.check_progress()),
        registry: Arc::clone(&registry),
        metrics: api_metrics,
    };
    let mut api_config = kubelet_api::Config::new(&config.node_name, &config.kubelet_api.client_ca);
    api_config.configz = configz(&config);
    let api = kubelet_api::serve(api_config, api_node, listener, serving, stop_api.clone());
    tokio::pin!(api);
    let scrape = scrape(&config, registry, &stop);
    tokio::pin!(scrape);

    let ended = tokio::select! {
        result = &mut api => Err(match result {
            Ok(()) => anyhow::anyhow!("the kubelet API server ended by itself"),
            Err(error) => anyhow::Error::new(error).context("kubelet_api"),
        }),
        error = &mut scrape => Err(error),
        signal = terminated() => signal,
    };
    if ended.is_ok() {
        tracing::info!("stopping");
        // Live streams are told first, while everything they need still runs.
        stop_api.cancel();
        if let Err(error) = api.await {
            tracing::warn!(%error, "kubelet API");
        }
    }
    stop.cancel();
    tasks.close();
    limited(
        STOP_LIMIT,
        "the controllers did not end in time",
        tasks.wait(),
    )
    .await;
    let flush = async { tokio::join!(pods.flush(), node.flush()) };
    limited(FLUSH_LIMIT, "not every status was written", flush).await;
    ended
}

async fn client(config: &Config) -> anyhow::Result<Client> {
    let context = || format!("kubeconfig: {}", config.kubeconfig.display());
    let file = Kubeconfig::read_from(&config.kubeconfig).with_context(context)?;
    let mut config = kube::Config::from_custom_kubeconfig(file, &KubeConfigOptions::default())
        .await
        .with_context(context)?;
    config.connect_timeout = Some(CONNECT_TIMEOUT);
    Client::try_from(config).with_context(context)
}

/// Serves metrics; comes back only with an error.
async fn scrape(
    config: &Config,
    registry: Arc<Registry>,
    stop: &CancellationToken,
) -> anyhow::Error {
    let Some(address) = config.metrics_listen else {
        return std::future::pending().await;
    };
    match metrics::serve(address, registry, stop.clone()).await {
        Ok(()) => std::future::pending().await,
        Err(error) => anyhow::Error::new(error).context(format!("metrics_listen: {address}")),
    }
}

async fn terminated() -> anyhow::Result<()> {
    let mut term = signal(SignalKind::terminate()).context("SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("SIGINT")?;
    tokio::select! {
        _ = term.recv() => {}
        _ = interrupt.recv() => {}
    }
    Ok(())
}

async fn limited<T>(limit: Duration, late: &str, work: impl Future<Output = T>) {
    if tokio::time::timeout(limit, work).await.is_err() {
        tracing::warn!("{late}");
    }
}

/// The settings that readers of `/configz` look for, in the kubelet's words.
fn configz(config: &Config) -> serde_json::Value {
    serde_json::json!({
        "address": config.kubelet_api.listen.ip(),
        "port": config.kubelet_api.listen.port(),
        "clusterDNS": config.cluster_dns,
        "clusterDomain": config.cluster_domain,
        "providerID": config.node.provider_id,
        "nodeStatusReportFrequency": "5m0s",
        "nodeLeaseDurationSeconds": 40,
        "hosts": config.hosts.iter().map(|host| &host.name).collect::<Vec<_>>(),
        "daemonsetAllow": config.daemonset_allow,
    })
}
