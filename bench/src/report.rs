//! Results: a row a subject with the medians over its rounds, then a row a peer with Sandman's
//! share of the peer's figures. As JSON lines for programs and as a table for people.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

use serde::{Serialize, Serializer};

use crate::stats::{median, percentile, ratio, rounded};
use crate::subject::Subject;

/// A figure of a row, in the order of the columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Metric {
    /// Successes a second, from the first request to the last success.
    RatePerS,
    /// Half of the successes took no longer than this many milliseconds.
    P50Ms,
    /// See [`Metric::P50Ms`].
    P90Ms,
    /// See [`Metric::P50Ms`].
    P99Ms,
    /// Median of a request that does nothing, on the same way to the node.
    FloorP50Ms,
    /// Millions of bytes a second.
    MbPerS,
    /// Requests to the API server by an idle node, a minute.
    RequestsPerMin,
    /// Requests to the API server about which replica leads, a minute.
    ElectionPerMin,
    /// Writes of a pod's status in its life.
    StatusWritesEach,
    /// Of the pod whose status was written most.
    StatusWritesMax,
    /// Requests to the API server for a pod's life, what is about the node left out.
    RequestsEach,
    /// Processor seconds of the whole machine, control plane and bench included.
    CpuS,
    /// [`Metric::P50Ms`] of the first tenth, at most a thousand.
    FirstP50Ms,
    /// [`Metric::P50Ms`] of the last tenth, at most a thousand.
    LastP50Ms,
    /// Median of commands in pods picked at random.
    ExecP50Ms,
    /// Memory that a pod takes on its host, in MB: what the machine has less of, without what
    /// the control plane has grown by.
    MemMbEach,
    /// What the control plane has grown by, in MB.
    ControlMb,
    /// What the machine had less of after all pods were gone, in MB.
    LeftMb,
    /// Sandboxes that were there before those that are measured.
    Held,
    /// [`Metric::P50Ms`] with many there, divided by that with few.
    #[serde(rename = "many_by_few")]
    Flatness,
    /// [`Metric::P50Ms`] of the last, divided by that of the first.
    LastByFirst,
    /// Descriptors that daemons hold more than before.
    FilesMore,
    /// Memory cgroups that the machine has more than before, dying ones included.
    MemoryCgroupsMore,
}

impl Metric {
    /// Whether the share of a peer's figure says anything.
    fn is_comparable(self) -> bool {
        !matches!(self, Self::Held | Self::Flatness)
    }

    fn heading(self) -> &'static str {
        match self {
            Self::RatePerS => "RATE/S",
            Self::P50Ms => "P50 MS",
            Self::P90Ms => "P90 MS",
            Self::P99Ms => "P99 MS",
            Self::FloorP50Ms => "FLOOR MS",
            Self::MbPerS => "MB/S",
            Self::RequestsPerMin => "REQ/MIN",
            Self::ElectionPerMin => "ELECT/MIN",
            Self::StatusWritesEach => "STATUS/POD",
            Self::StatusWritesMax => "STATUS MAX",
            Self::RequestsEach => "REQ/POD",
            Self::CpuS => "CPU S",
            Self::FirstP50Ms => "FIRST MS",
            Self::LastP50Ms => "LAST MS",
            Self::ExecP50Ms => "EXEC MS",
            Self::MemMbEach => "MB EACH",
            Self::ControlMb => "CONTROL MB",
            Self::LeftMb => "LEFT MB",
            Self::Held => "HELD",
            Self::Flatness => "MANY/FEW",
            Self::LastByFirst => "LAST/FIRST",
            Self::FilesMore => "FILES +",
            Self::MemoryCgroupsMore => "MEMCG +",
        }
    }
}

/// Figures by name.
pub(crate) type Metrics = BTreeMap<Metric, f64>;

/// The usual percentiles of latencies in milliseconds; none if nothing succeeded.
pub(crate) fn latencies(milliseconds: &[f64]) -> Metrics {
    [
        (Metric::P50Ms, 50),
        (Metric::P90Ms, 90),
        (Metric::P99Ms, 99),
    ]
    .into_iter()
    .filter_map(|(metric, percent)| Some((metric, percentile(milliseconds, percent)?)))
    .collect()
}

