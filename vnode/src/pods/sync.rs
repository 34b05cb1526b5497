//! One run of a pod's worker: looks at the pod and at its host, does the next
//! thing, and writes what is true. Returns early wherever only an event can
//! help; that event runs it again.

use std::sync::atomic::Ordering;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Pod, PodStatus};
use k8s_openapi::jiff::Timestamp;
use sandman_protocol::v1;
use sandman_protocol::v1::Lifecycle;

use super::admit::{self, Rejection};
use super::placement::{Candidate, Decision, place};
use super::resolve::{Resolved, Sources, Unresolved, references, resolve};
use super::resources::requests;
use super::spec;
use super::status::{self, Observation, Waiting, is_terminal};
use super::store::{Applied, Entry, Work};
use super::{PodController, lock};
use crate::hosts::{Connection, HostError, HostView, Uid};
use crate::metrics::{Reason, ReasonLabel};
use crate::node::object::{platform, under_pressure};
use crate::view::HostName;

/// Why a run has to be repeated.
#[derive(Debug, thiserror::Error)]
pub(super) enum SyncError {
    /// The API server did not do what was asked.
    #[error(transparent)]
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
    pub(super) async fn sync(&self, uid: &Uid) -> Result<(), SyncError> {
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
            lock(&self.ledger).book(&entry.uid, &found, requests(pod), owner(pod));
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
            return self.write_status(entry, work, &status).await;
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
            && let Some(rejection) = self.apply(entry, work, pod, &view).await?
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
        self.write_status(entry, work, &status).await
    }

    /// Chooses a host and makes the choice durable. `None` when there is none
    /// now; what is needed then will run the worker again.
    async fn place(
        &self,
        entry: &Entry,
        work: &mut Work,
        pod: &Pod,
    ) -> Result<Option<HostName>, SyncError> {
        if let Err(rejection) = admit::admit(pod) {
            self.reject(entry, work, pod, &rejection).await?;
            return Ok(None);
        }
        if let Some(daemonset) = admit::daemonset_of(pod)
            && !self.config.daemonset_allow.contains(&daemonset)
        {
            self.count_hold(&entry.uid);
            let message = format!(
                "pods of DaemonSet {daemonset} do not run on this node unless daemonset_allow of its configuration names it"
            );
            self.hold(entry, work, pod, "DaemonSetNotAllowed", message)
                .await?;
            return Ok(None);
        }
        let handler = self.runtime_handler(pod).await?;
        let decision = self.decide(entry, pod, &handler);
        let host = match decision {
            Decision::Place(host) => host,
            Decision::Never { reason, message } => {
                self.reject(entry, work, pod, &Rejection { reason, message })
                    .await?;
                return Ok(None);
            }
            Decision::NotNow(message) => {
                self.hold(entry, work, pod, "WaitingForHost", message)
                    .await?;
                return Ok(None);
            }
        };
        work.waiting = None;
        lock(&self.unplaced).remove(&entry.uid);
        let placed = match self.hosts.view(&host) {
            Some(view) => {
                let observation = self.observation(&view, None, work);
                let status = status::generate(pod, observation, Timestamp::now());
                self.write_placement(entry, &status, &host).await
            }
            None => Err(SyncError::NotDurable),
        };
        if let Err(error) = placed {
            // Nobody knows whether it was stored: the next run reads it.
            self.room_was_made(&entry.uid);
            return Err(error);
        }
        entry.set_host(host.clone());
        tracing::info!(pod_uid = &*entry.uid, %host, "placed");
        Ok(Some(host))
    }

