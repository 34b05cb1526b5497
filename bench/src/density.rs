//! `density`: many pods held at once. They are created a few at a time, so that the time of each
//! is its own; then all are looked at from every side, used, and removed without a trace.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use futures::StreamExt;
use futures::stream;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use kube::api::{Api, AttachParams};
use tokio::io::AsyncReadExt;
use tokio::process::Command;

use crate::batch::{Batch, Plan, warm};
use crate::census::{self, Census, Place};
use crate::cli::DensityArgs;
use crate::cluster::{Cluster, Session};
use crate::pod::{CONTAINER, Progress, progress, sleeper};
use crate::report::{Metric, Metrics, Report, Round, latencies};
use crate::stats::median;
use crate::subject::{Subject, subjects};

/// containerd's namespace of the sandboxes.
const CONTAINERD_NAMESPACE: &str = "sandman";
/// A command that takes longer has failed.
const EXEC_WITHIN: Duration = Duration::from_secs(30);
/// Commands at once.
const EXECS_AT_ONCE: usize = 4;
/// The largest answer that a command may give, in bytes.
const MAX_ANSWER: u64 = 4096;
/// The kernel takes network namespaces and cgroups down in its own time, after their removal.
const BACK_WITHIN: Duration = Duration::from_secs(120);
/// No event tells of that.
const LOOK_AGAIN: Duration = Duration::from_millis(500);
/// Size of the first and the last part whose creation times are compared.
const PART: usize = 1000;

/// Measures the subjects in turn.
pub(crate) async fn run(cluster: &mut Cluster, arguments: &DensityArgs) -> anyhow::Result<Report> {
    let subjects = subjects(&arguments.peers, false);
    let session = cluster.open(&subjects).await?;
    let control_plane = cluster.control_plane().await?;
    if let Some(kernel) = census::kernel_mb() {
        tracing::info!(
            kernel_mb = kernel.round(),
            "what the kernel keeps for cgroups and mounts follows the most there ever was since \
             boot: after an earlier run with more, these figures are too high"
        );
    }
    let mut results = Vec::new();
    for &subject in &subjects {
        let count = match subject {
            Subject::Kubelet => arguments.peer_count.get(),
            Subject::Sandman | Subject::Null => arguments.count.get(),
        };
        warm(&session, subject, arguments.deadline).await?;
        let round = turn(&session, subject, count, &control_plane, arguments).await?;
        tracing::info!(
            subject = subject.name(),
            count,
            failed = round.failed,
            "measured"
        );
        results.push((subject, count, vec![round]));
    }
    let rows = results
        .iter()
        .map(|(subject, n, rounds)| (*subject, *n, rounds));
    Ok(Report::sized("density", rows))
}

async fn turn(
    session: &Session,
    subject: Subject,
    count: usize,
    control_plane: &[u32],
    arguments: &DensityArgs,
) -> anyhow::Result<Round> {
    let counted = Census::take(&session.place)?;
    let memory = Memory::measure(control_plane)?;
    let plan = Plan {
        subject,
        name: format!("density-{}", subject.name()),
        pods: count,
        concurrency: arguments.window.get(),
        window: Some(arguments.window.get()),
        deadline: arguments.deadline,
        manifest: sleeper,
    };
    let (batch, outcome) = Batch::create(session, plan).await?;
    let full = Memory::measure(control_plane)?;

    let mut failed = outcome.failures.len();
    let pods = batch.list().await?;
    failed += not_ready(&pods);
    if subject == Subject::Sandman {
        failed += unknown_to_containerd(session, &pods).await?;
    }
    let mut metrics = creation(&outcome.latencies, outcome.span);
    // Hosts that do no work run no commands.
    if subject != Subject::Null {
        let (wrong, milliseconds) = commands(session, &pods, arguments.execs).await;
        failed += wrong;
        metrics.extend(median(&milliseconds).map(|p50| (Metric::ExecP50Ms, p50)));
    }
    let control = full.control_mb - memory.control_mb;
    #[expect(
        clippy::cast_precision_loss,
        reason = "a count of pods is far below 2^52"
    )]
    let each = (memory.available_mb - full.available_mb - control) / count as f64;
    metrics.insert(Metric::MemMbEach, each);
    metrics.insert(Metric::ControlMb, control);

    batch.remove().await?;
    back(&session.place, counted).await?;
    let after = Memory::measure(control_plane)?;
    let left = memory.available_mb - after.available_mb - (after.control_mb - memory.control_mb);
    metrics.insert(Metric::LeftMb, left);
    Ok(Round { failed, metrics })
}

