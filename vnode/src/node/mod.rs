//! The Node object: registered once, kept true afterwards, and made again if
//! somebody deletes it. Status goes out when it changes, and now and then so
//! that readers see the node is alive.

pub mod lease;
pub mod object;
pub mod serving;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use k8s_openapi::api::core::v1::{Node, NodeStatus};
use k8s_openapi::jiff::Timestamp;
use kube::api::{Patch, PatchParams, PostParams};
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher;
use kube::runtime::watcher::DefaultBackoff;
use kube::{Api, Client};
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::time::Instant;

use crate::backoff::{Backoff, unit_random};
use crate::config::Config;
use crate::errors::brief;
use crate::events::Events;
use crate::hosts::{HostView, Hosts};
use crate::strategic;
use crate::view::HostName;

/// Interval of status writes that only say "still alive"; varied by half.
const HEARTBEAT: Duration = Duration::from_secs(5 * 60);
/// Changes that come within this time are written together.
const SETTLE: Duration = Duration::from_millis(250);
/// A write that takes longer hangs on a dead connection; it is repeated.
const CALL_LIMIT: Duration = Duration::from_secs(30);
const FIRST_RETRY: Duration = Duration::from_millis(100);
/// The kubelet's longest delay between registration attempts.
const MAX_RETRY: Duration = Duration::from_secs(7);

/// Keeps the Node object. `published` carries the newest copy to others.
pub struct NodeController {
    config: Arc<Config>,
    hosts: Arc<Hosts>,
    api: Api<Node>,
    events: Events,
    published: watch::Sender<Option<Arc<Node>>>,
}

// === impl NodeController ===

impl NodeController {
    /// A controller that has not done anything yet.
    pub fn new(config: Arc<Config>, hosts: Arc<Hosts>, client: Client, events: Events) -> Self {
        Self {
            config,
            hosts,
            api: Api::all(client),
            events,
            published: watch::Sender::new(None),
        }
    }

    /// The newest copy of the Node, `None` while there is none.
    pub fn subscribe(&self) -> watch::Receiver<Option<Arc<Node>>> {
        self.published.subscribe()
    }

    /// Registers the node and keeps its object true; ends only by being dropped.
    pub async fn run(&self) {
        self.events
            .node(&self.config.node_name, "Starting", "Starting kubelet.");
        tokio::join!(self.follow(), self.keep());
    }

    /// Writes the status once more, for an orderly end.
    pub async fn flush(&self) {
        let node = self.published.borrow().clone();
        if let Some(node) = node
            && let Err(error) = self.write_status(&node, false).await
        {
            tracing::warn!(error = brief(&error), "cannot write the last node status");
        }
    }

    /// Publishes the Node as the API server shows it.
    async fn follow(&self) {
        let watch = watcher::watch_object(self.api.clone(), &self.config.node_name)
            .backoff(DefaultBackoff::default());
        tokio::pin!(watch);
        while let Some(event) = watch.next().await {
            match event {
                Ok(node) => {
                    if node.is_none() && self.published.borrow().is_some() {
                        tracing::warn!("the node object was deleted");
                    }
                    self.published.send_replace(node.map(Arc::new));
                }
                Err(error) => tracing::debug!(error = brief(&error), "watching the node object"),
            }
        }
    }

    async fn keep(&self) {
        let mut node = self.published.subscribe();
        let mut hosts = self.hosts.changes();
        let mut heartbeat = next_heartbeat();
        let mut backoff = Backoff::new(FIRST_RETRY, MAX_RETRY);
        let mut boots = Boots::default();
        loop {
            let current = node.borrow_and_update().clone();
            hosts.borrow_and_update();
            for (host, boot) in boots.look(&self.hosts.views()) {
                let message = format!("Host {host} has been rebooted, boot id: {boot}");
                let name = &self.config.node_name;
                self.events.node_warning(name, "Rebooted", &message);
            }
            let due = Instant::now() >= heartbeat;
            let write = async {
                match &current {
                    None => self.register().await,
                    Some(current) => self.write_status(current, due).await,
                }
            };
            let result = match tokio::time::timeout(CALL_LIMIT, write).await {
                Ok(result) => result,
                Err(elapsed) => Err(kube::Error::Service(elapsed.into())),
            };
            match result {
                Ok(()) => {
                    backoff.reset();
                    if due {
                        heartbeat = next_heartbeat();
                    }
                }
                Err(error) => {
                    tracing::warn!(error = brief(&error), "cannot write the node object");
                    tokio::time::sleep(backoff.step()).await;
                    continue;
                }
            }
            tokio::select! {
                // The senders live as long as this controller.
                _ = node.changed() => {}
                _ = hosts.changed() => {}
                () = tokio::time::sleep_until(heartbeat) => {}
            }
            tokio::time::sleep(SETTLE).await;
        }
    }

    /// Creates the Node, or adopts the one that is there.
    async fn register(&self) -> Result<(), kube::Error> {
        let wanted = object::node(&self.config, &self.hosts.views(), Timestamp::now());
        match self.api.create(&PostParams::default(), &wanted).await {
            Ok(node) => {
                tracing::info!(node = self.config.node_name, "registered the node");
                self.published.send_replace(Some(Arc::new(node)));
                Ok(())
            }
            Err(kube::Error::Api(status)) if status.code == 409 => {
                let node = self.api.get(&self.config.node_name).await?;
                tracing::info!(node = self.config.node_name, "took over the existing node");
                self.published.send_replace(Some(Arc::new(node)));
                Ok(())
            }
            Err(error) => Err(error),
        }
    }

