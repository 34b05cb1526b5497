//! Stand-ins for the rest of the node: pods, policy and a way to the host.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use k8s_openapi::api::authentication::v1::{TokenReviewStatus, UserInfo};
use k8s_openapi::api::authorization::v1::{SubjectAccessReviewSpec, SubjectAccessReviewStatus};
use k8s_openapi::api::core::v1::Pod;
use sandman_protocol::v1;
use sandman_protocol::v1::host_client::HostClient;
use serde_json::json;
use tonic::transport::Channel;

use crate::kubelet_api::{ReviewError, Reviews};
use crate::view::{HostName, HostStreams, PodView, StreamError};

pub(super) const HOST: &str = "host-0";

/// One pod `ns/pod` with the running container `main` and the waiting `late`.
pub(super) struct Pods(Vec<Arc<Pod>>);

impl Default for Pods {
    fn default() -> Self {
        let status = |name: &str, state: serde_json::Value| {
            json!({"name": name, "image": "i", "imageID": "i", "ready": false,
                   "restartCount": 0, "state": state})
        };
        let pod = json!({
            "metadata": {"namespace": "ns", "name": "pod", "uid": "uid-1"},
            "spec": {"nodeName": "node-1", "containers": [{"name": "main"}, {"name": "late"}]},
            "status": {"containerStatuses": [
                status("main", json!({"running": {"startedAt": "2026-11-29T12:00:00Z"}})),
                status("late", json!({"waiting": {"reason": "ContainerCreating"}})),
            ]},
        });
        Self(vec![Arc::new(serde_json::from_value(pod).expect("a pod"))])
    }
}

impl PodView for Pods {
    fn pods(&self) -> Vec<Arc<Pod>> {
        self.0.clone()
    }

    fn find(&self, namespace: &str, name: &str) -> Option<Arc<Pod>> {
        let same = |pod: &&Arc<Pod>| {
            pod.metadata.namespace.as_deref() == Some(namespace)
                && pod.metadata.name.as_deref() == Some(name)
        };
        self.0.iter().find(same).cloned()
    }

    fn find_by_uid(&self, uid: &str) -> Option<Arc<Pod>> {
        let same = |pod: &&Arc<Pod>| pod.metadata.uid.as_deref() == Some(uid);
        self.0.iter().find(same).cloned()
    }

    fn host_of(&self, uid: &str) -> Option<HostName> {
        self.find_by_uid(uid).map(|_| HostName::from(HOST))
    }

    fn running_pods(&self) -> Vec<Arc<Pod>> {
        Vec::new()
    }
}

/// The one host, if it can be reached.
pub(super) struct Hosts {
    pub(super) client: Mutex<Option<HostClient<Channel>>>,
}

#[async_trait]
impl HostStreams for Hosts {
    async fn client(&self, _uid: &str) -> Result<HostClient<Channel>, StreamError> {
        let client = self.client.lock().expect("not poisoned").clone();
        client.ok_or_else(|| StreamError::Unreachable(HOST.into()))
    }

    async fn stats(&self) -> Vec<(HostName, v1::Stats)> {
        let usage = v1::Usage {
            cpu_nanos: 2_000_000_000,
            memory_working_set_bytes: 4096,
            ..v1::Usage::default()
        };
        let stats = v1::Stats {
            host: Some(usage),
            sandboxes: vec![v1::SandboxStats {
                uid: "uid-1".into(),
                containers: vec![v1::ContainerStats {
                    name: "main".into(),
                    started_at: None,
                    usage: Some(usage),
                    logs: None,
                }],
                ..v1::SandboxStats::default()
            }],
            at: None,
            files: None,
        };
        vec![(HOST.into(), stats)]
    }
}

/// `admin` may do all, `viewer` may get, others nothing; the token `token-X` is
/// the user X's.
#[derive(Default)]
pub(super) struct Policy {
    pub(super) token_reviews: AtomicUsize,
    pub(super) last: Mutex<Option<SubjectAccessReviewSpec>>,
}

#[async_trait]
impl Reviews for Policy {
    async fn token(&self, token: &str) -> Result<TokenReviewStatus, ReviewError> {
        self.token_reviews.fetch_add(1, Ordering::SeqCst);
        let Some(user) = token.strip_prefix("token-") else {
            return Ok(TokenReviewStatus::default());
        };
        Ok(TokenReviewStatus {
            authenticated: Some(true),
            user: Some(UserInfo {
                username: Some(user.to_owned()),
                ..UserInfo::default()
            }),
            ..TokenReviewStatus::default()
        })
    }

    async fn access(
        &self,
        spec: SubjectAccessReviewSpec,
    ) -> Result<SubjectAccessReviewStatus, ReviewError> {
        let verb = spec
            .resource_attributes
            .as_ref()
            .and_then(|attributes| attributes.verb.clone());
        let allowed = match spec.user.as_deref() {
            Some("admin") => true,
            Some("viewer") => verb.as_deref() == Some("get"),
            Some("broken") => return Err(ReviewError::TimedOut),
            _ => false,
        };
        *self.last.lock().expect("not poisoned") = Some(spec);
        Ok(SubjectAccessReviewStatus {
            allowed,
            ..SubjectAccessReviewStatus::default()
        })
    }
}
