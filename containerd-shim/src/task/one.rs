//! One task: a container and its first process.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::Shared;
use super::backend::Backend;
use super::error::{Result, TaskError};
use super::make::remove_files;
use super::process::{Phase, Process, State};
use super::processes::{End, Exit, Name};
use super::record::Record;
use crate::events::{Event, What};
use crate::runc::SpecView;
use crate::stats;
use crate::stdio::Owner;

/// See the module.
pub(crate) struct Task {
    pub(super) shared: Arc<Shared>,
    pub(super) backend: Backend,
    pub(super) init: Process,
    pub(super) execs: Mutex<HashMap<String, Arc<Process>>>,
    /// Start, end and deletion of the first process, one at a time.
    gate: tokio::sync::Mutex<Record>,
    id: String,
    bundle: PathBuf,
    dir: PathBuf,
    /// Processes can outlive the first one, so its end kills them.
    shares_pids: bool,
}

impl Task {
    pub(crate) fn id(&self) -> &str {
        &self.id
    }

    pub(crate) fn bundle(&self) -> &Path {
        &self.bundle
    }

    /// A task in `state`, whose ends nobody follows yet.
    pub(super) fn assemble(
        shared: &Arc<Shared>,
        record: Record,
        backend: Backend,
        view: &SpecView,
        state: State,
    ) -> Arc<Self> {
        Arc::new(Self {
            shared: Arc::clone(shared),
            backend,
            init: Process::new(record.stdio.clone(), Vec::new(), state),
            execs: Mutex::default(),
            id: record.id.clone(),
            bundle: record.bundle.clone(),
            dir: shared.task_dir(&record.id),
            shares_pids: view.shares_pid_namespace(),
            gate: tokio::sync::Mutex::new(record),
        })
    }

    /// Waits for the first process's end.
    pub(super) fn follow(self: &Arc<Self>, end: End) {
        let task = Arc::clone(self);
        tokio::spawn(async move {
            match end.await {
                Ok(exit) => task.ended(exit).await,
                Err(_) => task.lost().await,
            }
        });
    }

    /// The holder is gone, or knows nothing of the container: how it ends will not be seen, so it
    /// is ended now.
    pub(super) async fn lost(&self) {
        tracing::warn!(id = self.id, "the container is lost and is ended");
        if let Err(error) = self.backend.delete(true).await {
            tracing::error!(%error, id = self.id, "ending a lost container");
        }
        self.ended(Exit::unknown()).await;
    }

    async fn ended(&self, exit: Exit) {
        self.init.enter(Phase::Stopped(exit));
        let mut record = self.gate.lock().await;
        self.tell_end(&mut record).await;
    }

    /// Records and publishes the end once, if it has come.
    async fn tell_end(&self, record: &mut Record) {
        let state = self.init.state();
        let (Some(exit), None) = (state.exit(), record.exit) else {
            return;
        };
        if self.shares_pids
            && let Err(error) = self.backend.kill(9, true).await
            && !matches!(error, TaskError::NotFound(_))
        {
            tracing::warn!(%error, id = self.id, "killing what the container left");
        }
        record.exit = Some(exit.into());
        self.save(record);
        self.publish(What::Exited {
            exec: "",
            pid: state.pid(),
            exit,
        });
    }

    /// Lets the container's command go.
    pub(super) async fn start(self: &Arc<Self>) -> Result<State> {
        let mut record = self.gate.lock().await;
        match self.init.state().phase {
            Phase::Created => {}
            Phase::Stopped(_) => return Err(refused("cannot start a stopped process")),
            _ => return Err(refused("cannot start a running process")),
        }
        let oom = stats::oom::Watch::new(self.init.state().pid);
        self.backend.start().await?;
        self.init.enter(Phase::Running);
        record.started = true;
        self.save(&record);
        let state = self.init.state();
        self.publish(What::Started { pid: state.pid() });
        self.follow_oom(oom);
        Ok(state)
    }

