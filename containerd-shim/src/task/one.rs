//! One task: a container and its first process.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use containerd_shim_protos::api;

use super::console::Console;
use super::error::{Result, TaskError};
use super::process::{Phase, Process, State};
use super::processes::{End, Exit, Name, Processes};
use super::record::Record;
use super::{Shared, rootfs};
use crate::events::{Event, What};
use crate::runc::{Container, Runc, Settings, SpecView, Streams};
use crate::stats;
use crate::stdio::{Names, Opened, Owner};

/// What a create request says.
pub(crate) struct CreateTask {
    pub(crate) id: String,
    pub(crate) bundle: PathBuf,
    pub(crate) rootfs: Vec<api::Mount>,
    pub(crate) stdio: Names,
    pub(crate) runc: Settings,
}

/// See the module.
pub(crate) struct Task {
    pub(super) shared: Arc<Shared>,
    pub(super) container: Container,
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

    /// Makes the container. What was made is undone if any of it fails.
    pub(super) async fn create(shared: &Arc<Shared>, request: CreateTask) -> Result<Arc<Self>> {
        let words = "task state";
        let dir = shared.task_dir(&request.id);
        let view = read_spec(&request.bundle)?;
        crate::stdio::check(&request.stdio)?;
        fs::create_dir_all(&dir).map_err(TaskError::io(words))?;
        let mut record = Record {
            id: request.id.clone(),
            bundle: request.bundle.clone(),
            stdio: request.stdio.clone(),
            runc: request.runc.clone(),
            pid: 0,
            started: false,
            exit: None,
        };
        // First of all: who finds this folder knows what else there may be.
        record.save(&dir).map_err(TaskError::io(words))?;
        let container = container(shared, &record, &dir);
        let made = Self::make(shared, &request, &container).await;
        let (pid, end, opened) = match made {
            Ok(made) => made,
            Err(error) => {
                discard(&container, &record, &dir).await;
                return Err(error);
            }
        };
        record.pid = pid;
        let owner = owner(shared, &record.id);
        let begun = match record.save(&dir) {
            Ok(()) => opened.begin(&owner).await,
            Err(error) => Err(TaskError::failed(words, error)),
        };
        let io = match begun {
            Ok(io) => io,
            Err(error) => {
                discard(&container, &record, &dir).await;
                shared.processes.forget_after(owner.name.key()?, end);
                return Err(error);
            }
        };
        let state = State {
            pid,
            phase: Phase::Created,
        };
        let task = Self::assemble(shared, record, dir, container, view, state);
        task.init.attach(io);
        task.publish(What::Created {
            bundle: &task.bundle.to_string_lossy(),
            rootfs: &request.rootfs,
            stdio: &task.init.stdio,
            pid: state.pid(),
        });
        task.follow(end);
        Ok(task)
    }

    async fn make(
        shared: &Shared,
        request: &CreateTask,
        container: &Container,
    ) -> Result<(i32, End, Opened)> {
        let bundle = &request.bundle;
        if !request.rootfs.is_empty() {
            let root = bundle.join("rootfs");
            fs::create_dir_all(&root).map_err(TaskError::io("rootfs"))?;
            rootfs::mount_all(&request.rootfs, &root)?;
        }
        let owner = owner(shared, &request.id);
        if request.stdio.terminal {
            let words = "terminal";
            let console = Console::bind(&shared.dir).map_err(TaskError::io(words))?;
            let (pid, end) = container
                .create(bundle, Streams::default(), Some(console.path()))
                .await?;
            let master = console.receive().map_err(TaskError::io(words))?;
            let opened = Opened::terminal(&request.stdio, &owner, master).await?;
            Ok((pid, end, opened))
        } else {
            let (streams, opened) = Opened::pipes(&request.stdio, &owner).await?;
            let (pid, end) = container.create(bundle, streams, None).await?;
            Ok((pid, end, opened))
        }
    }

