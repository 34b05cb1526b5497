//! The loop around the decision: every pending request is looked at when it appears, when it
//! changes and after a restart, so none is missed and none is decided twice.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use k8s_openapi::api::certificates::v1::{
    CertificateSigningRequest, CertificateSigningRequestCondition,
};
use kube::api::PostParams;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::runtime::controller::{Action, Controller};
use kube::runtime::watcher;
use kube::{Api, Client, ResourceExt};

use super::decide::{Decision, SIGNER, decide};
use super::nodes::ExpectedNodes;

/// Pause before a decision that the API server did not take is sent again.
const RETRY: Duration = Duration::from_secs(5);

/// Why the approver did not start.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// The kubeconfig, or the service account of the pod, is not usable.
    #[error("cannot read the API server's address and credentials: {0}")]
    Kubeconfig(#[from] kube::config::KubeconfigError),
    /// There is no kubeconfig and no service account.
    #[error("no kubeconfig given and not in a pod: {0}")]
    InCluster(#[from] kube::config::InClusterError),
    /// No client could be made from them.
    #[error("cannot make an API client: {0}")]
    Client(#[source] kube::Error),
}

struct Context {
    api: Api<CertificateSigningRequest>,
    nodes: ExpectedNodes,
}

/// Approves and denies until SIGTERM or SIGINT. Without a kubeconfig the pod's service account is used.
pub async fn run(kubeconfig: Option<&Path>, nodes: ExpectedNodes) -> Result<(), RunError> {
    let config = match kubeconfig {
        Some(path) => {
            let file = Kubeconfig::read_from(path)?;
            kube::Config::from_custom_kubeconfig(file, &KubeConfigOptions::default()).await?
        }
        None => kube::Config::incluster()?,
    };
    let api: Api<CertificateSigningRequest> =
        Api::all(Client::try_from(config).map_err(RunError::Client)?);
    let pending = watcher::Config::default().fields(&format!("spec.signerName={SIGNER}"));
    tracing::info!(signer = SIGNER, "watching certificate signing requests");
    Controller::new(api.clone(), pending)
        .shutdown_on_signal()
        .run(reconcile, retry, Arc::new(Context { api, nodes }))
        .for_each(|outcome| async {
            // Failed decisions are logged where they are retried; these are the watch's own.
            if let Err(kube::runtime::controller::Error::QueueError(error)) = outcome {
                tracing::warn!(%error, "watch interrupted, trying again");
            }
        })
        .await;
    Ok(())
}

async fn reconcile(
    csr: Arc<CertificateSigningRequest>,
    context: Arc<Context>,
) -> Result<Action, kube::Error> {
    let (kind, message) = match decide(&csr, &context.nodes) {
        Decision::Ignore => return Ok(Action::await_change()),
        Decision::Approve => (
            "Approved",
            "subject and addresses are the node's".to_owned(),
        ),
        Decision::Deny(reason) => ("Denied", reason),
    };
    let name = csr.name_any();
    let decided = with_condition(&csr, kind, &message);
    match context
        .api
        .replace_subresource("approval", &name, &PostParams::default(), &decided)
        .await
    {
        Ok(_) => {
            let requester = csr.spec.username.as_deref().unwrap_or_default();
            tracing::info!(
                csr = name,
                requester,
                decision = kind,
                reason = message,
                "decided"
            );
            Ok(Action::await_change())
        }
        // Changed or gone since it was read: the watch brings what is true now.
        Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => {
            Ok(Action::await_change())
        }
        Err(error) => Err(error),
    }
}

fn retry(csr: Arc<CertificateSigningRequest>, error: &kube::Error, _: Arc<Context>) -> Action {
    tracing::warn!(csr = csr.name_any(), %error, "the decision was not taken, trying again");
    Action::requeue(RETRY)
}

/// The request with a condition added; its resource version guards against another approver.
fn with_condition(
    csr: &CertificateSigningRequest,
    kind: &str,
    message: &str,
) -> CertificateSigningRequest {
    let mut decided = csr.clone();
    let status = decided.status.get_or_insert_default();
    status
        .conditions
        .get_or_insert_default()
        .push(CertificateSigningRequestCondition {
            type_: kind.to_owned(),
            status: "True".to_owned(),
            reason: Some("SandmanNodeAddresses".to_owned()),
            message: Some(message.to_owned()),
            ..Default::default()
        });
    decided
}
