//! Takes over containers that an earlier process of this service made.

use std::collections::BTreeMap;
use std::time::Duration;

use jiff::Timestamp;
use sandman_protocol::v1;
use tracing::{info, warn};

use super::facts::{Attempt, Facts, Phase, Termination, UNKNOWN_EXIT_CODE};
use super::identity::{Identity, Kind};
use super::jobs::{self, Host};
use super::plan::members;
use crate::logs::{ContainerLog, LogId};
use crate::runtime::TaskStatus;

const RETRY: Duration = Duration::from_secs(1);
/// How long one container may hold up the start of the service.
const PATIENCE: Duration = Duration::from_secs(30);

/// Brings facts into line with the containers found in containerd. `known` tells whether the
/// sandbox has a record; without one its history is what the labels say.
pub(super) async fn merge(host: &Host, known: bool, facts: &mut Facts, found: Vec<Identity>) {
    let mut by_name: BTreeMap<String, Vec<Identity>> = BTreeMap::new();
    for identity in found {
        by_name
            .entry(identity.container.clone())
            .or_default()
            .push(identity);
    }
    for (name, mut attempts) in by_name {
        attempts.sort_by_key(|identity| identity.attempt);
        let recorded = facts.attempt(&name).map(|attempt| attempt.number);
        let Some(newest) = attempts.pop() else {
            continue;
        };
        for old in attempts {
            if recorded != Some(old.attempt) {
                remove(host, &old).await;
            }
        }
        if recorded.is_some_and(|number| number >= newest.attempt) {
            continue;
        }
        let phase = match state(host, &newest).await {
            Some(TaskStatus::Running | TaskStatus::Stopped(_) | TaskStatus::Unknown) => {
                Phase::Running {
                    since: Timestamp::now(),
                }
            }
            // Made but never started: the same attempt is made again.
            Some(TaskStatus::Created) | None if known => {
                remove(host, &newest).await;
                continue;
            }
            Some(TaskStatus::Created) | None => Phase::Ended(unknown_end(&newest)),
        };
        info!(
            pod_uid = newest.uid,
            container = name,
            attempt = newest.attempt,
            "adopted a container by its labels"
        );
        let mut attempt = Attempt::running(&newest, Timestamp::now());
        attempt.phase = phase;
        facts
            .containers
            .entry(name)
            .or_default()
            .begin(attempt, Timestamp::now());
    }
}

/// The record of a sandbox that is known only from its containers' labels. Its schema 0 keeps
/// everything but removal from being decided for it.
pub(super) fn skeleton(found: &[Identity]) -> Option<v1::SandboxSpec> {
    let first = found.first()?;
    let mut spec = v1::SandboxSpec {
        uid: first.uid.clone(),
        namespace: first.namespace.clone(),
        name: first.pod.clone(),
        restart_policy: v1::RestartPolicy::Never as i32,
        ..Default::default()
    };
    let mut by_name = BTreeMap::new();
    for identity in found {
        by_name.insert(&identity.container, identity);
    }
    for (name, identity) in by_name {
        let container = v1::Container {
            name: name.clone(),
            image: identity.image.clone(),
            ..Default::default()
        };
        match identity.kind {
            Kind::Init => spec.init_containers.push(container),
            Kind::Regular => spec.containers.push(container),
            Kind::Ephemeral => spec.ephemeral_containers.push(container),
        }
    }
    Some(spec)
}

/// Goes on copying the output of a container that runs.
pub(super) fn reopen_log(
    host: &Host,
    spec: &v1::SandboxSpec,
    name: &str,
    attempt: &Attempt,
) -> Option<ContainerLog> {
    let streams = members(spec)
        .find(|member| member.spec.name == name)
        .map(|member| member.spec.into())
        .unwrap_or_default();
    let stdio = host.container_stdio(&attempt.id, streams);
    let id = LogId {
        uid: spec.uid.clone(),
        container: name.to_owned(),
        attempt: attempt.number,
    };
    // A skeleton does not know about terminals: what is there decides.
    let stderr = stdio.stderr.filter(|path| path.exists());
    match host.logs.start(&id, &stdio.stdout?, stderr.as_deref()) {
        Ok(log) => Some(log),
        Err(error) => {
            warn!(pod_uid = spec.uid, container = name, %error, "cannot go on with a log");
            None
        }
    }
}

fn unknown_end(identity: &Identity) -> Termination {
    Termination {
        exit_code: UNKNOWN_EXIT_CODE,
        reason: "ContainerStatusUnknown".to_owned(),
        message: "The container could not be located when the pod was terminated".to_owned(),
        started_at: None,
        finished_at: Timestamp::now(),
        container_id: identity.container_id(),
    }
}

/// The state of a task. One that containerd cannot tell in time is unknown: the whole host
/// waits for this look before it serves, and the sandbox's worker goes on asking.
async fn state(host: &Host, identity: &Identity) -> Option<TaskStatus> {
    let answer = tokio::time::timeout(PATIENCE, async {
        loop {
            match host.runtime.state(&identity.container_id()).await {
                Ok(state) => return state,
                Err(error) => {
                    warn!(pod_uid = identity.uid, %error, "cannot ask containerd about a container");
                    if !error.is_unavailable() {
                        return Some(TaskStatus::Unknown);
                    }
                    tokio::time::sleep(RETRY).await;
                }
            }
        }
    });
    answer.await.unwrap_or(Some(TaskStatus::Unknown))
}

async fn remove(host: &Host, identity: &Identity) {
    let id = identity.container_id();
    if let Err(error) = jobs::destroy(host, &id).await {
        // It is removed again before the next attempt and with the sandbox.
        warn!(pod_uid = identity.uid, container_id = id, %error, "cannot remove a leftover");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_skeleton_is_inert_and_complete() {
        let identity = |container: &str, kind| Identity {
            uid: "u".into(),
            namespace: "ns".into(),
            pod: "p".into(),
            container: container.into(),
            attempt: 0,
            kind,
            spec_hash: String::new(),
            image: "busybox".into(),
            image_id: String::new(),
            stop_signal: 15,
        };
        let found = [identity("i", Kind::Init), identity("c", Kind::Regular)];
        let spec = skeleton(&found).unwrap();
        assert_eq!(
            (spec.schema, spec.uid.as_str(), spec.name.as_str()),
            (0, "u", "p")
        );
        assert_eq!(spec.init_containers[0].name, "i");
        assert_eq!(spec.containers[0].image, "busybox");
        assert!(skeleton(&[]).is_none());
    }
}
