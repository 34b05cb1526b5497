//! `api-cost`: what a node costs the API server, idle and for the lives of pods, counted from the
//! API server's own audit log.

use std::time::Duration;

use anyhow::Context;

use crate::audit::{AuditLog, Requests};
use crate::batch::{Batch, Plan, warm};
use crate::cli::ApiCostArgs;
use crate::cluster::{Cluster, Session};
use crate::pod::sleeper;
use crate::report::{Case, Metric, Report, Round};
use crate::subject::Subject;

/// What pods left to be told, as events, is told within this; it is not the idle node's.
const SETTLE: Duration = Duration::from_secs(15);

/// Measures the subjects as often as asked: idle all at once, for each has an identity of its own,
/// then pods in turn.
pub(crate) async fn run(cluster: &mut Cluster, arguments: &ApiCostArgs) -> anyhow::Result<Report> {
    let subjects = arguments.comparison.subjects();
    let session = cluster.open(&subjects).await?;
    let audit = session.audit_log.clone();
    let audit = audit.context("`hack/dev env` does not give SANDMAN_AUDIT_LOG")?;
    for &subject in &subjects {
        warm(&session, subject, arguments.deadline).await?;
    }
    let results = || subjects.iter().map(|&subject| (subject, Vec::new()));
    let mut idle: Vec<(Subject, Vec<Round>)> = results().collect();
    let mut pods: Vec<(Subject, Vec<Round>)> = results().collect();
    for round in 1..=arguments.comparison.rounds.get() {
        tokio::time::sleep(SETTLE).await;
        let mark = audit.mark()?;
        tokio::time::sleep(arguments.idle).await;
        for (subject, rounds) in &mut idle {
            let requests = audit.since(mark, subject.node())?;
            rounds.push(at_rest(*subject, &requests, arguments.idle));
        }
        for (subject, rounds) in &mut pods {
            let result = lives(&session, &audit, *subject, round, arguments).await?;
            tracing::info!(
                subject = subject.name(),
                round,
                failed = result.failed,
                status_writes_each = result.metrics.get(&Metric::StatusWritesEach),
                "measured"
            );
            rounds.push(result);
        }
    }
    let seconds = usize::try_from(arguments.idle.as_secs()).unwrap_or(usize::MAX);
    let cases = vec![
        Case::new("idle", seconds, idle),
        Case::new("pods", arguments.pods.get(), pods),
    ];
    Ok(Report::of_cases("api-cost", &cases))
}

/// Creates pods, waits until they are Ready, and removes them.
async fn lives(
    session: &Session,
    audit: &AuditLog,
    subject: Subject,
    round: usize,
    arguments: &ApiCostArgs,
) -> anyhow::Result<Round> {
    let plan = Plan {
        subject,
        name: format!("cost-{}-{round}", subject.name()),
        pods: arguments.pods.get(),
        concurrency: arguments.pods.get(),
        window: None,
        deadline: arguments.deadline,
        manifest: sleeper,
    };
    let mark = audit.mark()?;
    let (batch, outcome) = Batch::create(session, plan).await?;
    batch.remove().await?;
    tokio::time::sleep(SETTLE).await;
    let requests = audit.since(mark, subject.node())?;
    Ok(of_lives(
        &requests,
        arguments.pods.get(),
        outcome.failures.len(),
    ))
}

#[expect(
    clippy::cast_precision_loss,
    reason = "counts of requests are far below 2^52"
)]
fn at_rest(subject: Subject, requests: &Requests, window: Duration) -> Round {
    let minutes = window.as_secs_f64() / 60.0;
    let mut metrics: crate::report::Metrics =
        [(Metric::RequestsPerMin, requests.all as f64 / minutes)].into();
    // A peer takes no part in the election.
    if subject == Subject::Sandman {
        metrics.insert(Metric::ElectionPerMin, requests.election as f64 / minutes);
    }
    Round { failed: 0, metrics }
}

#[expect(
    clippy::cast_precision_loss,
    reason = "counts of requests are far below 2^52"
)]
fn of_lives(requests: &Requests, pods: usize, failed: usize) -> Round {
    let writes: usize = requests.status_writes.values().sum();
    let most = requests.status_writes.values().max().copied();
    let each = |count: usize| count as f64 / pods as f64;
    Round {
        failed,
        metrics: [
            (Metric::StatusWritesEach, each(writes)),
            (Metric::StatusWritesMax, most.unwrap_or_default() as f64),
            (Metric::RequestsEach, each(requests.for_pods)),
        ]
        .into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_idle_node_is_counted_a_minute_and_the_election_apart() {
        let requests = Requests {
            all: 14,
            election: 60,
            ..Requests::default()
        };
        let round = at_rest(Subject::Sandman, &requests, Duration::from_secs(120));
        assert_eq!(round.metrics[&Metric::RequestsPerMin], 7.0);
        assert_eq!(round.metrics[&Metric::ElectionPerMin], 30.0);
        let peer = at_rest(Subject::Kubelet, &requests, Duration::from_secs(120));
        assert_eq!(peer.metrics.get(&Metric::ElectionPerMin), None);
    }

    #[test]
    fn the_pod_that_was_written_most_is_told() {
        let requests = Requests {
            for_pods: 20,
            status_writes: [("a".to_owned(), 3), ("b".to_owned(), 5)].into(),
            ..Requests::default()
        };
        let round = of_lives(&requests, 2, 0);
        assert_eq!(round.metrics[&Metric::StatusWritesEach], 4.0);
        assert_eq!(round.metrics[&Metric::StatusWritesMax], 5.0);
        assert_eq!(round.metrics[&Metric::RequestsEach], 10.0);
    }
}
