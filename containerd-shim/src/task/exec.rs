//! Further processes of a task.

use std::collections::hash_map::Entry;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::backend::Backend;
use super::console::Console;
use super::error::{Result, TaskError};
use super::one::{Task, refused};
use super::own::Sandbox;
use super::process::{Phase, Process, State};
use super::processes::{End, Exit, Name};
use crate::events::What;
use crate::launch::SLOT_GATE;
use crate::runc::{Container, Started, Streams};
use crate::stdio::{Io, Names, Opened, Owner};

/// What the holder keeps of an exec beside its descriptors.
#[derive(Debug, Serialize, Deserialize)]
struct Note {
    stdio: Names,
}

impl Task {
    /// The process `exec`; the first one if that is empty.
    pub(super) fn with_process<T>(
        &self,
        exec: &str,
        use_it: impl FnOnce(&Process) -> T,
    ) -> Result<T> {
        if exec.is_empty() {
            Ok(use_it(&self.init))
        } else {
            self.exec(exec).map(|process| use_it(&process))
        }
    }

    fn exec(&self, exec: &str) -> Result<Arc<Process>> {
        self.execs()
            .get(exec)
            .cloned()
            .ok_or_else(|| TaskError::NotFound(format!("exec {exec:?} does not exist")))
    }

    /// Waits for the end of a process.
    pub(super) async fn wait(&self, exec: &str) -> Result<(State, Exit)> {
        if exec.is_empty() {
            self.init.wait().await
        } else {
            self.exec(exec)?.wait().await
        }
    }

    /// Remembers a process that [`Self::start_exec`] is to start.
    pub(super) fn add_exec(&self, exec: &str, stdio: Names, spec: Vec<u8>) -> Result<()> {
        crate::stdio::check(&stdio)?;
        if self.init.state().exit().is_some() {
            return Err(refused("cannot exec in a stopped state"));
        }
        match self.execs().entry(exec.to_owned()) {
            Entry::Occupied(_) => {
                return Err(TaskError::AlreadyExists(format!("id {exec}")));
            }
            Entry::Vacant(vacant) => {
                let state = State {
                    pid: 0,
                    phase: Phase::Added,
                };
                vacant.insert(Arc::new(Process::new(stdio, spec, state)));
            }
        }
        self.publish(What::ExecAdded { exec });
        Ok(())
    }

    pub(super) async fn start_exec(self: &Arc<Self>, exec: &str) -> Result<State> {
        let process = self.exec(exec)?;
        let gate = process.gate.lock().await;
        if process.state().phase != Phase::Added {
            return Err(refused("cannot start a process twice"));
        }
        if self.init.state().phase == Phase::Paused {
            return Err(TaskError::Failed(
                "OCI runtime exec failed: cannot exec in a paused container (use --ignore-paused \
                 to override)"
                    .into(),
            ));
        }
        let owner = self.exec_owner(exec);
        // Before the process: with it the next shim knows what this one was about to start.
        let note = Note {
            stdio: process.stdio.clone(),
        };
        let note = serde_json::to_vec(&note).map_err(|error| TaskError::failed("note", error))?;
        owner.processes.note(&owner.name, note).await?;
        let ((pid, end), io) = match self.make_exec(&owner, exec, &process).await {
            Ok(made) => made,
            Err(error) => {
                // Nobody could talk to it.
                drop(owner.processes.signal(&owner.name, 9).await);
                owner.processes.forget_when_ended(&owner.name).await;
                return Err(error);
            }
        };
        process.attach(io);
        process.begin(pid, Phase::Running);
        let state = process.state();
        self.publish(What::ExecStarted {
            exec,
            pid: state.pid(),
        });
        drop(gate);
        self.follow_exec(exec, process, end);
        Ok(state)
    }

    /// Waits for the end of an exec.
    fn follow_exec(self: &Arc<Self>, exec: &str, process: Arc<Process>, end: End) {
        let (task, exec) = (Arc::clone(self), exec.to_owned());
        tokio::spawn(async move {
            // Lost with the holder: it ends with its container.
            let exit = end.await.unwrap_or_else(|_| Exit::unknown());
            let _gate = process.gate.lock().await;
            process.enter(Phase::Stopped(exit));
            task.publish(What::Exited {
                exec: &exec,
                pid: process.state().pid(),
                exit,
            });
        });
    }

