//! Whom a container runs as, and what it may do.

use k8s_openapi::api::core::v1::{PodSecurityContext, SeccompProfile, SecurityContext};
use sandman_protocol::v1;
use sandman_protocol::v1::seccomp::Kind as SeccompKind;

use super::id;

/// The container's settings, with the pod's where it has none.
pub(super) fn security(
    pod: Option<&PodSecurityContext>,
    container: Option<&SecurityContext>,
) -> v1::SecurityContext {
    let capabilities = container.and_then(|c| c.capabilities.as_ref());
    let names = |list: Option<&Vec<String>>| -> Vec<String> {
        let strip = |name: &String| name.to_uppercase().trim_start_matches("CAP_").to_owned();
        list.into_iter().flatten().map(strip).collect()
    };
    let profile = container
        .and_then(|c| c.seccomp_profile.as_ref())
        .or_else(|| pod.and_then(|p| p.seccomp_profile.as_ref()));
    v1::SecurityContext {
        run_as_user: container
            .and_then(|c| c.run_as_user)
            .or_else(|| pod.and_then(|p| p.run_as_user))
            .and_then(id),
        run_as_group: container
            .and_then(|c| c.run_as_group)
            .or_else(|| pod.and_then(|p| p.run_as_group))
            .and_then(id),
        run_as_non_root: container
            .and_then(|c| c.run_as_non_root)
            .or_else(|| pod.and_then(|p| p.run_as_non_root))
            == Some(true),
        supplemental_groups: pod
            .and_then(|p| p.supplemental_groups.as_ref())
            .into_iter()
            .flatten()
            .copied()
            .chain(pod.and_then(|p| p.fs_group))
            .filter_map(id)
            .collect(),
        read_only_root: container.and_then(|c| c.read_only_root_filesystem) == Some(true),
        privileged: container.and_then(|c| c.privileged) == Some(true),
        no_new_privileges: container.and_then(|c| c.allow_privilege_escalation) == Some(false),
        add_capabilities: names(capabilities.and_then(|c| c.add.as_ref())),
        drop_capabilities: names(capabilities.and_then(|c| c.drop.as_ref())),
        seccomp: Some(seccomp(profile)),
        unmasked_proc: container.and_then(|c| c.proc_mount.as_deref()) == Some("Unmasked"),
        strict_groups: pod.and_then(|p| p.supplemental_groups_policy.as_deref()) == Some("Strict"),
    }
}

/// Pods that say nothing get the runtime's default profile, as with the
/// kubelet's `--seccomp-default`: these pods run code that nobody vouches for.
fn seccomp(profile: Option<&SeccompProfile>) -> v1::Seccomp {
    let (kind, file) = match profile.map(|profile| profile.type_.as_str()) {
        Some("Unconfined") => (SeccompKind::Unconfined, None),
        Some("Localhost") => (
            SeccompKind::Localhost,
            profile.and_then(|p| p.localhost_profile.clone()),
        ),
        _ => (SeccompKind::RuntimeDefault, None),
    };
    v1::Seccomp {
        kind: kind.into(),
        profile: file.unwrap_or_default(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::pods::spec::tests::build;

    #[test]
    fn security_of_pod_and_container() {
        let spec = build(json!({
            "securityContext": {
                "runAsUser": 1000, "runAsGroup": 1000, "fsGroup": 2000,
                "supplementalGroups": [3000], "seccompProfile": {"type": "Unconfined"},
            },
            "containers": [
                {"name": "a", "image": "i"},
                {"name": "b", "image": "i", "securityContext": {
                    "runAsUser": 0, "allowPrivilegeEscalation": false, "readOnlyRootFilesystem": true,
                    "capabilities": {"add": ["CAP_net_admin"], "drop": ["ALL"]},
                    "seccompProfile": {"type": "Localhost", "localhostProfile": "a.json"},
                }},
            ],
        }));
        let [a, b] = [0, 1].map(|index| spec.containers[index].security.clone().unwrap());
        assert_eq!((a.run_as_user, a.run_as_group), (Some(1000), Some(1000)));
        assert_eq!(a.supplemental_groups, [3000, 2000]);
        assert_eq!(a.seccomp.unwrap().kind(), SeccompKind::Unconfined);
        assert_eq!(b.run_as_user, Some(0));
        assert!(b.no_new_privileges && b.read_only_root);
        assert_eq!(
            (b.add_capabilities, b.drop_capabilities),
            (vec!["NET_ADMIN".into()], vec!["ALL".into()])
        );
        assert_eq!(b.seccomp.unwrap().profile, "a.json");
        assert_eq!(spec.fs_group, Some(2000));
    }
}
