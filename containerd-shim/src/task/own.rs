//! A container that our own launcher has made.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use containerd_shim_protos::api;
use nix::sys::signal::Signal;
use oci_spec::runtime::{LinuxResources, Process, Spec};

use super::error::{Result, TaskError};
use super::processes::{End, Name, Processes, holder_error};
use crate::launch::cgroup::Cgroup;
use crate::launch::{
    CreateError, Exec, Gate, Launcher, PrepareError, Prepared, RootMount, Rootfs, SLOT_GATE,
    Streams, Subset,
};
use crate::runc::{self, Started, null};

/// See the module.
pub(crate) struct Sandbox {
    id: String,
    launcher: Arc<Launcher>,
    processes: Arc<Processes>,
    /// Open between create and start.
    gate: Mutex<Option<Gate>>,
    cgroup: Option<Cgroup>,
}

/// What a sandbox is made of.
pub(crate) struct Parts<'a> {
    /// The spec, as it was read.
    pub(crate) subset: Subset,
    /// Its first process.
    pub(crate) process: Option<&'a Process>,
    /// Mounts of its root; without any, a folder of the bundle.
    pub(crate) root: Vec<api::Mount>,
    /// containerd's folder of it.
    pub(crate) bundle: &'a Path,
    /// Its streams, unless it has a terminal.
    pub(crate) streams: runc::Streams,
}

/// A sandbox that waits for its start.
pub(crate) struct Made {
    pub(crate) sandbox: Sandbox,
    pub(crate) pid: i32,
    pub(crate) end: End,
    /// The terminal's master, if it has one.
    pub(crate) terminal: Option<OwnedFd>,
}

/// Why there is none.
pub(crate) enum NotMade {
    /// It is for runc, because of this field.
    Outside(String),
    /// It cannot be made.
    Failed(TaskError),
}

impl From<TaskError> for NotMade {
    fn from(error: TaskError) -> Self {
        Self::Failed(error)
    }
}

/// How long the kernel may take to end what was killed, to freeze, and to let a cgroup go.
const END: Duration = Duration::from_secs(10);
/// Between looks at what the kernel tells of in no other way.
const LOOK: Duration = Duration::from_millis(1);

impl Sandbox {
    /// Makes `id` of `parts`: its process waits for [`Self::start`].
    pub(crate) async fn create(
        launcher: &Arc<Launcher>,
        processes: &Arc<Processes>,
        id: &str,
        parts: Parts<'_>,
    ) -> std::result::Result<Made, NotMade> {
        let words = "OCI runtime create failed";
        let name = Name::Task(id);
        let key = name.key()?;
        let streams = launch_streams(parts.subset.terminal, parts.process, parts.streams)
            .map_err(TaskError::io(words))?;
        let path = parts.bundle.join(&parts.subset.root_path);
        let (subset, root, maker) = (parts.subset, parts.root, Arc::clone(launcher));
        let prepared = blocking(words, move || {
            let mounts: Vec<RootMount> = root.into_iter().map(root_mount).collect();
            let rootfs = if mounts.is_empty() {
                Rootfs::Path(&path)
            } else {
                Rootfs::Mounts(&mounts)
            };
            maker.prepare_read(subset, rootfs, streams)
        })
        .await?;
        let prepared = match prepared {
            Ok(prepared) => prepared,
            Err(PrepareError::Outside(outside)) => return Err(NotMade::Outside(outside.field)),
            Err(error) => return Err(TaskError::failed(words, error).into()),
        };
        // Before it can end.
        let end = processes.expect(&key);
        match prepared.create(processes.client(), &key, &[]).await {
            Ok(created) => Ok(Made {
                sandbox: Self {
                    id: id.to_owned(),
                    launcher: Arc::clone(launcher),
                    processes: Arc::clone(processes),
                    gate: Mutex::new(Some(created.gate)),
                    cgroup: created.cgroup,
                },
                pid: created.pid,
                end,
                terminal: created.terminal,
            }),
            Err(CreateError::Holder(error)) => Err(holder_error(error).into()),
            Err(error) => Err(TaskError::failed(words, error).into()),
        }
    }

