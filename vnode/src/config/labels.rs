//! Labels that a node may give itself.

use sandman_protocol::identity::is_dns1123_subdomain;

use super::{ConfigError, invalid};

/// Labels that a node may not set on itself are refused here, because the API
/// server would refuse the whole Node (NodeRestriction).
pub(super) fn check(label: &str, value: &str) -> Result<(), ConfigError> {
    let key = format!("node.labels.{label}");
    let (domain, name) = label.rsplit_once('/').unwrap_or(("", label));
    let part_ok = |part: &str| {
        part.len() <= 63
            && part.starts_with(|c: char| c.is_ascii_alphanumeric())
            && part.ends_with(|c: char| c.is_ascii_alphanumeric())
            && part
                .bytes()
                .all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b))
    };
    if !part_ok(name) || !(domain.is_empty() || is_dns1123_subdomain(domain)) {
        return Err(invalid(&key, "is not a valid label key"));
    }
    if !(value.is_empty() || part_ok(value)) {
        return Err(invalid(
            &key,
            format!("{value:?} is not a valid label value"),
        ));
    }
    let own = domain == "kubelet.kubernetes.io"
        || domain == "node.kubernetes.io"
        || domain.ends_with(".kubelet.kubernetes.io")
        || domain.ends_with(".node.kubernetes.io");
    let reserved = ["kubernetes.io", "k8s.io"]
        .iter()
        .any(|root| domain == *root || domain.strip_suffix(root).is_some_and(|d| d.ends_with('.')));
    let known = matches!(
        label,
        "topology.kubernetes.io/zone"
            | "topology.kubernetes.io/region"
            | "failure-domain.beta.kubernetes.io/zone"
            | "failure-domain.beta.kubernetes.io/region"
            | "beta.kubernetes.io/instance-type"
            | "beta.kubernetes.io/os"
            | "beta.kubernetes.io/arch"
    );
    if reserved && !own && !known {
        return Err(invalid(
            &key,
            "a node may not give itself this label (NodeRestriction); set it with kubectl label",
        ));
    }
    Ok(())
}
