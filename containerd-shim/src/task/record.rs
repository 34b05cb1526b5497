//! What must be known of a task after this process was killed.
//!
//! A folder a task in the shim's state, not in containerd's bundle: the next shim finds all of them
//! by one listing, without knowing how containerd names its folders.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use super::backend::Maker;
use super::processes::Exit;
use crate::stdio::Names;

/// See the module.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Record {
    /// The container's id.
    pub(crate) id: String,
    /// containerd's folder of it.
    pub(crate) bundle: PathBuf,
    /// Streams of the first process.
    pub(crate) stdio: Names,
    /// Who made the container.
    pub(crate) maker: Maker,
    /// The first process; 0 while the container is being made.
    pub(crate) pid: i32,
    /// Whether the container's command has been let go.
    pub(crate) started: bool,
    /// The end of the first process.
    pub(crate) exit: Option<ExitRecord>,
}

/// An end, in the record's terms.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ExitRecord {
    status: u32,
    /// Nanoseconds since 1970.
    at: u64,
}

impl From<Exit> for ExitRecord {
    fn from(exit: Exit) -> Self {
        let since = exit.at.duration_since(UNIX_EPOCH).unwrap_or_default();
        Self {
            status: exit.status,
            at: u64::try_from(since.as_nanos()).unwrap_or(u64::MAX),
        }
    }
}

impl From<ExitRecord> for Exit {
    fn from(exit: ExitRecord) -> Self {
        Self {
            status: exit.status,
            at: UNIX_EPOCH
                .checked_add(Duration::from_nanos(exit.at))
                .unwrap_or_else(SystemTime::now),
        }
    }
}

/// Name of a record in its folder.
const FILE: &str = "task.json";

impl Record {
    /// Reads the record in `dir`; none if its folder or it is not there.
    ///
    /// # Errors
    /// If it cannot be read or is not one.
    pub(crate) fn load(dir: &Path) -> io::Result<Option<Self>> {
        match fs::read(dir.join(FILE)) {
            Ok(bytes) => Ok(Some(serde_json::from_slice(&bytes)?)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Writes it to `dir`, whole or not at all.
    pub(crate) fn save(&self, dir: &Path) -> io::Result<()> {
        let new = dir.join("task.json.new");
        fs::write(&new, serde_json::to_vec(self)?)?;
        fs::rename(new, dir.join(FILE))
    }
}

#[cfg(test)]
mod tests {
    use super::{Exit, Maker, Record};
    use crate::stdio::Names;

    #[test]
    fn a_record_comes_back() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(Record::load(dir.path()).unwrap(), None);
        let exit = Exit {
            status: 3,
            at: std::time::UNIX_EPOCH + std::time::Duration::from_nanos(5),
        };
        let record = Record {
            id: "a".into(),
            bundle: "/b".into(),
            stdio: Names::default(),
            maker: Maker::Launcher {
                cgroup: Some("/c".into()),
                memory_cgroup: Some("/m".into()),
            },
            pid: 7,
            started: true,
            exit: Some(exit.into()),
        };
        record.save(dir.path()).unwrap();
        let loaded = Record::load(dir.path()).unwrap().unwrap();
        assert_eq!(loaded, record);
        assert_eq!(loaded.exit.map(Exit::from), Some(exit));
    }
}
