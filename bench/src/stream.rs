//! `stream`: bytes through one pod's exec, port-forward and log, over the API server, each byte
//! compared with what was sent.

mod bytes;
mod flows;

use std::time::{Duration, Instant};

use anyhow::bail;

use self::bytes::{MIB, log_text};
use self::flows::Pipes;
use crate::batch::{Batch, Plan};
use crate::cli::StreamArgs;
use crate::cluster::{Cluster, Session};
use crate::pod::sleeper;
use crate::report::{Case, Metric, Report, Round};
use crate::subject::Subject;

/// A pod is Ready, and has written its log, within this.
const READY_WITHIN: Duration = Duration::from_secs(120);
/// Pause before a pod's log, or a node that has no serving certificate yet, is asked again: no
/// event tells.
const RETRY_AFTER: Duration = Duration::from_millis(250);
/// A flow that takes longer has failed.
const FLOW_WITHIN: Duration = Duration::from_secs(600);
/// How often the log is read each time: it is small, for a node keeps only so much of it.
const LOG_READS: u64 = 8;

/// What is measured, in this order: each flow needs what the one before left in the pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Flow {
    ExecIn,
    ExecOut,
    ForwardOut,
    ForwardIn,
    Logs,
}

const FLOWS: [Flow; 5] = [
    Flow::ExecIn,
    Flow::ExecOut,
    Flow::ForwardOut,
    Flow::ForwardIn,
    Flow::Logs,
];

impl Flow {
    fn name(self) -> &'static str {
        match self {
            Self::ExecIn => "exec-in",
            Self::ExecOut => "exec-out",
            Self::ForwardOut => "forward-out",
            Self::ForwardIn => "forward-in",
            Self::Logs => "logs",
        }
    }
}

/// A running pod of one subject.
struct Target {
    subject: Subject,
    batch: Batch,
    pipes: Pipes,
    mib: u64,
}

/// Measures the subjects in turn, as often as asked.
pub(crate) async fn run(cluster: &mut Cluster, arguments: &StreamArgs) -> anyhow::Result<Report> {
    let subjects = arguments.comparison.subjects();
    if subjects.contains(&Subject::Null) {
        bail!("--peer null: hosts that do no work move no bytes; leave it out");
    }
    let session = cluster.open(&subjects).await?;
    let mut targets = Vec::new();
    for &subject in &subjects {
        let target = Target::start(&session, subject, arguments.mib).await?;
        target.warm_up().await?;
        targets.push(target);
    }
    let mut results: Vec<Vec<(Subject, Vec<Round>)>> = FLOWS
        .iter()
        .map(|_| subjects.iter().map(|&s| (s, Vec::new())).collect())
        .collect();
    for round in 1..=arguments.comparison.rounds.get() {
        for (index, target) in targets.iter().enumerate() {
            for (flow, results) in FLOWS.into_iter().zip(&mut results) {
                let result = target.turn(flow).await;
                tracing::info!(
                    subject = target.subject.name(),
                    case = flow.name(),
                    round,
                    mb_per_s = result.metrics.get(&Metric::MbPerS),
                    "measured"
                );
                results[index].1.push(result);
            }
        }
    }
    for target in targets {
        target.batch.remove().await?;
    }
    let cases: Vec<Case> = FLOWS
        .into_iter()
        .zip(results)
        .map(|(flow, results)| Case::new(flow.name(), 1, results))
        .collect();
    Ok(Report::of_cases("stream", &cases))
}

impl Target {
    async fn start(session: &Session, subject: Subject, mib: u64) -> anyhow::Result<Self> {
        let plan = Plan {
            subject,
            name: format!("stream-{}", subject.name()),
            pods: 1,
            concurrency: 1,
            window: None,
            deadline: READY_WITHIN,
            manifest,
        };
        let (batch, outcome) = Batch::create(session, plan).await?;
        if let Some((pod, reason)) = outcome.failures.first() {
            bail!("{} cannot run pod {pod}: {reason}", subject.name());
        }
        let pipes = Pipes::new(session.pods(), batch.pod(0));
        Ok(Self {
            subject,
            batch,
            pipes,
            mib,
        })
    }

