//! `soak`: pods that come and go for long, a few at a time: whether the last take longer than the
//! first, and whether anything stays behind. It can be stopped, reports what it has, and goes on
//! later from a file.

mod life;
mod progress;
mod things;

use std::time::{Duration, Instant};

use anyhow::Context;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, DeleteParams, PostParams};
use tokio::sync::watch::Receiver;
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval};

use self::life::{Lives, Next};
use self::progress::Progress;
use self::things::Things;
use crate::batch::warm;
use crate::cli::SoakArgs;
use crate::cluster::{Cluster, Session};
use crate::pod::sleeper;
use crate::report::{Case, Metric, Metrics, Report, Round, latencies};
use crate::stats::{median, ratio};
use crate::subject::Subject;
use crate::watch::PodWatch;

/// Value of the batch label of all pods.
const BATCH: &str = "soak";
/// The kernel takes network namespaces and cgroups down in its own time, after their removal.
const BACK_WITHIN: Duration = Duration::from_secs(180);
/// No event tells of that, nor of a pod that is late.
const LOOK_AGAIN: Duration = Duration::from_secs(1);
/// Pods between two entries of the log, and two writes of the file.
const NOTE_EVERY: usize = 500;

/// Creates and removes as many pods as asked, or until `stop` turns true.
pub(crate) async fn run(
    cluster: &mut Cluster,
    arguments: &SoakArgs,
    stop: Receiver<bool>,
) -> anyhow::Result<Report> {
    let session = cluster.open(&[Subject::Sandman]).await?;
    warm(&session, Subject::Sandman, arguments.deadline).await?;
    let instance = session.variable("SANDMAN_INSTANCE")?;
    let file = arguments.progress.as_deref();
    let mut progress = match file
        .map(|file| Progress::load(file, instance))
        .transpose()?
    {
        Some(Some(progress)) => {
            tracing::info!(created = progress.created, "going on");
            progress
        }
        Some(None) | None => {
            let before = settled(cluster, &session).await?;
            tracing::info!(%before, "before");
            Progress::new(instance, before)
        }
    };
    let result = churn(&session, arguments, &mut progress, stop).await;
    if let Some(file) = file {
        progress.save(file)?;
    }
    result?;
    let (left, after) = back(cluster, &session, &progress.before).await?;
    tracing::info!(%after, "after");
    for line in &left {
        tracing::warn!("left behind: {line}");
    }
    Ok(report(&progress, left.len(), &after))
}

/// The loop itself.
async fn churn(
    session: &Session,
    arguments: &SoakArgs,
    progress: &mut Progress,
    mut stop: Receiver<bool>,
) -> anyhow::Result<()> {
    let api = session.pods();
    let mut watch = PodWatch::open(api.clone(), BATCH).await;
    let mut lives = Lives::new(arguments.deadline);
    let mut calls = JoinSet::new();
    let mut tick = interval(LOOK_AGAIN);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut noted = progress.created;
    loop {
        let stopped = *stop.borrow();
        while !stopped
            && lives.len() < arguments.window.get()
            && progress.created < arguments.creates.get()
        {
            let name = format!("soak-{}", progress.created);
            progress.created += 1;
            let pod = sleeper(&name, BATCH, Subject::Sandman.node(), &session.image);
            lives.requested(&name, Instant::now());
            let (api, pod) = (api.clone(), serde_json::from_value(pod)?);
            calls.spawn(create(api, name, pod));
        }
        if lives.is_empty() && calls.is_empty() {
            return Ok(());
        }
        let next = tokio::select! {
            change = watch.next() => lives.changed(change.context("the watch of pods ended")?),
            Some(refused) = calls.join_next() => match refused? {
                Ok(()) => Next::Nothing,
                Err((name, reason)) => lives.refused(&name, reason),
            },
            _ = tick.tick() => lives.late(Instant::now()),
            Ok(()) = stop.changed() => Next::Nothing,
        };
        match next {
            Next::Nothing => {}
            Next::Ready(name, took) => {
                progress.ready(took);
                calls.spawn(delete(api.clone(), name));
            }
            Next::Failed(name, reason) => {
                progress.failed += 1;
                tracing::warn!(%name, %reason, "failed");
                calls.spawn(delete(api.clone(), name));
            }
        }
        if progress.created >= noted + NOTE_EVERY {
            noted = progress.created;
            let (created, failed) = (progress.created, progress.failed);
            let p50_ms = median(&progress.last()).map(f64::round);
            tracing::info!(created, failed, p50_ms, "coming and going");
            if let Some(file) = &arguments.progress {
                progress.save(file)?;
            }
        }
    }
}

type Call = Result<(), (String, String)>;

async fn create(api: Api<Pod>, name: String, pod: Pod) -> Call {
    match api.create(&PostParams::default(), &pod).await {
        Ok(_) => Ok(()),
        Err(error) => Err((name, error.to_string())),
    }
}

async fn delete(api: Api<Pod>, name: String) -> Call {
    match api.delete(&name, &DeleteParams::default()).await {
        Ok(_) => Ok(()),
        Err(kube::Error::Api(status)) if status.is_not_found() => Ok(()),
        Err(error) => Err((name, error.to_string())),
    }
}

/// What there is once no less comes of it any more.
async fn settled(cluster: &Cluster, session: &Session) -> anyhow::Result<Things> {
    let deadline = Instant::now() + BACK_WITHIN;
    let mut things = Things::count(cluster, session).await?;
    loop {
        tokio::time::sleep(2 * LOOK_AGAIN).await;
        let now = Things::count(cluster, session).await?;
        if now.grown(&things).is_empty() && things.grown(&now).is_empty()
            || Instant::now() > deadline
        {
            return Ok(now);
        }
        things = now;
    }
}

/// Waits until there is no more of anything than before; says what there is more of, if it does
/// not go.
async fn back(
    cluster: &Cluster,
    session: &Session,
    before: &Things,
) -> anyhow::Result<(Vec<String>, Things)> {
    let deadline = Instant::now() + BACK_WITHIN;
    loop {
        let now = Things::count(cluster, session).await?;
        let left = now.grown(before);
        if left.is_empty() || Instant::now() > deadline {
            return Ok((left, now));
        }
        tokio::time::sleep(LOOK_AGAIN).await;
    }
}

fn report(progress: &Progress, left: usize, after: &Things) -> Report {
    let (first, last) = (progress.first(), progress.last());
    let row = |name, n, failed, metrics| {
        let round = Round { failed, metrics };
        Case::new(name, n, vec![(Subject::Sandman, vec![round])])
    };
    let mut at_the_end = latencies(&last);
    let slower = median(&last).zip(median(&first));
    let slower = slower.and_then(|(last, first)| ratio(last, first));
    at_the_end.extend(slower.map(|it| (Metric::LastByFirst, it)));
    let mut remains = Metrics::new();
    remains.insert(Metric::FilesMore, after.files_more(&progress.before));
    remains.insert(
        Metric::MemoryCgroupsMore,
        after.memory_cgroups_more(&progress.before),
    );
    Report::of_cases(
        "soak",
        &[
            row("first", first.len(), 0, latencies(&first)),
            row("last", last.len(), progress.failed, at_the_end),
            row("left", progress.created, left, remains),
        ],
    )
}