    /// The decision, booked at once so that the next pod sees it.
    fn decide(&self, entry: &Entry, pod: &Pod, handler: &str) -> Decision {
        let views = self.hosts.views();
        let node = platform(&views);
        let mut ledger = lock(&self.ledger);
        let candidates: Vec<Candidate> = views
            .iter()
            .map(|view| {
                let mut candidate = Candidate {
                    name: view.name.clone(),
                    unavailable: unavailable(view, &node, handler),
                    allocatable: view.inventory.as_ref().and_then(|i| i.allocatable),
                    used: v1::Resources::default(),
                    assumed_used: v1::Resources::default(),
                    siblings: 0,
                };
                ledger.fill(&mut candidate, owner(pod));
                candidate
            })
            .collect();
        let known = |view: &HostView| {
            let inventory = view.inventory.as_ref()?;
            Some(
                inventory
                    .runtime_handlers
                    .iter()
                    .any(|known| known == handler),
            )
        };
        if !handler.is_empty() && views.iter().all(|view| known(view) == Some(false)) {
            return Decision::Never {
                reason: admit::UNSUPPORTED,
                message: format!(
                    "spec.runtimeClassName: no host has a runtime for handler {handler:?}"
                ),
            };
        }
        let requests = requests(pod);
        let decision = place(&entry.uid, requests, &candidates);
        match &decision {
            Decision::Place(host) => ledger.book(&entry.uid, host, requests, owner(pod)),
            _ => {
                lock(&self.unplaced).insert(Uid::clone(&entry.uid));
            }
        }
        decision
    }

    /// The containerd runtime that the pod's RuntimeClass stands for.
    async fn runtime_handler(&self, pod: &Pod) -> Result<String, SyncError> {
        use k8s_openapi::api::node::v1::RuntimeClass;
        let Some(class) = pod
            .spec
            .as_ref()
            .and_then(|spec| spec.runtime_class_name.as_ref())
        else {
            return Ok(String::new());
        };
        if let Some(handler) = lock(&self.runtime_handlers).get(class) {
            return Ok(handler.clone());
        }
        // A handler never changes, so one read is enough.
        let api: kube::Api<RuntimeClass> = kube::Api::all(self.client.clone());
        let handler = api.get(class).await?.handler;
        lock(&self.runtime_handlers).insert(class.clone(), handler.clone());
        Ok(handler)
    }

    /// Tells the host what should be true, if it does not know that yet. Returns
    /// the host's refusal, if it refuses for good.
    async fn apply(
        &self,
        entry: &Entry,
        work: &mut Work,
        pod: &Pod,
        view: &HostView,
    ) -> Result<Option<Rejection>, SyncError> {
        let wanted = Applied {
            epoch: view.epoch,
            generation: pod.metadata.generation.unwrap_or(0),
        };
        let due = work.tokens.next_due().is_some_and(|due| due.is_zero());
        // Cleared first: a change from now on runs the worker again.
        let changed = entry.changed.swap(false, Ordering::Relaxed);
        if work.applied == Some(wanted) && !changed && !due {
            return Ok(None);
        }
        let result = self.resolve_and_apply(entry, work, pod, view).await;
        match result {
            Ok(true) => {
                work.applied = Some(wanted);
                if let Some(due) = work.tokens.next_due() {
                    self.queue.add_after(Uid::clone(&entry.uid), due);
                }
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
                self.unresolved(work, pod, unresolved);
                return Ok(false);
            }
        };
        work.waiting = None;
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
        Ok(resolve(pod, &sources))
    }

