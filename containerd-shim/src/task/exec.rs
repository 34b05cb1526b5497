//! Further processes of a task.

use std::collections::hash_map::Entry;
use std::sync::Arc;

use super::console::Console;
use super::error::{Result, TaskError};
use super::one::{Task, refused};
use super::process::{Phase, Process, State};
use super::processes::{Exit, Name};
use crate::events::What;
use crate::runc::{Started, Streams};
use crate::stdio::{Io, Names, Opened, Owner};

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
        let ((pid, end), io) = self.make_exec(exec, &process).await?;
        process.attach(io);
        process.begin(pid, Phase::Running);
        let state = process.state();
        self.publish(What::ExecStarted {
            exec,
            pid: state.pid(),
        });
        drop(gate);
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
        Ok(state)
    }

    fn exec_owner<'a>(&'a self, exec: &'a str) -> Owner<'a> {
        Owner {
            id: self.id(),
            namespace: &self.shared.namespace,
            processes: &self.shared.processes,
            name: Name::Exec(self.id(), exec),
        }
    }

    async fn make_exec(&self, exec: &str, process: &Process) -> Result<(Started, Io)> {
        let owner = self.exec_owner(exec);
        let ((pid, end), opened) = self.open_exec(&owner, exec, process).await?;
        let io = match opened {
            Ok(opened) => opened.begin(&owner).await,
            Err(error) => Err(error),
        };
        match io {
            Ok(io) => Ok(((pid, end), io)),
            Err(error) => {
                // Nobody could talk to it.
                drop(owner.processes.signal(&owner.name, 9).await);
                owner.processes.forget_after(owner.name.key()?, end);
                Err(error)
            }
        }
    }

    /// Starts the process; its streams may fail after that.
    async fn open_exec(
        &self,
        owner: &Owner<'_>,
        exec: &str,
        process: &Process,
    ) -> Result<(Started, Result<Opened>)> {
        let container = &self.container;
        if !process.stdio.terminal {
            let (streams, opened) = Opened::pipes(&process.stdio, owner).await?;
            let started = container.exec(exec, &process.spec, streams, None).await?;
            return Ok((started, Ok(opened)));
        }
        let words = "terminal";
        let console = Console::bind(&self.shared.dir).map_err(TaskError::io(words))?;
        let streams = Streams::default();
        let socket = Some(console.path());
        let started = container.exec(exec, &process.spec, streams, socket).await?;
        let opened = match console.receive().map_err(TaskError::io(words)) {
            Ok(master) => Opened::terminal(&process.stdio, owner, master).await,
            Err(error) => Err(error),
        };
        Ok((started, opened))
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
