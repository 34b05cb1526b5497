//! Puts the parts of the node together, runs them, and ends them in order.

use std::future::Future;
use std::net::SocketAddr;
use std::path::Path;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use kube::Client;
use kube::config::{KubeConfigOptions, Kubeconfig};
use prometheus_client::registry::Registry;
use sandman_protocol::transport::FleetTls;
use tokio::net::TcpSocket;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::cluster_network;
use crate::config::Config;
use crate::election::{Election, Leader, Lost};
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
/// Connections to the kubelet API that wait to be taken.
const BACKLOG: u32 = 1024;
/// How long the Node waits for hosts to connect before it is registered or
/// written, so that a restart does not empty it for a moment.
const HOSTS_SETTLE: Duration = Duration::from_secs(10);
/// A connection to the API server that takes longer is tried again.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Time for the controllers to end what they are at, and for the last writes.
const STOP_LIMIT: Duration = Duration::from_secs(10);
const FLUSH_LIMIT: Duration = Duration::from_secs(5);

/// Runs the node until SIGTERM or SIGINT, as soon as this process leads.
///
/// # Errors
/// When something that it cannot run without is missing at the start, a part of
/// it ends by itself, or another replica leads.
pub async fn run(config: Config, null_hosts: bool) -> anyhow::Result<()> {
    let config = Arc::new(config);
    let client = client_of(&config.kubeconfig).await?;
    let tls = match &config.fleet_tls {
        Some(dir) if !null_hosts => Some(FleetTls::load(dir, &config.fleet).context("fleet_tls")?),
        _ => None,
    };
    let mut registry = Registry::default();
    let metrics = Metrics::register(&mut registry);
    let api_metrics = kubelet_api::ApiMetrics::register(&mut registry);
    let registry = Arc::new(registry);
    let socket = api_socket(config.kubelet_api.listen)
        .with_context(|| format!("kubelet_api.listen: {}", config.kubelet_api.listen))?;

    let stop = CancellationToken::new();
    let tasks = TaskTracker::new();
    let until_stop = |part: futures::future::BoxFuture<'static, ()>| {
        let stop = stop.clone();
        tasks.spawn(async move {
            let _ = stop.run_until_cancelled(part).await;
        });
    };
    let scrape = scrape(&config, Arc::clone(&registry), &stop);
    tokio::pin!(scrape);
    let mut terminated = pin!(terminated());
    // A replica that stands by has its certificate already when it is to lead.
    let (serving, csr) =
        CsrController::for_config(&config, client.clone()).context("kubelet_api.cert_file")?;
    if let Some(csr) = csr {
        until_stop(Box::pin(csr.run()));
    }
    let leader = match &config.election {
        None => None,
        Some(section) => {
            let election = Election::new(section).await?;
            tokio::select! {
                leader = election.win() => Some(Arc::new(leader)),
                error = &mut scrape => return Err(error),
                signal = &mut terminated => return signal,
            }
        }
    };
    let term = leader.as_ref().map_or(ONLY_LEADER, |leader| leader.term());
    let mut reign = tokio::spawn(reign(leader.clone()));

    let (events, poster) = events::channel(client.clone(), &config.node_name, &metrics);
    let hosts = Arc::new(Hosts::new(&config.hosts, tls.as_ref(), term, &metrics));
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
    let observer: Arc<dyn Observer> = Arc::clone(&pods) as _;
    hosts.start(&observer, config.host_lost_after, &tasks, &stop);
    pods.follow_node(node.subscribe());
    pods.start(&tasks, &stop);
    cluster_network::start(&config, &hosts, &tasks, &stop)
        .await
        .context("cluster_network")?;
    let (settling, registering) = (Arc::clone(&hosts), Arc::clone(&node));
    until_stop(Box::pin(async move {
        settling.settled(HOSTS_SETTLE).await;
        registering.run().await;
    }));
    until_stop(Box::pin(lease.run()));
    until_stop(Box::pin(poster.run()));

    let checked = Arc::clone(&pods);
    let api_node = kubelet_api::Node {
        pods: Arc::clone(&pods) as _,
        hosts: Arc::clone(&pods) as _,
        reviews: Arc::new(kubelet_api::ClusterReviews::new(client)),
        listed: pods.listed(),
        syncloop: Arc::new(move || checked.check_progress()),
        registry,
        metrics: api_metrics,
    };
    let mut api_config = kubelet_api::Config::new(&config.node_name, &config.kubelet_api.client_ca);
    api_config.configz = configz(&config);
    let listener = socket.listen(BACKLOG).context("kubelet_api.listen")?;
    let stop_api = CancellationToken::new();
    let api = kubelet_api::serve(api_config, api_node, listener, serving, stop_api.clone());
    tokio::pin!(api);

    let (ended, leads) = tokio::select! {
        result = &mut api => (Err(match result {
            Ok(()) => anyhow::anyhow!("the kubelet API server ended by itself"),
            Err(error) => anyhow::Error::new(error).context("kubelet_api"),
        }), true),
        error = &mut scrape => (Err(error), true),
        signal = &mut terminated => (signal, true),
        // Whoever leads now must not be written over: this process just goes.
        lost = &mut reign => (Err(lost_leadership(lost)), false),
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
    if !leads {
        return ended;
    }
    limited(
        STOP_LIMIT,
        "the controllers did not end in time",
        tasks.wait(),
    )
    .await;
    let flush = async { tokio::join!(pods.flush(), node.flush()) };
    limited(FLUSH_LIMIT, "not every status was written", flush).await;
    reign.abort();
    if let Some(leader) = leader {
        // Nothing renews behind its back any more.
        let _ = reign.await;
        leader.release().await;
    }
    ended
}

/// Ends when this process does not lead any more.
async fn reign(leader: Option<Arc<Leader>>) -> Lost {
    match leader {
        Some(leader) => leader.lead().await,
        None => std::future::pending().await,
    }
}

fn lost_leadership(lost: Result<Lost, tokio::task::JoinError>) -> anyhow::Error {
    match lost {
        Ok(lost) => anyhow::Error::new(lost).context("does not lead any more"),
        Err(error) => anyhow::Error::new(error).context("the election ended"),
    }
}

/// Claims the port of the kubelet API, so that a mistake is found at the start.
/// Connections are refused until this process leads.
fn api_socket(address: SocketAddr) -> std::io::Result<TcpSocket> {
    let socket = match address {
        SocketAddr::V4(_) => TcpSocket::new_v4()?,
        SocketAddr::V6(_) => TcpSocket::new_v6()?,
    };
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    Ok(socket)
}

/// A client with the credentials of a kubeconfig file.
pub(crate) async fn client_of(kubeconfig: &Path) -> anyhow::Result<Client> {
    let context = || format!("kubeconfig: {}", kubeconfig.display());
    let file = Kubeconfig::read_from(kubeconfig).with_context(context)?;
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
