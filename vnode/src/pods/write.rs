//! Writes of a pod's status: one guarded patch per real change, and changes
//! that nobody waits for are collected for a moment. A pod that starts, runs
//! and is deleted costs at most four.

use std::sync::atomic::Ordering;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Pod, PodStatus};
use kube::Api;
use kube::api::{DeleteParams, Patch, PatchParams, Preconditions};
use serde_json::{Value, json};
use tokio::time::Instant;

use super::PodController;
use super::resize;
use super::status::{is_terminal, is_urgent};
use super::store::{Entry, Work};
use super::sync::SyncError;
use crate::hosts::Uid;
use crate::strategic;
use crate::view::HostName;

/// How long changes that are not urgent are collected.
const COLLECT: Duration = Duration::from_secs(1);
/// For the eyes of users only; the placement itself is `status.hostIP`.
pub(super) const HOST_ANNOTATION: &str = "sandman.dev/host";

impl PodController {
    /// Brings the API server's copy of the status to `new`, now or in a moment.
    /// `pod` is the copy that `new` was made from: the difference to a newer one
    /// would take back what others wrote in between.
    pub(super) async fn write_status(
        &self,
        entry: &Entry,
        work: &mut Work,
        pod: &Pod,
        new: &PodStatus,
    ) -> Result<(), SyncError> {
        let empty = PodStatus::default();
        let old = pod.status.as_ref().unwrap_or(&empty);
        let Some(patch) = strategic::diff(&to_value(old)?, &to_value(new)?) else {
            work.unwritten = None;
            return Ok(());
        };
        entry.show(new);
        let since = *work.unwritten.get_or_insert_with(Instant::now);
        // Readers turn away from a pod when it is being deleted, not when its
        // containers end one by one.
        let deleting = pod.metadata.deletion_timestamp.is_some();
        let urgent = if deleting {
            old.phase != new.phase
        } else {
            is_urgent(old, new)
        };
        let wait = COLLECT.saturating_sub(since.elapsed());
        if !urgent && !wait.is_zero() && !self.flushing.load(Ordering::Relaxed) {
            self.queue.add_after(Uid::clone(&entry.uid), wait);
            return Ok(());
        }
        self.patch_status(entry, pod, json!({ "status": patch }))
            .await?;
        work.unwritten = None;
        if !is_terminal(new.phase.as_deref()) {
            for told in resize::events(pod, old, new) {
                self.events
                    .pod(pod, told.warning, told.reason, &told.message);
            }
        }
        Ok(())
    }

    /// Makes a placement durable. Returns only after the API server has it.
    /// `pod` is the copy that `new` was made from.
    pub(super) async fn write_placement(
        &self,
        entry: &Entry,
        pod: &Pod,
        new: &PodStatus,
        host: &HostName,
    ) -> Result<(), SyncError> {
        let empty = PodStatus::default();
        let old = pod.status.as_ref().unwrap_or(&empty);
        let status = strategic::diff(&to_value(old)?, &to_value(new)?).unwrap_or_else(|| json!({}));
        let body = json!({
            "metadata": { "annotations": { HOST_ANNOTATION: host.as_str() } },
            "status": status,
        });
        self.patch_status(entry, pod, body).await?;
        if entry
            .api()
            .status
            .as_ref()
            .and_then(|status| status.host_ip.as_ref())
            .is_none()
        {
            return Err(SyncError::NotDurable);
        }
        Ok(())
    }

    async fn patch_status(&self, entry: &Entry, pod: &Pod, body: Value) -> Result<(), SyncError> {
        let mut body = body;
        // Not another pod that took over the name.
        body["metadata"]["uid"] = json!(&*entry.uid);
        let name = pod.metadata.name.as_deref().unwrap_or_default();
        self.metrics.status_patches.inc();
        let patch = Patch::Strategic(body);
        let patched = self
            .api(pod)
            .patch_status(name, &PatchParams::default(), &patch)
            .await;
        match patched {
            Ok(pod) => {
                entry.observe(pod);
                Ok(())
            }
            // The pod is gone, or another has its name: the watch will say so.
            Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => {
                Err(SyncError::Gone)
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Lets the API server drop the pod, after nothing of it is left here.
    pub(super) async fn delete(&self, entry: &Entry) -> Result<(), SyncError> {
        let pod = entry.api();
        let name = pod.metadata.name.as_deref().unwrap_or_default();
        let params = DeleteParams::default()
            .grace_period(0)
            .preconditions(Preconditions {
                uid: Some(entry.uid.to_string()),
                resource_version: None,
            });
        match self.api(&pod).delete(name, &params).await {
            Ok(_) => Ok(()),
            Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    fn api(&self, pod: &Pod) -> Api<Pod> {
        Api::namespaced(
            self.client.clone(),
            pod.metadata.namespace.as_deref().unwrap_or_default(),
        )
    }
}

fn to_value(status: &PodStatus) -> Result<Value, SyncError> {
    serde_json::to_value(status).map_err(|error| kube::Error::SerdeError(error).into())
}