    /// Notes why a pod waits. One that runs already just goes on with what it
    /// has.
    fn unresolved(&self, work: &mut Work, pod: &Pod, unresolved: Unresolved) {
        let message = unresolved.to_string();
        let (container, reason) = match unresolved {
            // A moment's wait is not worth a word; the API server's refusals are.
            Unresolved::Pending(_) => return,
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

    /// A pod in a terminal phase: its containers are stopped, its logs stay until
    /// it is deleted.
    async fn sync_finished(
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
        self.write_status(entry, work, &status).await?;
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
    async fn sync_deleted(
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
                    .finish(entry, work, &ended(pod, Observation::default()))
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
            return self.finish(entry, work, &status).await;
        }
        let status = status::generate(pod, observation, Timestamp::now());
        self.write_status(entry, work, &status).await
    }

    /// Writes the last status and lets the object go.
    async fn finish(
        &self,
        entry: &Entry,
        work: &mut Work,
        status: &PodStatus,
    ) -> Result<(), SyncError> {
        self.write_status(entry, work, status).await?;
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

    async fn reject(
        &self,
        entry: &Entry,
        work: &mut Work,
        pod: &Pod,
        rejection: &Rejection,
    ) -> Result<(), SyncError> {
        tracing::info!(
            pod_uid = &*entry.uid,
            reason = rejection.reason,
            message = rejection.message,
            "refused"
        );
        let label = ReasonLabel {
            reason: Reason(rejection.reason),
        };
        self.metrics.rejections.get_or_create(&label).inc();
        self.warn_once(work, pod, rejection.reason, &rejection.message);
        let observation = Observation {
            rejection: Some(rejection),
            ..Observation::default()
        };
        let status = status::generate(pod, observation, Timestamp::now());
        self.write_status(entry, work, &status).await
    }

    /// Keeps a pod Pending and says why.
    async fn hold(
        &self,
        entry: &Entry,
        work: &mut Work,
        pod: &Pod,
        reason: &'static str,
        message: String,
    ) -> Result<(), SyncError> {
        self.warn_once(work, pod, reason, &message);
        work.waiting = Some(Waiting {
            container: None,
            reason,
            message,
            whole_pod: true,
        });
        let observation = Observation {
            waiting: work.waiting.as_ref(),
            ..Observation::default()
        };
        let status = status::generate(pod, observation, Timestamp::now());
        self.write_status(entry, work, &status).await
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
        if work.warned.as_ref() != Some(&text) {
            self.events.warn(pod, reason, message);
            work.warned = Some(text);
        }
    }

    fn count_hold(&self, uid: &Uid) {
        let mut held = lock(&self.held);
        held.insert(Uid::clone(uid));
        self.show_held(held.len());
    }

    pub(super) fn release_hold(&self, uid: &Uid) {
        let mut held = lock(&self.held);
        if held.remove(uid) {
            self.show_held(held.len());
        }
    }

    fn show_held(&self, count: usize) {
        let label = ReasonLabel {
            reason: Reason("DaemonSetNotAllowed"),
        };
        let count = i64::try_from(count).unwrap_or(i64::MAX);
        self.metrics.pods_held.get_or_create(&label).set(count);
    }
}

fn unavailable(view: &HostView, node: &(String, String), handler: &str) -> Option<&'static str> {
    use v1::host_condition::Kind;
    if view.lost {
        return Some("lost");
    }
    let inventory = view
        .inventory
        .as_ref()
        .filter(|_| view.connection == Connection::Synced);
    let Some(inventory) = inventory else {
        return Some("not connected");
    };
    if (&inventory.operating_system, &inventory.architecture) != (&node.0, &node.1) {
        return Some("of another platform");
    }
    if !handler.is_empty()
        && !inventory
            .runtime_handlers
            .iter()
            .any(|known| known == handler)
    {
        return Some("without the runtime");
    }
    for (kind, why) in [
        (Kind::MemoryPressure, "under memory pressure"),
        (Kind::DiskPressure, "under disk pressure"),
        (Kind::PidPressure, "under PID pressure"),
    ] {
        if under_pressure(inventory, kind) {
            return Some(why);
        }
    }
    None
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

fn restarts(pod: &Pod) -> bool {
    pod.spec
        .as_ref()
        .and_then(|spec| spec.restart_policy.as_deref())
        != Some("Never")
}

/// The status of a pod of which nothing is left.
fn ended(pod: &Pod, observation: Observation<'_>) -> PodStatus {
    let seen = Observation {
        ended: true,
        ..observation
    };
    status::generate(pod, seen, Timestamp::now())
}