    /// The sandbox `id`, made by an earlier shim, with the gate that it left.
    pub(crate) fn adopt(
        launcher: &Arc<Launcher>,
        processes: &Arc<Processes>,
        id: &str,
        cgroup: Option<Cgroup>,
        gate: Option<OwnedFd>,
    ) -> Result<Self> {
        let words = "taking a sandbox over";
        let gate = gate.map(Gate::from_fd).transpose();
        Ok(Self {
            id: id.to_owned(),
            launcher: Arc::clone(launcher),
            processes: Arc::clone(processes),
            gate: Mutex::new(gate.map_err(TaskError::io(words))?),
            cgroup,
        })
    }

    /// Lets its command go.
    pub(crate) async fn start(&self) -> Result<()> {
        let words = "OCI runtime start failed";
        let gate = self
            .gate
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        let Some(gate) = gate else {
            return Err(TaskError::failed(words, "it was started before"));
        };
        gate.start()
            .await
            .map_err(|error| TaskError::failed(words, error))?;
        let key = Name::Task(&self.id).key()?;
        self.processes.drop_slot(&key, SLOT_GATE).await;
        Ok(())
    }

    /// Starts another process: `process` is an OCI process as JSON, `bundle` has the sandbox's
    /// spec, `first` is its first process. Returns the terminal's master if it is to have one.
    pub(crate) async fn exec(
        &self,
        name: &Name<'_>,
        process: &[u8],
        bundle: &Path,
        first: i32,
        terminal: bool,
        streams: runc::Streams,
    ) -> Result<(Started, Option<OwnedFd>)> {
        let words = "OCI runtime exec failed";
        let prepared = self
            .prepare_exec(words, process, bundle, first, terminal, streams)
            .await?;
        // What was opened by the number `first` is the sandbox's only if that has not ended.
        if !self.processes.runs(&Name::Task(&self.id)).await? {
            return Err(TaskError::failed(
                words,
                "cannot exec in a stopped container",
            ));
        }
        let key = name.key()?;
        let end = self.processes.expect(&key);
        let created = match prepared.create(self.processes.client(), &key, &[]).await {
            Ok(created) => created,
            Err(CreateError::Holder(error)) => return Err(holder_error(error)),
            Err(error) => return Err(exec_failed(words, &error)),
        };
        if let Err(error) = created.gate.start().await {
            return Err(exec_failed(words, &error));
        }
        self.processes.drop_slot(&key, SLOT_GATE).await;
        Ok(((created.pid, end), created.terminal))
    }

    async fn prepare_exec(
        &self,
        words: &'static str,
        process: &[u8],
        bundle: &Path,
        first: i32,
        terminal: bool,
        streams: runc::Streams,
    ) -> Result<Prepared> {
        let mut process: Process = serde_json::from_slice(process)
            .map_err(|error| TaskError::InvalidArgument(format!("process: {error}")))?;
        let streams =
            launch_streams(terminal, Some(&process), streams).map_err(TaskError::io(words))?;
        let (launcher, cgroup) = (Arc::clone(&self.launcher), self.cgroup.clone());
        let path = bundle.join("config.json");
        let prepared = blocking(words, move || {
            let text =
                std::fs::read(&path).map_err(|error| TaskError::failed(path.display(), error))?;
            let spec: Spec = serde_json::from_slice(&text)
                .map_err(|error| TaskError::failed(path.display(), error))?;
            inherit(&mut process, &spec);
            let linux = spec.linux().as_ref();
            let exec = Exec {
                pid: first,
                process: &process,
                seccomp: linux.and_then(|linux| linux.seccomp().as_ref()),
                cgroup: cgroup.as_ref(),
                streams,
            };
            launcher.prepare_exec(exec).map_err(|error| match error {
                // runc has no part in this container.
                PrepareError::Outside(outside) => TaskError::InvalidArgument(format!(
                    "{} is not supported for an exec in this container",
                    outside.field
                )),
                error => exec_failed(words, &error),
            })
        });
        prepared.await?
    }

