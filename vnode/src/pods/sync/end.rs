//! A pod that is over or being deleted: its sandbox goes first, then its object.

use std::time::Duration;

use k8s_openapi::api::core::v1::{Pod, PodStatus};
use k8s_openapi::jiff::Timestamp;
use sandman_protocol::v1::Lifecycle;

use super::{Place, SyncError, phase};
use crate::hosts::{Connection, HostView};
use crate::pods::spec;
use crate::pods::status::{self, Observation, is_terminal};
use crate::pods::store::{Entry, Work};
use crate::pods::{PodController, lock};

impl PodController {
    /// A pod in a terminal phase: its containers are stopped, its logs stay until
    /// it is deleted.
    pub(super) async fn sync_finished(
        &self,
        entry: &Entry,
        work: &mut Work,
        pod: &Pod,
        place: Place,
    ) -> Result<(), SyncError> {
        self.room_was_made(&entry.uid);
        self.objects.release(&entry.uid);
        let Place::On(name) = place else {
            return Ok(());
        };
        let (Some(view), Some(host)) = (self.hosts.view(&name), self.hosts.host(&name)) else {
            return Ok(());
        };
        let report = self.hosts.report(&name, &entry.uid);
        let Some(report) = report.filter(|_| view.connection == Connection::Synced) else {
            return Ok(());
        };
        let ended = matches!(report.lifecycle(), Lifecycle::Finished | Lifecycle::Removed);
        let observation = self.observation(&view, Some(&report), work);
        let status = status::generate(
            pod,
            Observation {
                ended,
                ..observation
            },
            Timestamp::now(),
        );
        self.write_status(entry, work, pod, &status).await?;
        if !ended {
            let grace = spec::grace_period(pod);
            return self
                .remove(entry, work, &view, grace, "the pod is over")
                .await;
        }
        if report.lifecycle() == Lifecycle::Removed && work.unwritten.is_none() {
            host.forget(&entry.uid)
                .await
                .map_err(|error| SyncError::Host {
                    host: name.clone(),
                    error,
                })?;
            self.hosts.forgotten(&name, &entry.uid);
        }
        Ok(())
    }

    /// A pod that is being deleted: its object goes when its sandbox is gone.
    pub(super) async fn sync_deleted(
        &self,
        entry: &Entry,
        work: &mut Work,
        pod: &Pod,
        place: Place,
    ) -> Result<(), SyncError> {
        lock(&self.unplaced).remove(&entry.uid);
        let name = match place {
            // No host was ever told about it.
            Place::None => {
                return self
                    .finish(entry, work, pod, &ended(pod, Observation::default()))
                    .await;
            }
            // Nobody can say that it is gone: it stays until that host is
            // configured again, or somebody deletes it by force.
            Place::Unknown(_) => return Ok(()),
            Place::On(name) => name,
        };
        let Some(view) = self.hosts.view(&name) else {
            return Ok(());
        };
        if view.connection != Connection::Synced {
            return Ok(());
        }
        let report = self.hosts.report(&name, &entry.uid);
        let removed = report
            .as_ref()
            .is_some_and(|r| r.lifecycle() == Lifecycle::Removed);
        if !removed {
            self.remove(
                entry,
                work,
                &view,
                spec::grace_period(pod),
                "the pod was deleted",
            )
            .await?;
        }
        // An in-process host is done by now.
        let report = self.hosts.report(&name, &entry.uid);
        let removed = report
            .as_ref()
            .is_some_and(|r| r.lifecycle() == Lifecycle::Removed);
        let observation = self.observation(&view, report.as_deref(), work);
        if removed {
            let status = ended(pod, observation);
            return self.finish(entry, work, pod, &status).await;
        }
        let status = status::generate(pod, observation, Timestamp::now());
        self.write_status(entry, work, pod, &status).await
    }

    /// Writes the last status and lets the object go.
    async fn finish(
        &self,
        entry: &Entry,
        work: &mut Work,
        pod: &Pod,
        status: &PodStatus,
    ) -> Result<(), SyncError> {
        self.write_status(entry, work, pod, status).await?;
        if work.deleted || !is_terminal(phase(&entry.api())) {
            return Ok(());
        }
        self.delete(entry).await?;
        work.deleted = true;
        Ok(())
    }

    /// Tells the host to end a sandbox, once for each list and grace period.
    async fn remove(
        &self,
        entry: &Entry,
        work: &mut Work,
        view: &HostView,
        grace: Duration,
        reason: &str,
    ) -> Result<(), SyncError> {
        let told = work
            .removal
            .is_some_and(|(epoch, told)| epoch == view.epoch && told <= grace);
        if told {
            return Ok(());
        }
        let Some(host) = self.hosts.host(&view.name) else {
            return Ok(());
        };
        host.remove(&entry.uid, grace, reason)
            .await
            .map_err(|error| SyncError::Host {
                host: view.name.clone(),
                error,
            })?;
        work.removal = Some((view.epoch, grace));
        Ok(())
    }
}

/// The status of a pod of which nothing is left.
fn ended(pod: &Pod, observation: Observation<'_>) -> PodStatus {
    let seen = Observation {
        ended: true,
        ..observation
    };
    status::generate(pod, seen, Timestamp::now())
}
