//! The node's heartbeat in `kube-node-lease`. One PUT of the last copy every
//! ten seconds and no GET, as `k8s.io/component-helpers/apimachinery/lease`.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta, OwnerReference};
use k8s_openapi::jiff::Timestamp;
use kube::api::PostParams;
use kube::{Api, Client};
use tokio::sync::watch;
use tokio::time::MissedTickBehavior;

use crate::backoff::Backoff;
use crate::errors::brief;
use crate::metrics::Metrics;

const NAMESPACE: &str = "kube-node-lease";
const DURATION_SECONDS: i32 = 40;
const RENEW: Duration = Duration::from_secs(10);
/// A call that takes longer hangs on a dead connection; see [`WORST`].
const CALL_TIMEOUT: Duration = Duration::from_secs(5);
/// Attempts to write the last copy before the lease is read again.
const UPDATE_ATTEMPTS: u64 = 3;
/// Age that the lease reaches when every renewal hangs and only the first read
/// and write after them succeed: the node must still count as alive.
const WORST: Duration =
    Duration::from_secs(RENEW.as_secs() + CALL_TIMEOUT.as_secs() * (UPDATE_ATTEMPTS + 2));
const _: () = assert!(WORST.as_millis() < DURATION_SECONDS.unsigned_abs() as u128 * 1000);
const FIRST_RETRY: Duration = Duration::from_millis(100);
const MAX_RETRY: Duration = Duration::from_secs(7);

/// Renews the lease of a node for ever.
pub struct LeaseController {
    node_name: String,
    api: Api<Lease>,
    node: watch::Receiver<Option<Arc<Node>>>,
    metrics: Metrics,
}

// === impl LeaseController ===

impl LeaseController {
    /// `node` shows the newest copy of the node's object.
    pub fn new(
        node_name: &str,
        client: Client,
        node: watch::Receiver<Option<Arc<Node>>>,
        metrics: Metrics,
    ) -> Self {
        let api = Api::namespaced(client, NAMESPACE);
        Self {
            node_name: node_name.to_owned(),
            api,
            node,
            metrics,
        }
    }

    /// Ends only by being dropped.
    pub async fn run(mut self) {
        let mut tick = tokio::time::interval(RENEW);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut last: Option<Lease> = None;
        loop {
            tick.tick().await;
            let renewed = match last.take() {
                Some(lease) => self.update(lease).await,
                None => None,
            };
            last = match renewed {
                Some(lease) => Some(lease),
                None => Some(self.ensure().await),
            };
        }
    }

    /// Writes the last copy with a new time; `None` after several failures.
    async fn update(&self, mut lease: Lease) -> Option<Lease> {
        for _ in 0..UPDATE_ATTEMPTS {
            self.renew(&mut lease);
            match self.put(&lease).await {
                Ok(written) => return Some(written),
                Err(error) => {
                    self.failed(&error);
                    // Gone, or written by somebody else: only a GET helps.
                    if matches!(&error, kube::Error::Api(s) if s.code == 404 || s.code == 409) {
                        return None;
                    }
                }
            }
        }
        None
    }

    /// Reads or creates the lease, for as long as it takes.
    async fn ensure(&mut self) -> Lease {
        let mut backoff = Backoff::new(FIRST_RETRY, MAX_RETRY);
        loop {
            match self.try_ensure().await {
                Ok(lease) => return lease,
                Err(error) => self.failed(&error),
            }
            tokio::time::sleep(backoff.step()).await;
        }
    }

    async fn try_ensure(&mut self) -> Result<Lease, kube::Error> {
        match bounded(self.api.get_opt(&self.node_name)).await? {
            Some(mut lease) => {
                self.renew(&mut lease);
                self.put(&lease).await
            }
            None => {
                // The lease belongs to the node, and goes with it.
                let node = match self.node.wait_for(Option::is_some).await {
                    Ok(node) => node.clone(),
                    Err(_) => None,
                };
                let mut lease = Lease {
                    metadata: ObjectMeta {
                        name: Some(self.node_name.clone()),
                        namespace: Some(NAMESPACE.to_owned()),
                        owner_references: node.map(|node| vec![owner(&node)]),
                        ..ObjectMeta::default()
                    },
                    spec: None,
                };
                self.renew(&mut lease);
                bounded(self.api.create(&PostParams::default(), &lease)).await
            }
        }
    }

    fn renew(&self, lease: &mut Lease) {
        let spec = lease.spec.get_or_insert_with(LeaseSpec::default);
        spec.holder_identity = Some(self.node_name.clone());
        spec.lease_duration_seconds = Some(DURATION_SECONDS);
        spec.renew_time = Some(MicroTime(Timestamp::now()));
        if lease.metadata.owner_references.is_none()
            && let Some(node) = &*self.node.borrow()
        {
            lease.metadata.owner_references = Some(vec![owner(node)]);
        }
    }

    async fn put(&self, lease: &Lease) -> Result<Lease, kube::Error> {
        let params = PostParams::default();
        bounded(self.api.replace(&self.node_name, &params, lease)).await
    }

    fn failed(&self, error: &kube::Error) {
        self.metrics.lease_failures.inc();
        tracing::warn!(error = brief(error), "cannot renew the node's lease");
    }
}

async fn bounded<T>(call: impl Future<Output = Result<T, kube::Error>>) -> Result<T, kube::Error> {
    match tokio::time::timeout(CALL_TIMEOUT, call).await {
        Ok(result) => result,
        Err(elapsed) => Err(kube::Error::Service(elapsed.into())),
    }
}

fn owner(node: &Node) -> OwnerReference {
    OwnerReference {
        api_version: "v1".to_owned(),
        kind: "Node".to_owned(),
        name: node.metadata.name.clone().unwrap_or_default(),
        uid: node.metadata.uid.clone().unwrap_or_default(),
        ..OwnerReference::default()
    }
}
