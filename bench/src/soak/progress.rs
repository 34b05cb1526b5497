//! What a soak has seen so far, which may be kept in a file.

use std::collections::VecDeque;
use std::fs;
use std::io;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, ensure};
use serde::{Deserialize, Serialize};

use super::things::Things;

/// Pods whose latencies are compared, at the beginning and at the end.
const PART: usize = 1000;

/// State of one soak.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Progress {
    /// Of the dev cluster: on another one, nothing of this is comparable.
    instance: String,
    /// Pods requested.
    pub(super) created: usize,
    /// Of these, those of which something went wrong.
    pub(super) failed: usize,
    ready: usize,
    first: Vec<f64>,
    last: VecDeque<f64>,
    /// What there was before the first pod.
    pub(super) before: Things,
}

impl Progress {
    pub(super) fn new(instance: &str, before: Things) -> Self {
        Self {
            instance: instance.to_owned(),
            created: 0,
            failed: 0,
            ready: 0,
            first: Vec::new(),
            last: VecDeque::new(),
            before,
        }
    }

    /// Reads what an earlier run left; nothing if there is no file.
    pub(super) fn load(file: &Path, instance: &str) -> anyhow::Result<Option<Self>> {
        let bytes = match fs::read(file) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            bytes => bytes.with_context(|| format!("--progress {}", file.display()))?,
        };
        let progress: Self = serde_json::from_slice(&bytes)
            .with_context(|| format!("--progress {}", file.display()))?;
        ensure!(
            progress.instance == instance,
            "--progress {} is about another cluster; remove it to begin anew",
            file.display()
        );
        Ok(Some(progress))
    }

    /// Writes the file anew; a crash leaves the old or the new one.
    pub(super) fn save(&self, file: &Path) -> anyhow::Result<()> {
        let new = file.with_extension("new");
        fs::write(&new, serde_json::to_vec(self)?)
            .and_then(|()| fs::rename(&new, file))
            .with_context(|| format!("--progress {}", file.display()))
    }

    /// A pod became Ready.
    pub(super) fn ready(&mut self, took: Duration) {
        let milliseconds = took.as_secs_f64() * 1e3;
        self.ready += 1;
        if self.first.len() < PART {
            self.first.push(milliseconds);
        }
        if self.last.len() == PART {
            self.last.pop_front();
        }
        self.last.push_back(milliseconds);
    }

    /// Latencies of the first thousand in milliseconds, or of the first tenth if that is less.
    pub(super) fn first(&self) -> Vec<f64> {
        let part = self.part().min(self.first.len());
        self.first[..part].to_vec()
    }

    /// The same of the last.
    pub(super) fn last(&self) -> Vec<f64> {
        let skip = self.last.len().saturating_sub(self.part());
        self.last.iter().skip(skip).copied().collect()
    }

    fn part(&self) -> usize {
        PART.min(self.ready.div_ceil(10))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ran(pods: u64) -> Progress {
        let mut progress = Progress::new("a", Things::default());
        for pod in 0..pods {
            progress.ready(Duration::from_millis(pod));
        }
        progress
    }

    #[test]
    fn the_first_and_the_last_are_apart() {
        let few = ran(25);
        assert_eq!(few.first(), [0.0, 1.0, 2.0]);
        assert_eq!(few.last(), [22.0, 23.0, 24.0]);
        let many = ran(50_000);
        assert_eq!((many.first().len(), many.last().len()), (PART, PART));
        assert_eq!((many.first()[0], many.last()[PART - 1]), (0.0, 49_999.0));
        assert!(ran(0).first().is_empty() && ran(0).last().is_empty());
    }

    #[test]
    fn a_soak_goes_on_only_where_it_was() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("soak.json");
        assert_eq!(Progress::load(&file, "a").unwrap(), None);
        let progress = ran(25);
        progress.save(&file).unwrap();
        assert_eq!(Progress::load(&file, "a").unwrap(), Some(progress));
        assert!(Progress::load(&file, "b").is_err());
        fs::write(&file, "{").unwrap();
        assert!(Progress::load(&file, "a").is_err());
    }
}
