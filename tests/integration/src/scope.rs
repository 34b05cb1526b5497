//! The namespace of one test: made at its start, deleted at its end, and
//! explained when the test fails.

use std::future::Future;

use anyhow::{Context as _, Result};
use k8s_openapi::api::core::v1::{Event, Namespace, Pod, ServiceAccount};
use kube::api::{Api, DeleteParams, ListParams, PostParams};
use kube::runtime::wait::await_condition;
use kube::{Client, ResourceExt as _};

use crate::kubectl::{Kubectl, Transport};
use crate::wait::DEADLINE;
use crate::{Cluster, Component, wait_pod};

/// What a test works with.
#[derive(Clone)]
pub struct Scope {
    /// The cluster under test.
    pub cluster: Cluster,
    /// Administrator's client.
    pub client: Client,
    /// The test's own namespace.
    pub namespace: String,
}

impl Scope {
    /// Runs `test` in a new namespace. A failing test leaves its namespace's
    /// pods and events and the logs of the node's components on stderr.
    ///
    /// # Panics
    /// When the test fails, with its error.
    pub fn run<F, Fut>(test: F)
    where
        F: FnOnce(Self) -> Fut,
        Fut: Future<Output = Result<()>>,
    {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap_or_else(|error| panic!("cannot start a runtime: {error}"));
        let outcome = runtime.block_on(async {
            let scope = Self::create().await?;
            // Boxed: some tests hold many large futures.
            let outcome = Box::pin(test(scope.clone())).await;
            if let Err(error) = &outcome {
                scope.explain(error).await;
            }
            scope.delete().await?;
            outcome
        });
        if let Err(error) = outcome {
            panic!("{error:?}");
        }
    }

    async fn create() -> Result<Self> {
        let cluster = Cluster::from_env()?;
        let client = cluster.client().await?;
        let namespace = format!("t-{}", &uuid::Uuid::new_v4().simple().to_string()[..12]);
        let object = Namespace {
            metadata: kube::api::ObjectMeta {
                name: Some(namespace.clone()),
                ..Default::default()
            },
            ..Default::default()
        };
        Api::<Namespace>::all(client.clone())
            .create(&PostParams::default(), &object)
            .await
            .with_context(|| format!("create namespace {namespace}"))?;
        let scope = Self {
            cluster,
            client,
            namespace,
        };
        // Pods are refused until the controller manager made this account.
        let accounts: Api<ServiceAccount> = scope.api();
        tokio::time::timeout(
            DEADLINE,
            await_condition(accounts, "default", |account: Option<&ServiceAccount>| {
                account.is_some()
            }),
        )
        .await
        .context("the namespace's default service account does not appear")??;
        Ok(scope)
    }

    /// API of a namespaced kind in this namespace.
    #[must_use]
    pub fn api<K>(&self) -> Api<K>
    where
        K: kube::Resource<Scope = kube::core::NamespaceResourceScope>,
        <K as kube::Resource>::DynamicType: Default,
    {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    /// kubectl in this namespace, speaking WebSocket.
    #[must_use]
    pub fn kubectl(&self) -> Kubectl {
        self.kubectl_over(Transport::WebSocket)
    }

    /// kubectl in this namespace with a chosen streaming transport.
    #[must_use]
    pub fn kubectl_over(&self, transport: Transport) -> Kubectl {
        Kubectl::new(&self.cluster, &self.namespace, transport)
    }

    /// Creates a pod and waits until it is Running and Ready.
    ///
    /// # Errors
    /// When the API refuses it, or it is not ready in time.
    pub async fn ready_pod(&self, pod: &Pod) -> Result<Pod> {
        self.create_pod(pod).await?;
        wait_pod(&self.api(), &pod.name_any(), "ready", crate::is_ready).await
    }

    /// Creates a pod.
    ///
    /// # Errors
    /// When the API refuses it.
    pub async fn create_pod(&self, pod: &Pod) -> Result<Pod> {
        Ok(self
            .api::<Pod>()
            .create(&PostParams::default(), pod)
            .await?)
    }

    /// Prints what a person would look at first.
    async fn explain(&self, error: &anyhow::Error) {
        eprintln!("=== test in namespace {} failed: {error:#}", self.namespace);
        match self.api::<Pod>().list(&ListParams::default()).await {
            Ok(pods) => {
                for pod in pods {
                    let status = serde_json::to_string(&pod.status).unwrap_or_default();
                    eprintln!("--- pod {}: {status}", pod.name_any());
                }
            }
            Err(error) => eprintln!("--- pods: {error}"),
        }
        match self.api::<Event>().list(&ListParams::default()).await {
            Ok(events) => {
                for event in events {
                    eprintln!(
                        "--- event {}: {} {}",
                        event.involved_object.name.unwrap_or_default(),
                        event.reason.unwrap_or_default(),
                        event.message.unwrap_or_default(),
                    );
                }
            }
            Err(error) => eprintln!("--- events: {error}"),
        }
        let shims = (0..self.cluster.hosts).map(Component::RuntimeShim);
        for component in std::iter::once(Component::Vnode).chain(shims) {
            let name = component.name();
            eprintln!("--- {name}\n{}", self.cluster.log_tail(&name).await);
        }
    }

    async fn delete(&self) -> Result<()> {
        Api::<Namespace>::all(self.client.clone())
            .delete(&self.namespace, &DeleteParams::default())
            .await
            .with_context(|| format!("delete namespace {}", self.namespace))?;
        Ok(())
    }
}
