//! The task service: what containerd asks of a shim, for many tasks in one process.
//!
//! `service` speaks ttrpc, [`Tasks`] finds the task, `one` and `exec` do it. Who makes a container,
//! `backend` tells: `own` by our launcher, for what its subset leaves out the `runc` module. Each process of a task has a gate: start, exit and delete go
//! through it one at a time, so their events are in order. State is read without it.

pub(crate) mod backend;
pub(crate) mod console;
pub(crate) mod convert;
pub(crate) mod error;
mod exec;
mod make;
mod one;
mod options;
mod own;
pub(crate) mod process;
pub(crate) mod processes;

pub(crate) mod record;
pub(crate) mod rootfs;
mod service;
pub(crate) mod sys;

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

pub(crate) use make::{Removed, remove_left};
pub(crate) use service::services;

use crate::events::Publisher;
use crate::launch::Launcher;
use error::{Result, TaskError};
use one::Task;
use processes::{Name, Processes};

/// What all tasks of a shim share.
pub(crate) struct Shared {
    /// containerd's namespace.
    pub(crate) namespace: String,
    /// The shim's folder.
    pub(crate) dir: PathBuf,
    /// Who starts processes and tells their ends.
    pub(crate) processes: Arc<Processes>,
    /// Makes what it can; the rest is runc's, and everything where the kernel lacks what it needs.
    pub(crate) launcher: Option<Arc<Launcher>>,
    /// Events to containerd.
    pub(crate) events: Publisher,
}

impl Shared {
    /// Folder of the task `id`.
    fn task_dir(&self, id: &str) -> PathBuf {
        self.dir.join("tasks").join(id)
    }
}

/// All tasks of this shim, by container id.
pub(crate) struct Tasks {
    shared: Arc<Shared>,
    /// `None` while one is being made.
    tasks: Mutex<HashMap<String, Option<Arc<Task>>>>,
    idle: Box<dyn Fn() + Send + Sync>,
    settled: Box<dyn Fn(&str) + Send + Sync>,
}

impl Tasks {
    /// No tasks yet. `events` is containerd's ttrpc address; `dir` the shim's folder; `idle` is
    /// called when containerd asks the shim to end and no task is left.
    pub(crate) fn new(
        namespace: &str,
        dir: &Path,
        events: &str,
        processes: Arc<Processes>,
        launcher: Option<Launcher>,
        idle: impl Fn() + Send + Sync + 'static,
    ) -> Self {
        Self {
            shared: Arc::new(Shared {
                namespace: namespace.to_owned(),
                dir: dir.to_owned(),
                events: Publisher::start(events, namespace),
                processes,
                launcher: launcher.map(Arc::new),
            }),
            tasks: Mutex::default(),
            idle: Box::new(idle),
            settled: Box::new(|_| {}),
        }
    }

    /// Calls `settled` with the id of each task that was made or could not be.
    #[must_use]
    pub(crate) fn settled_by(mut self, settled: impl Fn(&str) + Send + Sync + 'static) -> Self {
        self.settled = Box::new(settled);
        self
    }

    /// Waits, within reason, until containerd has taken all events.
    pub(crate) async fn flush_events(&self) {
        self.shared.events.flush().await;
    }

    /// Takes over what an earlier shim of this folder left: running containers are adopted, ended
    /// ones are told again, half-made ones removed.
    ///
    /// # Errors
    /// If the records cannot be listed. One that cannot be used is logged and left.
    pub(crate) async fn recover(&self) -> io::Result<()> {
        let entries = self.shared.processes.list().await;
        let entries = entries.map_err(io::Error::other)?;
        self.shared.processes.tidy(&entries);
        self.recover_tasks().await?;
        for entry in &entries {
            let Some((id, exec)) = Name::exec_of(&entry.key) else {
                continue;
            };
            let recovered = match self.get(id) {
                Ok(task) => task.recover_exec(exec).await,
                // It ended with its container, in whose deletion a shim was killed.
                Err(_) => {
                    let name = Name::Exec(id, exec);
                    self.shared.processes.forget_when_ended(&name).await;
                    Ok(())
                }
            };
            if let Err(error) = recovered {
                tracing::error!(%error, id, exec, "an exec cannot be taken over");
            }
        }
        Ok(())
    }

    async fn recover_tasks(&self) -> io::Result<()> {
        let listing = match fs::read_dir(self.shared.dir.join("tasks")) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            other => other?,
        };
        for entry in listing {
            let dir = entry?.path();
            match Task::recover(&self.shared, &dir).await {
                Ok(Some(task)) => {
                    self.lock().insert(task.id().to_owned(), Some(task));
                }
                Ok(None) => {}
                Err(error) => {
                    tracing::error!(%error, dir = %dir.display(), "a task cannot be taken over");
                }
            }
        }
        Ok(())
    }

    fn get(&self, id: &str) -> Result<Arc<Task>> {
        self.lock()
            .get(id)
            .and_then(Clone::clone)
            .ok_or_else(|| TaskError::NotFound(format!("container {id:?} does not exist")))
    }

    /// Takes the name `id` for a task that is being made; given back unless it is filled.
    fn reserve(&self, id: &str) -> Result<Reservation<'_>> {
        match self.lock().entry(id.to_owned()) {
            Entry::Occupied(_) => Err(TaskError::AlreadyExists(format!(
                "container {id:?} already exists"
            ))),
            Entry::Vacant(vacant) => {
                vacant.insert(None);
                Ok(Reservation {
                    tasks: self,
                    id: id.to_owned(),
                })
            }
        }
    }

    fn remove(&self, id: &str) {
        self.lock().remove(id);
    }

    /// Called for each Shutdown, which may come after every deletion.
    fn shutdown(&self) {
        if self.lock().is_empty() {
            (self.idle)();
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, Option<Arc<Task>>>> {
        self.tasks.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A name without a task.
struct Reservation<'a> {
    tasks: &'a Tasks,
    id: String,
}

impl Reservation<'_> {
    fn fill(self, task: Arc<Task>) {
        self.tasks.lock().insert(self.id.clone(), Some(task));
    }
}

impl Drop for Reservation<'_> {
    fn drop(&mut self) {
        (self.tasks.settled)(&self.id);
        let mut tasks = self.tasks.lock();
        if matches!(tasks.get(&self.id), Some(None)) {
            tasks.remove(&self.id);
        }
    }
}

/// Ids become file names here: containerd's own rule for them, which excludes slashes and dots
/// alone.
pub(crate) fn check_id(field: &str, id: &str) -> Result<()> {
    let inner = |byte: u8| byte.is_ascii_alphanumeric();
    let valid = (1..=76).contains(&id.len())
        && id.bytes().all(|byte| inner(byte) || b"-_.".contains(&byte))
        && id.bytes().next().is_some_and(inner)
        && id.bytes().last().is_some_and(inner);
    if valid {
        Ok(())
    } else {
        Err(TaskError::InvalidArgument(format!(
            "{field} {id:?}: must be 1 to 76 letters, digits, '-', '_' or '.', and begin and end \
             with a letter or digit"
        )))
    }
}

#[cfg(test)]
mod tests {
    use super::check_id;

    #[test]
    fn ids_are_file_names() {
        for id in ["a", "A-b_c.d", "0", &"x".repeat(76)] {
            check_id("id", id).unwrap();
        }
        for id in [
            "",
            ".",
            "..",
            "a/b",
            "-a",
            "a.",
            "a b",
            "ä",
            &"x".repeat(77),
        ] {
            assert!(check_id("id", id).is_err(), "{id:?}");
        }
    }
}
