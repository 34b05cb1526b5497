//! `exec`: a command that does nothing, from request to exit status, one after the other over one
//! client. A WebSocket takes a connection of its own, so each pays for a TLS handshake; the floor
//! is a request that pays for the same and does nothing on the node.

use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use http::Request;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, AttachParams};
use kube::{Client, Config};

use crate::batch::{Batch, Plan};
use crate::cli::ExecArgs;
use crate::cluster::{Cluster, Session};
use crate::pod::{CONTAINER, sleeper};
use crate::report::{Metric, Report, Round, latencies};
use crate::stats::median;
use crate::subject::Subject;

/// One that takes longer has failed.
const EXEC_WITHIN: Duration = Duration::from_secs(30);
/// A pod is Ready, and a node that has just registered has its serving certificate, within this.
const READY_WITHIN: Duration = Duration::from_secs(120);
/// Pause before a node that does not answer yet is asked again: no event tells.
const RETRY_AFTER: Duration = Duration::from_millis(250);
/// Commands before the first that is measured.
const WARM_UP: usize = 5;

/// A running pod of one subject.
struct Target {
    subject: Subject,
    batch: Batch,
    pods: Api<Pod>,
    config: Config,
}

/// Measures the subjects in turn, as often as asked.
pub(crate) async fn run(cluster: &mut Cluster, arguments: &ExecArgs) -> anyhow::Result<Report> {
    let subjects = arguments.comparison.subjects();
    if subjects.contains(&Subject::Null) {
        bail!("--peer null: hosts that do no work run no commands; leave it out");
    }
    let session = cluster.open(&subjects).await?;
    let mut targets = Vec::new();
    for &subject in &subjects {
        let target = Target::start(&session, subject).await?;
        target.warm_up().await?;
        targets.push((target, Vec::new()));
    }
    for round in 1..=arguments.comparison.rounds.get() {
        for (target, rounds) in &mut targets {
            let result = target.turn(arguments.count.get()).await?;
            tracing::info!(
                subject = target.subject.name(),
                round,
                failed = result.failed,
                p50_ms = result.metrics.get(&Metric::P50Ms),
                "measured"
            );
            rounds.push(result);
        }
    }
    let mut results = Vec::new();
    for (target, rounds) in targets {
        results.push((target.subject, rounds));
        target.batch.remove().await?;
    }
    Ok(Report::new("exec", arguments.count.get(), &results))
}

impl Target {
    async fn start(session: &Session, subject: Subject) -> anyhow::Result<Self> {
        let plan = Plan {
            subject,
            name: format!("exec-{}", subject.name()),
            pods: 1,
            concurrency: 1,
            window: None,
            deadline: READY_WITHIN,
            manifest: sleeper,
        };
        let (batch, outcome) = Batch::create(session, plan).await?;
        if let Some((pod, reason)) = outcome.failures.first() {
            bail!("{} cannot run pod {pod}: {reason}", subject.name());
        }
        Ok(Self {
            subject,
            batch,
            pods: session.pods(),
            config: session.config.clone(),
        })
    }

    async fn warm_up(&self) -> anyhow::Result<()> {
        let deadline = Instant::now() + READY_WITHIN;
        let mut succeeded = 0;
        while succeeded < WARM_UP {
            let both = async {
                self.exec().await?;
                self.floor().await
            };
            match both.await {
                Ok(_) => succeeded += 1,
                Err(error) if Instant::now() > deadline => {
                    return Err(error.context(format!("{} runs no command", self.subject.name())));
                }
                Err(error) => {
                    tracing::debug!(error = format!("{error:#}"), "not yet");
                    tokio::time::sleep(RETRY_AFTER).await;
                }
            }
        }
        Ok(())
    }

    /// Runs commands, each followed by one request of the floor, so that both see the same load.
    async fn turn(&self, count: usize) -> anyhow::Result<Round> {
        let mut failed = 0;
        let mut milliseconds = Vec::with_capacity(count);
        let mut floors = Vec::with_capacity(count);
        for _ in 0..count {
            match self.exec().await {
                Ok(took) => milliseconds.push(took.as_secs_f64() * 1e3),
                Err(error) => {
                    failed += 1;
                    let error = format!("{error:#}");
                    tracing::warn!(subject = self.subject.name(), error, "failed");
                }
            }
            let floor = self
                .floor()
                .await
                .with_context(|| format!("node {} does not answer", self.subject.node()))?;
            floors.push(floor.as_secs_f64() * 1e3);
        }
        let mut metrics = latencies(&milliseconds);
        metrics.extend(median(&floors).map(|floor| (Metric::FloorP50Ms, floor)));
        Ok(Round { failed, metrics })
    }

    /// Runs `true`; gives the time from the request to its exit status.
    async fn exec(&self) -> anyhow::Result<Duration> {
        let exec = async {
            let begun = Instant::now();
            let parameters = AttachParams::default().container(CONTAINER);
            let mut process = self
                .pods
                .exec(&self.batch.pod(0), ["true"], &parameters)
                .await?;
            let status = process.take_status().context("exec gives no status")?;
            let status = status.await.context("exec ended without a status")?;
            let took = begun.elapsed();
            // The stream's own end is not part of what was asked for.
            process.join().await?;
            if status.status.as_deref() != Some("Success") {
                bail!(
                    "{}",
                    status.message.unwrap_or_else(|| "no reason".to_owned())
                );
            }
            Ok(took)
        };
        match tokio::time::timeout(EXEC_WITHIN, exec).await {
            Ok(result) => result,
            Err(_) => bail!("no exit status after {EXEC_WITHIN:?}"),
        }
    }

    /// Asks the node's own port for its health, through the API server, on a new connection.
    async fn floor(&self) -> anyhow::Result<Duration> {
        let client = Client::try_from(self.config.clone())?;
        let path = format!("/api/v1/nodes/{}/proxy/healthz", self.subject.node());
        let request = Request::get(path).body(Vec::new())?;
        let begun = Instant::now();
        match tokio::time::timeout(EXEC_WITHIN, client.request_text(request)).await {
            Ok(answer) => {
                answer?;
                Ok(begun.elapsed())
            }
            Err(_) => bail!("no answer after {EXEC_WITHIN:?}"),
        }
    }
}
