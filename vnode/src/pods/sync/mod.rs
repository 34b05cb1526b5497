//! One run of a pod's worker: looks at the pod and at its host, does the next
//! thing, and writes what is true. Returns early wherever only an event can
//! help; that event runs it again.

mod apply;
mod end;
mod place;

use k8s_openapi::api::core::v1::{Container, Pod};
use k8s_openapi::jiff::Timestamp;
use sandman_protocol::v1;
use sandman_protocol::v1::Lifecycle;

use super::resources::taken;
use super::status::{self, Observation, is_terminal};
use super::store::{Entry, Work};
use super::{PodController, lock};
use crate::hosts::{Connection, HostError, HostView, Uid};
use crate::view::HostName;

/// Different warnings posted about one pod.
const MAX_WARNINGS: usize = 32;

/// Why a run has to be repeated.
#[derive(Debug, thiserror::Error)]
pub(in crate::pods) enum SyncError {
    /// The API server did not do what was asked.
    #[error("{}", crate::errors::brief(.0))]
    Api(#[from] kube::Error),
    /// The host did not do what was asked.
    #[error("host {host}: {error}")]
    Host { host: HostName, error: HostError },
    /// The pod was deleted while it was worked on; the watch will tell.
    #[error("the pod is gone")]
    Gone,
    /// It took too long.
    #[error("no answer in time")]
    Late,
    /// The API server took the placement and did not keep it.
    #[error("the placement was not stored")]
    NotDurable,
}

/// Where a pod is.
enum Place {
    /// Nowhere yet.
    None,
    /// On a host of this node.
    On(HostName),
    /// On a host that this node is not configured for.
    Unknown(String),
}

impl PodController {
    pub(in crate::pods) async fn sync(&self, uid: &Uid) -> Result<(), SyncError> {
        let Some(entry) = self.store.get(uid) else {
            return Ok(());
        };
        let mut work = entry.work.lock().await;
        let pod = entry.api();
        let place = self.placement(&entry, &pod);
        let result = if pod.metadata.deletion_timestamp.is_some() {
            self.sync_deleted(&entry, &mut work, &pod, place).await
        } else if is_terminal(phase(&pod)) {
            self.sync_finished(&entry, &mut work, &pod, place).await
        } else {
            self.sync_active(&entry, &mut work, &pod, place).await
        };
        match result {
            Err(SyncError::Gone) => Ok(()),
            other => other,
        }
    }

    /// The pod's host: as decided in this process, else as its status says, else
    /// the one that already runs it.
    ///
    /// A host's word counts only for a pod that some node has worked on before:
    /// else any host could claim a new pod, and get its secrets.
    fn placement(&self, entry: &Entry, pod: &Pod) -> Place {
        if let Some(host) = entry.host() {
            return Place::On(host);
        }
        let status = pod.status.as_ref();
        let found = match status.and_then(|s| s.host_ip.as_deref()) {
            Some(ip) => match self.hosts.by_ip(ip) {
                Some(host) => host,
                None => return Place::Unknown(ip.to_owned()),
            },
            None if status.is_some_and(|s| s.start_time.is_some()) => {
                match self.hosts.reporting(&entry.uid).pop() {
                    Some(host) => host,
                    None => return Place::None,
                }
            }
            None => return Place::None,
        };
        entry.set_host(found.clone());
        if !is_terminal(phase(pod)) {
            lock(&self.ledger).book(&entry.uid, &found, taken(pod), owner(pod));
        }
        Place::On(found)
    }

