//! The cluster under test: found or started, with the peers' nodes and a namespace of the bench's
//! own in it. What was started or made here is ended and removed at the end.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, bail};
use futures::FutureExt;
use futures::future::BoxFuture;
use k8s_openapi::api::core::v1::{Namespace, Node, Pod, ServiceAccount};
use kube::api::{Api, DeleteParams, PostParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::runtime::wait::{Condition, await_condition};
use kube::{Client, Config};
use serde_json::json;

use crate::audit::AuditLog;
use crate::census::Place;
use crate::cli::DevArgs;
use crate::dev::{Dev, State};
use crate::subject::Subject;

/// A node registers, and the controller manager serves a new namespace, well within this.
const READY_WITHIN: Duration = Duration::from_secs(120);
/// The image that all pods run, at the dev cluster's registry.
const IMAGE: &str = "sandman/busybox:1";

/// The dev cluster, and what of it is ours to end.
pub(crate) struct Cluster {
    dev: Dev,
    hosts: Option<u8>,
    started: bool,
    peers: Vec<Subject>,
    made: Option<Session>,
    endings: Vec<BoxFuture<'static, anyhow::Result<()>>>,
}

/// How to work on the cluster.
#[derive(Clone)]
pub(crate) struct Session {
    /// One client for all, as a user's program has.
    pub(crate) client: Client,
    /// To make further clients.
    pub(crate) config: Config,
    /// Where the pods go.
    pub(crate) namespace: String,
    /// The image that they run.
    pub(crate) image: String,
    /// Hosts of Sandman's node.
    pub(crate) hosts: usize,
    /// containerd's client, and where each host's containerd listens.
    pub(crate) containerd: (PathBuf, Vec<PathBuf>),
    /// Where its pods leave traces.
    pub(crate) place: Place,
    /// Runtime of Sandman's pods, if the cluster says.
    pub(crate) runtime: Option<String>,
    /// Who asked the API server for what.
    pub(crate) audit_log: Option<AuditLog>,
    /// All that `hack/dev env` says.
    variables: BTreeMap<String, String>,
}

impl Session {
    /// What `hack/dev env` says of something.
    pub(crate) fn variable(&self, name: &str) -> anyhow::Result<&str> {
        let value = self.variables.get(name).map(String::as_str);
        value.with_context(|| format!("`hack/dev env` does not give {name}"))
    }

    /// The bench's pods.
    pub(crate) fn pods(&self) -> Api<Pod> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }
}

impl Cluster {
    /// Looks at nothing yet.
    pub(crate) fn new(arguments: &DevArgs) -> Self {
        Self {
            dev: Dev::new(arguments),
            hosts: arguments.hosts,
            started: false,
            peers: Vec::new(),
            made: None,
            endings: Vec::new(),
        }
    }

    /// Makes everything ready for these subjects.
    pub(crate) async fn open(&mut self, subjects: &[Subject]) -> anyhow::Result<Session> {
        self.up().await?;
        let variables = self.dev.variables().await?;
        let variable = |name: &str| {
            let value = variables.get(name).cloned();
            value.with_context(|| format!("`hack/dev env` does not give {name}"))
        };
        let kubeconfig = Kubeconfig::read_from(variable("KUBECONFIG")?)?;
        let config =
            Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await?;
        let session = Session {
            client: Client::try_from(config.clone())?,
            config,
            namespace: format!("sandman-bench-{:.8}", uuid::Uuid::new_v4().simple()),
            image: format!("{}/{IMAGE}", variable("SANDMAN_REGISTRY")?),
            hosts: variable("SANDMAN_HOSTS")?.parse()?,
            containerd: (
                variable("SANDMAN_CTR")?.into(),
                variable("SANDMAN_CONTAINERD")?
                    .split(':')
                    .map(PathBuf::from)
                    .collect(),
            ),
            place: Place {
                cgroup_parent: variable("SANDMAN_CGROUP_PARENT")?,
                mount_marks: vec![
                    format!("sandman-{}", variable("SANDMAN_INSTANCE")?),
                    variable("SANDMAN_STATE_DIR")?,
                ],
            },
            runtime: variables.get("SANDMAN_RUNTIME").cloned(),
            audit_log: variables.get("SANDMAN_AUDIT_LOG").map(AuditLog::new),
            variables: variables.clone(),
        };
        if subjects.contains(&Subject::Sandman) && session.hosts == 0 {
            bail!("the dev cluster has no hosts; run `hack/dev down`, or give --peers-only");
        }
        self.made = Some(session.clone());
        make_namespace(&session).await?;
        for &subject in subjects {
            self.start(subject, &session.client).await?;
        }
        Ok(session)
    }

    /// Processes of the control plane, by the names of `hack/dev status`.
    pub(crate) async fn control_plane(&self) -> anyhow::Result<Vec<u32>> {
        const NAMES: [&str; 4] = ["etcd", "apiserver", "controller-manager", "scheduler"];
        let components = self.components().await?;
        let pids: Vec<u32> = NAMES
            .iter()
            .filter_map(|name| components.get(*name).copied())
            .collect();
        if pids.len() != NAMES.len() {
            bail!("`hack/dev status` does not show {}", NAMES.join(", "));
        }
        Ok(pids)
    }