/// What came of one subject's turn.
#[derive(Clone, Debug, Default)]
pub(crate) struct Round {
    /// Operations that did not succeed.
    pub(crate) failed: usize,
    /// Figures of those that did.
    pub(crate) metrics: Metrics,
}

/// What came of all subjects in one case of a bench.
#[derive(Clone, Debug)]
pub(crate) struct Case {
    name: &'static str,
    subjects: Vec<(Subject, usize, Vec<Round>)>,
}

impl Case {
    /// `n` is the number of operations in a round.
    pub(crate) fn new(name: &'static str, n: usize, subjects: Vec<(Subject, Vec<Round>)>) -> Self {
        let sized = subjects.into_iter();
        let sized = sized.map(|(subject, rounds)| (subject, n, rounds));
        Self::sized(name, sized.collect())
    }

    /// The same, where `n` differs from subject to subject.
    pub(crate) fn sized(name: &'static str, subjects: Vec<(Subject, usize, Vec<Round>)>) -> Self {
        Self { name, subjects }
    }
}

/// One line of the report.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct Row {
    bench: &'static str,
    subject: &'static str,
    /// Of a bench that measures several things.
    #[serde(skip_serializing_if = "Option::is_none")]
    case: Option<&'static str>,
    /// Runtime of Sandman's pods.
    #[serde(skip_serializing_if = "Option::is_none")]
    runtime: Option<String>,
    /// Of a ratio: to whom Sandman is compared.
    #[serde(skip_serializing_if = "Option::is_none")]
    peer: Option<&'static str>,
    /// Operations in each round.
    n: usize,
    rounds: usize,
    /// Operations that failed, of all rounds. A ratio has none.
    #[serde(skip_serializing_if = "Option::is_none")]
    failed: Option<usize>,
    #[serde(flatten, serialize_with = "serialize_rounded")]
    metrics: Metrics,
}

/// All rows of a run.
#[derive(Clone, Debug)]
pub(crate) struct Report {
    rows: Vec<Row>,
}

impl Report {
    /// Sums the rounds of each subject up. `n` is the number of operations in a round.
    pub(crate) fn new(bench: &'static str, n: usize, subjects: &[(Subject, Vec<Round>)]) -> Self {
        let sized = subjects
            .iter()
            .map(|(subject, rounds)| (*subject, n, rounds));
        Self::sized(bench, sized)
    }

    /// The same, where `n` differs from subject to subject.
    pub(crate) fn sized<'a>(
        bench: &'static str,
        subjects: impl IntoIterator<Item = (Subject, usize, &'a Vec<Round>)>,
    ) -> Self {
        Self {
            rows: rows(bench, None, subjects),
        }
    }

    /// The same for each case, one after the other.
    pub(crate) fn of_cases(bench: &'static str, cases: &[Case]) -> Self {
        let rows = cases
            .iter()
            .flat_map(|case| {
                let subjects = case.subjects.iter();
                let sized = subjects.map(|(subject, n, rounds)| (*subject, *n, rounds));
                rows(bench, Some(case.name), sized)
            })
            .collect();
        Self { rows }
    }

    /// Says which runtime Sandman's pods had.
    pub(crate) fn with_runtime(mut self, runtime: Option<&str>) -> Self {
        for row in &mut self.rows {
            if row.subject == Subject::Sandman.name() {
                row.runtime = runtime.map(str::to_owned);
            }
        }
        self
    }

    /// Operations that failed, of all subjects.
    pub(crate) fn failed(&self) -> usize {
        self.rows.iter().filter_map(|row| row.failed).sum()
    }

    /// One JSON object a line.
    pub(crate) fn json_lines(&self) -> String {
        self.rows
            .iter()
            .filter_map(|row| serde_json::to_string(row).ok())
            .map(|line| line + "\n")
            .collect()
    }

