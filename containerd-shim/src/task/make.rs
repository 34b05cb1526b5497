//! Makes tasks, takes them over from an earlier shim, and removes what is left of them.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use containerd_shim_protos::api;
use oci_spec::runtime::Spec;

use super::backend::{Backend, Maker};
use super::console::Console;
use super::error::{Result, TaskError};
use super::one::{Task, owner};
use super::own::{self, NotMade, Parts, Sandbox};
use super::process::{Phase, State};
use super::processes::{End, Exit, Name, Processes};
use super::record::Record;
use super::{Shared, rootfs};
use crate::events::What;
use crate::launch::cgroup::Cgroup;
use crate::launch::{Launcher, SLOT_GATE, Subset, subset};
use crate::runc::{Container, Runc, Settings, SpecView, Streams};
use crate::stdio::{Names, Opened};

/// What a create request says.
pub(crate) struct CreateTask {
    pub(crate) id: String,
    pub(crate) bundle: PathBuf,
    pub(crate) rootfs: Vec<api::Mount>,
    pub(crate) stdio: Names,
    pub(crate) runc: Settings,
}

/// A container whose command waits for the start.
struct Made {
    backend: Backend,
    pid: i32,
    end: End,
    streams: Opened,
}

/// How long the kernel may take to end a process that was killed.
const END: Duration = Duration::from_secs(10);

impl Task {
    /// Makes the container. What was made is undone if any of it fails.
    pub(super) async fn create(shared: &Arc<Shared>, request: CreateTask) -> Result<Arc<Self>> {
        let words = "task state";
        let dir = shared.task_dir(&request.id);
        let config = read_config(&request.bundle)?;
        let view = SpecView::parse(&config)?;
        crate::stdio::check(&request.stdio)?;
        let own = match plan_own(shared, &request, &config) {
            Ok(own) => Some(own),
            Err(field) => {
                tracing::info!(id = request.id, field, "made by runc");
                None
            }
        };
        let mut record = Record {
            id: request.id.clone(),
            bundle: request.bundle.clone(),
            stdio: request.stdio.clone(),
            maker: match &own {
                Some(own) => Maker::Launcher {
                    cgroup: own.subset.cgroup.clone(),
                    memory_cgroup: own.subset.memory_cgroup.clone(),
                },
                None => Maker::Runc(request.runc.clone()),
            },
            pid: 0,
            started: false,
            exit: None,
        };
        fs::create_dir_all(&dir).map_err(TaskError::io(words))?;
        // First of all: who finds this folder knows what else there may be.
        record.save(&dir).map_err(TaskError::io(words))?;
        let made = Box::pin(make(shared, &request, own, &mut record)).await;
        let done = match made {
            Ok(made) => Self::begin(shared, &request, record.clone(), &view, made).await,
            Err(error) => Err(error),
        };
        if done.is_err() {
            discard(shared, &record).await;
        }
        done
    }

    async fn begin(
        shared: &Arc<Shared>,
        request: &CreateTask,
        mut record: Record,
        view: &SpecView,
        made: Made,
    ) -> Result<Arc<Self>> {
        record.pid = made.pid;
        let dir = shared.task_dir(&record.id);
        record.save(&dir).map_err(TaskError::io("task state"))?;
        let io = made.streams.begin(&owner(shared, &record.id)).await?;
        let state = State {
            pid: made.pid,
            phase: Phase::Created,
        };
        let task = Self::assemble(shared, record, made.backend, view, state);
        task.init.attach(io);
        task.publish(What::Created {
            bundle: &task.bundle().to_string_lossy(),
            rootfs: &request.rootfs,
            stdio: &task.init.stdio,
            pid: state.pid(),
        });
        task.follow(made.end);
        Ok(task)
    }

