//! Waiting: always by a watch, always with a deadline, and a timeout says what
//! the last seen state was.

use std::time::Duration;

use anyhow::{Result, bail};
use futures::{StreamExt as _, TryStreamExt as _};
use k8s_openapi::api::core::v1::{ContainerState, Event, Pod};
use kube::api::{Api, WatchEvent, WatchParams};
use kube::runtime::{WatchStreamExt as _, watcher};

/// Deadline of ordinary waits. Generous, since it only costs time on failure.
pub const DEADLINE: Duration = Duration::from_secs(120);

/// Watches one pod until `reached` is true of it.
///
/// # Errors
/// After [`DEADLINE`], with the pod's last status.
pub async fn wait_pod(
    pods: &Api<Pod>,
    name: &str,
    what: &str,
    reached: impl Fn(&Pod) -> bool,
) -> Result<Pod> {
    let mut last = None;
    let config = watcher::Config::default().fields(&format!("metadata.name={name}"));
    let mut stream = watcher(pods.clone(), config)
        .default_backoff()
        .applied_objects()
        .boxed();
    let found = tokio::time::timeout(DEADLINE, async {
        while let Some(event) = stream.next().await {
            // The watcher reconnects by itself; its errors are the API server's pauses.
            let Ok(pod) = event else { continue };
            if reached(&pod) {
                return Some(pod);
            }
            last = Some(pod);
        }
        None
    })
    .await;
    match found {
        Ok(Some(pod)) => Ok(pod),
        _ => bail!(
            "pod {name} is not {what} after {DEADLINE:?}; its status: {}",
            last.map_or("(never seen)".to_owned(), |pod| {
                serde_json::to_string_pretty(&pod.status).unwrap_or_default()
            })
        ),
    }
}

/// Watches until no pod of that name and UID exists any more.
///
/// # Errors
/// After [`DEADLINE`], with the pod's last state.
pub async fn wait_gone(pods: &Api<Pod>, name: &str, uid: &str) -> Result<()> {
    let gone = async {
        loop {
            let Some(pod) = pods.get_opt(name).await? else {
                return Ok(());
            };
            if pod.metadata.uid.as_deref() != Some(uid) {
                return Ok(());
            }
            let version = pod.metadata.resource_version.clone().unwrap_or_default();
            let params = WatchParams::default().fields(&format!("metadata.name={name}"));
            let mut stream = pods.watch(&params, &version).await?.boxed();
            while let Ok(Some(event)) = stream.try_next().await {
                if let WatchEvent::Deleted(old) = event
                    && old.metadata.uid.as_deref() == Some(uid)
                {
                    return Ok(());
                }
            }
        }
    };
    match tokio::time::timeout(DEADLINE, gone).await {
        Ok(result) => result,
        Err(_) => {
            let pod = pods.get_opt(name).await?;
            bail!("pod {name} still exists after {DEADLINE:?}: {pod:#?}")
        }
    }
}

/// Watches for an event about `pod` with this reason whose message contains `text`.
///
/// # Errors
/// After [`DEADLINE`], with the events that were seen instead.
pub async fn wait_event(events: &Api<Event>, pod: &str, reason: &str, text: &str) -> Result<Event> {
    let config = watcher::Config::default().fields(&format!("involvedObject.name={pod}"));
    first_event(events, config, reason, text).await
}

/// Watches for an event with this reason about anything in the namespace.
///
/// # Errors
/// After [`DEADLINE`], with the events that were seen instead.
pub async fn wait_any_event(events: &Api<Event>, reason: &str) -> Result<Event> {
    first_event(events, watcher::Config::default(), reason, "").await
}

async fn first_event(
    events: &Api<Event>,
    config: watcher::Config,
    reason: &str,
    text: &str,
) -> Result<Event> {
    let mut seen = Vec::new();
    let mut stream = watcher(events.clone(), config)
        .default_backoff()
        .applied_objects()
        .boxed();
    let found = tokio::time::timeout(DEADLINE, async {
        while let Some(event) = stream.next().await {
            let Ok(event) = event else { continue };
            let message = event.message.clone().unwrap_or_default();
            if event.reason.as_deref() == Some(reason) && message.contains(text) {
                return Some(event);
            }
            seen.push(format!("{}: {message}", event.reason.unwrap_or_default()));
        }
        None
    })
    .await;
    match found {
        Ok(Some(event)) => Ok(event),
        _ => bail!("no event {reason} with {text:?}; seen: {seen:#?}"),
    }
}

/// Whether the pod is in this phase.
#[must_use]
pub fn is_phase(pod: &Pod, phase: &str) -> bool {
    pod.status
        .as_ref()
        .and_then(|status| status.phase.as_deref())
        == Some(phase)
}

/// Status of one of the pod's conditions: "True", "False", "Unknown" or "" when absent.
#[must_use]
pub fn condition<'a>(pod: &'a Pod, name: &str) -> &'a str {
    pod.status
        .iter()
        .flat_map(|status| status.conditions.iter().flatten())
        .find(|condition| condition.type_ == name)
        .map_or("", |condition| condition.status.as_str())
}

/// Whether the pod is running and ready.
#[must_use]
pub fn is_ready(pod: &Pod) -> bool {
    is_phase(pod, "Running") && condition(pod, "Ready") == "True"
}

/// State of a container or init container, if the pod reports one.
#[must_use]
pub fn container_state<'a>(pod: &'a Pod, name: &str) -> Option<&'a ContainerState> {
    let status = pod.status.as_ref()?;
    status
        .container_statuses
        .iter()
        .flatten()
        .chain(status.init_container_statuses.iter().flatten())
        .find(|status| status.name == name)?
        .state
        .as_ref()
}
