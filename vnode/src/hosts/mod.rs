//! The hosts of the node: one connection each, what they have, and what they
//! report about sandboxes. Nothing here knows about pods.

mod host;
mod limits;
mod link;
mod null;
mod patient;
mod remote;
mod reports;
mod state;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, SystemTime};

use sandman_protocol::transport::FleetTls;
use sandman_protocol::v1;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

pub use self::host::{Host, HostError, Updates};
use self::null::NullHost;
use self::patient::Patient;
use self::remote::RemoteHost;
pub use self::state::{Connection, HostState, Uid};
use crate::config;
use crate::metrics::{HostLabel, Metrics};
use crate::view::HostName;

/// Who is told about changes. Called from the connections' tasks; must not
/// block.
pub trait Observer: Send + Sync {
    /// Reports of these sandboxes appeared, changed or vanished.
    fn sandboxes_changed(&self, host: &HostName, uids: &[Uid]);
    /// The host connected, disconnected, was lost or came back.
    fn connection_changed(&self, host: &HostName);
    /// The host has other resources, images or conditions than before.
    fn inventory_changed(&self, host: &HostName);
    /// Something worth a cluster event happened to a sandbox.
    fn event(&self, host: &HostName, event: v1::SandboxEvent);
}

/// What is known about a host at one moment.
#[derive(Debug, Clone)]
pub struct HostView {
    /// Name in the fleet.
    pub name: HostName,
    /// `hostIP` of its pods.
    pub ip: IpAddr,
    /// The same as text.
    pub ip_text: Arc<str>,
    /// Where its connection stands.
    pub connection: Connection,
    /// Number of the newest complete list.
    pub epoch: u64,
    /// Silent for too long.
    pub lost: bool,
    /// Since when it is not connected, when it is not.
    pub down_since: SystemTime,
    /// What it has, as last heard; `None` if it was never reached.
    pub inventory: Option<Arc<v1::Inventory>>,
}

/// All configured hosts.
pub struct Hosts {
    entries: BTreeMap<HostName, Arc<Entry>>,
    version: watch::Sender<u64>,
}

/// One host with its state.
struct Entry {
    name: HostName,
    address: SocketAddr,
    ip_text: Arc<str>,
    pods: config::Cidr,
    host: Arc<dyn Host>,
    state: RwLock<HostState>,
    metrics: Metrics,
}

/// Architecture of this machine as OCI and Go name it.
pub fn local_architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}

// === impl Hosts ===

impl Hosts {
    /// The configured hosts, not connected yet. Without `tls` they are null
    /// hosts. `term` is the leader's term that hosts are told.
    pub fn new(
        configured: &[config::Host],
        tls: Option<&FleetTls>,
        term: u64,
        metrics: &Metrics,
    ) -> Self {
        let now = SystemTime::now();
        let entries = configured.iter().map(|config| {
            let name = HostName::from(config.name.as_str());
            let host: Arc<dyn Host> = match tls {
                Some(tls) => Arc::new(Patient::new(Arc::new(RemoteHost::new(
                    name.clone(),
                    config.address,
                    tls.clone(),
                    term,
                )))),
                None => Arc::new(NullHost::new(name.clone(), config.pod_cidr)),
            };
            let entry = Entry {
                name: name.clone(),
                address: config.address,
                ip_text: config.address.ip().to_string().into(),
                pods: config.pod_cidr,
                host,
                state: RwLock::new(HostState::new(now)),
                metrics: metrics.clone(),
            };
            (name, Arc::new(entry))
        });
        Self {
            entries: entries.collect(),
            version: watch::Sender::new(0),
        }
    }

    /// Connects to every host and stays connected until `shutdown`.
    pub fn start(
        self: &Arc<Self>,
        observer: &Arc<dyn Observer>,
        lost_after: Duration,
        tasks: &TaskTracker,
        shutdown: &CancellationToken,
    ) {
        let observer: Arc<dyn Observer> = Arc::new(Versioned {
            hosts: Arc::clone(self),
            next: Arc::clone(observer),
        });
        for entry in self.entries.values() {
            tasks.spawn(link::run(
                Arc::clone(entry),
                Arc::clone(&observer),
                lost_after,
                shutdown.clone(),
            ));
        }
    }

