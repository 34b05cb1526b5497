//! A placed pod: resolved, and its host told what should be true.

use std::sync::atomic::Ordering;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use sandman_protocol::v1;
use sandman_protocol::v1::Lifecycle;
use tokio::time::Instant;

use super::SyncError;
use crate::backoff::unit_random;
use crate::hosts::{HostError, HostView, Uid};
use crate::pods::PodController;
use crate::pods::admit::{self, Rejection};
use crate::pods::resolve::{self, Resolved, Sources, Unresolved, references};
use crate::pods::spec;
use crate::pods::status::Waiting;
use crate::pods::store::{Applied, Entry, Work};

/// How long a reference may be unreadable before the user is told.
const UNREAD_PATIENCE: Duration = Duration::from_secs(10);
/// Pods that are adopted a second after a restart. Each costs a token or two,
/// which live for many minutes more.
const ADOPTIONS_PER_SECOND: u32 = 50;
const ADOPTION_LIMIT: Duration = Duration::from_secs(90);

impl PodController {
    /// Tells the host what should be true, if it does not know that yet. Returns
    /// the host's refusal, if it refuses for good.
    pub(super) async fn apply(
        &self,
        entry: &Entry,
        work: &mut Work,
        pod: &Pod,
        view: &HostView,
        report: Option<&v1::SandboxReport>,
    ) -> Result<Option<Rejection>, SyncError> {
        let rejection = self.apply_news(entry, work, pod, view, report).await?;
        // On every way out: an earlier need of the same pod has taken the place
        // of this one in the queue. An error is retried sooner than that.
        if let Some(due) = work.tokens.next_due() {
            self.queue.add_after(Uid::clone(&entry.uid), due);
        }
        Ok(rejection)
    }

    async fn apply_news(
        &self,
        entry: &Entry,
        work: &mut Work,
        pod: &Pod,
        view: &HostView,
        report: Option<&v1::SandboxReport>,
    ) -> Result<Option<Rejection>, SyncError> {
        let wanted = Applied::of(pod, view.epoch);
        let due = work.tokens.next_due().is_some_and(|due| due.is_zero());
        if work.applied.is_none() && self.adopts_later(entry, work, pod, report) {
            return Ok(None);
        }
        // Cleared first: a change from now on runs the worker again.
        let changed = entry.changed.swap(false, Ordering::Relaxed);
        if work.applied == Some(wanted) && !changed && !due {
            return Ok(None);
        }
        let result = self.resolve_and_apply(entry, work, pod, view).await;
        match result {
            Ok(true) => {
                work.applied = Some(wanted);
                Ok(None)
            }
            Ok(false) => {
                entry.changed.store(true, Ordering::Relaxed);
                Ok(None)
            }
            Err(SyncError::Host {
                error: HostError::Refused(message),
                ..
            }) => Ok(Some(Rejection {
                reason: admit::UNSUPPORTED,
                message,
            })),
            // Its end is on the way and will be reported.
            Err(SyncError::Host {
                error: HostError::Removing,
                ..
            }) => Ok(None),
            Err(error) => {
                entry.changed.store(true, Ordering::Relaxed);
                if let SyncError::Host {
                    error: HostError::Full(message),
                    ..
                } = &error
                {
                    self.warn_once(work, pod, "HostFull", message);
                }
                Err(error)
            }
        }
    }

    /// Whether the host knows the pod from before this process started, and can
    /// wait to be told again: a restart must not ask the API server for the
    /// tokens of all pods at once.
    fn adopts_later(
        &self,
        entry: &Entry,
        work: &mut Work,
        pod: &Pod,
        report: Option<&v1::SandboxReport>,
    ) -> bool {
        let known = report.is_some_and(|report| {
            report.lifecycle() == Lifecycle::Active
                && Some(report.observed_generation) == pod.metadata.generation
        });
        if !known {
            return false;
        }
        let at = *work.adopt_at.get_or_insert_with(|| {
            let pods = u32::try_from(self.store.len()).unwrap_or(u32::MAX);
            let spread = (Duration::from_secs(1) / ADOPTIONS_PER_SECOND).saturating_mul(pods);
            Instant::now() + spread.min(ADOPTION_LIMIT).mul_f64(unit_random())
        });
        let wait = at.saturating_duration_since(Instant::now());
        if !wait.is_zero() {
            self.queue.add_after(Uid::clone(&entry.uid), wait);
        }
        !wait.is_zero()
    }

    /// `false` when something that the pod refers to is not there.
    async fn resolve_and_apply(
        &self,
        entry: &Entry,
        work: &mut Work,
        pod: &Pod,
        view: &HostView,
    ) -> Result<bool, SyncError> {
        let resolved = match self.resolve(entry, work, pod, view).await? {
            Ok(resolved) => resolved,
            Err(unresolved) => {
                self.unresolved(entry, work, pod, unresolved);
                return Ok(false);
            }
        };
        work.waiting = None;
        work.unread_since = None;
        for secret in &resolved.bad_pull_secrets {
            let message = format!(
                "Unable to retrieve some image pull secrets ({secret}); attempting to pull the image may not succeed."
            );
            self.warn_once(work, pod, "FailedToRetrieveImagePullSecret", &message);
        }
        let handler = self.runtime_handler(pod).await?;
        let spec = spec::sandbox(&self.config, pod, &handler, resolved);
        let Some(host) = self.hosts.host(&view.name) else {
            return Ok(false);
        };
        host.apply(spec).await.map_err(|error| SyncError::Host {
            host: view.name.clone(),
            error,
        })?;
        Ok(true)
    }

    async fn resolve(
        &self,
        entry: &Entry,
        work: &mut Work,
        pod: &Pod,
        view: &HostView,
    ) -> Result<Result<Resolved, Unresolved>, SyncError> {
        let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
        let references = references(pod);
        self.objects.set(&entry.uid, namespace, references.clone());
        let (config_maps, secrets) = self.objects.found(namespace, &references);
        work.tokens.refresh(&self.client, pod).await?;
        let links = pod.spec.as_ref().and_then(|spec| spec.enable_service_links) != Some(false);
        let sources = Sources {
            config_maps,
            secrets,
            services: self.services.variables(namespace, links),
            tokens: work.tokens.texts(),
            host_ip: view.ip.to_string(),
            allocatable: view
                .inventory
                .as_ref()
                .and_then(|i| i.allocatable)
                .unwrap_or_default(),
        };
        Ok(resolve::resolve(pod, &sources))
    }

    /// Notes why a pod waits. One that runs already just goes on with what it
    /// has.
    fn unresolved(&self, entry: &Entry, work: &mut Work, pod: &Pod, unresolved: Unresolved) {
        let message = unresolved.to_string();
        let (container, reason) = match unresolved {
            Unresolved::Pending(_) => {
                // A moment's wait is not worth a word.
                let since = *work.unread_since.get_or_insert_with(Instant::now);
                let wait = UNREAD_PATIENCE.saturating_sub(since.elapsed());
                if wait.is_zero() {
                    self.warn_once(work, pod, "FailedMount", &message);
                } else {
                    self.queue.add_after(Uid::clone(&entry.uid), wait);
                }
                return;
            }
            Unresolved::Config { container, .. } => {
                self.warn_once(work, pod, "Failed", &format!("Error: {message}"));
                (Some(container), "CreateContainerConfigError")
            }
            Unresolved::Mount { .. } => {
                self.warn_once(work, pod, "FailedMount", &message);
                (None, "ContainerCreating")
            }
        };
        work.waiting = Some(Waiting {
            container,
            reason,
            message,
            whole_pod: false,
        });
    }
}
