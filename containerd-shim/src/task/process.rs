//! A process of a task: its first one or an exec.

use std::sync::Mutex;

use tokio::sync::watch;

use super::error::{Result, TaskError};
use super::processes::Exit;
use crate::stdio::{Io, Names};

/// Where a process is in its life. It only moves down this list, but for pause and resume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phase {
    /// An exec that has not been started.
    Added,
    /// The container is there; its command waits for the start.
    Created,
    /// It runs.
    Running,
    /// It is frozen.
    Paused,
    /// It has ended.
    Stopped(Exit),
}

/// What is known of a process at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct State {
    /// Its number on the host; 0 before there is one.
    pub(crate) pid: i32,
    /// How far it is.
    pub(crate) phase: Phase,
}

impl State {
    /// The end, if it has come.
    pub(crate) fn exit(&self) -> Option<Exit> {
        match self.phase {
            Phase::Stopped(exit) => Some(exit),
            _ => None,
        }
    }

    /// The process id as messages carry it.
    pub(crate) fn pid(&self) -> u32 {
        self.pid.cast_unsigned()
    }
}

/// See the module. State is read without waiting for an operation that is under way.
pub(crate) struct Process {
    /// Its streams, as asked for.
    pub(crate) stdio: Names,
    /// The OCI process of an exec, as JSON; empty for a first process.
    pub(crate) spec: Vec<u8>,
    /// Held by start, end and deletion of an exec; a first process has its task's.
    pub(crate) gate: tokio::sync::Mutex<()>,
    state: watch::Sender<State>,
    io: Mutex<Option<std::sync::Arc<Io>>>,
}

impl Process {
    pub(crate) fn new(stdio: Names, spec: Vec<u8>, state: State) -> Self {
        Self {
            stdio,
            spec,
            gate: tokio::sync::Mutex::new(()),
            state: watch::Sender::new(state),
            io: Mutex::new(None),
        }
    }

    pub(crate) fn state(&self) -> State {
        *self.state.borrow()
    }

    /// Moves on to `phase`. An end is never taken back.
    pub(crate) fn enter(&self, phase: Phase) {
        self.state.send_if_modified(|state| {
            let moves = state.exit().is_none() && state.phase != phase;
            if moves {
                state.phase = phase;
            }
            moves
        });
    }

    /// Becomes the process `pid`.
    pub(crate) fn begin(&self, pid: i32, phase: Phase) {
        self.state
            .send_modify(|state| *state = State { pid, phase });
    }

    /// Waits for the end.
    pub(crate) async fn wait(&self) -> Result<(State, Exit)> {
        let mut states = self.state.subscribe();
        let state = states
            .wait_for(|state| state.exit().is_some())
            .await
            .map(|state| *state)
            .map_err(|_| TaskError::NotFound("the process was deleted".into()))?;
        state
            .exit()
            .map(|exit| (state, exit))
            .ok_or_else(|| TaskError::Failed("the process has no end".into()))
    }

    pub(crate) fn attach(&self, io: Io) {
        *self.io_slot() = Some(std::sync::Arc::new(io));
    }

    /// The copying of its streams, while there is some.
    pub(crate) fn io(&self) -> Option<std::sync::Arc<Io>> {
        self.io_slot().clone()
    }

    fn io_slot(&self) -> std::sync::MutexGuard<'_, Option<std::sync::Arc<Io>>> {
        self.io
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::{Exit, Phase, Process, State};
    use crate::stdio::Names;

    fn process() -> Process {
        let state = State {
            pid: 0,
            phase: Phase::Added,
        };
        Process::new(Names::default(), Vec::new(), state)
    }

    #[test]
    fn an_end_is_final() {
        let process = process();
        process.begin(7, Phase::Running);
        let exit = Exit {
            status: 3,
            at: std::time::UNIX_EPOCH,
        };
        process.enter(Phase::Stopped(exit));
        process.enter(Phase::Running);
        assert_eq!(process.state().exit(), Some(exit));
        process.enter(Phase::Stopped(Exit::unknown()));
        assert_eq!(process.state().exit(), Some(exit));
    }

    #[tokio::test]
    async fn waiting_sees_an_end_before_and_after() {
        let process = process();
        process.begin(7, Phase::Running);
        let exit = Exit {
            status: 3,
            at: std::time::UNIX_EPOCH,
        };
        let (waited, ()) = tokio::join!(process.wait(), async {
            process.enter(Phase::Stopped(exit));
        });
        assert_eq!(waited.unwrap().1, exit);
        assert_eq!(process.wait().await.unwrap().1, exit);
    }
}