    /// Processes of all components that run, by the names of `hack/dev status`.
    pub(crate) async fn components(&self) -> anyhow::Result<BTreeMap<String, u32>> {
        let status = self.dev.status().await?;
        let rows = status["components"].as_array().cloned().unwrap_or_default();
        let pids = rows.iter().filter_map(|row| {
            let pid = row["pid"].as_u64()?.try_into().ok()?;
            Some((row["component"].as_str()?.to_owned(), pid))
        });
        Ok(pids.collect())
    }

    /// Has something done at the end, however the measuring ends.
    pub(crate) fn at_end(
        &mut self,
        ending: impl Future<Output = anyhow::Result<()>> + Send + 'static,
    ) {
        self.endings.push(ending.boxed());
    }

    /// Runtime of Sandman's pods, if the cluster is open and says.
    pub(crate) fn runtime(&self) -> Option<&str> {
        self.made.as_ref()?.runtime.as_deref()
    }

    async fn up(&mut self) -> anyhow::Result<()> {
        let mut arguments = vec!["up".to_owned()];
        match self.dev.state().await? {
            State::Up => return Ok(()),
            State::Ailing => {}
            State::Absent => {
                // Set first: a half-started cluster must be taken down as well.
                self.started = true;
                arguments.extend(self.hosts.map(|hosts| format!("--hosts={hosts}")));
            }
        }
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        self.dev.run(&arguments).await
    }

    /// Starts a peer unless somebody else did, and waits for its node.
    async fn start(&mut self, subject: Subject, client: &Client) -> anyhow::Result<()> {
        let nodes: Api<Node> = Api::all(client.clone());
        let node = nodes.get_opt(subject.node()).await?;
        if node.as_ref().is_some_and(is_ready) {
            return Ok(());
        }
        if let Some(component) = subject.component() {
            tracing::info!(component, "starting");
            self.peers.push(subject);
            self.dev.run(&["start", component]).await?;
        }
        let ready = |node: Option<&Node>| node.is_some_and(is_ready);
        wait(nodes, subject.node(), ready).await
    }

    /// Ends and removes what this bench started and made. Goes on after a failure, and reports
    /// the first.
    pub(crate) async fn clean(&mut self) -> anyhow::Result<()> {
        let mut result = Ok(());
        for ending in std::mem::take(&mut self.endings) {
            result = result.and(ending.await);
        }
        if self.started {
            self.started = false;
            return result.and(self.dev.run(&["down"]).await);
        }
        let Some(session) = self.made.take() else {
            return result;
        };
        // The nodes end the pods in it before they go.
        let removed = remove_namespace(&session).await;
        result = result.and(removed);
        for peer in std::mem::take(&mut self.peers) {
            let Some(component) = peer.component() else {
                continue;
            };
            let stopped = self.dev.run(&["stop", component]).await;
            // A node that stays behind NotReady would worry whoever looks next.
            let removed = remove::<Node>(&Api::all(session.client.clone()), peer.node()).await;
            result = result.and(stopped).and(removed);
        }
        result
    }
}

async fn make_namespace(session: &Session) -> anyhow::Result<()> {
    let namespaces: Api<Namespace> = Api::all(session.client.clone());
    let namespace = serde_json::from_value(json!({"metadata": {"name": session.namespace}}))?;
    namespaces
        .create(&PostParams::default(), &namespace)
        .await
        .context("cannot make a namespace")?;
    // No pod is admitted without the account that it would run as.
    let accounts: Api<ServiceAccount> = Api::namespaced(session.client.clone(), &session.namespace);
    let exists = |account: Option<&ServiceAccount>| account.is_some();
    wait(accounts, "default", exists).await
}

async fn remove_namespace(session: &Session) -> anyhow::Result<()> {
    let namespaces: Api<Namespace> = Api::all(session.client.clone());
    remove(&namespaces, &session.namespace).await?;
    let gone = |namespace: Option<&Namespace>| namespace.is_none();
    wait(namespaces, &session.namespace, gone).await
}

async fn remove<K>(api: &Api<K>, name: &str) -> anyhow::Result<()>
where
    K: Clone + std::fmt::Debug + serde::de::DeserializeOwned,
{
    match api.delete(name, &DeleteParams::default()).await {
        Err(kube::Error::Api(status)) if status.is_not_found() => Ok(()),
        Err(error) => Err(error).with_context(|| format!("cannot delete {name}")),
        Ok(_) => Ok(()),
    }
}

fn is_ready(node: &Node) -> bool {
    let conditions = node
        .status
        .iter()
        .flat_map(|s| s.conditions.iter().flatten());
    conditions
        .into_iter()
        .any(|c| c.type_ == "Ready" && c.status == "True")
}

async fn wait<K>(api: Api<K>, name: &str, condition: impl Condition<K>) -> anyhow::Result<()>
where
    K: kube::Resource + Clone + std::fmt::Debug + Send + serde::de::DeserializeOwned + 'static,
{
    match tokio::time::timeout(READY_WITHIN, await_condition(api, name, condition)).await {
        Ok(done) => Ok(done.map(drop)?),
        Err(_) => bail!("waiting for {name} took longer than {READY_WITHIN:?}"),
    }
}
