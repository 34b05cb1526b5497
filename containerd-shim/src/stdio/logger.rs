//! Logging programs (`binary://`): both outputs by descriptor 3 and 4, and 5 to close when ready.

use std::ffi::OsString;
use std::os::fd::OwnedFd;
use std::time::Duration;

use super::channel::Channel;
use super::uri::Logger;
use super::{Owner, pipe};
use crate::runc::{next_call, null};
use crate::task::error::{Result, TaskError};
use crate::task::processes::Name;

/// How long a logger may take to become ready.
const READY: Duration = Duration::from_secs(10);

/// Starts `logger` and waits until it has closed its descriptor 5. It ends by itself when both
/// outputs do.
pub(super) async fn start(
    logger: &Logger,
    owner: &Owner<'_>,
    stdout: OwnedFd,
    stderr: OwnedFd,
) -> Result<()> {
    let words = format!("stdout: logger {}", logger.program.display());
    let (ready, signal) = pipe("stdout")?;
    let mut fds = Vec::new();
    for _ in 0..3 {
        fds.push(null().map_err(TaskError::io(&words))?);
    }
    fds.extend([stdout, stderr, signal]);
    let mut env: Vec<(OsString, OsString)> = vec![
        ("CONTAINER_ID".into(), owner.id.into()),
        ("CONTAINER_NAMESPACE".into(), owner.namespace.into()),
    ];
    env.extend(std::env::var_os("PATH").map(|path| ("PATH".into(), path)));
    let name = Name::Logger(owner.id, next_call());
    let processes = owner.processes;
    let (_, end) = processes
        .spawn(&name, &logger.program, &logger.args, env, &fds)
        .await
        .map_err(|error| TaskError::failed(&words, error))?;
    processes.forget_after(name.key()?, end);
    drop(fds);
    let ready = Channel::new(ready).map_err(TaskError::io(&words))?;
    match tokio::time::timeout(READY, ready.read()).await {
        Ok(Ok(_)) => Ok(()),
        Ok(Err(error)) => Err(TaskError::failed(words, error)),
        Err(_) => Err(TaskError::failed(
            words,
            "not ready in time; it must close descriptor 5 once it reads 3 and 4",
        )),
    }
}