    /// Aligned columns, only those that a row has.
    pub(crate) fn table(&self) -> String {
        let metrics: BTreeSet<Metric> = self
            .rows
            .iter()
            .flat_map(|row| row.metrics.keys().copied())
            .collect();
        let mut lines = vec![
            ["SUBJECT", "N", "FAILED"]
                .into_iter()
                .chain(metrics.iter().map(|metric| metric.heading()))
                .map(str::to_owned)
                .collect::<Vec<_>>(),
        ];
        for row in &self.rows {
            let dash = || "-".to_owned();
            let subject = row.peer.map_or_else(
                || row.subject.to_owned(),
                |peer| format!("{} / {peer}", Subject::Sandman.name()),
            );
            let mut line = vec![
                match row.case {
                    Some(case) => format!("{case}: {subject}"),
                    None => subject,
                },
                row.n.to_string(),
                row.failed.map_or_else(dash, |failed| failed.to_string()),
            ];
            line.extend(metrics.iter().map(|metric| {
                row.metrics
                    .get(metric)
                    .map_or_else(dash, |value| format!("{value:.2}"))
            }));
            lines.push(line);
        }
        align(&lines)
    }
}

/// A row a subject, then one a peer.
fn rows<'a>(
    bench: &'static str,
    case: Option<&'static str>,
    subjects: impl IntoIterator<Item = (Subject, usize, &'a Vec<Round>)>,
) -> Vec<Row> {
    let mut rows: Vec<Row> = subjects
        .into_iter()
        .map(|(subject, n, rounds)| Row {
            bench,
            subject: subject.name(),
            case,
            runtime: None,
            peer: None,
            n,
            rounds: rounds.len(),
            failed: Some(rounds.iter().map(|round| round.failed).sum()),
            metrics: medians(rounds),
        })
        .collect();
    let ratios: Vec<Row> = rows
        .iter()
        .find(|row| row.subject == Subject::Sandman.name())
        .into_iter()
        .flat_map(|ours| {
            rows.iter()
                .filter(|row| row.subject != ours.subject)
                .map(|peer| ours.against(peer))
        })
        .collect();
    rows.extend(ratios);
    rows
}

impl Row {
    fn against(&self, peer: &Self) -> Self {
        let metrics = self
            .metrics
            .iter()
            .filter(|(metric, _)| metric.is_comparable())
            .filter_map(|(metric, ours)| Some((*metric, ratio(*ours, *peer.metrics.get(metric)?)?)))
            .collect();
        Self {
            subject: "ratio",
            peer: Some(peer.subject),
            failed: None,
            metrics,
            ..self.clone()
        }
    }
}

/// A round without a figure, because all failed in it, takes no part in that figure's median;
/// `failed` tells.
fn medians(rounds: &[Round]) -> Metrics {
    let mut samples: BTreeMap<Metric, Vec<f64>> = BTreeMap::new();
    for round in rounds {
        for (&metric, &value) in &round.metrics {
            samples.entry(metric).or_default().push(value);
        }
    }
    samples
        .into_iter()
        .filter_map(|(metric, values)| Some((metric, median(&values)?)))
        .collect()
}

fn serialize_rounded<S: Serializer>(metrics: &Metrics, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_map(
        metrics
            .iter()
            .map(|(metric, value)| (metric, rounded(*value))),
    )
}

