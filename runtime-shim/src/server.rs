//! Puts the parts together and serves until told to stop.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use prometheus_client::collector::Collector;
use sandman_layer_store::store::StoreEvent;
use sandman_protocol::identity::Role;
use sandman_protocol::transport::{self, FleetTls};
use sandman_protocol::v1::host_server::HostServer;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tonic::transport::Channel;
use tracing::{info, warn};

use crate::cache_commands;
use crate::config::Config;
use crate::eviction::Monitor;
use crate::host_api::{HostService, InventorySource, Machine, Term, end_stale, pods_wanted};
use crate::images::{Images, ImagesConfig};
use crate::layers::{self, LayerMetrics, Layers};
use crate::limits::{self, Demand, Finding};
use crate::logs::{LogLimits, LogStore};
use crate::metrics::Metrics;
use crate::network::{Network, NetworkConfig};
use crate::rootfs::{Overlays, RootFs, Snapshots};
use crate::runtime::{Containerd, NAMESPACE, connect};
use crate::sandbox::board::Board;
use crate::sandbox::oom::SharedKills;
use crate::sandbox::queue::CreationQueue;
use crate::sandbox::store::Store;
use crate::sandbox::{Host, Sandboxes};
use crate::spec::resources::shared_cgroup;
use crate::stats::Stats;
use crate::users::{self, Users};
use crate::volumes::Volumes;
use crate::{agent, machine};

/// How long open streams get to end at shutdown.
const DRAIN: Duration = Duration::from_secs(5);
/// Largest message: a sandbox's spec with the contents of its volumes, each at most 1 MiB.
const MAX_MESSAGE: usize = 64 * 1024 * 1024;
/// Scrapes served at once.
const MAX_SCRAPES: usize = 16;

/// Runs the host service until `shutdown`. Containers go on without it.
///
/// # Errors
/// Whatever keeps it from starting.
pub async fn serve(config: Config, shutdown: CancellationToken) -> anyhow::Result<()> {
    for dir in [&config.state_dir, &config.data_dir] {
        std::fs::create_dir_all(dir).with_context(|| format!("cannot make {}", dir.display()))?;
    }
    let tls = FleetTls::load(&config.fleet_tls, &config.fleet)?;
    let listener = TcpListener::bind(config.listen)
        .await
        .with_context(|| format!("listen: cannot bind {}", config.listen))?;
    let findings = check_limits(&config);
    let measured =
        Machine::detect(&config, limits::room(&findings)).context("cannot measure the machine")?;
    let allocatable = measured.allocatable;
    let (layers, layer_events) = open_layers(&config).await?.unzip();
    let host = host(&config, measured.capacity.memory_bytes, layers.clone()).await?;
    let host = Arc::new(host);
    for finding in &findings {
        host.metrics
            .limit(finding.name, finding.value, finding.needed);
    }
    let term = Arc::new(Term::load(host.store.clone()).context("cannot read the leader term")?);
    if let Some(address) = config.metrics_listen {
        let listener = TcpListener::bind(address)
            .await
            .with_context(|| format!("metrics_listen: cannot bind {address}"))?;
        tokio::spawn(serve_metrics(listener, host.clone(), shutdown.clone()));
    }

    let sandboxes = Sandboxes::start(host.clone(), allocatable).await?;
    end_stale(&host);
    if let (Some(layers), Some(events)) = (layers.clone(), layer_events) {
        tokio::spawn(layers::watch(layers.clone(), sandboxes.clone(), events));
        let socket = cache_commands::bind(&config.state_dir).context("cache commands")?;
        tokio::spawn(cache_commands::serve(
            socket,
            host.clone(),
            layers,
            shutdown.clone(),
        ));
    }
    let (monitor, pressure) = Monitor::new(
        sandboxes.clone(),
        layers,
        config.eviction,
        config.data_dir.clone(),
    );
    tokio::spawn(monitor.run(shutdown.clone()));
    let inventory = InventorySource::new(host, &config, measured, pressure);
    let service = HostServer::new(HostService::new(
        sandboxes,
        inventory,
        term,
        shutdown.clone(),
    ))
    .max_decoding_message_size(MAX_MESSAGE)
    .max_encoding_message_size(MAX_MESSAGE);
    info!(host = config.host_name, listen = %config.listen, "serving");
    let stop = shutdown.clone();
    let serving = transport::server()
        .add_service(service)
        .serve_with_incoming_shutdown(
            transport::incoming(&tls, listener, &[Role::Vnode]),
            async move { stop.cancelled().await },
        );
    tokio::pin!(serving);
    tokio::select! {
        result = &mut serving => result?,
        () = shutdown.cancelled() => {
            // Watches never end by themselves: streams get a moment, then they are cut.
            if tokio::time::timeout(DRAIN, serving).await.is_err() {
                info!("closing the streams that are left");
            }
        }
    }
    info!("stopped; containers go on");
    Ok(())
}

