//! A host whose commands are refused at once while it answers none. One that
//! hangs would otherwise take every worker of the node, a pod each, and stop the
//! pods of all other hosts.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use sandman_protocol::v1;
use sandman_protocol::v1::host_client::HostClient;
use tokio::time::Instant;
use tonic::transport::Channel;

use super::host::{Host, HostError, Updates};
use crate::view::StreamError;

/// Commands that a host may always have unanswered.
const COMMANDS: usize = 16;
/// How long more may wait for the next answer.
const PATIENCE: Duration = Duration::from_secs(1);

/// The host behind it, with patience that ends.
pub(super) struct Patient {
    host: Arc<dyn Host>,
    commands: Commands,
}

/// The commands that a host was given and has not answered.
#[derive(Debug)]
struct Commands(Mutex<State>);

#[derive(Debug)]
struct State {
    unanswered: usize,
    /// When the host last answered, or had nothing left to answer.
    since: Instant,
    /// The last command to end had no answer.
    silent: bool,
}

/// One command.
struct Turn<'a> {
    commands: &'a Commands,
    answered: bool,
}

// === impl Patient ===

impl Patient {
    pub(super) fn new(host: Arc<dyn Host>) -> Self {
        Self {
            host,
            commands: Commands::new(),
        }
    }

    async fn command<T>(
        &self,
        command: impl Future<Output = Result<T, HostError>>,
    ) -> Result<T, HostError> {
        let mut turn = self.commands.begin()?;
        let result = command.await;
        turn.answered = !matches!(result, Err(HostError::Unreachable(_)));
        result
    }
}

#[async_trait]
impl Host for Patient {
    async fn connect(&self) -> Result<(v1::Inventory, Updates), HostError> {
        self.host.connect().await
    }

    async fn apply(&self, spec: v1::SandboxSpec) -> Result<(), HostError> {
        self.command(self.host.apply(spec)).await
    }

    async fn remove(&self, uid: &str, grace: Duration, reason: &str) -> Result<(), HostError> {
        self.command(self.host.remove(uid, grace, reason)).await
    }

    async fn forget(&self, uid: &str) -> Result<(), HostError> {
        self.command(self.host.forget(uid)).await
    }

    async fn set_cluster_network(&self, wish: v1::ClusterNetworkRequest) -> Result<(), HostError> {
        // One at a time, and nobody waits for it.
        self.host.set_cluster_network(wish).await
    }

    async fn stats(&self) -> Result<v1::Stats, HostError> {
        self.host.stats().await
    }

    async fn streams(&self) -> Result<HostClient<Channel>, StreamError> {
        self.host.streams().await
    }
}

// === impl Commands ===

impl Commands {
    fn new() -> Self {
        Self(Mutex::new(State {
            unanswered: 0,
            since: Instant::now(),
            silent: false,
        }))
    }

    fn begin(&self) -> Result<Turn<'_>, HostError> {
        let mut state = self.lock();
        if state.unanswered == 0 && !state.silent {
            state.since = Instant::now();
        }
        if state.unanswered >= COMMANDS && state.since.elapsed() > PATIENCE {
            return Err(HostError::Silent(state.unanswered));
        }
        state.unanswered += 1;
        Ok(Turn {
            commands: self,
            answered: false,
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let mut state = self.commands.lock();
        state.unanswered -= 1;
        state.silent = !self.answered;
        if self.answered {
            state.since = Instant::now();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn begin(commands: &Commands, count: usize) -> Vec<Turn<'_>> {
        (0..count).map_while(|_| commands.begin().ok()).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn a_host_that_answers_has_no_limit() {
        let commands = Commands::new();
        tokio::time::advance(10 * PATIENCE).await;
        let mut turns = begin(&commands, 4 * COMMANDS);
        assert_eq!(turns.len(), 4 * COMMANDS, "idle is not silent");
        for _ in 0..10 {
            tokio::time::advance(PATIENCE).await;
            turns.pop().unwrap().answered = true;
            turns.extend(begin(&commands, 1));
        }
        assert_eq!(turns.len(), 4 * COMMANDS);
    }

    #[tokio::test(start_paused = true)]
    async fn a_silent_host_holds_a_few_commands_until_it_answers() {
        let commands = Commands::new();
        let turns = begin(&commands, COMMANDS);
        tokio::time::advance(2 * PATIENCE).await;
        assert!(matches!(commands.begin(), Err(HostError::Silent(COMMANDS))));
        // All of them end by their limit: that is no answer.
        drop(turns);
        let mut turns = begin(&commands, 4 * COMMANDS);
        assert_eq!(turns.len(), COMMANDS);
        turns.pop().unwrap().answered = true;
        assert_eq!(begin(&commands, 4 * COMMANDS).len(), 4 * COMMANDS);
    }
}