    /// Sends `signal` to its first process, or to `all`.
    pub(crate) async fn kill(&self, signal: u32, all: bool) -> Result<()> {
        let signal = i32::try_from(signal)
            .ok()
            .and_then(|number| Signal::try_from(number).ok())
            .ok_or_else(|| {
                TaskError::InvalidArgument(format!("signal {signal}: no such signal"))
            })?;
        let name = Name::Task(&self.id);
        let killed = self.processes.signal(&name, signal as i32).await;
        if all {
            self.on_cgroup("kill", move |cgroup| cgroup.signal(signal))
                .await?;
        }
        if signal == Signal::SIGKILL {
            // In a frozen cgroup of version 1 a signal waits for the thaw.
            self.on_cgroup("kill", Cgroup::thaw).await?;
        }
        killed
    }

    /// Freezes it, and waits until it is.
    pub(crate) async fn pause(&self) -> Result<()> {
        let words = "OCI runtime pause failed";
        self.need_cgroup(words)?;
        self.on_cgroup(words, |cgroup| {
            let deadline = std::time::Instant::now() + END;
            cgroup.freeze()?;
            while !cgroup.frozen()? {
                if std::time::Instant::now() > deadline {
                    cgroup.thaw()?;
                    let words = "the kernel does not freeze it: a process of it cannot be stopped";
                    return Err(std::io::Error::other(words));
                }
                std::thread::sleep(LOOK);
            }
            Ok(())
        })
        .await
    }

    /// Thaws it.
    pub(crate) async fn resume(&self) -> Result<()> {
        let words = "OCI runtime resume failed";
        self.need_cgroup(words)?;
        self.on_cgroup(words, Cgroup::thaw).await
    }

    /// Sets `resources`, OCI LinuxResources as JSON.
    pub(crate) async fn update(&self, resources: &[u8]) -> Result<()> {
        let words = "OCI runtime update failed";
        self.need_cgroup(words)?;
        let resources: LinuxResources = serde_json::from_slice(resources)
            .map_err(|error| TaskError::InvalidArgument(format!("resources: {error}")))?;
        crate::launch::subset::supported(&resources).map_err(|outside| {
            TaskError::InvalidArgument(format!(
                "{} is not supported for this container",
                outside.field
            ))
        })?;
        self.on_cgroup(words, move |cgroup| cgroup.update(&resources))
            .await
    }

    /// Its processes, as the host numbers them; `first` is one of them.
    pub(crate) async fn pids(&self, first: i32) -> Result<Vec<i32>> {
        let words = "reading the cgroup";
        let Some(cgroup) = self.cgroup.clone() else {
            return Ok(vec![first]);
        };
        blocking(words, move || cgroup.pids())
            .await?
            .map_err(TaskError::io(words))
    }

    /// Whether it is frozen; what cannot be asked is not.
    pub(crate) fn paused(&self) -> bool {
        let frozen = self.cgroup.as_ref().map(Cgroup::frozen);
        frozen.is_some_and(|frozen| frozen.unwrap_or(false))
    }

    /// Ends it if it has not ended, and removes what is left.
    pub(crate) async fn delete(&self) -> Result<()> {
        remove(&self.processes, &self.id, self.cgroup.clone()).await
    }

    fn need_cgroup(&self, words: &str) -> Result<()> {
        match self.cgroup {
            Some(_) => Ok(()),
            None => Err(TaskError::failed(
                words,
                "the container has no cgroup; give it a linux.cgroupsPath",
            )),
        }
    }