type LayerEvents = mpsc::UnboundedReceiver<StoreEvent>;

/// The layer store, if the configuration wants one.
async fn open_layers(config: &Config) -> anyhow::Result<Option<(Arc<Layers>, LayerEvents)>> {
    if config.layers.mode == layers::Mode::Containerd {
        return Ok(None);
    }
    let config = config.clone();
    let open =
        move || Layers::open(&config.layers, &config.state_dir, &config.data_dir).context("layers");
    Ok(Some(tokio::task::spawn_blocking(open).await??))
}

async fn root_fs(
    config: &Config,
    channel: Channel,
    images: &Images,
    layers: Option<Arc<Layers>>,
) -> anyhow::Result<Arc<dyn RootFs>> {
    let snapshots = Snapshots::new(channel, &config.snapshotter, &config.state_dir);
    let Some(layers) = layers else {
        return Ok(Arc::new(snapshots));
    };
    let origins = images.origins();
    let (state, data) = (config.state_dir.clone(), config.data_dir.clone());
    let adopt = move || Overlays::adopt(layers, origins, snapshots, &state, &data);
    let overlays = tokio::task::spawn_blocking(adopt).await?;
    Ok(Arc::new(overlays.context("layers")?))
}

/// Raises the limits that are too small, and says what the rest costs.
fn check_limits(config: &Config) -> Vec<Finding> {
    let pods = pods_wanted(config);
    let runtime = config.runtime_type("").unwrap_or_default();
    let demand = Demand {
        pods,
        tasks_each: limits::tasks_each(runtime),
    };
    let findings = limits::check(
        demand,
        &config.containerd_socket,
        config.raise_kernel_limits,
    );
    limits::log(&findings);
    let room = limits::room(&findings);
    if room < pods {
        warn!(
            wanted = pods,
            offered = room,
            "this host offers fewer pods than it should: its limits have no room for more"
        );
    }
    findings
}

async fn host(
    config: &Config,
    memory_bytes: u64,
    layers: Option<Arc<Layers>>,
) -> anyhow::Result<Host> {
    let channel = connect(&config.containerd_socket)?;
    let agent =
        agent::mount_image(&config.daemon_image, &config.state_dir).context("daemon_image")?;
    let fifo_dir = config.state_dir.join("fifos");
    std::fs::create_dir_all(&fifo_dir)?;
    let images = Images::new(
        channel.clone(),
        ImagesConfig {
            namespace: NAMESPACE.to_owned(),
            snapshotter: config.snapshotter.clone(),
            registries: config.registries.clone(),
            state_dir: config.state_dir.clone(),
        },
        layers.clone(),
    )?;
    let counted = layers.clone().map(|layers| {
        let counters = LayerMetrics::new(layers, Arc::clone(images.origins().counters()));
        Box::new(counters) as Box<dyn Collector>
    });
    let metrics = Metrics::with(counted);
    let rootfs = root_fs(config, channel.clone(), &images, layers).await?;
    let network = Network::start(NetworkConfig {
        state_dir: config.state_dir.clone(),
        pod_cidr: config.pod_cidr,
        cluster_cidrs: std::iter::once(config.pod_cidr)
            .chain(config.cluster_cidrs.iter().copied())
            .collect(),
        closed_ports: vec![config.listen.port()],
    })
    .await
    .context("network")?;
    let logs = LogStore::new(
        &config.data_dir,
        LogLimits {
            max_bytes: config.log_max_bytes,
            max_files: config.log_max_files,
        },
    )?;
    let mut runtime_types: HashMap<String, String> = config
        .runtimes
        .iter()
        .map(|(handler, runtime)| (handler.clone(), runtime.runtime_type.clone()))
        .collect();
    if let Some(default) = config.runtime_type("") {
        runtime_types.insert(String::new(), default.to_owned());
    }
    let width = match config.max_concurrent_creates {
        // Making a container keeps about one processor busy; twice that hides its waits.
        0 => std::thread::available_parallelism()?.get() * 2,
        width => width,
    };
    Ok(Host {
        runtime: Arc::new(Containerd::new(channel, &config.snapshotter)),
        rootfs,
        images,
        network,
        volumes: Volumes::new(&config.state_dir, &config.data_dir, config.allow.clone())
            .context("volumes")?,
        logs,
        stats: Stats::detect().context("cgroups")?,
        shared_kills: SharedKills::new(shared_cgroup(&config.cgroup_parent)),
        store: Store::open(&config.state_dir)?,
        board: Arc::new(Board::default()),
        queue: CreationQueue::new(width),
        metrics,
        limits: machine::limits(config, memory_bytes)?,
        runtime_types,
        agent,
        fifo_dir,
        seccomp_dir: config.seccomp_profiles.clone(),
        host_ip: config.host_ip,
        own_ports: std::iter::once(config.listen)
            .chain(config.metrics_listen)
            .map(|address| address.port())
            .collect(),
        access: config.allow.clone(),
        users: own_users(config),
        room: tokio::sync::Notify::new(),
    })
}

