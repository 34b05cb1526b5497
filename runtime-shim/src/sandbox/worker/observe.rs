//! What containerd says about the containers that should run, and what follows from it.

use jiff::{SignedDuration, Timestamp};
use sandman_protocol::v1;
use tracing::{info, warn};

use super::Worker;
use crate::logs::LogId;
use crate::runtime::{Exit, RuntimeError, TaskStatus};
use crate::sandbox::facts::{Attempt, Phase, UNKNOWN_EXIT_CODE};
use crate::sandbox::jobs::{self, Last, Outcome};
use crate::sandbox::plan::members;
use crate::spec::sandbox_cgroup;

/// When containerd could not be asked about a container.
const LOOK_AGAIN: SignedDuration = SignedDuration::from_secs(2);

impl Worker {
    /// Asks containerd about every container that should run.
    pub(super) async fn look(&mut self) {
        self.look_at = None;
        let running: Vec<(String, String)> = self
            .facts
            .containers
            .iter()
            .filter_map(|(name, facts)| Some((name.clone(), facts.current.as_ref()?)))
            .filter(|(_, attempt)| attempt.is_live())
            .map(|(name, attempt)| (name, attempt.id.clone()))
            .collect();
        for (name, id) in running {
            if self.facts.attempt(&name).is_some_and(Attempt::is_running) {
                match self.host.runtime.state(&id).await {
                    Ok(Some(TaskStatus::Running)) => continue,
                    Ok(Some(TaskStatus::Stopped(exit))) => self.exited(&name, exit, false),
                    Ok(None | Some(TaskStatus::Created)) => self.lost(&name),
                    // The shim did not answer containerd in time, which a busy host is enough for.
                    // Of a shim that is gone containerd says that there is no task.
                    Ok(Some(TaskStatus::Unknown)) => {
                        self.look_later(&RuntimeError::Unavailable(format!(
                            "containerd cannot tell the state of task {id}"
                        )));
                        continue;
                    }
                    Err(error) => {
                        self.look_later(&error);
                        continue;
                    }
                }
            }
            self.collect(&name);
        }
    }

    pub(super) fn look_later(&mut self, error: &RuntimeError) {
        self.host.metrics.runtime_error();
        warn!(pod_uid = self.spec.uid, %error, "cannot ask containerd about a container");
        self.look_at = Timestamp::now().saturating_add(LOOK_AGAIN).ok();
    }

    pub(super) fn lost(&mut self, name: &str) {
        let exit = Exit {
            code: UNKNOWN_EXIT_CODE,
            at: std::time::SystemTime::now(),
        };
        self.exited(name, exit, true);
    }

    pub(super) fn exited(&mut self, name: &str, exit: Exit, lost: bool) {
        let Some(attempt) = self
            .facts
            .containers
            .get_mut(name)
            .and_then(|facts| facts.current.as_mut())
        else {
            return;
        };
        let Phase::Running { since } = attempt.phase else {
            return;
        };
        let at = Timestamp::try_from(exit.at).unwrap_or_else(|_| Timestamp::now());
        attempt.phase = Phase::Exited {
            since,
            code: exit.code,
            at: at.max(since),
            lost,
        };
        info!(
            pod_uid = self.spec.uid,
            container = name,
            attempt = attempt.number,
            exit_code = exit.code,
            lost,
            "container ended"
        );
        self.persist();
    }

    /// Starts the collection of an exit that is on record: it makes the runtime forget it.
    pub(super) fn collect(&mut self, name: &str) {
        if !self.journal.is_current() {
            return;
        }
        let Some(attempt) = self.facts.attempt(name).cloned() else {
            return;
        };
        let Phase::Exited {
            since,
            code,
            at,
            lost,
        } = attempt.phase
        else {
            return;
        };
        let live = self.live.containers.entry(name.to_owned()).or_default();
        if std::mem::replace(&mut live.collecting, true) {
            return;
        }
        let policy = members(&self.spec)
            .find(|member| member.spec.name == name)
            .map_or(v1::TerminationMessagePolicy::File, |member| {
                member.spec.termination_message_policy()
            });
        let last = Last {
            log: LogId {
                uid: self.spec.uid.clone(),
                container: name.to_owned(),
                attempt: attempt.number,
            },
            container_id: attempt.id,
            cgroup: sandbox_cgroup(&self.host.limits.cgroup_parent, &self.spec),
            since,
            code,
            at,
            lost,
            policy,
        };
        let log = self
            .outputs
            .get_mut(name)
            .and_then(|output| output.log.take());
        let (host, name) = (self.host.clone(), name.to_owned());
        self.jobs
            .spawn(async move { Outcome::Collected(name, jobs::collect(&host, &last, log).await) });
    }
}
