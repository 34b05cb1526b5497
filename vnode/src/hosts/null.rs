//! A host that does no work: every sandbox runs at once and ends at once. It
//! shows what the control plane and the rest of the node can do by themselves.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use futures::StreamExt;
use sandman_protocol::v1::host_client::HostClient;
use sandman_protocol::v1::watch_response::Item;
use sandman_protocol::{SCHEMA, v1};
use tokio::sync::mpsc;
use tokio_stream::wrappers::UnboundedReceiverStream;
use tonic::transport::Channel;

use super::host::{Host, HostError, Updates};
use super::local_architecture;
use crate::config::Cidr;
use crate::view::{HostName, StreamError};

/// Large enough that placement never is what a measurement measures.
const CAPACITY: v1::Resources = v1::Resources {
    cpu_millis: 1_000_000,
    memory_bytes: 4 << 40,
    ephemeral_storage_bytes: 16 << 40,
    pods: 16_000,
};

/// The first addresses of a range are the host's own.
const FIRST_IP: u128 = 2;

/// A simulated host.
#[derive(Debug)]
pub(super) struct NullHost {
    name: HostName,
    pod_cidr: Cidr,
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    sandboxes: HashMap<String, v1::SandboxReport>,
    next_ip: u128,
    watcher: Option<mpsc::UnboundedSender<v1::WatchResponse>>,
}

impl NullHost {
    /// A host that gives out addresses of `pod_cidr`.
    pub(super) fn new(name: HostName, pod_cidr: Cidr) -> Self {
        Self {
            name,
            pod_cidr,
            inner: Mutex::default(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    fn publish(&mut self, report: v1::SandboxReport) {
        let response = v1::WatchResponse {
            item: Some(Item::Report(report.clone())),
        };
        self.sandboxes.insert(report.uid.clone(), report);
        if let Some(watcher) = &self.watcher
            && watcher.send(response).is_err()
        {
            self.watcher = None;
        }
    }
}

#[async_trait]
impl Host for NullHost {
    async fn connect(&self) -> Result<(v1::Inventory, Updates), HostError> {
        let inventory = v1::Inventory {
            host_name: self.name.to_string(),
            schema: SCHEMA,
            capacity: Some(CAPACITY),
            allocatable: Some(CAPACITY),
            pod_cidr: self.pod_cidr.to_string(),
            architecture: local_architecture().to_owned(),
            operating_system: "linux".to_owned(),
            kernel_version: "0".to_owned(),
            os_image: "null host".to_owned(),
            runtime_version: "null://0".to_owned(),
            ..Default::default()
        };
        let mut inner = self.lock();
        let (sender, receiver) = mpsc::unbounded_channel();
        let list = inner.sandboxes.values().cloned().map(Item::Report);
        for item in list.chain([Item::Synced(v1::Synced {})]) {
            // The receiver is right here.
            let _ = sender.send(v1::WatchResponse { item: Some(item) });
        }
        inner.watcher = Some(sender);
        Ok((
            inventory,
            UnboundedReceiverStream::new(receiver).map(Ok).boxed(),
        ))
    }

    async fn apply(&self, spec: v1::SandboxSpec) -> Result<(), HostError> {
        let mut inner = self.lock();
        if let Some(known) = inner.sandboxes.get(&spec.uid) {
            return match known.lifecycle() {
                v1::Lifecycle::Removed => Err(HostError::Removing),
                _ => Ok(()),
            };
        }
        let ip = self.pod_cidr.address(FIRST_IP + inner.next_ip);
        inner.next_ip = (inner.next_ip + 1) % u128::from(CAPACITY.pods);
        inner.publish(running(&spec, ip));
        Ok(())
    }

    async fn remove(&self, uid: &str, _: Duration, _: &str) -> Result<(), HostError> {
        let mut inner = self.lock();
        let mut report = inner.sandboxes.get(uid).cloned().unwrap_or_default();
        uid.clone_into(&mut report.uid);
        report.set_lifecycle(v1::Lifecycle::Removed);
        report.sandbox_ready = false;
        let now = Some(SystemTime::now().into());
        for container in &mut report.containers {
            container.ready = false;
            container.started = false;
            container.state = Some(v1::container_report::State::Terminated(v1::Terminated {
                reason: "Completed".to_owned(),
                started_at: report.started_at,
                finished_at: now,
                container_id: container.container_id.clone(),
                ..Default::default()
            }));
        }
        inner.publish(report);
        Ok(())
    }

    async fn forget(&self, uid: &str) -> Result<(), HostError> {
        self.lock().sandboxes.remove(uid);
        Ok(())
    }

    async fn set_cluster_network(&self, _: v1::ClusterNetworkRequest) -> Result<(), HostError> {
        Ok(())
    }

    async fn stats(&self) -> Result<v1::Stats, HostError> {
        Err(HostError::Refused("a null host uses nothing".to_owned()))
    }

    async fn streams(&self) -> Result<HostClient<Channel>, StreamError> {
        Err(StreamError::Unsupported(self.name.clone()))
    }
}

fn running(spec: &v1::SandboxSpec, ip: IpAddr) -> v1::SandboxReport {
    let now: Option<prost_types::Timestamp> = Some(SystemTime::now().into());
    let report = |container: &v1::Container| v1::ContainerReport {
        name: container.name.clone(),
        image: container.image.clone(),
        image_id: format!("null@{}", container.image),
        container_id: format!("null://{}-{}", spec.uid, container.name),
        ..Default::default()
    };
    let done = |container: &v1::Container| v1::ContainerReport {
        ready: true,
        started: container.sidecar,
        state: Some(if container.sidecar {
            v1::container_report::State::Running(v1::Running { started_at: now })
        } else {
            v1::container_report::State::Terminated(v1::Terminated {
                reason: "Completed".to_owned(),
                started_at: now,
                finished_at: now,
                ..Default::default()
            })
        }),
        ..report(container)
    };
    v1::SandboxReport {
        uid: spec.uid.clone(),
        namespace: spec.namespace.clone(),
        name: spec.name.clone(),
        observed_generation: spec.generation,
        lifecycle: v1::Lifecycle::Active.into(),
        sandbox_ready: true,
        pod_ip: ip.to_string(),
        started_at: now,
        init_containers: spec.init_containers.iter().map(done).collect(),
        ephemeral_containers: spec.ephemeral_containers.iter().map(done).collect(),
        containers: spec
            .containers
            .iter()
            .map(|container| v1::ContainerReport {
                started: true,
                ready: true,
                state: Some(v1::container_report::State::Running(v1::Running {
                    started_at: now,
                })),
                ..report(container)
            })
            .collect(),
        ..Default::default()
    }
}
