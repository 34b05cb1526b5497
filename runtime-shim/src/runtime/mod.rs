//! What a container runtime must do for sandboxes, and the containerd implementation of it.
//!
//! The trait is the seam at which another launcher takes over from runc tasks: everything above
//! it speaks of containers, execs and exits, never of shims.

mod containerd;
mod events;
pub(crate) mod fifo;
pub(crate) mod process_group;
mod request;

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use async_trait::async_trait;
use oci_spec::runtime::{LinuxResources, Process, Spec};
use tokio::sync::broadcast;

pub use self::containerd::Containerd;
pub use self::request::{NAMESPACE, connect};

/// A container to be recorded with the runtime.
#[derive(Clone, Debug)]
pub struct NewContainer {
    /// Unique on the host.
    pub id: String,
    /// Identity that survives this process; see `sandbox::identity`.
    pub labels: HashMap<String, String>,
    /// containerd runtime type.
    pub runtime: String,
    /// Image name, for people who list containers.
    pub image: String,
    /// Snapshot that holds the root file system, if containerd makes it.
    pub snapshot: Option<String>,
    /// The OCI spec.
    pub spec: Spec,
}

/// A container as the runtime has it on record.
#[derive(Clone, Debug)]
pub struct ContainerRecord {
    /// Its id.
    pub id: String,
    /// Its labels.
    pub labels: HashMap<String, String>,
    /// When it was recorded.
    pub created_at: Option<SystemTime>,
}

/// One mount of a root file system, as snapshotters describe them.
pub type RootMount = containerd_client::types::Mount;

/// Where a process's streams go; absent ones are `/dev/null`.
#[derive(Clone, Debug, Default)]
pub struct Stdio {
    /// FIFO.
    pub stdin: Option<PathBuf>,
    /// FIFO.
    pub stdout: Option<PathBuf>,
    /// FIFO; unused with a terminal.
    pub stderr: Option<PathBuf>,
    /// Allocate a pseudo terminal.
    pub terminal: bool,
}

/// Stage of a container's main process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TaskStatus {
    /// Made but not started.
    Created,
    /// Running, or paused.
    Running,
    /// Ended; the record still holds the exit.
    Stopped(Exit),
    /// The runtime cannot tell now, for example because its shim did not answer in time.
    /// Nothing follows from it but to ask again.
    Unknown,
}

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exit {
    /// Exit code; 128+n for signal n.
    pub code: i32,
    /// When.
    pub at: SystemTime,
}

/// Something happened; a hint to look at the state, never the state itself.
#[derive(Clone, Debug)]
pub enum RuntimeEvent {
    /// A container's main process ended.
    Exited {
        /// The container.
        container_id: String,
    },
    /// Events may have been missed: look at everything.
    Resync,
}

/// Why the runtime did not do it.
#[derive(Clone, Debug, thiserror::Error)]
pub enum RuntimeError {
    /// No such container, task or exec.
    #[error("not found: {0}")]
    NotFound(String),
    /// It exists already.
    #[error("already exists: {0}")]
    AlreadyExists(String),
    /// The object is not in a state for this, for example a stopped task.
    #[error("{0}")]
    Precondition(String),
    /// The runtime cannot be reached or did not answer in time; trying again is right.
    #[error("container runtime unavailable: {0}")]
    Unavailable(String),
    /// It tried and failed; the text is the runtime's own.
    #[error("{0}")]
    Failed(String),
}

impl RuntimeError {
    /// Whether nothing is wrong with the request itself.
    #[must_use]
    pub fn is_unavailable(&self) -> bool {
        matches!(self, Self::Unavailable(_))
    }
}

/// Containers, their tasks and execs. All calls have deadlines and may be repeated.
#[async_trait]
pub trait Runtime: Send + Sync + 'static {
    /// Name and version, for example `containerd://1.6.20`.
    async fn version(&self) -> Result<String, RuntimeError>;

    /// Records a container. One that is recorded already stays as it is.
    async fn create(&self, container: &NewContainer) -> Result<(), RuntimeError>;

    /// Makes the container's namespaces and main process, ready to be started.
    /// `AlreadyExists` means that an earlier call, perhaps of a process that was killed, got
    /// there first.
    async fn create_task(
        &self,
        id: &str,
        rootfs: Vec<RootMount>,
        stdio: &Stdio,
    ) -> Result<(), RuntimeError>;

    /// Starts the main process.
    async fn start(&self, id: &str) -> Result<(), RuntimeError>;

    /// The main process's stage; `None` when there is no task.
    async fn state(&self, id: &str) -> Result<Option<TaskStatus>, RuntimeError>;

    /// Gives a container that runs other limits and weights. Those that are not named stay.
    async fn update(&self, id: &str, resources: &LinuxResources) -> Result<(), RuntimeError>;

    /// Process id of a main process that has not ended.
    async fn pid(&self, id: &str) -> Result<Option<u32>, RuntimeError>;

    /// All containers on record.
    async fn list(&self) -> Result<Vec<ContainerRecord>, RuntimeError>;

    /// The OCI spec that a container was made with.
    async fn spec(&self, id: &str) -> Result<Spec, RuntimeError>;

    /// Signals the main process, or an exec's. One that ended already is no error.
    async fn kill(&self, id: &str, exec: Option<&str>, signal: u32) -> Result<(), RuntimeError>;

    /// Deletes a stopped task; `None` when there was none.
    async fn delete_task(&self, id: &str) -> Result<Option<Exit>, RuntimeError>;

    /// Deletes the record of a container that has no task. A missing one is no error.
    async fn delete(&self, id: &str) -> Result<(), RuntimeError>;

    /// Records a further process of a running container, ready to be waited for and started.
    async fn exec(
        &self,
        id: &str,
        exec: &str,
        process: &Process,
        stdio: &Stdio,
    ) -> Result<(), RuntimeError>;

    /// Starts an exec; returns its process id on the host. One that does not start is forgotten.
    async fn start_exec(&self, id: &str, exec: &str) -> Result<u32, RuntimeError>;

    /// Waits for an exec's end, however long that takes.
    async fn wait_exec(&self, id: &str, exec: &str) -> Result<Exit, RuntimeError>;

    /// Forgets an ended exec.
    async fn delete_exec(&self, id: &str, exec: &str) -> Result<(), RuntimeError>;

    /// Sets the size of an exec's terminal.
    async fn resize(
        &self,
        id: &str,
        exec: &str,
        width: u32,
        height: u32,
    ) -> Result<(), RuntimeError>;

    /// Closes an exec's standard input once what was written has been read.
    async fn close_stdin(&self, id: &str, exec: &str) -> Result<(), RuntimeError>;

    /// Hints from now on. A receiver that lags must treat that as [`RuntimeEvent::Resync`].
    fn events(&self) -> broadcast::Receiver<RuntimeEvent>;
}

/// Path as the runtime's protocol wants it.
fn path_text(path: Option<&Path>) -> String {
    path.map(|p| p.to_string_lossy().into_owned())
        .unwrap_or_default()
}