    /// Changes whenever a host connects, disconnects, is lost, comes back or has
    /// another inventory.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.version.subscribe()
    }

    /// What is known about every host.
    pub fn views(&self) -> Vec<HostView> {
        self.entries.values().map(|entry| entry.view()).collect()
    }

    /// What is known about one host.
    pub fn view(&self, name: &HostName) -> Option<HostView> {
        self.entries.get(name).map(|entry| entry.view())
    }

    /// The host whose pods have that `hostIP`.
    pub fn by_ip(&self, ip: &str) -> Option<HostName> {
        let ip: IpAddr = ip.parse().ok()?;
        self.entries
            .values()
            .find(|entry| entry.address.ip() == ip)
            .map(|entry| entry.name.clone())
    }

    /// Whether an address is one that the host may give to a pod.
    pub fn may_give(&self, name: &HostName, ip: &str) -> bool {
        let entry = self.entries.get(name);
        entry.is_some_and(|entry| ip.parse().is_ok_and(|ip| entry.pods.contains(ip)))
    }

    /// Commands to a host.
    pub fn host(&self, name: &HostName) -> Option<Arc<dyn Host>> {
        self.entries.get(name).map(|entry| Arc::clone(&entry.host))
    }

    /// What a host last reported about a sandbox.
    pub fn report(&self, name: &HostName, uid: &str) -> Option<Arc<v1::SandboxReport>> {
        self.entries
            .get(name)?
            .read(|state| state.report_of(uid).cloned())
    }

    /// Hosts that report a sandbox of that UID.
    pub fn reporting(&self, uid: &str) -> Vec<HostName> {
        self.entries
            .values()
            .filter(|entry| entry.read(|state| state.report_of(uid).is_some()))
            .map(|entry| entry.name.clone())
            .collect()
    }

    /// UIDs of all sandboxes that a host reports.
    pub fn uids(&self, name: &HostName) -> Vec<Uid> {
        let Some(entry) = self.entries.get(name) else {
            return Vec::new();
        };
        entry.read(|state| state.uids().cloned().collect())
    }

    /// Drops a report after the host dropped its record.
    pub fn forgotten(&self, name: &HostName, uid: &str) {
        if let Some(entry) = self.entries.get(name) {
            entry.write(|state| state.forget(uid));
        }
    }

    /// Waits until every host is in sync, or for `limit`.
    pub async fn settled(&self, limit: Duration) {
        let mut changes = self.changes();
        let all_synced = async {
            while self
                .entries
                .values()
                .any(|e| e.view().connection != Connection::Synced)
            {
                if changes.changed().await.is_err() {
                    return;
                }
            }
        };
        if tokio::time::timeout(limit, all_synced).await.is_err() {
            tracing::warn!("not every host is connected; going on with those that are");
        }
    }
}

// === impl Entry ===

impl Entry {
    fn read<T>(&self, f: impl FnOnce(&HostState) -> T) -> T {
        f(&self.state.read().unwrap_or_else(PoisonError::into_inner))
    }

    fn write<T>(&self, f: impl FnOnce(&mut HostState) -> T) -> T {
        f(&mut self.state.write().unwrap_or_else(PoisonError::into_inner))
    }

    fn label(&self) -> HostLabel {
        HostLabel {
            host: self.name.to_string(),
        }
    }

    fn view(&self) -> HostView {
        self.read(|state| HostView {
            name: self.name.clone(),
            ip: self.address.ip(),
            ip_text: Arc::clone(&self.ip_text),
            connection: state.connection(),
            epoch: state.epoch(),
            lost: state.lost(),
            down_since: state.down_since(),
            inventory: state.inventory().cloned(),
        })
    }
}

/// Bumps the version before it passes a change on.
struct Versioned {
    hosts: Arc<Hosts>,
    next: Arc<dyn Observer>,
}

impl Versioned {
    fn bump(&self) {
        self.hosts.version.send_modify(|version| *version += 1);
    }
}

impl Observer for Versioned {
    fn sandboxes_changed(&self, host: &HostName, uids: &[Uid]) {
        self.next.sandboxes_changed(host, uids);
    }

    fn connection_changed(&self, host: &HostName) {
        self.bump();
        self.next.connection_changed(host);
    }

    fn inventory_changed(&self, host: &HostName) {
        self.bump();
        self.next.inventory_changed(host);
    }

    fn event(&self, host: &HostName, event: v1::SandboxEvent) {
        self.next.event(host, event);
    }
}