/// Pods with users of their own are refused where that cannot be.
fn own_users(config: &Config) -> Result<Users, String> {
    let ids = config.user_namespaces;
    match users::try_out(ids, &[&config.state_dir, &config.data_dir]) {
        Ok(()) => Ok(Users::new(ids)),
        Err(error) => {
            warn!(%error, "no user namespaces with mapped mounts; pods with hostUsers: false are refused");
            Err(error.to_string())
        }
    }
}

async fn serve_metrics(listener: TcpListener, host: Arc<Host>, shutdown: CancellationToken) {
    let slots = Arc::new(tokio::sync::Semaphore::new(MAX_SCRAPES));
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = shutdown.cancelled() => return,
        };
        let stream = match accepted {
            Ok((stream, _)) => stream,
            Err(error) => {
                warn!(%error, "cannot accept a scrape");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let Ok(slot) = slots.clone().try_acquire_owned() else {
            continue;
        };
        let host = host.clone();
        tokio::spawn(async move {
            let _slot = slot;
            let service = service_fn(move |request| {
                let host = host.clone();
                async move { Ok::<_, std::convert::Infallible>(answer(&host, &request)) }
            });
            let connection = hyper::server::conn::http1::Builder::new()
                .keep_alive(false)
                .serve_connection(TokioIo::new(stream), service);
            // A scraper that goes away or is slow is not our problem.
            let _ = tokio::time::timeout(Duration::from_secs(10), connection).await;
        });
    }
}

fn answer(host: &Host, request: &Request<Incoming>) -> Response<Full<Bytes>> {
    let (status, text) = match (request.method(), request.uri().path()) {
        (&Method::GET, "/healthz") => (StatusCode::OK, "ok".to_owned()),
        (&Method::GET, "/metrics") => {
            count_sandboxes(host);
            match host.metrics.encode() {
                Ok(text) => (StatusCode::OK, text),
                Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()),
            }
        }
        _ => (StatusCode::NOT_FOUND, "404 page not found\n".to_owned()),
    };
    let mut response = Response::new(Full::new(Bytes::from(text)));
    *response.status_mut() = status;
    response.headers_mut().insert(
        hyper::header::CONTENT_TYPE,
        hyper::header::HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8"),
    );
    response
}

fn count_sandboxes(host: &Host) {
    use sandman_protocol::v1::Lifecycle;
    host.metrics.waiting(host.queue.waiting());
    let reports = host.board.reports();
    for (lifecycle, state) in [
        (Lifecycle::Active, "active"),
        (Lifecycle::Finished, "finished"),
        (Lifecycle::Terminating, "terminating"),
        (Lifecycle::Removed, "removed"),
    ] {
        let count = reports
            .iter()
            .filter(|report| report.lifecycle() == lifecycle)
            .count();
        host.metrics.sandboxes(state, count);
    }
}