    /// The task recorded in `dir`, if it is still one.
    pub(super) async fn recover(shared: &Arc<Shared>, dir: &Path) -> Result<Option<Arc<Self>>> {
        let words = "task state";
        let Some(record) = Record::load(dir).map_err(TaskError::io(words))? else {
            // Killed before the record, so before anything else.
            fs::remove_dir_all(dir).map_err(TaskError::io(words))?;
            return Ok(None);
        };
        if record.pid == 0 {
            tracing::info!(id = record.id, "removing a half-made container");
            discard(shared, &record).await;
            return Ok(None);
        }
        let taken = shared.processes.take(&Name::Task(&record.id)).await?;
        let known = taken.is_some();
        let mut fds = taken.map(|taken| taken.fds).unwrap_or_default();
        let gate = fds.iter().position(|(slot, _)| *slot == SLOT_GATE);
        let gate = gate.map(|at| fds.swap_remove(at).1);
        let (backend, started) = match (&record.maker, &shared.launcher) {
            (Maker::Runc(settings), _) => {
                let container = container(shared, &record.id, settings);
                (Backend::Runc(container), record.started)
            }
            (
                Maker::Launcher {
                    cgroup,
                    memory_cgroup,
                },
                Some(launcher),
            ) => {
                // The gate goes when the start is through; the record follows it.
                let started = record.started || gate.is_none();
                let (processes, id) = (&shared.processes, &record.id);
                let cgroup = cgroup.as_deref();
                let cgroup = cgroup.map(|path| launcher.cgroup(path, memory_cgroup.as_deref()));
                let cgroup = cgroup.transpose();
                let cgroup = cgroup.map_err(TaskError::io("taking a sandbox over"))?;
                let sandbox = Sandbox::adopt(launcher, processes, id, cgroup, gate)?;
                (Backend::Own(sandbox), started)
            }
            (Maker::Launcher { .. }, None) => {
                return Err(TaskError::Failed("this shim has no launcher".into()));
            }
        };
        let phase = match (record.exit, started) {
            (Some(exit), _) => Phase::Stopped(exit.into()),
            (None, false) => Phase::Created,
            (None, true) if backend.paused().await => Phase::Paused,
            (None, true) => Phase::Running,
        };
        let state = State {
            pid: record.pid,
            phase,
        };
        let (told, stdio) = (record.exit, record.stdio.clone());
        let view = read_config(&record.bundle)
            .and_then(|config| SpecView::parse(&config))
            .unwrap_or_default();
        let task = Self::assemble(shared, record, backend, &view, state);
        let opened = Opened::adopted(&stdio, fds)?;
        task.init.attach(opened.run(&task.owner())?);
        match told {
            // It may have been killed between the record and the event.
            Some(exit) => task.publish(What::Exited {
                exec: "",
                pid: state.pid(),
                exit: exit.into(),
            }),
            None if known => {
                if started {
                    task.watch_memory();
                }
                task.follow(shared.processes.expect(&task.owner().name.key()?));
            }
            None => task.lost().await,
        }
        Ok(Some(task))
    }
}

/// What the launcher makes of a request.
struct Own {
    spec: Spec,
    subset: Subset,
}

/// The request, if our launcher makes it; else the field that it leaves out.
fn plan_own(
    shared: &Shared,
    request: &CreateTask,
    config: &[u8],
) -> std::result::Result<Box<Own>, String> {
    if shared.launcher.is_none() {
        return Err("the host (no launcher)".into());
    }
    if request.runc.systemd_cgroup {
        return Err("options.systemd_cgroup".into());
    }
    // runc has the words for a spec that is none.
    let spec: Spec =
        serde_json::from_slice(config).map_err(|error| format!("config.json: {error}"))?;
    let mut subset = subset::read(&spec).map_err(|outside| outside.field)?;
    subset.cgroup = Some(own::cgroup_path(&spec, &request.id));
    Ok(Box::new(Own { spec, subset }))
}

async fn make(
    shared: &Shared,
    request: &CreateTask,
    own: Option<Box<Own>>,
    record: &mut Record,
) -> Result<Made> {
    if let (Some(own), Some(launcher)) = (own, &shared.launcher) {
        match make_own(shared, launcher, request, own).await {
            Ok(made) => return Ok(made),
            Err(NotMade::Failed(error)) => return Err(error),
            Err(NotMade::Outside(field)) => {
                tracing::info!(id = request.id, field, "made by runc");
                record.maker = Maker::Runc(request.runc.clone());
                let dir = shared.task_dir(&request.id);
                record.save(&dir).map_err(TaskError::io("task state"))?;
            }
        }
    }
    make_by_runc(shared, request).await
}

async fn make_own(
    shared: &Shared,
    launcher: &Arc<Launcher>,
    request: &CreateTask,
    own: Box<Own>,
) -> std::result::Result<Made, NotMade> {
    let owner = owner(shared, &request.id);
    let (streams, opened) = if request.stdio.terminal {
        (Streams::default(), None)
    } else {
        let (streams, opened) = Opened::pipes(&request.stdio, &owner).await?;
        (streams, Some(opened))
    };
    let own = *own;
    let parts = Parts {
        subset: own.subset,
        process: own.spec.process().as_ref(),
        root: request.rootfs.clone(),
        bundle: &request.bundle,
        streams,
    };
    let made = Sandbox::create(launcher, &shared.processes, &request.id, parts).await?;
    let streams = match (opened, made.terminal) {
        (Some(opened), _) => opened,
        (None, Some(master)) => Opened::terminal(&request.stdio, &owner, master).await?,
        (None, None) => {
            let words = "terminal: process.terminal is not set in the spec";
            return Err(TaskError::InvalidArgument(words.into()).into());
        }
    };
    Ok(Made {
        backend: Backend::Own(made.sandbox),
        pid: made.pid,
        end: made.end,
        streams,
    })
}