    /// Takes over an exec that an earlier shim started; one that had not begun yet is ended.
    pub(super) async fn recover_exec(self: &Arc<Self>, exec: &str) -> Result<()> {
        let owner = self.exec_owner(exec);
        let processes = owner.processes;
        let Some(taken) = processes.take(&owner.name).await? else {
            return Ok(());
        };
        let waits = taken.fds.iter().any(|(slot, _)| *slot == SLOT_GATE);
        let note = serde_json::from_slice::<Note>(&taken.entry.note);
        let (Some(pid), false, Ok(note)) = (taken.entry.pid, waits, note) else {
            drop(processes.signal(&owner.name, 9).await);
            processes.forget_when_ended(&owner.name).await;
            return Ok(());
        };
        let state = State {
            pid,
            phase: Phase::Running,
        };
        let opened = Opened::adopted(&note.stdio, taken.fds)?;
        let process = Arc::new(Process::new(note.stdio, Vec::new(), state));
        process.attach(opened.run(&owner)?);
        let end = processes.expect(&owner.name.key()?);
        self.execs().insert(exec.to_owned(), Arc::clone(&process));
        self.follow_exec(exec, process, end);
        Ok(())
    }

    fn exec_owner<'a>(&'a self, exec: &'a str) -> Owner<'a> {
        Owner {
            id: self.id(),
            namespace: &self.shared.namespace,
            processes: &self.shared.processes,
            name: Name::Exec(self.id(), exec),
        }
    }

    async fn make_exec(
        &self,
        owner: &Owner<'_>,
        exec: &str,
        process: &Process,
    ) -> Result<(Started, Io)> {
        let (started, opened) = match &self.backend {
            Backend::Own(sandbox) => self.exec_own(sandbox, owner, process).await?,
            Backend::Runc(container) => self.exec_runc(container, owner, exec, process).await?,
        };
        Ok((started, opened.begin(owner).await?))
    }

    async fn exec_own(
        &self,
        sandbox: &Sandbox,
        owner: &Owner<'_>,
        process: &Process,
    ) -> Result<(Started, Opened)> {
        let (terminal, first) = (process.stdio.terminal, self.init.state().pid);
        let (streams, opened) = if terminal {
            (Streams::default(), None)
        } else {
            let (streams, opened) = Opened::pipes(&process.stdio, owner).await?;
            (streams, Some(opened))
        };
        let (name, spec, bundle) = (&owner.name, &process.spec, self.bundle());
        let exec = sandbox.exec(name, spec, bundle, first, terminal, streams);
        let (started, master) = exec.await?;
        let opened = match (opened, master) {
            (Some(opened), _) => opened,
            (None, Some(master)) => Opened::terminal(&process.stdio, owner, master).await?,
            (None, None) => return Err(TaskError::Failed("the exec has no terminal".into())),
        };
        Ok((started, opened))
    }

    async fn exec_runc(
        &self,
        container: &Container,
        owner: &Owner<'_>,
        exec: &str,
        process: &Process,
    ) -> Result<(Started, Opened)> {
        if !process.stdio.terminal {
            let (streams, opened) = Opened::pipes(&process.stdio, owner).await?;
            let started = container.exec(exec, &process.spec, streams, None).await?;
            return Ok((started, opened));
        }
        let words = "terminal";
        let console = Console::bind(&self.shared.dir).map_err(TaskError::io(words))?;
        let (streams, socket) = (Streams::default(), Some(console.path()));
        let started = container.exec(exec, &process.spec, streams, socket).await?;
        let master = console.receive().map_err(TaskError::io(words))?;
        Ok((
            started,
            Opened::terminal(&process.stdio, owner, master).await?,
        ))
    }

    /// Sends a signal to an exec.
    pub(super) async fn kill_exec(&self, exec: &str, signal: u32) -> Result<()> {
        match self.exec(exec)?.state().phase {
            Phase::Added => return Err(refused("process not created")),
            Phase::Stopped(_) => {
                return Err(TaskError::NotFound("process already finished".into()));
            }
            _ => {}
        }
        let signal = i32::try_from(signal)
            .map_err(|_| TaskError::InvalidArgument(format!("signal {signal}: no such signal")))?;
        let name = Name::Exec(self.id(), exec);
        self.shared.processes.signal(&name, signal).await
    }

    /// Forgets an exec that has ended or was never started.
    pub(super) async fn delete_exec(&self, exec: &str) -> Result<(State, Exit)> {
        let process = self.exec(exec)?;
        let _gate = process.gate.lock().await;
        let state = process.state();
        let exit = match state.phase {
            Phase::Added => Exit::unknown(),
            Phase::Stopped(exit) => exit,
            _ => return Err(refused("cannot delete a running process")),
        };
        if let Some(io) = process.io() {
            io.drain().await;
        }
        let name = Name::Exec(self.id(), exec);
        self.shared.processes.forget(&name).await;
        self.execs().remove(exec);
        Ok((state, exit))
    }
}