/// Memory of the machine at one moment.
struct Memory {
    available_mb: f64,
    control_mb: f64,
}

impl Memory {
    fn measure(control_plane: &[u32]) -> anyhow::Result<Self> {
        Ok(Self {
            available_mb: census::available_mb().context("/proc/meminfo")?,
            control_mb: census::resident_mb(control_plane)
                .context("the control plane does not run any more")?,
        })
    }
}

/// Percentiles over all, and medians of the first and the last.
fn creation(latencies_in_order: &[Duration], span: Duration) -> Metrics {
    let milliseconds: Vec<f64> = latencies_in_order
        .iter()
        .map(|latency| latency.as_secs_f64() * 1e3)
        .collect();
    let mut metrics = latencies(&milliseconds);
    let part = PART.min(milliseconds.len().div_ceil(10));
    let last = milliseconds.len() - part;
    metrics.extend(median(&milliseconds[..part]).map(|p50| (Metric::FirstP50Ms, p50)));
    metrics.extend(median(&milliseconds[last..]).map(|p50| (Metric::LastP50Ms, p50)));
    if !span.is_zero() {
        #[expect(
            clippy::cast_precision_loss,
            reason = "a count of pods is far below 2^52"
        )]
        let ready = milliseconds.len() as f64;
        metrics.insert(Metric::RatePerS, ready / span.as_secs_f64());
    }
    metrics
}

/// All must be Ready at the same time, and none may have been started twice.
fn not_ready(pods: &[Pod]) -> usize {
    let bad: Vec<_> = pods
        .iter()
        .map(|pod| (pod.name_any(), progress(pod)))
        .filter(|(_, progress)| *progress != Progress::Ready)
        .collect();
    if let Some((pod, progress)) = bad.first() {
        tracing::warn!(
            pod,
            ?progress,
            others = bad.len() - 1,
            "not Ready when all should be"
        );
    }
    bad.len()
}

/// containerd of each host must know exactly these containers, running.
async fn unknown_to_containerd(session: &Session, pods: &[Pod]) -> anyhow::Result<usize> {
    let wanted: BTreeSet<String> = pods.iter().filter_map(container_id).collect();
    let mut running = BTreeSet::new();
    let (ctr, sockets) = &session.containerd;
    for socket in sockets {
        let output = Command::new(ctr)
            .arg("--address")
            .arg(socket)
            .args(["--namespace", CONTAINERD_NAMESPACE, "tasks", "ls"])
            .kill_on_drop(true)
            .output()
            .await
            .with_context(|| format!("cannot run {}", ctr.display()))?;
        ensure!(
            output.status.success(),
            "ctr tasks ls: {}",
            String::from_utf8_lossy(&output.stderr)
        );
        running.extend(running_tasks(&String::from_utf8_lossy(&output.stdout)));
    }
    let missing = wanted.difference(&running).count();
    let other = running.difference(&wanted).count();
    if missing + other > 0 {
        tracing::warn!(missing, other, "containerd does not agree on what runs");
    }
    Ok(missing + other)
}

fn container_id(pod: &Pod) -> Option<String> {
    let statuses = pod.status.as_ref()?.container_statuses.as_ref()?;
    let id = statuses.first()?.container_id.as_deref()?;
    Some(id.strip_prefix("containerd://")?.to_owned())
}

/// Ids of the running ones in the table `TASK PID STATUS`.
fn running_tasks(table: &str) -> Vec<String> {
    table
        .lines()
        .skip(1)
        .filter_map(|line| {
            let mut columns = line.split_whitespace();
            let id = columns.next()?;
            (columns.nth(1)? == "RUNNING").then(|| id.to_owned())
        })
        .collect()
}