async fn make_by_runc(shared: &Shared, request: &CreateTask) -> Result<Made> {
    let container = container(shared, &request.id, &request.runc);
    let bundle = &request.bundle;
    if !request.rootfs.is_empty() {
        let root = bundle.join("rootfs");
        fs::create_dir_all(&root).map_err(TaskError::io("rootfs"))?;
        rootfs::mount_all(&request.rootfs, &root)?;
    }
    let owner = owner(shared, &request.id);
    let ((pid, end), streams) = if request.stdio.terminal {
        let words = "terminal";
        let console = Console::bind(&shared.dir).map_err(TaskError::io(words))?;
        let socket = Some(console.path());
        let started = container.create(bundle, Streams::default(), socket).await?;
        let master = console.receive().map_err(TaskError::io(words))?;
        let opened = Opened::terminal(&request.stdio, &owner, master).await?;
        (started, opened)
    } else {
        let (streams, opened) = Opened::pipes(&request.stdio, &owner).await?;
        (container.create(bundle, streams, None).await?, opened)
    };
    Ok(Made {
        backend: Backend::Runc(container),
        pid,
        end,
        streams,
    })
}

fn container(shared: &Shared, id: &str, settings: &Settings) -> Container {
    let processes = Some(Arc::clone(&shared.processes));
    Container::new(
        Runc::new(settings.clone(), shared.task_dir(id), processes),
        id,
    )
}

/// Undoes what a create left.
async fn discard(shared: &Shared, record: &Record) {
    let dir = shared.task_dir(&record.id);
    let removed = match &record.maker {
        Maker::Runc(settings) => container(shared, &record.id, settings).delete(true).await,
        Maker::Launcher { cgroup, .. } => {
            remove_own(&shared.processes, &record.id, cgroup.as_deref()).await
        }
    };
    shared.processes.end(&Name::Task(&record.id), END).await;
    if let Err(error) = removed.and_then(|()| remove_files(record, &dir)) {
        tracing::warn!(%error, id = record.id, "removing a container that could not be made");
    }
}

async fn remove_own(processes: &Arc<Processes>, id: &str, cgroup: Option<&Path>) -> Result<()> {
    let cgroup = cgroup.map(Cgroup::open).transpose();
    let cgroup = cgroup.map_err(TaskError::io("linux.cgroupsPath"))?;
    own::remove(processes, id, cgroup).await
}

/// The last steps of a deletion. The record goes last.
pub(super) fn remove_files(record: &Record, dir: &Path) -> Result<()> {
    rootfs::unmount_all(&record.bundle.join("rootfs"));
    match fs::remove_dir_all(dir) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(TaskError::failed("task state", error))
        }
        _ => Ok(()),
    }
}

fn read_config(bundle: &Path) -> Result<Vec<u8>> {
    let path = bundle.join("config.json");
    fs::read(&path).map_err(TaskError::io(path.display()))
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
    // Without a shim nobody else is connected to the holder; without a holder nothing runs.
    let processes = Processes::connect(&holder, || ()).await.ok();
    match (&record.maker, &processes) {
        (Maker::Runc(settings), _) => {
            let runc = Runc::new(settings.clone(), dir.clone(), None);
            Container::new(runc, id).delete(true).await?;
        }
        (Maker::Launcher { cgroup, .. }, Some(processes)) => {
            remove_own(processes, id, cgroup.as_deref()).await?;
        }
        (
            Maker::Launcher {
                cgroup: Some(path), ..
            },
            None,
        ) => {
            let cgroup = Cgroup::open(path).map_err(TaskError::io("linux.cgroupsPath"))?;
            own::remove_cgroup(cgroup).await?;
        }
        (Maker::Launcher { cgroup: None, .. }, None) => {}
    }
    if let Some(processes) = &processes {
        processes.end(&Name::Task(id), END).await;
        processes.end_execs(id, END).await;
    }
    remove_files(&record, &dir)?;
    Ok(Removed {
        pid: record.pid,
        exit: record.exit.map_or_else(Exit::unknown, Exit::from),
    })
}