    async fn on_cgroup(
        &self,
        words: &'static str,
        work: impl FnOnce(&Cgroup) -> std::io::Result<()> + Send + 'static,
    ) -> Result<()> {
        let Some(cgroup) = self.cgroup.clone() else {
            return Ok(());
        };
        blocking(words, move || work(&cgroup))
            .await?
            .map_err(TaskError::io(words))
    }
}

/// Ends the first process of `id` by its name alone, and removes its cgroup. The name stays until
/// its end is recorded.
pub(crate) async fn remove(
    processes: &Arc<Processes>,
    id: &str,
    cgroup: Option<Cgroup>,
) -> Result<()> {
    let killed = processes
        .signal(&Name::Task(id), Signal::SIGKILL as i32)
        .await;
    match killed {
        Ok(()) | Err(TaskError::NotFound(_)) => {}
        // Without the holder it has ended too, or does so now by its cgroup.
        Err(error) => tracing::warn!(%error, id, "ending a sandbox"),
    }
    match cgroup {
        Some(cgroup) => remove_cgroup(cgroup).await,
        None => Ok(()),
    }
}

/// Removes a sandbox's cgroup, and ends what is in it.
pub(crate) async fn remove_cgroup(cgroup: Cgroup) -> Result<()> {
    let words = "OCI runtime delete failed";
    blocking(words, move || {
        let deadline = std::time::Instant::now() + END;
        cgroup.thaw()?;
        // The kernel empties the cgroup a moment after the exit was told.
        loop {
            match cgroup.remove() {
                Err(error)
                    if error.kind() == std::io::ErrorKind::ResourceBusy
                        && std::time::Instant::now() < deadline =>
                {
                    cgroup.signal(Signal::SIGKILL)?;
                    std::thread::sleep(LOOK);
                }
                other => return other,
            }
        }
    })
    .await?
    .map_err(TaskError::io(words))
}

/// What an exec leaves open is the first process's, as runc has it.
fn inherit(process: &mut Process, spec: &Spec) {
    let Some(first) = spec.process().as_ref() else {
        return;
    };
    if process.capabilities().is_none() {
        process.set_capabilities(first.capabilities().clone());
    }
    if process.rlimits().as_ref().is_none_or(Vec::is_empty) {
        process.set_rlimits(first.rlimits().clone());
    }
    if process.oom_score_adj().is_none() {
        process.set_oom_score_adj(first.oom_score_adj());
    }
}

fn exec_failed(words: &str, error: &dyn std::fmt::Display) -> TaskError {
    TaskError::failed(words, format_args!("exec failed: {error}"))
}

fn root_mount(mount: api::Mount) -> RootMount {
    RootMount {
        kind: mount.type_,
        source: mount.source,
        options: mount.options,
    }
}

fn launch_streams(
    terminal: bool,
    process: Option<&Process>,
    streams: runc::Streams,
) -> std::io::Result<Streams> {
    if terminal {
        let size = process.and_then(Process::console_size);
        let side = |value: u64| u16::try_from(value).unwrap_or_default();
        return Ok(Streams::Terminal {
            width: size.map_or(0, |size| side(size.width())),
            height: size.map_or(0, |size| side(size.height())),
        });
    }
    let or_null = |fd: Option<_>| fd.map_or_else(null, Ok);
    Ok(Streams::Fds([
        or_null(streams.stdin)?,
        or_null(streams.stdout)?,
        or_null(streams.stderr)?,
    ]))
}

/// Work that waits for the kernel, away from the threads that serve.
async fn blocking<T: Send + 'static>(
    words: &str,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T> {
    tokio::task::spawn_blocking(work)
        .await
        .map_err(|error| TaskError::failed(words, error))
}

/// The cgroup that a spec names; its own by its id where it names none, as runc does.
pub(crate) fn cgroup_path(spec: &Spec, id: &str) -> PathBuf {
    let linux = spec.linux().as_ref();
    let named = linux.and_then(|linux| linux.cgroups_path().clone());
    named
        .filter(|path| !path.as_os_str().is_empty())
        .unwrap_or_else(|| Path::new("/").join(id))
}