/// The first column to the left, numbers to the right.
fn align(lines: &[Vec<String>]) -> String {
    let columns = lines.first().map_or(0, Vec::len);
    let widths: Vec<usize> = (0..columns)
        .map(|column| {
            lines
                .iter()
                .map(|line| line[column].len())
                .max()
                .unwrap_or_default()
        })
        .collect();
    let mut text = String::new();
    for line in lines {
        for (column, (cell, &width)) in line.iter().zip(&widths).enumerate() {
            // Writing to a String cannot fail.
            let _ = if column == 0 {
                write!(text, "{cell:width$}")
            } else {
                write!(text, "  {cell:>width$}")
            };
        }
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn round(failed: usize, figures: &[(Metric, f64)]) -> Round {
        Round {
            failed,
            metrics: figures.iter().copied().collect(),
        }
    }

    fn lines(report: &Report) -> Vec<Value> {
        report
            .json_lines()
            .lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect()
    }

    #[test]
    fn rows_hold_medians_and_all_failures() {
        let rounds = [2.0, 9.0, 4.0]
            .map(|p50| round(1, &[(Metric::P50Ms, p50), (Metric::RatePerS, 10.0)]))
            .to_vec();
        let report = Report::new("burst", 5, &[(Subject::Kubelet, rounds)]);
        assert_eq!(
            lines(&report),
            [
                json!({"bench": "burst", "subject": "kubelet", "n": 5, "rounds": 3, "failed": 3,
                    "rate_per_s": 10.0, "p50_ms": 4.0})
            ]
        );
        assert_eq!(report.failed(), 3);
    }

    #[test]
    fn each_peer_gets_a_ratio_with_the_keys_that_both_have() {
        let ours = vec![round(0, &[(Metric::P50Ms, 1.0), (Metric::RatePerS, 30.0)])];
        let kubelet = vec![round(0, &[(Metric::P50Ms, 3.0), (Metric::RatePerS, 0.0)])];
        let null = vec![round(0, &[(Metric::RatePerS, 60.0)])];
        let subjects = [
            (Subject::Sandman, ours),
            (Subject::Null, null),
            (Subject::Kubelet, kubelet),
        ];
        let lines = lines(&Report::new("burst", 5, &subjects));
        assert_eq!(lines.len(), 5);
        assert_eq!(
            lines[3],
            json!({"bench": "burst", "subject": "ratio", "peer": "null", "n": 5, "rounds": 1,
                   "rate_per_s": 0.5})
        );
        // Nothing is divided by zero, and thirds are rounded.
        assert_eq!(
            lines[4],
            json!({"bench": "burst", "subject": "ratio", "peer": "kubelet", "n": 5, "rounds": 1,
                   "p50_ms": 0.333})
        );
    }

    #[test]
    fn a_round_in_which_all_failed_only_counts_as_failures() {
        let rounds = vec![round(5, &[]), round(0, &[(Metric::P50Ms, 3.0)])];
        let lines = lines(&Report::new("exec", 5, &[(Subject::Sandman, rounds)]));
        assert_eq!(lines[0]["failed"], 5);
        assert_eq!(lines[0]["p50_ms"], 3.0);
    }

    #[test]
    fn without_any_success_there_are_no_figures() {
        let report = Report::new("exec", 5, &[(Subject::Sandman, vec![round(5, &[])])]);
        assert_eq!(lines(&report)[0].get("p50_ms"), None);
        assert!(latencies(&[]).is_empty());
    }

    #[test]
    fn cases_are_rows_of_their_own() {
        let case = |name, value| {
            let subjects = vec![
                (Subject::Sandman, vec![round(0, &[(Metric::MbPerS, value)])]),
                (Subject::Kubelet, vec![round(0, &[(Metric::MbPerS, 10.0)])]),
            ];
            Case::new(name, 1, subjects)
        };
        let report = Report::of_cases("stream", &[case("in", 20.0), case("out", 30.0)]);
        let report = report.with_runtime(Some("runc"));
        let lines = lines(&report);
        assert_eq!(lines.len(), 6);
        assert_eq!(lines[0]["runtime"], "runc");
        assert_eq!(lines[1].get("runtime"), None);
        assert_eq!(lines[2]["case"], "in");
        assert_eq!(lines[2]["mb_per_s"], 2.0);
        assert_eq!(lines[5]["case"], "out");
        assert_eq!(lines[5]["mb_per_s"], 3.0);
        assert!(report.table().contains("out: sandman / kubelet"));
    }

    #[test]
    fn the_table_is_aligned() {
        let subjects = [
            (Subject::Sandman, vec![round(0, &[(Metric::P50Ms, 1.0)])]),
            (Subject::Kubelet, vec![round(12, &[])]),
        ];
        let table = Report::new("exec", 5, &subjects).table();
        let lengths: BTreeSet<usize> = table.lines().map(str::len).collect();
        assert_eq!(lengths.len(), 1, "{table}");
    }
}
