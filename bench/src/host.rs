//! `host`: one host's share of a pod's life, without the API server: a sandbox created through its
//! containerd, and a command run over its API; with few sandboxes there, and with many.
//!
//! What is created is a copy of a pod's container: the same OCI spec, agent and seccomp profile,
//! with namespaces and a cgroup of its own, its output read from FIFOs as the host service does.
//! The calls are the host service's own code. What that service makes besides for a pod (the
//! network's link and address, volumes, records) is not in it: `density` has all of it.

mod api;
mod direct;
mod pace;

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context, bail, ensure};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::node::v1::RuntimeClass;
use kube::api::{Api, DeleteParams, PostParams};
use kube::{Client, ResourceExt};
use sandman_runtime_shim::limits::{self, Demand};
use serde_json::json;

use self::api::{Execs, Place};
use self::direct::{Copies, Model, remove_all};
use crate::batch::{Batch, Plan};
use crate::cli::HostArgs;
use crate::cluster::{Cluster, Session};
use crate::ctr;
use crate::density::container_id;
use crate::pod::{BATCH_LABEL, sleeper};
use crate::report::{Case, Metric, Metrics, Report, Round, latencies};
use crate::stats::ratio;
use crate::subject::Subject;

/// Pods of either runtime on each host: models, and whom commands are run in.
const MODELS_EACH: usize = 2;
/// containerd's own shim, and the handler that the dev cluster maps to it.
const PEER_RUNTIME: &str = "io.containerd.runc.v2";
const PEER_HANDLER: &str = "runc";
/// Ours.
const RUNTIME: &str = "io.containerd.sandman.v1";

/// Measures containerd's own shim, then ours with few and with many.
pub(crate) async fn run(cluster: &mut Cluster, arguments: &HostArgs) -> anyhow::Result<Report> {
    ensure!(arguments.few <= arguments.many, "--few is more than --many");
    let session = cluster.open(&[Subject::Sandman]).await?;
    let ours = models(&session, "host-sandman", sleeper, arguments).await?;
    let place = Place::of(&session, &ours[0])?;
    let target = Target::new(&session, place.clone(), &ours, RUNTIME).await?;
    check_room(&place, arguments)?;
    let prefix = format!("bench-{:.8}-", uuid::Uuid::new_v4().simple());
    let remove = remove_all(place.containerd.clone(), prefix.clone());
    cluster.at_end(remove);

    let peer = if arguments.peer_count > 0 {
        make_peer_class(cluster, &session.client).await?;
        let theirs = models(&session, "host-runc", peer_sleeper, arguments).await?;
        let target = Target::new(&session, place.clone(), &theirs, PEER_RUNTIME).await?;
        let copies = target.copies(&format!("{prefix}peer-"))?;
        let rate = arguments.peer_rate.get();
        let level = measure(&target, &copies, arguments.peer_count, rate, arguments).await?;
        remove_all(place.containerd.clone(), prefix.clone()).await?;
        Some(level)
    } else {
        None
    };

    let copies = target.copies(&prefix)?;
    let (samples, rate) = (arguments.samples.get(), arguments.rate.get());
    copies.fill(arguments.few.get()).await?;
    let few = measure(&target, &copies, samples, rate, arguments).await?;
    copies.fill(arguments.many.get()).await?;
    let many = measure(&target, &copies, samples, rate, arguments).await?;
    let lost = lost(&session, &place, &prefix, copies.count()).await?;
    Ok(report(peer, few, many, lost, arguments))
}

/// What was measured while some number was there.
struct Level {
    held: usize,
    created: pace::Paced,
    execs: Execs,
}

async fn measure(
    target: &Target,
    copies: &Arc<Copies>,
    samples: usize,
    rate: u32,
    arguments: &HostArgs,
) -> anyhow::Result<Level> {
    let held = copies.count();
    let created = copies.paced(samples, rate).await;
    let place = target.place.clone();
    let (pods, count) = (target.uids.clone(), arguments.execs.get());
    let execs = api::inside(place.netns.clone(), move || api::run(place, pods, count)).await?;
    tracing::info!(
        held,
        created = created.milliseconds.len(),
        failed = created.failed + execs.failed,
        "measured"
    );
    Ok(Level {
        held,
        created,
        execs,
    })
}

/// Pods on the host under test, and what copies of them are made from.
struct Target {
    place: Place,
    uids: Vec<String>,
    model: Model,
}

impl Target {
    async fn new(
        session: &Session,
        place: Place,
        pods: &[Pod],
        runtime: &'static str,
    ) -> anyhow::Result<Self> {
        let here: Vec<&Pod> = pods.iter().filter(|pod| place.has(pod)).collect();
        let model = here
            .first()
            .with_context(|| format!("no pod of {runtime} is on {}", place.name))?;
        let id = container_id(model).context("a Ready pod has no container id")?;
        let image = ctr::parent_of_snapshot(&session.containerd.0, &place.containerd, &id)
            .await
            .context("models need roots of containerd's snapshotter (`--layers containerd`)")?;
        Ok(Self {
            model: Model::read(&place.containerd, &id, image, runtime).await?,
            uids: here.iter().filter_map(|pod| pod.uid()).collect(),
            place,
        })
    }

    fn copies(&self, prefix: &str) -> anyhow::Result<Arc<Copies>> {
        Ok(Arc::new(Copies::new(
            &self.place.containerd,
            self.model.clone(),
            prefix.to_owned(),
        )?))
    }
}

