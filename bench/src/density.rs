//! `density`: many pods held at once. They are created a few at a time, so that the time of each
//! is its own; then all are looked at from every side, used, and removed without a trace.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use futures::StreamExt;
use futures::stream;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use kube::api::{Api, AttachParams};
use tokio::io::AsyncReadExt;

use crate::batch::{Batch, Plan, warm};
use crate::census::{Census, Place};
use crate::cli::DensityArgs;
use crate::cluster::{Cluster, Session};
use crate::ctr;
use crate::memory::{self, Memory};
use crate::pod::{CONTAINER, Progress, limited_sleeper, progress, sleeper};
use crate::report::{Case, Metric, Metrics, Report, Round, latencies};
use crate::stats::median;
use crate::subject::{Subject, subjects};

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
    tell_of_traps(&session)?;
    let (mut plain, mut limited) = (Vec::new(), Vec::new());
    for &subject in &subjects {
        let count = match subject {
            Subject::Kubelet => arguments.peer_count.get(),
            Subject::Sandman | Subject::Null | Subject::Containerd => arguments.count.get(),
        };
        warm(&session, subject, arguments.deadline).await?;
        let turn = Turn {
            session: &session,
            control_plane: &control_plane,
            arguments,
            subject,
        };
        plain.push((
            subject,
            count,
            vec![turn.run("plain", count, sleeper).await?],
        ));
        // Hosts that do no work have no memory of theirs to limit.
        let count = arguments.limited.min(count);
        if count > 0 && subject != Subject::Null {
            let round = turn.run("limited", count, limited_sleeper).await?;
            limited.push((subject, count, vec![round]));
        }
    }
    let mut cases = vec![Case::sized("plain", plain)];
    if !limited.is_empty() {
        cases.push(Case::sized("limited", limited));
    }
    Ok(Report::of_cases("density", &cases))
}

/// Figures may be worse than they would be on another machine, or on this one after a start.
fn tell_of_traps(session: &Session) -> anyhow::Result<()> {
    if let Some(kb) = memory::memory_cgroup_kb(&session.place.cgroup_parent) {
        tracing::info!(
            kb_each = kb.round(),
            "a memory cgroup costs the kernel this much here; it follows the most mounts there \
             ever were since the machine started: after a run with more, figures are too high"
        );
    }
    let state = Path::new(session.variable("SANDMAN_STATE_DIR")?);
    match memory::file_system(state) {
        Some((kind, None)) => tracing::info!(kind, "file system of the state folder"),
        Some((kind, Some(word))) => {
            tracing::warn!(kind, "file system of the state folder, {word}");
        }
        None => {}
    }
    Ok(())
}

/// One subject's.
struct Turn<'a> {
    session: &'a Session,
    control_plane: &'a [u32],
    arguments: &'a DensityArgs,
    subject: Subject,
}

impl Turn<'_> {
    async fn run(
        &self,
        case: &str,
        count: usize,
        manifest: fn(&str, &str, &str, &str) -> serde_json::Value,
    ) -> anyhow::Result<Round> {
        let (session, subject) = (self.session, self.subject);
        let counted = Census::take(&session.place)?;
        let memory = Memory::measure(self.control_plane)?;
        let plan = Plan {
            subject,
            name: format!("density-{case}-{}", subject.name()),
            pods: count,
            concurrency: self.arguments.window.get(),
            window: Some(self.arguments.window.get()),
            deadline: self.arguments.deadline,
            manifest,
        };
        let (batch, outcome) = Batch::create(session, plan).await?;
        let full = Memory::measure(self.control_plane)?;

        let mut failed = outcome.failures.len();
        let pods = batch.list().await?;
        failed += not_ready(&pods);
        if subject == Subject::Sandman {
            failed += unknown_to_containerd(session, &pods).await?;
        }
        let mut metrics = creation(&outcome.latencies, outcome.span);
        // Hosts that do no work run no commands.
        if subject != Subject::Null {
            let (wrong, milliseconds) = commands(session, &pods, self.arguments.execs).await;
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
        let after = Memory::measure(self.control_plane)?;
        let control = after.control_mb - memory.control_mb;
        let left = memory.available_mb - after.available_mb - control;
        metrics.insert(Metric::LeftMb, left);
        tracing::info!(
            subject = subject.name(),
            case,
            count,
            failed,
            full = %full.since(&memory),
            after = %after.since(&memory),
            "measured; what memory was spent on with all there, and after they were gone"
        );
        Ok(Round { failed, metrics })
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
    let (program, sockets) = &session.containerd;
    for socket in sockets {
        running.extend(ctr::running_tasks(program, socket).await?);
    }
    let missing = wanted.difference(&running).count();
    let other = running.difference(&wanted).count();
    if missing + other > 0 {
        tracing::warn!(missing, other, "containerd does not agree on what runs");
    }
    Ok(missing + other)
}

pub(crate) fn container_id(pod: &Pod) -> Option<String> {
    let statuses = pod.status.as_ref()?.container_statuses.as_ref()?;
    let id = statuses.first()?.container_id.as_deref()?;
    Some(id.strip_prefix("containerd://")?.to_owned())
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
    fn containers_are_known_by_their_runtime_ids() {
        let pod = serde_json::from_value(json!({"metadata": {}, "status": {"containerStatuses": [
            {"name": "main", "image": "", "imageID": "", "ready": true, "restartCount": 0,
             "containerID": "containerd://x-main-0"}]}}))
        .unwrap();
        assert_eq!(container_id(&pod).as_deref(), Some("x-main-0"));
        assert_eq!(container_id(&Pod::default()), None);
    }
}
