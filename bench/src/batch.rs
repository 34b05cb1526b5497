//! Pods of one subject that are created together, watched until they are Ready, and removed.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::bail;
use futures::StreamExt;
use futures::stream;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, DeleteParams, ListParams, PostParams};
use tokio::sync::Semaphore;

use crate::cluster::Session;
use crate::pod::{BATCH_LABEL, sleeper};
use crate::subject::Subject;
use crate::timeline::{Outcome, Timeline};
use crate::watch::{Change, PodWatch};

/// Failures that are told one by one.
const FAILURES_TOLD: usize = 5;

/// What to create.
pub(crate) struct Plan {
    pub(crate) subject: Subject,
    /// Unlike the others of this run.
    pub(crate) name: String,
    pub(crate) pods: usize,
    /// Create requests under way at once.
    pub(crate) concurrency: usize,
    /// Pods requested and not yet Ready at once, if that is bounded.
    pub(crate) window: Option<usize>,
    /// For all to be Ready, and again for all to be gone.
    pub(crate) deadline: Duration,
    /// Makes a pod of its name, the batch's, the node's and the image's.
    pub(crate) manifest: fn(&str, &str, &str, &str) -> serde_json::Value,
}

/// Pods that exist.
pub(crate) struct Batch {
    plan: Plan,
    api: Api<Pod>,
    watch: PodWatch,
}

impl Batch {
    /// Creates the pods; returns when each is Ready or failed, or when time is up.
    pub(crate) async fn create(session: &Session, plan: Plan) -> anyhow::Result<(Self, Outcome)> {
        let api = session.pods();
        let mut manifests = Vec::with_capacity(plan.pods);
        for index in 0..plan.pods {
            let name = format!("{}-{index}", plan.name);
            let pod = (plan.manifest)(&name, &plan.name, plan.subject.node(), &session.image);
            manifests.push((name, serde_json::from_value::<Pod>(pod)?));
        }
        let mut watch = PodWatch::open(api.clone(), &plan.name).await;
        let mut timeline = Timeline::new(plan.pods);

        let creator = api.clone();
        let room = Arc::new(Semaphore::new(plan.window.unwrap_or(plan.pods)));
        let permits = Arc::clone(&room);
        let create = move |(name, pod): (String, Pod)| {
            let api = creator.clone();
            let room = Arc::clone(&permits);
            // A task of its own, so that requests do not wait for the watch to be read.
            tokio::spawn(async move {
                // Given back when the pod is settled. Nobody closes it.
                if let Ok(permit) = room.acquire_owned().await {
                    permit.forget();
                }
                let requested = Instant::now();
                let answer = api.create(&PostParams::default(), &pod).await;
                (name, requested, answer)
            })
        };
        let mut creations = stream::iter(manifests)
            .map(create)
            .buffer_unordered(plan.concurrency);
        let deadline = tokio::time::sleep(plan.deadline);
        tokio::pin!(deadline);
        while !timeline.is_settled() {
            let settled = timeline.settled();
            tokio::select! {
                Some(created) = creations.next() => match created? {
                    (name, requested, Ok(_)) => timeline.created(&name, requested),
                    (name, requested, Err(error)) => {
                        timeline.refused(&name, requested, error.to_string());
                    }
                },
                change = watch.next() => match change {
                    Some(Change::Pod(name, progress, at)) => {
                        timeline.observed(&name, progress, at);
                    }
                    Some(Change::Gone(name)) => timeline.removed(&name),
                    None => bail!("the watch of pods ended"),
                },
                () = &mut deadline => break,
            }
            room.add_permits(timeline.settled() - settled);
        }
        let outcome = timeline.finish();
        for (pod, reason) in outcome.failures.iter().take(FAILURES_TOLD) {
            tracing::warn!(subject = plan.subject.name(), %pod, %reason, "failed");
        }
        Ok((Self { plan, api, watch }, outcome))
    }

    /// Name of a pod.
    pub(crate) fn pod(&self, index: usize) -> String {
        format!("{}-{index}", self.plan.name)
    }

    /// The pods as they are now.
    pub(crate) async fn list(&self) -> anyhow::Result<Vec<Pod>> {
        Ok(self.api.list(&self.all()).await?.items)
    }

    /// Deletes the pods; returns when the last is gone.
    pub(crate) async fn remove(mut self) -> anyhow::Result<()> {
        let parameters = DeleteParams::default();
        self.api
            .delete_collection(&parameters, &self.all())
            .await
            .map(drop)?;
        let gone = async {
            while !self.watch.is_empty() {
                if self.watch.next().await.is_none() {
                    break;
                }
            }
        };
        // The next turn would not be measured alone.
        if tokio::time::timeout(self.plan.deadline, gone)
            .await
            .is_err()
        {
            bail!(
                "{} of {} pods on {} are not gone {:?} after they were deleted",
                self.watch.len(),
                self.plan.pods,
                self.plan.subject.node(),
                self.plan.deadline
            );
        }
        Ok(())
    }

    fn all(&self) -> ListParams {
        ListParams::default().labels(&format!("{BATCH_LABEL}={}", self.plan.name))
    }
}

/// Runs a few pods, so that the image is on every host and nothing is done for the first time
/// while it is measured.
pub(crate) async fn warm(
    session: &Session,
    subject: Subject,
    deadline: Duration,
) -> anyhow::Result<()> {
    let hosts = match subject {
        Subject::Sandman | Subject::Containerd => session.hosts,
        Subject::Null | Subject::Kubelet => 1,
    };
    let plan = Plan {
        subject,
        name: format!("warm-{}", subject.name()),
        // Placement spreads; the second pod a host is for those that it does not spread evenly.
        pods: 2 * hosts,
        concurrency: hosts,
        window: None,
        deadline,
        manifest: sleeper,
    };
    tracing::info!(subject = subject.name(), pods = plan.pods, "warming up");
    let (batch, outcome) = Batch::create(session, plan).await?;
    let pods = batch.list().await?;
    batch.remove().await?;
    if let Some((pod, reason)) = outcome.failures.first() {
        bail!("{} cannot run pod {pod}: {reason}", subject.name());
    }
    let mut seen: Vec<_> = pods
        .iter()
        .filter_map(|pod| pod.status.as_ref()?.host_ip.clone())
        .collect();
    seen.sort();
    seen.dedup();
    if seen.len() < hosts {
        tracing::warn!(
            hosts,
            warm = seen.len(),
            "some hosts may have to pull the image in the first round"
        );
    }
    Ok(())
}
