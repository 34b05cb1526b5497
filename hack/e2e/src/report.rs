//! What the tests came to, read from the JSON report that ginkgo writes.

use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::Context;
use serde::Deserialize;

/// One test that ran.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Spec {
    /// The full name, which filters match and which the expectations list.
    pub(crate) name: String,
    pub(crate) outcome: Outcome,
    pub(crate) time: Duration,
    /// How often it ran.
    pub(crate) attempts: u32,
    /// First line of the reason, unless it passed.
    pub(crate) reason: String,
}

/// How a test ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outcome {
    Passed,
    /// In whatever way: an assertion, a panic, too late.
    Failed,
    /// The test itself found that it does not apply here.
    Skipped,
}

/// A whole run.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Report {
    /// Tests that ran, and steps around them that failed.
    pub(crate) specs: Vec<Spec>,
    /// Names of all tests there are, also of those that were not asked for.
    pub(crate) known: Vec<String>,
    /// Number of tests that were asked for and did not run.
    pub(crate) unfinished: usize,
}

/// Longest reason that is shown, in characters.
const MAX_REASON: usize = 160;

mod json {
    //! The parts of ginkgo's report that matter here.

    use serde::Deserialize;

    #[derive(Debug, Deserialize)]
    #[serde(rename_all = "PascalCase")]
    pub(super) struct Suite {
        pub(super) pre_run_stats: Stats,
        pub(super) spec_reports: Vec<Node>,
    }

    #[derive(Debug, Deserialize)]
    #[serde(rename_all = "PascalCase")]
    pub(super) struct Stats {
        pub(super) specs_that_will_run: usize,
    }

    #[derive(Debug, Deserialize)]
    #[serde(rename_all = "PascalCase")]
    pub(super) struct Node {
        #[serde(default, deserialize_with = "super::null_is_empty")]
        pub(super) container_hierarchy_texts: Vec<String>,
        pub(super) leaf_node_type: String,
        pub(super) leaf_node_text: String,
        pub(super) state: String,
        /// Nanoseconds.
        pub(super) run_time: u64,
        pub(super) num_attempts: u32,
        pub(super) failure: Option<Failure>,
    }

    #[derive(Debug, Deserialize)]
    #[serde(rename_all = "PascalCase")]
    pub(super) struct Failure {
        #[serde(default)]
        pub(super) message: String,
    }
}

/// Reads a report.
///
/// # Errors
/// It is not there or not ginkgo's.
pub(crate) fn read(path: &Path) -> anyhow::Result<Report> {
    let bytes = fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    let suites: Vec<json::Suite> = serde_json::from_slice(&bytes)
        .with_context(|| format!("{} is no report of ginkgo", path.display()))?;
    let mut report = Report::default();
    for suite in suites {
        take(&mut report, suite);
    }
    Ok(report)
}

fn take(report: &mut Report, suite: json::Suite) {
    let mut ran = 0;
    for node in suite.spec_reports {
        let is_test = node.leaf_node_type == "It";
        let spec = spec(&node);
        if is_test {
            report.known.push(spec.name.clone());
            // A filter skips a test without trying it.
            if node.num_attempts > 0 {
                ran += 1;
                report.specs.push(spec);
            }
        } else if spec.outcome == Outcome::Failed {
            report.specs.push(spec);
        }
    }
    report.unfinished += suite.pre_run_stats.specs_that_will_run.saturating_sub(ran);
}

fn spec(node: &json::Node) -> Spec {
    let mut words: Vec<&str> = node
        .container_hierarchy_texts
        .iter()
        .map(String::as_str)
        .collect();
    let step;
    if node.leaf_node_type != "It" {
        step = format!("[{}]", node.leaf_node_type);
        words.insert(0, &step);
    }
    words.push(&node.leaf_node_text);
    let message = node.failure.as_ref().map_or("", |failure| &failure.message);
    Spec {
        name: words.join(" ").trim_end().to_owned(),
        outcome: match node.state.as_str() {
            "passed" => Outcome::Passed,
            "skipped" | "pending" => Outcome::Skipped,
            _ => Outcome::Failed,
        },
        time: Duration::from_nanos(node.run_time),
        attempts: node.num_attempts,
        reason: match message.lines().find(|line| !line.trim().is_empty()) {
            Some(line) => line.trim().chars().take(MAX_REASON).collect(),
            None if node.state == "passed" => String::new(),
            None => node.state.clone(),
        },
    }
}