    /// Publishes kills for lack of memory from now on.
    pub(super) fn watch_memory(self: &Arc<Self>) {
        self.follow_oom(stats::oom::Watch::new(self.init.state().pid));
    }

    fn follow_oom(self: &Arc<Self>, watch: std::io::Result<Option<stats::oom::Watch>>) {
        let mut watch = match watch {
            Ok(Some(watch)) => watch,
            Ok(None) => return,
            Err(error) => {
                tracing::warn!(%error, id = self.id, "no events for lack of memory");
                return;
            }
        };
        let task = Arc::downgrade(self);
        tokio::spawn(async move {
            while watch.next().await {
                let Some(task) = task.upgrade() else { return };
                task.publish(What::OutOfMemory);
            }
        });
    }

    /// Sends a signal to the first process or to all.
    pub(super) async fn kill(&self, signal: u32, all: bool) -> Result<()> {
        if self.init.state().exit().is_some() && !all {
            return Err(TaskError::NotFound("process already finished".into()));
        }
        self.backend.kill(signal, all).await
    }

    pub(super) async fn pause(&self) -> Result<()> {
        let _record = self.gate.lock().await;
        match self.init.state().phase {
            Phase::Running => {}
            _ => return Err(refused("cannot pause a process that is not running")),
        }
        self.backend.pause().await?;
        self.init.enter(Phase::Paused);
        self.publish(What::Paused);
        Ok(())
    }

    pub(super) async fn resume(&self) -> Result<()> {
        let _record = self.gate.lock().await;
        match self.init.state().phase {
            Phase::Paused => {}
            _ => return Err(refused("cannot resume a process that is not paused")),
        }
        self.backend.resume().await?;
        self.init.enter(Phase::Running);
        self.publish(What::Resumed);
        Ok(())
    }

    pub(super) async fn update(&self, resources: &[u8]) -> Result<()> {
        let _record = self.gate.lock().await;
        self.backend.update(resources).await
    }

    /// Removes the container, which has ended or was never started.
    pub(super) async fn delete(&self) -> Result<(State, Exit)> {
        let mut record = self.gate.lock().await;
        match self.init.state().phase {
            Phase::Stopped(_) => self.backend.delete(false).await?,
            Phase::Created => self.backend.delete(true).await?,
            _ => return Err(refused("cannot delete a running process")),
        }
        let (state, exit) = self.init.wait().await?;
        self.tell_end(&mut record).await;
        if let Some(io) = self.init.io() {
            io.drain().await;
        }
        // Further processes that the client has not deleted: they have ended with it.
        let execs: Vec<String> = self.execs().keys().cloned().collect();
        for exec in &execs {
            let name = Name::Exec(&self.id, exec);
            self.shared.processes.forget_when_ended(&name).await;
        }
        self.shared.processes.forget(&Name::Task(&self.id)).await;
        remove_files(&record, &self.dir)?;
        self.publish(What::Deleted {
            pid: state.pid(),
            exit,
        });
        Ok((state, exit))
    }

    pub(super) fn publish(&self, what: What<'_>) {
        self.shared.events.publish(&Event { id: &self.id, what });
    }

    fn save(&self, record: &Record) {
        if let Err(error) = record.save(&self.dir) {
            tracing::error!(%error, id = self.id, "the task's record cannot be written");
        }
    }

    pub(super) fn owner(&self) -> Owner<'_> {
        owner(&self.shared, &self.id)
    }

    pub(super) fn execs(&self) -> MutexGuard<'_, HashMap<String, Arc<Process>>> {
        self.execs.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

pub(super) fn refused(words: &str) -> TaskError {
    TaskError::FailedPrecondition(words.into())
}

/// The first process of the task `id`.
pub(super) fn owner<'a>(shared: &'a Shared, id: &'a str) -> Owner<'a> {
    Owner {
        id,
        namespace: &shared.namespace,
        processes: &shared.processes,
        name: Name::Task(id),
    }
}
