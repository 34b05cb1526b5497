//! Counts by group of tests, as a table.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::time::Duration;

use crate::report::{Outcome, Report, Spec};

/// Counts of one group.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Row {
    passed: usize,
    failed: usize,
    skipped: usize,
    /// Sum over its tests.
    time: Duration,
}

/// The special interest group that owns a test, and the strictest promise that it is part of.
fn group(name: &str) -> String {
    let owner = name
        .find("[sig-")
        .and_then(|start| name[start + 1..].split(']').next())
        .unwrap_or("around the tests");
    let promise = ["NodeConformance", "Conformance"]
        .into_iter()
        .find(|promise| name.contains(&format!("[{promise}]")));
    match promise {
        Some(promise) => format!("{owner} {promise}"),
        None => owner.to_owned(),
    }
}

fn rows(report: &Report) -> BTreeMap<String, Row> {
    let mut rows: BTreeMap<String, Row> = BTreeMap::new();
    for Spec {
        name,
        outcome,
        time,
        ..
    } in &report.specs
    {
        let row = rows.entry(group(name)).or_default();
        row.time += *time;
        match outcome {
            Outcome::Passed => row.passed += 1,
            Outcome::Failed => row.failed += 1,
            Outcome::Skipped => row.skipped += 1,
        }
    }
    rows
}

/// The table of one node; `wall` is what the whole run took.
pub(crate) fn of(node: &str, report: &Report, wall: Duration) -> String {
    let mut text = format!(
        "{:<32} {:>7} {:>7} {:>7} {:>8}\n",
        node, "passed", "failed", "skipped", "time"
    );
    let mut line = |name: &str, row: &Row| {
        // Writing to a String cannot fail.
        let _ = writeln!(
            text,
            "{name:<32} {:>7} {:>7} {:>7} {:>7}s",
            row.passed,
            row.failed,
            row.skipped,
            row.time.as_secs()
        );
    };
    for (name, row) in rows(report) {
        line(&name, &row);
    }
    let all = Row {
        passed: report.count(Outcome::Passed),
        failed: report.count(Outcome::Failed),
        skipped: report.count(Outcome::Skipped),
        time: wall,
    };
    line("all, by the clock", &all);
    text
}

/// The closing line.
pub(crate) fn counts(report: &Report) -> String {
    format!(
        "{} passed, {} failed, {} skipped",
        report.count(Outcome::Passed),
        report.count(Outcome::Failed),
        report.count(Outcome::Skipped)
    )
}

/// Names of the tests that passed in one report and did not in the other, both ways.
pub(crate) fn beside(ours: &Report, theirs: &Report) -> (Vec<String>, Vec<String>) {
    let only = |one: &Report, other: &Report| {
        let passed = |spec: &&Spec| spec.outcome == Outcome::Passed;
        one.specs
            .iter()
            .filter(passed)
            .map(|spec| spec.name.clone())
            .filter(|name| {
                let mut same = other.specs.iter().filter(|spec| spec.name == *name);
                same.all(|spec| spec.outcome != Outcome::Passed)
            })
            .collect()
    };
    (only(ours, theirs), only(theirs, ours))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::tests::made;

    fn report(specs: Vec<Spec>) -> Report {
        Report {
            specs,
            ..Report::default()
        }
    }

    #[test]
    fn groups_are_owners_and_promises() {
        for (name, want) in [
            (
                "[sig-node] Pods a [NodeConformance] [Conformance]",
                "sig-node NodeConformance",
            ),
            ("[sig-cli] Kubectl b [Conformance]", "sig-cli Conformance"),
            ("[sig-cli] Kubectl c", "sig-cli"),
            ("[SynchronizedBeforeSuite]", "around the tests"),
        ] {
            assert_eq!(group(name), want);
        }
    }

    #[test]
    fn counts_and_times_add_up() {
        let report = report(vec![
            made("[sig-cli] a", Outcome::Passed, 3),
            made("[sig-cli] b", Outcome::Failed, 4),
            made("[sig-node] c [Conformance]", Outcome::Skipped, 0),
        ]);
        assert_eq!(
            of("sandman", &report, Duration::from_secs(5)),
            "sandman                           passed  failed skipped     time\n\
             sig-cli                                1       1       0       7s\n\
             sig-node Conformance                   0       0       1       0s\n\
             all, by the clock                      1       1       1       5s\n"
        );
        assert_eq!(counts(&report), "1 passed, 1 failed, 1 skipped");
    }

    #[test]
    fn two_nodes_side_by_side() {
        let ours = report(vec![
            made("a", Outcome::Passed, 1),
            made("b", Outcome::Failed, 1),
        ]);
        let theirs = report(vec![
            made("a", Outcome::Failed, 1),
            made("b", Outcome::Passed, 1),
        ]);
        assert_eq!(beside(&ours, &theirs), (vec!["a".into()], vec!["b".into()]));
    }
}
