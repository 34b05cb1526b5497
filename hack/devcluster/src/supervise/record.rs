//! Which process runs a component. Written by the process itself just before it becomes the
//! component, read by every later command.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Context;
use serde::{Deserialize, Serialize};

use super::Identity;

/// The last process of a component.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Record {
    /// Name of the component.
    pub(crate) name: String,
    /// Its process.
    #[serde(flatten)]
    pub(crate) identity: Identity,
    /// Hash of all that the process was started with.
    pub(crate) fingerprint: String,
}

impl Record {
    /// Writes the record in one step.
    pub(crate) fn write(&self, dir: &Path) -> anyhow::Result<()> {
        let path = file(dir, &self.name);
        let temporary = path.with_extension("new");
        fs::write(&temporary, serde_json::to_vec(self)?)
            .with_context(|| format!("cannot write {}", temporary.display()))?;
        Ok(fs::rename(temporary, path)?)
    }

    /// The record of a component, if there is one.
    pub(crate) fn read(dir: &Path, name: &str) -> Option<Self> {
        serde_json::from_slice(&fs::read(file(dir, name)).ok()?).ok()
    }

    /// All records, by name.
    pub(crate) fn read_all(dir: &Path) -> Vec<Self> {
        let Ok(entries) = fs::read_dir(dir) else {
            return Vec::new();
        };
        let mut records: Vec<Self> = entries
            .flatten()
            .filter(|entry| entry.path().extension().is_some_and(|e| e == "json"))
            .filter_map(|entry| serde_json::from_slice(&fs::read(entry.path()).ok()?).ok())
            .collect();
        records.sort_by(|a, b| a.name.cmp(&b.name));
        records
    }
}

fn file(dir: &Path, name: &str) -> PathBuf {
    dir.join(format!("{name}.json"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_read_back_and_rubbish_is_skipped() {
        let dir = tempfile::tempdir().unwrap();
        let record = Record {
            name: "etcd".into(),
            identity: Identity::own().unwrap(),
            fingerprint: "f".into(),
        };
        record.write(dir.path()).unwrap();
        fs::write(dir.path().join("half.json"), "{").unwrap();
        assert_eq!(Record::read(dir.path(), "etcd").as_ref(), Some(&record));
        assert_eq!(Record::read_all(dir.path()), [record]);
        assert_eq!(Record::read(dir.path(), "half"), None);
    }
}
