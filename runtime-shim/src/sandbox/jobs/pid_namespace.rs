//! The process namespace of a container that runs, held so that nobody else's can take its place.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::PathBuf;

use super::Host;
use crate::runtime::{RuntimeError, TaskStatus};

/// A namespace, as long as this lives.
#[derive(Debug)]
pub(super) struct PidNamespace(File);

impl PidNamespace {
    /// That of a container's main process.
    ///
    /// # Errors
    /// The runtime's; the container does not run.
    pub(super) async fn of(host: &Host, container_id: &str) -> Result<Self, RuntimeError> {
        let gone = || {
            RuntimeError::Precondition(format!("target container {container_id} is not running"))
        };
        let before = host.runtime.pid(container_id).await?.ok_or_else(gone)?;
        let file = File::open(format!("/proc/{before}/ns/pid")).map_err(|_| gone())?;
        // The number may have been given to another process before the file was opened: only if
        // the container still runs was it not.
        match host.runtime.state(container_id).await? {
            Some(TaskStatus::Running) => Ok(Self(file)),
            _ => Err(gone()),
        }
    }

    /// For programs of this host that run while this lives.
    pub(super) fn path(&self) -> PathBuf {
        PathBuf::from(format!(
            "/proc/{}/fd/{}",
            std::process::id(),
            self.0.as_raw_fd()
        ))
    }
}