/// Pods that stay until the bench's namespace goes.
async fn models(
    session: &Session,
    name: &str,
    manifest: fn(&str, &str, &str, &str) -> serde_json::Value,
    arguments: &HostArgs,
) -> anyhow::Result<Vec<Pod>> {
    let pods = MODELS_EACH * session.hosts;
    let plan = Plan {
        subject: Subject::Sandman,
        name: name.to_owned(),
        pods,
        concurrency: pods,
        window: None,
        deadline: arguments.deadline,
        manifest,
    };
    let (batch, outcome) = Batch::create(session, plan).await?;
    if let Some((pod, reason)) = outcome.failures.first() {
        bail!("cannot run pod {pod}: {reason}");
    }
    batch.list().await
}

fn peer_sleeper(name: &str, batch: &str, node: &str, image: &str) -> serde_json::Value {
    let mut pod = sleeper(name, batch, node, image);
    pod["spec"]["runtimeClassName"] = json!(peer_class());
    pod
}

/// Name of the RuntimeClass that the peer's pods have, by process: two benches may run at once.
fn peer_class() -> String {
    format!("sandman-bench-{PEER_HANDLER}-{}", std::process::id())
}

async fn make_peer_class(cluster: &mut Cluster, client: &Client) -> anyhow::Result<()> {
    let classes: Api<RuntimeClass> = Api::all(client.clone());
    let class = serde_json::from_value(json!({
        "metadata": {"name": peer_class(), "labels": {BATCH_LABEL: "host"}},
        "handler": PEER_HANDLER,
    }))?;
    classes.create(&PostParams::default(), &class).await?;
    cluster.at_end(async move {
        let parameters = DeleteParams::default();
        classes.delete(&peer_class(), &parameters).await?;
        Ok(())
    });
    Ok(())
}

/// containerd holds descriptors of each, and cannot be given more while it runs.
fn check_room(place: &Place, arguments: &HostArgs) -> anyhow::Result<()> {
    let pods = (arguments.many.get() + arguments.samples.get()) as u64;
    let demand = Demand {
        pods,
        tasks_each: limits::tasks_each(RUNTIME),
    };
    let findings = limits::check(demand, &place.containerd, false);
    let room = limits::room(&findings);
    if room < pods {
        let short: Vec<String> = findings
            .iter()
            .filter(|finding| finding.room.is_some_and(|room| room < pods))
            .map(|finding| format!("{} is {}", finding.name, finding.value))
            .collect();
        bail!(
            "--many and --samples make {pods} sandboxes; {} has room for {room} ({})",
            place.name,
            short.join(", ")
        );
    }
    Ok(())
}

/// Copies that should run and do not, by containerd's word.
async fn lost(
    session: &Session,
    place: &Place,
    prefix: &str,
    expected: usize,
) -> anyhow::Result<usize> {
    let program: &PathBuf = &session.containerd.0;
    let running = ctr::running_tasks(program, &place.containerd).await?;
    let ours = running.iter().filter(|id| id.starts_with(prefix)).count();
    if ours != expected {
        tracing::warn!(expected, running = ours, "containerd does not agree");
    }
    Ok(expected.abs_diff(ours))
}

fn report(
    peer: Option<Level>,
    few: Level,
    many: Level,
    lost: usize,
    arguments: &HostArgs,
) -> Report {
    let samples = arguments.samples.get();
    let execs = arguments.execs.get();
    let mut create_few = vec![(Subject::Sandman, samples, vec![few.creation(0)])];
    let mut exec_few = vec![(Subject::Sandman, execs, vec![few.execution()])];
    if let Some(peer) = peer {
        let round = vec![peer.creation(0)];
        create_few.push((Subject::Containerd, arguments.peer_count, round));
        exec_few.push((Subject::Containerd, execs, vec![peer.execution()]));
    }
    let flat = |mut round: Round, base: &Round| {
        let p50 = |round: &Round| round.metrics.get(&Metric::P50Ms).copied();
        let flatness = p50(&round).zip(p50(base));
        let flatness = flatness.and_then(|(many, few)| ratio(many, few));
        round
            .metrics
            .extend(flatness.map(|it| (Metric::Flatness, it)));
        round
    };
    let create_many = flat(many.creation(lost), &create_few[0].2[0]);
    let exec_many = flat(many.execution(), &exec_few[0].2[0]);
    let ours = |n, round| vec![(Subject::Sandman, n, vec![round])];
    Report::of_cases(
        "host",
        &[
            Case::sized("create-few", create_few),
            Case::sized("create-many", ours(samples, create_many)),
            Case::sized("exec-few", exec_few),
            Case::sized("exec-many", ours(execs, exec_many)),
        ],
    )
}

impl Level {
    fn creation(&self, lost: usize) -> Round {
        let mut metrics = self.figures(&self.created.milliseconds);
        metrics.extend(self.created.rate().map(|rate| (Metric::RatePerS, rate)));
        Round {
            failed: self.created.failed + lost,
            metrics,
        }
    }

    fn execution(&self) -> Round {
        let mut metrics = self.figures(&self.execs.milliseconds);
        let floor = crate::stats::median(&self.execs.floors);
        metrics.extend(floor.map(|floor| (Metric::FloorP50Ms, floor)));
        Round {
            failed: self.execs.failed,
            metrics,
        }
    }

    fn figures(&self, milliseconds: &[f64]) -> Metrics {
        #[expect(
            clippy::cast_precision_loss,
            reason = "a count of sandboxes is far below 2^52"
        )]
        let held = self.held as f64;
        let mut metrics = latencies(milliseconds);
        metrics.insert(Metric::Held, held);
        metrics
    }
}
