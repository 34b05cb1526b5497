//! The tests that are known not to pass, each with its reason, and how a run differs from them.
//! A difference either way is a finding: what is listed and passes hides the next regression.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use anyhow::{Context, bail};

use crate::report::{Outcome, Report};

/// `tests/conformance/expected.txt`: a line that starts in the first column is a reason; the
/// indented lines below it are names of tests that do not pass for it. `#` starts a comment.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Expected {
    reasons: BTreeMap<String, String>,
}

/// How a run differs from what was expected.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Difference {
    /// Name and reason of tests that did not pass and should have.
    pub(crate) regressions: Vec<(String, String)>,
    /// Tests that passed and are listed.
    pub(crate) improvements: Vec<String>,
    /// Listed names that no test has.
    pub(crate) unknown: Vec<String>,
    /// Number of tests that were asked for and did not run.
    pub(crate) unfinished: usize,
}

impl Expected {
    /// Reads the file's content.
    ///
    /// # Errors
    /// A name without a reason, or listed twice.
    pub(crate) fn parse(text: &str) -> anyhow::Result<Self> {
        let mut reasons = BTreeMap::new();
        let mut reason = None;
        for (index, line) in text.lines().enumerate() {
            let number = index + 1;
            let content = line.trim();
            if content.is_empty() || line.starts_with('#') {
                continue;
            }
            if !line.starts_with(char::is_whitespace) {
                reason = Some(content);
                continue;
            }
            let reason = reason
                .with_context(|| format!("line {number}: a test without a reason above it"))?;
            if reasons
                .insert(content.to_owned(), reason.to_owned())
                .is_some()
            {
                bail!("line {number}: listed twice: {content}");
            }
        }
        Ok(Self { reasons })
    }

    /// Compares what ran.
    pub(crate) fn compare(&self, report: &Report) -> Difference {
        let known: BTreeSet<&str> = report.known.iter().map(String::as_str).collect();
        let mut difference = Difference {
            unfinished: report.unfinished,
            unknown: self
                .reasons
                .keys()
                .filter(|name| !known.contains(name.as_str()))
                .cloned()
                .collect(),
            ..Difference::default()
        };
        for spec in &report.specs {
            let listed = self.reasons.contains_key(&spec.name);
            match (spec.outcome, listed) {
                (Outcome::Passed, true) => difference.improvements.push(spec.name.clone()),
                (Outcome::Passed, false) | (Outcome::Failed | Outcome::Skipped, true) => {}
                (Outcome::Failed | Outcome::Skipped, false) => difference
                    .regressions
                    .push((spec.name.clone(), spec.reason.clone())),
            }
        }
        difference.regressions.sort();
        difference.improvements.sort();
        difference
    }
}

// === impl Difference ===

impl Difference {
    /// Whether all is as expected.
    pub(crate) fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.regressions.is_empty() {
            writeln!(f, "did not pass and is not listed:")?;
        }
        for (name, reason) in &self.regressions {
            writeln!(f, "  {name}\n      {reason}")?;
        }
        if !self.improvements.is_empty() {
            writeln!(f, "passed and is listed; take it off the list:")?;
        }
        for name in &self.improvements {
            writeln!(f, "  {name}")?;
        }
        if !self.unknown.is_empty() {
            writeln!(f, "listed, and no test has that name:")?;
        }
        for name in &self.unknown {
            writeln!(f, "  {name}")?;
        }
        if self.unfinished > 0 {
            writeln!(
                f,
                "the run was cut short: {} tests did not run",
                self.unfinished
            )?;
        }
        Ok(())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::report::tests::made;

    const LIST: &str = "# comment\n\nNo probes yet.\n  a\n  b\nNo Services.\n  c\n  gone\n";

    #[test]
    fn names_stand_below_their_reason() {
        let expected = Expected::parse(LIST).unwrap();
        assert_eq!(expected.reasons["b"], "No probes yet.");
        assert_eq!(expected.reasons["c"], "No Services.");
        for bad in ["  a\n", "Reason.\n  a\nOther.\n  a\n"] {
            assert!(Expected::parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn differences_either_way() {
        let report = Report {
            specs: vec![
                made("a", Outcome::Failed, 1),
                made("b", Outcome::Passed, 1),
                made("d", Outcome::Passed, 1),
                made("e", Outcome::Failed, 1),
                made("f", Outcome::Skipped, 1),
            ],
            known: ["a", "b", "c", "d", "e", "f"].map(str::to_owned).to_vec(),
            unfinished: 1,
        };
        let difference = Expected::parse(LIST).unwrap().compare(&report);
        let names: Vec<_> = difference
            .regressions
            .iter()
            .map(|(name, _)| name)
            .collect();
        assert_eq!(names, ["e", "f"]);
        assert_eq!(difference.improvements, ["b"]);
        assert_eq!(difference.unknown, ["gone"]);
        assert_eq!(difference.unfinished, 1);
        assert!(!difference.is_empty());
        let text = difference.to_string();
        assert!(text.contains("take it off the list:\n  b\n"), "{text}");
    }

    #[test]
    fn what_did_not_run_says_nothing() {
        let report = Report {
            specs: vec![made("a", Outcome::Failed, 1)],
            known: ["a", "b", "c", "gone"].map(str::to_owned).to_vec(),
            unfinished: 0,
        };
        assert!(Expected::parse(LIST).unwrap().compare(&report).is_empty());
    }

    #[test]
    fn the_list_of_this_repository_is_sound() {
        let list = include_str!("../../../tests/conformance/expected.txt");
        assert!(Expected::parse(list).is_ok());
    }
}