fn null_is_empty<'de, D, T>(deserializer: D) -> Result<Vec<T>, D::Error>
where
    D: serde::Deserializer<'de>,
    T: Deserialize<'de>,
{
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}

// === impl Report ===

impl Report {
    /// Number of tests that ended like this.
    pub(crate) fn count(&self, outcome: Outcome) -> usize {
        self.specs
            .iter()
            .filter(|spec| spec.outcome == outcome)
            .count()
    }

    /// Tests that passed, but not at once.
    pub(crate) fn flaky(&self) -> impl Iterator<Item = &Spec> {
        self.specs
            .iter()
            .filter(|spec| spec.outcome == Outcome::Passed && spec.attempts > 1)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
pub(crate) mod tests {
    use serde_json::{Value, json};

    use super::*;

    /// A spec as other modules' tests need it.
    pub(crate) fn made(name: &str, outcome: Outcome, seconds: u64) -> Spec {
        Spec {
            name: name.to_owned(),
            outcome,
            time: Duration::from_secs(seconds),
            attempts: 1,
            reason: String::new(),
        }
    }

    fn node(kind: &str, texts: Value, text: &str, state: &str, attempts: u32) -> Value {
        json!({
            "ContainerHierarchyTexts": texts, "LeafNodeType": kind, "LeafNodeText": text,
            "State": state, "RunTime": 2_000_000_000_u64, "NumAttempts": attempts,
            "LeafNodeLabels": null,
        })
    }

    fn parse(will_run: usize, nodes: Vec<Value>) -> anyhow::Result<Report> {
        let file = tempfile::NamedTempFile::new().unwrap();
        let suites = json!([{
            "PreRunStats": {"SpecsThatWillRun": will_run},
            "SpecReports": nodes,
        }]);
        fs::write(file.path(), suites.to_string()).unwrap();
        read(file.path())
    }

    #[test]
    fn outcomes_names_and_reasons() {
        let mut failed = node(
            "It",
            json!(["[sig-node] Pods", "when"]),
            "fails",
            "panicked",
            1,
        );
        failed["Failure"] = json!({"Message": "\n  timed out\nlong story"});
        let report = parse(
            3,
            vec![
                node("SynchronizedBeforeSuite", Value::Null, "", "passed", 1),
                node("It", json!(["[sig-node] Pods"]), "runs", "passed", 1),
                failed,
                node("It", json!([]), "does not apply", "skipped", 1),
                node("It", json!([]), "was not asked for", "skipped", 0),
            ],
        )
        .unwrap();
        let seen: Vec<_> = report
            .specs
            .iter()
            .map(|spec| (spec.name.as_str(), spec.outcome, spec.reason.as_str()))
            .collect();
        assert_eq!(
            seen,
            [
                ("[sig-node] Pods runs", Outcome::Passed, ""),
                ("[sig-node] Pods when fails", Outcome::Failed, "timed out"),
                ("does not apply", Outcome::Skipped, "skipped"),
            ]
        );
        assert_eq!(report.specs[0].time, Duration::from_secs(2));
        assert_eq!(report.known.len(), 4);
        assert_eq!(report.count(Outcome::Failed), 1);
    }

    #[test]
    fn what_passed_at_the_second_attempt_is_flaky() {
        let nodes = vec![
            node("It", json!([]), "at once", "passed", 1),
            node("It", json!([]), "at last", "passed", 2),
            node("It", json!([]), "never", "failed", 2),
        ];
        let report = parse(3, nodes).unwrap();
        let flaky: Vec<_> = report.flaky().map(|spec| spec.name.as_str()).collect();
        assert_eq!(flaky, ["at last"]);
    }

    #[test]
    fn a_run_that_was_cut_short_says_so() {
        let report = parse(2, vec![node("It", json!([]), "runs", "passed", 1)]).unwrap();
        assert_eq!(report.unfinished, 1);
    }

    #[test]
    fn a_failed_step_around_the_tests_counts() {
        let nodes = vec![
            node("SynchronizedBeforeSuite", Value::Null, "", "failed", 1),
            node("It", json!([]), "never ran", "skipped", 0),
        ];
        let report = parse(1, nodes).unwrap();
        assert_eq!(report.specs[0].name, "[SynchronizedBeforeSuite]");
        assert_eq!(report.unfinished, 1);
    }
}