    fn assemble(
        shared: &Arc<Shared>,
        record: Record,
        dir: PathBuf,
        container: Container,
        view: SpecView,
        state: State,
    ) -> Arc<Self> {
        Arc::new(Self {
            shared: Arc::clone(shared),
            container,
            init: Process::new(record.stdio.clone(), Vec::new(), state),
            execs: Mutex::default(),
            id: record.id.clone(),
            bundle: record.bundle.clone(),
            dir,
            shares_pids: view.shares_pid_namespace(),
            gate: tokio::sync::Mutex::new(record),
        })
    }

    /// The task recorded in `dir`, if it is still one.
    pub(super) async fn recover(shared: &Arc<Shared>, dir: &Path) -> Result<Option<Arc<Self>>> {
        let words = "task state";
        let Some(record) = Record::load(dir).map_err(TaskError::io(words))? else {
            // Killed before the record, so before anything else.
            fs::remove_dir_all(dir).map_err(TaskError::io(words))?;
            return Ok(None);
        };
        let container = container(shared, &record, dir);
        if record.pid == 0 {
            tracing::info!(id = record.id, "removing a half-made container");
            discard(&container, &record, dir).await;
            return Ok(None);
        }
        let owner = owner(shared, &record.id);
        let taken = shared.processes.take(&owner.name).await?;
        let phase = match (record.exit, record.started) {
            (Some(exit), _) => Phase::Stopped(exit.into()),
            (None, false) => Phase::Created,
            (None, true) if container.paused().await => Phase::Paused,
            (None, true) => Phase::Running,
        };
        let state = State {
            pid: record.pid,
            phase,
        };
        let told = record.exit;
        let stdio = record.stdio.clone();
        let view = read_spec(&record.bundle).unwrap_or_default();
        let task = Self::assemble(shared, record, dir.to_owned(), container, view, state);
        if let Some(exit) = told {
            // It may have been killed between the record and the event.
            task.publish(What::Exited {
                exec: "",
                pid: state.pid(),
                exit: exit.into(),
            });
        }
        let owner = task.owner();
        match taken {
            Some(taken) => {
                let opened = Opened::adopted(&stdio, taken.fds)?;
                task.init.attach(opened.run(&owner)?);
                if told.is_none() {
                    task.follow(shared.processes.expect(&owner.name.key()?));
                }
            }
            None if told.is_none() => task.lost().await,
            None => {}
        }
        Ok(Some(task))
    }

