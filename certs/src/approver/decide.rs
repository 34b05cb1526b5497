//! The decision over one request, as a pure function. It follows the rules of the signer
//! `kubernetes.io/kubelet-serving` (kubernetes, pkg/apis/certificates/helpers.go) and adds the one
//! that the signer cannot check: that the addresses are the node's.

use std::collections::BTreeSet;

use k8s_openapi::api::certificates::v1::CertificateSigningRequest;

use super::nodes::ExpectedNodes;
use super::request;

/// Signer of the kubelets' serving certificates.
pub(super) const SIGNER: &str = "kubernetes.io/kubelet-serving";
const NODE_PREFIX: &str = "system:node:";
const NODES_GROUP: &str = "system:nodes";

/// What is to be done with a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Decision {
    /// The signer may sign it.
    Approve,
    /// It claims one of our nodes wrongly; the text says how.
    Deny(String),
    /// It is decided already, or none of our business.
    Ignore,
}

/// Decides over `csr`. Only requests made by one of `nodes`, or in its name, are touched.
pub fn decide(csr: &CertificateSigningRequest, nodes: &ExpectedNodes) -> Decision {
    let spec = &csr.spec;
    let decided = csr.status.as_ref().is_some_and(|status| {
        status
            .certificate
            .as_ref()
            .is_some_and(|issued| !issued.0.is_empty())
            || status
                .conditions
                .iter()
                .flatten()
                .any(|c| matches!(c.type_.as_str(), "Approved" | "Denied" | "Failed"))
    });
    if spec.signer_name != SIGNER || decided {
        return Decision::Ignore;
    }
    // The API server fills in the user from the requester's authentication.
    let requester = spec.username.as_deref().unwrap_or_default();
    let expected = |user: &str| nodes.get(user.strip_prefix(NODE_PREFIX)?);

    let request = match request::parse(&spec.request.0) {
        Ok(request) => request,
        Err(reason) if expected(requester).is_some() => return Decision::Deny(reason),
        Err(_) => return Decision::Ignore,
    };
    let Some(node) = expected(&request.common_name) else {
        return match expected(requester) {
            Some(node) => Decision::Deny(format!(
                "{NODE_PREFIX}{} asks for a certificate of {:?}",
                node.name, request.common_name
            )),
            None => Decision::Ignore,
        };
    };

    if requester != request.common_name {
        return Decision::Deny(format!(
            "{requester:?} asks for a certificate of {:?}",
            request.common_name
        ));
    }
    if !spec
        .groups
        .iter()
        .flatten()
        .any(|group| group == NODES_GROUP)
    {
        return Decision::Deny(format!("the requester is not in the group {NODES_GROUP}"));
    }
    if request.organization != NODES_GROUP {
        return Decision::Deny(format!(
            "the subject's organization is {:?}, not {NODES_GROUP}",
            request.organization
        ));
    }
    let usages: BTreeSet<&str> = spec.usages.iter().flatten().map(String::as_str).collect();
    let needed = BTreeSet::from(["digital signature", "server auth"]);
    let with_rsa = BTreeSet::from(["digital signature", "key encipherment", "server auth"]);
    if usages != needed && usages != with_rsa {
        return Decision::Deny(format!(
            "usages must be digital signature, server auth and, for RSA keys, key encipherment, \
             not {usages:?}"
        ));
    }
    if request.dns.is_empty() && request.ips.is_empty() {
        return Decision::Deny("a DNS or IP subject alternative name is required".to_owned());
    }
    if let Some(foreign) = request.dns.iter().find(|name| !node.dns.contains(*name)) {
        return Decision::Deny(format!(
            "DNS name {foreign:?} is not of the node {}",
            node.name
        ));
    }
    if let Some(foreign) = request.ips.iter().find(|ip| !node.ips.contains(ip)) {
        return Decision::Deny(format!(
            "address {foreign} is not of the node {}",
            node.name
        ));
    }
    Decision::Approve
}

#[cfg(test)]
mod tests;
