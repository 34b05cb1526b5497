//! What exec, logs and stats need to know of a sandbox, as of its last step.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use oci_spec::runtime::Process;
use sandman_protocol::v1;
use tokio::sync::{OnceCell, watch};

use super::facts::Attempt;
use crate::logs::Listeners;

/// A sandbox at one moment.
#[derive(Clone, Debug)]
pub struct View {
    /// Pod namespace.
    pub namespace: String,
    /// Pod name.
    pub name: String,
    /// Its cgroup.
    pub cgroup: PathBuf,
    /// Its stage.
    pub lifecycle: v1::Lifecycle,
    /// By container name.
    pub containers: BTreeMap<String, ContainerView>,
}

/// A container at one moment.
#[derive(Clone, Debug)]
pub struct ContainerView {
    /// The newest attempt.
    pub attempt: Option<Attempt>,
    /// Why it waits, when it does.
    pub waiting: Option<String>,
    /// False once the newest attempt has ended and its output is complete.
    pub running: watch::Receiver<bool>,
    /// The main process of the newest attempt as the runtime was given it, once somebody asked.
    pub process: Arc<OnceCell<Process>>,
    /// Who listens to the newest attempt's output; `None` once it is over.
    pub listeners: Option<Listeners>,
    /// Which streams its process has.
    pub streams: Streams,
}

/// The streams of a container's own process, as its pod asked for them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Streams {
    /// Its input stays open for clients that attach.
    pub stdin: bool,
    /// Its input ends with the first of them.
    pub stdin_once: bool,
    /// All three are one terminal.
    pub tty: bool,
}

impl From<&v1::Container> for Streams {
    fn from(container: &v1::Container) -> Self {
        Self {
            stdin: container.stdin,
            stdin_once: container.stdin_once,
            tty: container.tty,
        }
    }
}

impl ContainerView {
    /// The attempt whose process runs.
    #[must_use]
    pub fn running_attempt(&self) -> Option<&Attempt> {
        self.attempt.as_ref().filter(|attempt| attempt.is_running())
    }
}