    /// A pod that should run.
    async fn sync_active(
        &self,
        entry: &Entry,
        work: &mut Work,
        pod: &Pod,
        place: Place,
    ) -> Result<(), SyncError> {
        let host = match place {
            Place::On(host) => host,
            Place::None => match self.place(entry, work, pod).await? {
                Some(host) => host,
                None => return Ok(()),
            },
            Place::Unknown(ip) => {
                let message = format!(
                    "the pod is on a host with address {ip}, which this node does not have"
                );
                return self.hold(entry, work, pod, "HostUnknown", message).await;
            }
        };
        // Placing changed the API server's copy.
        let pod = &*entry.api();
        // A resize changes what it takes.
        lock(&self.ledger).book(&entry.uid, &host, taken(pod), owner(pod));
        let Some(view) = self.hosts.view(&host) else {
            return Ok(());
        };
        if view.connection != Connection::Synced {
            if !view.lost {
                return Ok(());
            }
            let lost = Observation {
                lost: Some(&host),
                ..self.observation(&view, None, work)
            };
            let status = status::generate(pod, lost, Timestamp::now());
            return self.write_status(entry, work, pod, &status).await;
        }
        let report = self.hosts.report(&host, &entry.uid);
        let lifecycle = report.as_ref().map(|report| report.lifecycle());
        let lost_for_good = report.is_none() && has_run(pod) && !restarts(pod);
        let ended =
            lost_for_good || matches!(lifecycle, Some(Lifecycle::Finished | Lifecycle::Removed));
        if lost_for_good {
            tracing::warn!(pod_uid = &*entry.uid, %host, "the host lost the pod, which must not run again");
        }
        if !ended
            && lifecycle != Some(Lifecycle::Terminating)
            && let Some(rejection) = self
                .apply(entry, work, pod, &view, report.as_deref())
                .await?
        {
            if report.is_none() {
                return self.reject(entry, work, pod, &rejection).await;
            }
            self.warn_once(work, pod, rejection.reason, &rejection.message);
        }
        let report = self.hosts.report(&host, &entry.uid);
        let observation = self.observation(&view, report.as_deref(), work);
        let status = status::generate(
            pod,
            Observation {
                ended,
                ..observation
            },
            Timestamp::now(),
        );
        self.write_status(entry, work, pod, &status).await
    }

    fn observation<'a>(
        &self,
        view: &'a HostView,
        report: Option<&'a v1::SandboxReport>,
        work: &'a Work,
    ) -> Observation<'a> {
        let pod_ip = report.map(|report| report.pod_ip.as_str());
        Observation {
            report,
            pod_ip: pod_ip.filter(|ip| self.hosts.may_give(&view.name, ip)),
            host_ip: Some(&view.ip_text),
            waiting: work.waiting.as_ref(),
            ..Observation::default()
        }
    }

    fn warn_once(&self, work: &mut Work, pod: &Pod, reason: &str, message: &str) {
        let text = format!("{reason}: {message}");
        if work.warned.len() < MAX_WARNINGS && work.warned.insert(text) {
            self.events.warn(pod, reason, message);
        }
    }
}

fn phase(pod: &Pod) -> Option<&str> {
    pod.status.as_ref()?.phase.as_deref()
}

fn owner(pod: &Pod) -> Option<&str> {
    let owners = pod.metadata.owner_references.as_ref()?;
    let owner = owners.iter().find(|owner| owner.controller == Some(true))?;
    Some(&owner.uid)
}

/// Whether a container of the pod was ever started, as the API server knows it.
fn has_run(pod: &Pod) -> bool {
    let Some(status) = &pod.status else {
        return false;
    };
    let statuses = status.init_container_statuses.iter().flatten();
    statuses
        .chain(status.container_statuses.iter().flatten())
        .any(|status| status.container_id.is_some())
}

/// Whether anything of the pod may run again after an end that nobody saw.
fn restarts(pod: &Pod) -> bool {
    pod.spec.as_ref().is_some_and(|spec| {
        let policy = |container: &Container| container.restart_policy.clone();
        let of_pod = spec.restart_policy.as_deref() != Some("Never");
        let mut containers = spec.containers.iter();
        containers.any(|container| policy(container).map_or(of_pod, |own| own != "Never"))
    })
}
