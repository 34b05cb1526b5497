//! Removal: of one attempt of a container, and of all that a sandbox left on the host.

use std::collections::BTreeSet;
use std::time::Duration;

use sandman_protocol::v1;
use tokio::sync::broadcast::error::RecvError;
use tokio::time::{Instant, timeout_at};

use super::{Host, remove_fifos};
use crate::runtime::{RuntimeError, RuntimeEvent, TaskStatus};
use crate::sandbox::facts::Facts;
use crate::sandbox::identity::container_id;
use crate::sandbox::live::Waiting;
use crate::sandbox::plan::members;
use crate::spec::cgroup_of_class;
use crate::spec::resources::Qos;

/// How long a killed process may take to be reported as ended. A stuck one (in uninterruptible
/// sleep) is tried again later.
const KILL_WAIT: Duration = Duration::from_secs(15);
const SIGKILL: u32 = libc::SIGKILL as u32;

/// Removes one attempt, whatever state it is in. A missing one is no error.
///
/// # Errors
/// The runtime's; trying again is right.
pub async fn destroy(host: &Host, id: &str) -> Result<(), RuntimeError> {
    // Subscribed before the look at the state, so that no end is missed.
    let mut events = host.runtime.events();
    let deadline = Instant::now() + KILL_WAIT;
    loop {
        match host.runtime.state(id).await? {
            None => break,
            Some(TaskStatus::Stopped(_)) => {
                host.runtime.delete_task(id).await?;
                break;
            }
            Some(TaskStatus::Created | TaskStatus::Running | TaskStatus::Unknown) => {
                host.runtime.kill(id, None, SIGKILL).await?;
            }
        }
        wait_for_exit(&mut events, id, deadline).await?;
    }
    host.runtime.delete(id).await?;
    host.rootfs.remove(id).await?;
    remove_fifos(&host.fifo_dir.join(id));
    Ok(())
}

async fn wait_for_exit(
    events: &mut tokio::sync::broadcast::Receiver<RuntimeEvent>,
    id: &str,
    deadline: Instant,
) -> Result<(), RuntimeError> {
    loop {
        match timeout_at(deadline, events.recv()).await {
            Ok(Ok(RuntimeEvent::Exited { container_id })) if container_id != id => {}
            Ok(Ok(_) | Err(RecvError::Lagged(_))) => return Ok(()),
            Ok(Err(RecvError::Closed)) | Err(_) => {
                return Err(RuntimeError::Unavailable(format!(
                    "container {id} does not end after SIGKILL"
                )));
            }
        }
    }
}

/// Removes everything of a sandbox but its record.
///
/// # Errors
/// What to show until the next try.
pub async fn tear_down(host: &Host, spec: &v1::SandboxSpec, facts: &Facts) -> Result<(), Waiting> {
    try_tear_down(host, spec, facts)
        .await
        .map_err(|message| Waiting {
            reason: "FailedKillPod".to_owned(),
            message: format!("error killing pod: {message}"),
        })
}

/// Removes what takes room of a sandbox that has ended: layers and volumes.
///
/// # Errors
/// What to show until the next try.
pub async fn release(host: &Host, spec: &v1::SandboxSpec, facts: &Facts) -> Result<(), Waiting> {
    try_release(host, spec, facts)
        .await
        .map_err(|message| Waiting {
            reason: "FailedKillPod".to_owned(),
            message: format!("error killing pod: {message}"),
        })
}

async fn try_release(host: &Host, spec: &v1::SandboxSpec, facts: &Facts) -> Result<(), String> {
    for id in container_ids(spec, facts) {
        destroy(host, &id)
            .await
            .map_err(|error| error.to_string())?;
    }
    host.volumes
        .remove(&spec.uid)
        .await
        .map_err(|error| error.to_string())?;
    host.rootfs
        .remove_images(&spec.uid)
        .await
        .map_err(|error| error.to_string())
}

async fn try_tear_down(host: &Host, spec: &v1::SandboxSpec, facts: &Facts) -> Result<(), String> {
    try_release(host, spec, facts).await?;
    host.network
        .teardown(&spec.uid)
        .await
        .map_err(|error| error.to_string())?;
    host.logs
        .remove(&spec.uid)
        .await
        .map_err(|error| error.to_string())?;
    // In each class: a sandbox without its record does not say which it was of.
    for class in Qos::ALL {
        let cgroup = cgroup_of_class(&host.limits.cgroup_parent, class, &spec.uid);
        host.stats
            .remove_cgroup(&cgroup.to_string_lossy())
            .map_err(|error| format!("cgroup {}: {error}", cgroup.display()))?;
    }
    Ok(())
}

/// Ids of all attempts that may exist: the newest known, and one that was being made when this
/// process died. Older ones are removed before a new one is made.
fn container_ids(spec: &v1::SandboxSpec, facts: &Facts) -> BTreeSet<String> {
    let names = members(spec)
        .map(|member| &member.spec.name)
        .chain(facts.containers.keys());
    let mut ids = BTreeSet::new();
    for name in names {
        let history = facts.containers.get(name);
        let next = history.map_or(0, |history| history.next_attempt());
        ids.insert(container_id(&spec.uid, name, next));
        ids.extend(
            history
                .and_then(|h| h.current.as_ref())
                .map(|attempt| attempt.id.clone()),
        );
    }
    ids
}
