//! `[cluster_network]`: what of the cluster's network the node brings to its hosts.

use std::path::PathBuf;

use serde::Deserialize;

/// What hosts are told of the cluster's network. All of it is off unless it is asked for: it takes
/// rights that reach across the whole cluster, which the node's own identity does not have
/// (`manifests/components/services`).
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ClusterNetwork {
    /// Sandboxes reach Services by their ClusterIP.
    pub services: bool,
    /// NetworkPolicies are enforced.
    pub policies: bool,
    /// Credentials of ServiceAccount `sandman-vnode`. Without, those of the pod that this process
    /// runs in.
    pub kubeconfig: Option<PathBuf>,
}

impl ClusterNetwork {
    /// Whether anything of it is on.
    pub fn any(&self) -> bool {
        self.services || self.policies
    }
}