    /// Brings labels, provider id and status of `node` to what they should be.
    /// Sends nothing when nothing changed, unless a heartbeat is `due`.
    async fn write_status(&self, node: &Node, due: bool) -> Result<(), kube::Error> {
        self.write_metadata(node).await?;
        let empty = NodeStatus::default();
        let old = node.status.as_ref().unwrap_or(&empty);
        let new = object::status(&self.config, &self.hosts.views(), old, Timestamp::now());
        if !due && object::same(&sorted(old), &sorted(&new)) {
            return Ok(());
        }
        let Some(patch) = strategic::diff(&to_value(old)?, &to_value(&new)?) else {
            return Ok(());
        };
        let patch = json!({ "metadata": { "uid": node.metadata.uid }, "status": patch });
        let patched = self.patch("status", patch).await?;
        self.announce(ready(old), ready(&new));
        self.publish(patched);
        Ok(())
    }

    async fn write_metadata(&self, node: &Node) -> Result<(), kube::Error> {
        let have = node.metadata.labels.clone().unwrap_or_default();
        let missing: serde_json::Map<String, Value> =
            object::labels(&self.config, &self.hosts.views())
                .into_iter()
                .filter(|(label, value)| have.get(label) != Some(value))
                .map(|(label, value)| (label, Value::String(value)))
                .collect();
        let has_id = node
            .spec
            .as_ref()
            .is_some_and(|spec| spec.provider_id.is_some());
        if missing.is_empty() && has_id {
            return Ok(());
        }
        let mut patch = json!({ "metadata": { "uid": node.metadata.uid, "labels": missing } });
        // Once set it never changes, whoever set it.
        if !has_id {
            patch["spec"] = json!({ "providerID": self.config.node.provider_id });
        }
        let params = PatchParams::default();
        self.api
            .patch(&self.config.node_name, &params, &Patch::Strategic(patch))
            .await?;
        Ok(())
    }

    async fn patch(&self, subresource: &str, patch: Value) -> Result<Node, kube::Error> {
        let params = PatchParams::default();
        let name = &self.config.node_name;
        self.api
            .patch_subresource(subresource, name, &params, &Patch::Strategic(patch))
            .await
    }

    /// Says when the node becomes ready, or stops being so.
    fn announce(&self, before: bool, after: bool) {
        if before != after {
            let name = &self.config.node_name;
            let reason = if after { "NodeReady" } else { "NodeNotReady" };
            self.events.node(
                name,
                reason,
                &format!("Node {name} status is now: {reason}"),
            );
        }
    }

    fn publish(&self, node: Node) {
        // The watch may have shown a deletion meanwhile; then it is right.
        self.published.send_if_modified(|current| match current {
            Some(current) if current.metadata.uid == node.metadata.uid => {
                *current = Arc::new(node);
                true
            }
            _ => false,
        });
    }
}

/// The boot that each host was last seen in.
#[derive(Debug, Default)]
struct Boots(HashMap<HostName, String>);

impl Boots {
    /// Hosts that are in another boot than before, and in which.
    fn look(&mut self, hosts: &[HostView]) -> Vec<(HostName, String)> {
        let seen = hosts.iter().filter_map(|host| {
            let boot = &host.inventory.as_ref()?.boot_id;
            (!boot.is_empty()).then(|| (host.name.clone(), boot.clone()))
        });
        seen.filter(|(host, boot)| {
            let before = self.0.insert(host.clone(), boot.clone());
            before.is_some_and(|before| before != *boot)
        })
        .collect()
    }
}

fn ready(status: &NodeStatus) -> bool {
    status
        .conditions
        .iter()
        .flatten()
        .any(|c| c.type_ == "Ready" && c.status == "True")
}

/// Conditions in a fixed order, because patches append.
fn sorted(status: &NodeStatus) -> NodeStatus {
    let mut status = status.clone();
    if let Some(conditions) = &mut status.conditions {
        conditions.sort_by(|a, b| a.type_.cmp(&b.type_));
    }
    status
}

fn to_value(status: &NodeStatus) -> Result<Value, kube::Error> {
    serde_json::to_value(status).map_err(kube::Error::SerdeError)
}

fn next_heartbeat() -> Instant {
    Instant::now() + HEARTBEAT.mul_f64(0.5 + unit_random())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node::object::tests::host;

    #[test]
    fn a_reboot_is_seen_once() {
        let boot = |id: &str| {
            let mut view = host("a", false);
            let mut inventory = view.inventory.as_deref().cloned().unwrap_or_default();
            inventory.boot_id = id.to_owned();
            view.inventory = Some(Arc::new(inventory));
            [view]
        };
        let mut boots = Boots::default();
        assert!(boots.look(&boot("1")).is_empty());
        assert!(boots.look(&boot("")).is_empty());
        assert!(boots.look(&boot("1")).is_empty());
        assert_eq!(boots.look(&boot("2")), [("a".into(), "2".to_owned())]);
        assert!(boots.look(&boot("2")).is_empty());
    }
}
