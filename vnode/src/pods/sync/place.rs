//! A pod without a host: admitted, placed, held back or refused.

use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::jiff::Timestamp;
use sandman_protocol::v1;

use super::{SyncError, owner};
use crate::hosts::{Connection, HostView, Uid};
use crate::metrics::{Reason, ReasonLabel};
use crate::node::object::{platform, under_pressure};
use crate::pods::admit::{self, Rejection};
use crate::pods::affinity;
use crate::pods::placement::{self, Candidate, Decision};
use crate::pods::resources::requests;
use crate::pods::status::{self, Observation, Waiting};
use crate::pods::store::{Entry, Work};
use crate::pods::{PodController, lock};
use crate::view::HostName;

impl PodController {
    /// Chooses a host and makes the choice durable. `None` when there is none
    /// now; what is needed then will run the worker again.
    pub(super) async fn place(
        &self,
        entry: &Entry,
        work: &mut Work,
        pod: &Pod,
    ) -> Result<Option<HostName>, SyncError> {
        if let Err(rejection) = admit::admit(pod, &self.config.allow) {
            self.reject(entry, work, pod, &rejection).await?;
            return Ok(None);
        }
        if let Some(rejection) = self.refused_by_affinity(pod).await? {
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
                self.write_placement(entry, pod, &status, &host).await
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

    /// Looks at the node's labels as last seen, and before a refusal at the API server's own: the
    /// scheduler may have seen a label that is on its way here.
    async fn refused_by_affinity(&self, pod: &Pod) -> Result<Option<Rejection>, SyncError> {
        let Some(spec) = pod.spec.as_ref().filter(|spec| affinity::is_asked(spec)) else {
            return Ok(None);
        };
        let name = &self.config.node_name;
        let check = |node: &Node| {
            let labels = node.metadata.labels.clone().unwrap_or_default();
            affinity::check(spec, name, &labels)
        };
        let seen = self.node.get().and_then(|node| node.borrow().clone());
        if seen.is_some_and(|node| check(&node).is_ok()) {
            return Ok(None);
        }
        let node = kube::Api::<Node>::all(self.client.clone())
            .get(name)
            .await?;
        Ok(check(&node).err())
    }

    /// The decision, booked at once so that the next pod sees it.
    fn decide(&self, entry: &Entry, pod: &Pod, handler: &str) -> Decision {
        let views = self.hosts.views();
        let node = platform(&views);
        let own_users = pod.spec.as_ref().and_then(|spec| spec.host_users) == Some(false);
        let mut ledger = lock(&self.ledger);
        let candidates: Vec<Candidate> = views
            .iter()
            .map(|view| {
                let mut candidate = Candidate {
                    name: view.name.clone(),
                    unavailable: unavailable(view, &node, handler, own_users),
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
        let without_users = |view: &HostView| {
            let inventory = view.inventory.as_ref();
            inventory.is_some_and(|inventory| !inventory.user_namespaces)
        };
        if own_users && !views.is_empty() && views.iter().all(without_users) {
            return Decision::Never {
                reason: admit::UNSUPPORTED,
                message: "spec.hostUsers: false: no host has user namespaces with mapped mounts"
                    .to_owned(),
            };
        }
        let requests = requests(pod);
        let decision = placement::place(&entry.uid, requests, &candidates);
        match &decision {
            Decision::Place(host) => ledger.book(&entry.uid, host, requests, owner(pod)),
            Decision::NotNow(_) => {
                lock(&self.unplaced).insert(Uid::clone(&entry.uid));
            }
            Decision::Never { .. } => {
                lock(&self.unplaced).remove(&entry.uid);
            }
        }
        decision
    }

    /// The containerd runtime that the pod's RuntimeClass stands for.
    pub(super) async fn runtime_handler(&self, pod: &Pod) -> Result<String, SyncError> {
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

    pub(super) async fn reject(
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
        self.write_status(entry, work, pod, &status).await
    }

    /// Keeps a pod Pending and says why.
    pub(super) async fn hold(
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
        self.write_status(entry, work, pod, &status).await
    }

    fn count_hold(&self, uid: &Uid) {
        let mut held = lock(&self.held);
        held.insert(Uid::clone(uid));
        self.show_held(held.len());
    }

    pub(in crate::pods) fn release_hold(&self, uid: &Uid) {
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

fn unavailable(
    view: &HostView,
    node: &(String, String),
    handler: &str,
    own_users: bool,
) -> Option<&'static str> {
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
    if own_users && !inventory.user_namespaces {
        return Some("without user namespaces");
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