    /// Once, with little: nothing is done for the first time while it is measured.
    async fn warm_up(&self) -> anyhow::Result<()> {
        let deadline = Instant::now() + READY_WITHIN;
        loop {
            let once = async {
                self.pipes.read_log().await?;
                self.pipes.exec_in(1).await?;
                self.pipes.exec_out(1).await
            };
            match once.await {
                Ok(()) => return Ok(()),
                Err(error) if Instant::now() > deadline => {
                    return Err(error.context(format!("{} moves no bytes", self.subject.name())));
                }
                Err(error) => {
                    tracing::debug!(error = format!("{error:#}"), "not yet");
                    tokio::time::sleep(RETRY_AFTER).await;
                }
            }
        }
    }

    async fn turn(&self, flow: Flow) -> Round {
        let begun = Instant::now();
        let result = match tokio::time::timeout(FLOW_WITHIN, self.run(flow)).await {
            Ok(result) => result,
            Err(_) => Err(anyhow::anyhow!("not done after {FLOW_WITHIN:?}")),
        };
        match result {
            Ok(moved) => Round {
                failed: 0,
                metrics: [(Metric::MbPerS, moved.rate())].into(),
            },
            Err(error) => {
                tracing::warn!(
                    subject = self.subject.name(),
                    case = flow.name(),
                    error = format!("{error:#}"),
                    after = ?begun.elapsed(),
                    "failed"
                );
                Round {
                    failed: 1,
                    ..Round::default()
                }
            }
        }
    }

    async fn run(&self, flow: Flow) -> anyhow::Result<Moved> {
        let begun = Instant::now();
        let mut bytes = self.mib * MIB;
        match flow {
            Flow::ExecIn => self.pipes.exec_in(self.mib).await?,
            Flow::ExecOut => self.pipes.exec_out(self.mib).await?,
            Flow::ForwardOut => return self.pipes.forward_out(self.mib).await,
            Flow::ForwardIn => return self.pipes.forward_in(self.mib).await,
            Flow::Logs => {
                for _ in 0..LOG_READS {
                    self.pipes.read_log().await?;
                }
                bytes = LOG_READS * log_text().len() as u64;
            }
        }
        Ok(Moved {
            bytes,
            took: begun.elapsed(),
        })
    }
}

/// How much was moved, and how long that took.
#[derive(Clone, Copy, Debug)]
struct Moved {
    bytes: u64,
    took: Duration,
}

impl Moved {
    #[expect(
        clippy::cast_precision_loss,
        reason = "a count of bytes is far below 2^52"
    )]
    fn rate(self) -> f64 {
        self.bytes as f64 / 1e6 / self.took.as_secs_f64()
    }
}

/// A pod that writes its log, then sleeps, with room in memory.
fn manifest(name: &str, batch: &str, node: &str, image: &str) -> serde_json::Value {
    let mut pod = sleeper(name, batch, node, image);
    pod["spec"]["volumes"] = serde_json::json!([{
        "name": "data",
        "emptyDir": {"medium": "Memory"},
    }]);
    let container = &mut pod["spec"]["containers"][0];
    container["volumeMounts"] = serde_json::json!([{"name": "data", "mountPath": bytes::DIR}]);
    container["command"] = serde_json::json!(["sh", "-c", bytes::log_script()]);
    pod
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_in_millions_of_bytes() {
        let moved = Moved {
            bytes: 300_000_000,
            took: Duration::from_millis(1500),
        };
        assert_eq!(moved.rate(), 200.0);
    }

    #[test]
    fn the_pod_has_room_in_memory() {
        let pod = manifest("a-0", "a", "sandman", "r/busybox:1");
        let pod: k8s_openapi::api::core::v1::Pod = serde_json::from_value(pod).unwrap();
        let spec = pod.spec.unwrap();
        let medium = spec.volumes.unwrap()[0].empty_dir.clone().unwrap().medium;
        assert_eq!(medium.as_deref(), Some("Memory"));
        assert_eq!(spec.containers[0].command.as_ref().unwrap()[0], "sh");
    }
}
