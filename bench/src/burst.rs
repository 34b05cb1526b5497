//! `burst`: pods created at once, from create to Ready as the client sees it.

use std::time::Duration;

use crate::batch::{Batch, Plan, warm};
use crate::cli::BurstArgs;
use crate::cluster::{Cluster, Session};
use crate::machine;
use crate::pod::sleeper;
use crate::report::{Metric, Report, Round, latencies};
use crate::subject::Subject;
use crate::timeline::Outcome;

/// Measures the subjects in turn, as often as asked.
pub(crate) async fn run(cluster: &mut Cluster, arguments: &BurstArgs) -> anyhow::Result<Report> {
    let subjects = arguments.comparison.subjects();
    let session = cluster.open(&subjects).await?;
    for &subject in &subjects {
        warm(&session, subject, arguments.deadline).await?;
    }
    let mut results: Vec<(Subject, Vec<Round>)> = subjects
        .iter()
        .map(|&subject| (subject, Vec::new()))
        .collect();
    for round in 1..=arguments.comparison.rounds.get() {
        for (subject, rounds) in &mut results {
            let result = turn(&session, *subject, round, arguments).await?;
            tracing::info!(
                subject = subject.name(),
                round,
                failed = result.failed,
                rate_per_s = result.metrics.get(&Metric::RatePerS),
                "measured"
            );
            rounds.push(result);
        }
    }
    Ok(Report::new("burst", arguments.pods.get(), &results))
}

async fn turn(
    session: &Session,
    subject: Subject,
    round: usize,
    arguments: &BurstArgs,
) -> anyhow::Result<Round> {
    let plan = Plan {
        subject,
        name: format!("burst-{}-{round}", subject.name()),
        pods: arguments.pods.get(),
        concurrency: arguments.concurrency.get(),
        window: None,
        deadline: arguments.deadline,
        manifest: sleeper,
    };
    let before = machine::busy();
    let (batch, outcome) = Batch::create(session, plan).await?;
    let busy = before
        .zip(machine::busy())
        .map(|(before, after)| after.saturating_sub(before));
    batch.remove().await?;
    Ok(summarize(&outcome, busy))
}

/// The figures of one turn.
fn summarize(outcome: &Outcome, busy: Option<Duration>) -> Round {
    let milliseconds: Vec<f64> = outcome
        .latencies
        .iter()
        .map(|latency| latency.as_secs_f64() * 1e3)
        .collect();
    let mut metrics = latencies(&milliseconds);
    if !outcome.span.is_zero() {
        #[expect(
            clippy::cast_precision_loss,
            reason = "a count of pods is far below 2^52"
        )]
        let ready = milliseconds.len() as f64;
        metrics.insert(Metric::RatePerS, ready / outcome.span.as_secs_f64());
    }
    // With failures, this is the price of something else.
    if let Some(busy) = busy.filter(|_| outcome.failures.is_empty()) {
        metrics.insert(Metric::CpuS, busy.as_secs_f64());
    }
    Round {
        failed: outcome.failures.len(),
        metrics,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rate_counts_what_became_ready() {
        let outcome = Outcome {
            latencies: [100, 300].map(Duration::from_millis).to_vec(),
            span: Duration::from_millis(500),
            failures: vec![("x".to_owned(), "late".to_owned())],
        };
        let round = summarize(&outcome, Some(Duration::from_secs(1)));
        assert_eq!(round.failed, 1);
        assert_eq!(round.metrics[&Metric::RatePerS], 4.0);
        assert_eq!(round.metrics[&Metric::P99Ms], 300.0);
        assert!(!round.metrics.contains_key(&Metric::CpuS));
    }

    #[test]
    fn nothing_ready_gives_no_rate() {
        let round = summarize(&Outcome::default(), None);
        assert!(round.metrics.is_empty());
    }
}