/// Runs a command in pods picked at random, whose answer is different in each. Gives the number
/// of failures, and the times of the others in milliseconds.
async fn commands(session: &Session, pods: &[Pod], count: usize) -> (usize, Vec<f64>) {
    let mut names: Vec<String> = pods.iter().map(ResourceExt::name_any).collect();
    // As good as random: ids of pods are.
    names.sort_by_cached_key(|_| uuid::Uuid::new_v4());
    names.truncate(count);
    let api = session.pods();
    let results: Vec<_> = stream::iter(names)
        .map(|name| {
            let api = api.clone();
            async move { (ask_name(&api, &name).await, name) }
        })
        .buffer_unordered(EXECS_AT_ONCE)
        .collect()
        .await;
    let mut failed = 0;
    let mut milliseconds = Vec::new();
    for (result, pod) in results {
        match result {
            Ok(took) => milliseconds.push(took.as_secs_f64() * 1e3),
            Err(error) => {
                failed += 1;
                tracing::warn!(%pod, error = format!("{error:#}"), "a command failed");
            }
        }
    }
    (failed, milliseconds)
}

/// Asks a pod for its host name, which is the pod's own.
async fn ask_name(pods: &Api<Pod>, name: &str) -> anyhow::Result<Duration> {
    let ask = async {
        let begun = Instant::now();
        let parameters = AttachParams::default().container(CONTAINER).stderr(false);
        let mut process = pods.exec(name, ["hostname"], &parameters).await?;
        let status = process.take_status().context("exec gives no status")?;
        let stdout = process.stdout().context("exec gives no output")?;
        let mut answer = String::new();
        stdout
            .take(MAX_ANSWER)
            .read_to_string(&mut answer)
            .await
            .context("output")?;
        let status = status.await.context("exec ended without a status")?;
        let took = begun.elapsed();
        process.join().await?;
        if status.status.as_deref() != Some("Success") {
            bail!("{}", status.message.unwrap_or_default());
        }
        ensure!(answer.trim_end() == name, "hostname answers {answer:?}");
        Ok(took)
    };
    match tokio::time::timeout(EXEC_WITHIN, ask).await {
        Ok(result) => result,
        Err(_) => bail!("no exit status after {EXEC_WITHIN:?}"),
    }
}

/// Waits until there is no more of anything than before.
async fn back(place: &Place, before: Census) -> anyhow::Result<()> {
    let deadline = Instant::now() + BACK_WITHIN;
    loop {
        let now = Census::take(place)?;
        if now.is_back(&before) {
            return Ok(());
        }
        if Instant::now() > deadline {
            bail!("something stayed behind: there were {before}, and there are {now}");
        }
        tokio::time::sleep(LOOK_AGAIN).await;
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_first_and_the_last_are_compared() {
        let latencies: Vec<_> = (1..=40).map(Duration::from_millis).collect();
        let metrics = creation(&latencies, Duration::from_secs(4));
        assert_eq!(metrics[&Metric::FirstP50Ms], 2.5);
        assert_eq!(metrics[&Metric::LastP50Ms], 38.5);
        assert_eq!(metrics[&Metric::RatePerS], 10.0);
        assert!(creation(&[], Duration::ZERO).is_empty());
    }

    #[test]
    fn running_tasks_are_read_from_the_table() {
        let table = "TASK    PID    STATUS    \na-main-0    12    RUNNING\nb    0    STOPPED\n\n";
        assert_eq!(running_tasks(table), ["a-main-0"]);
    }

    #[test]
    fn containers_are_known_by_their_runtime_ids() {
        let pod = serde_json::from_value(json!({"metadata": {}, "status": {"containerStatuses": [
            {"name": "main", "image": "", "imageID": "", "ready": true, "restartCount": 0,
             "containerID": "containerd://x-main-0"}]}}))
        .unwrap();
        assert_eq!(container_id(&pod).as_deref(), Some("x-main-0"));
        assert_eq!(container_id(&Pod::default()), None);
    }
}