    /// Waits for the first process's end.
    fn follow(self: &Arc<Self>, end: End) {
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
    async fn lost(&self) {
        tracing::warn!(id = self.id, "the container is lost and is ended");
        if let Err(error) = self.container.delete(true).await {
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
            && let Err(error) = self.container.kill(9, true).await
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
        self.container.start().await?;
        self.init.enter(Phase::Running);
        record.started = true;
        self.save(&record);
        let state = self.init.state();
        self.publish(What::Started { pid: state.pid() });
        match oom {
            Ok(watch) => self.follow_oom(watch),
            Err(error) => tracing::warn!(%error, id = self.id, "no events for lack of memory"),
        }
        Ok(state)
    }

    fn follow_oom(self: &Arc<Self>, mut watch: stats::oom::Watch) {
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
        self.container.kill(signal, all).await
    }

    pub(super) async fn pause(&self) -> Result<()> {
        let _record = self.gate.lock().await;
        match self.init.state().phase {
            Phase::Running => {}
            _ => return Err(refused("cannot pause a process that is not running")),
        }
        self.container.pause().await?;
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
        self.container.resume().await?;
        self.init.enter(Phase::Running);
        self.publish(What::Resumed);
        Ok(())
    }

    pub(super) async fn update(&self, resources: &[u8]) -> Result<()> {
        let _record = self.gate.lock().await;
        self.container.update(resources).await
    }

    /// Removes the container, which has ended or was never started.
    pub(super) async fn delete(&self) -> Result<(State, Exit)> {
        let mut record = self.gate.lock().await;
        match self.init.state().phase {
            Phase::Stopped(_) => self.container.delete(false).await?,
            Phase::Created => self.container.delete(true).await?,
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
            self.shared.processes.forget(&name).await;
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

    fn owner(&self) -> Owner<'_> {
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
fn owner<'a>(shared: &'a Shared, id: &'a str) -> Owner<'a> {
    Owner {
        id,
        namespace: &shared.namespace,
        processes: &shared.processes,
        name: Name::Task(id),
    }
}

fn container(shared: &Shared, record: &Record, dir: &Path) -> Container {
    let runc = Runc::new(
        record.runc.clone(),
        dir.to_owned(),
        Some(Arc::clone(&shared.processes)),
    );
    Container::new(runc, &record.id)
}

/// Undoes what a create left.
pub(super) async fn discard(container: &Container, record: &Record, dir: &Path) {
    if let Err(error) = container.delete(true).await {
        tracing::warn!(%error, id = record.id, "removing a container that could not be made");
    }
    if let Err(error) = remove_files(record, dir) {
        tracing::warn!(%error, id = record.id, "removing a container that could not be made");
    }
}

/// The last steps of a deletion. The record goes last.
fn remove_files(record: &Record, dir: &Path) -> Result<()> {
    rootfs::unmount_all(&record.bundle.join("rootfs"));
    match fs::remove_dir_all(dir) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(TaskError::failed("task state", error))
        }
        _ => Ok(()),
    }
}

/// The parts of the bundle's spec that matter here.
fn read_spec(bundle: &Path) -> Result<SpecView> {
    let path = bundle.join("config.json");
    let bytes = fs::read(&path).map_err(TaskError::io(format!("{}", path.display())))?;
    serde_json::from_slice(&bytes).map_err(|error| {
        TaskError::InvalidArgument(format!("{}: not an OCI spec: {error}", path.display()))
    })
}

/// What [`remove_left`] found.
pub(crate) struct Removed {
    /// The first process; 0 if none was known.
    pub(crate) pid: i32,
    /// Its end; unknown unless recorded.
    pub(crate) exit: Exit,
}

/// Removes a task whose shim is gone: `dir` is the shim's folder, `bundle` containerd's.
pub(crate) async fn remove_left(dir: &Path, id: &str, bundle: &Path) -> Result<Removed> {
    let holder = dir.join(crate::holder::SOCKET);
    let dir = dir.join("tasks").join(id);
    let Some(record) = Record::load(&dir).map_err(TaskError::io("task state"))? else {
        // Never made, or removed by the shim just before it ended.
        rootfs::unmount_all(&bundle.join("rootfs"));
        return Ok(Removed {
            pid: 0,
            exit: Exit::unknown(),
        });
    };
    let runc = Runc::new(record.runc.clone(), dir.clone(), None);
    Container::new(runc, id).delete(true).await?;
    // Without a shim nobody else is connected to the holder.
    if let Ok(processes) = Processes::connect(&holder).await {
        forget_all(&processes, id).await;
    }
    remove_files(&record, &dir)?;
    Ok(Removed {
        pid: record.pid,
        exit: record.exit.map_or_else(Exit::unknown, Exit::from),
    })
}

/// Forgets a task's processes, which have been killed.
async fn forget_all(processes: &Arc<Processes>, id: &str) {
    let Ok(entries) = processes.list().await else {
        return;
    };
    for entry in entries {
        if !Name::belongs(&entry.key, id) {
            continue;
        }
        let end = processes.expect(&entry.key);
        if tokio::time::timeout(FORGET, end).await.is_ok() {
            processes.forget_key(&entry.key).await;
        }
    }
}

/// How long the kernel may take to end a process that was killed.
const FORGET: std::time::Duration = std::time::Duration::from_secs(1);
