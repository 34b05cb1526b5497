//! Which pods this node runs at all. What it cannot honour is refused at once
//! and by name, because a pod that runs without something it asked for is worse
//! than one that does not run. Fields that change nothing here are accepted.

use std::path::Path;

use k8s_openapi::api::core::v1::{AppArmorProfile, Container, Pod, PodSpec, Volume};
use sandman_protocol::access::HostAccess;

/// Why a pod is refused: becomes phase Failed, this reason and message, and a
/// Warning event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rejection {
    /// A CamelCase word.
    pub reason: &'static str,
    /// For the user; names the field.
    pub message: String,
}

/// Reason of pods that use a feature this node does not have.
pub const UNSUPPORTED: &str = "UnsupportedPodFeature";

/// Sysctls that affect nobody else (`pkg/kubelet/sysctl/safe_sysctls.go`).
const SAFE_SYSCTLS: [&str; 12] = [
    "kernel.shm_rmid_forced",
    "net.ipv4.ip_local_port_range",
    "net.ipv4.tcp_syncookies",
    "net.ipv4.ping_group_range",
    "net.ipv4.ip_unprivileged_port_start",
    "net.ipv4.ip_local_reserved_ports",
    "net.ipv4.tcp_keepalive_time",
    "net.ipv4.tcp_fin_timeout",
    "net.ipv4.tcp_keepalive_intvl",
    "net.ipv4.tcp_keepalive_probes",
    "net.ipv4.tcp_rmem",
    "net.ipv4.tcp_wmem",
];

/// Checks a pod before it is placed. `allow` is what it may reach of its host.
///
/// # Errors
/// The first field that this node cannot honour.
pub fn admit(pod: &Pod, allow: &HostAccess) -> Result<(), Rejection> {
    let Some(spec) = &pod.spec else {
        return Err(unsupported("spec", "is missing"));
    };
    let annotations = pod.metadata.annotations.as_ref();
    refuse_if(
        annotations.is_some_and(|all| all.contains_key(MIRROR)),
        &format!("metadata.annotations[{MIRROR}]"),
    )?;
    admit_pod_fields(spec, allow)?;
    for (index, volume) in spec.volumes.iter().flatten().enumerate() {
        admit_volume(&format!("spec.volumes[{index}]"), volume, allow)?;
    }
    for (index, container) in spec.init_containers.iter().flatten().enumerate() {
        let path = format!("spec.initContainers[{index}]");
        admit_container(&path, container, spec, allow)?;
    }
    for (index, container) in spec.containers.iter().enumerate() {
        let path = format!("spec.containers[{index}]");
        admit_container(&path, container, spec, allow)?;
    }
    Ok(())
}

fn admit_pod_fields(spec: &PodSpec, allow: &HostAccess) -> Result<(), Rejection> {
    if spec.os.as_ref().is_some_and(|os| os.name != "linux") {
        return Err(Rejection {
            reason: "PodOSNotSupported",
            message: "Failed to admit pod as the OS field doesn't match node OS".to_owned(),
        });
    }
    for (wish, allowed, field) in [
        (spec.host_network, allow.host_network, "spec.hostNetwork"),
        (spec.host_pid, allow.host_pid, "spec.hostPID"),
        (spec.host_ipc, allow.host_ipc, "spec.hostIPC"),
    ] {
        refuse_if(wish == Some(true) && !allowed, field)?;
    }
    refuse_if(has_any(&spec.resource_claims), "spec.resourceClaims")?;
    let Some(security) = &spec.security_context else {
        return Ok(());
    };
    admit_app_armor(security.app_armor_profile.as_ref())?;
    for sysctl in security.sysctls.iter().flatten() {
        admit_sysctl(&sysctl.name.replace('/', "."), spec)?;
    }
    Ok(())
}

/// `validateSysctl` of `pkg/kubelet/sysctl/allowlist.go`.
fn admit_sysctl(name: &str, spec: &PodSpec) -> Result<(), Rejection> {
    let shared = if name.starts_with("net.") {
        ("net", spec.host_network)
    } else {
        ("ipc", spec.host_ipc)
    };
    let why = match shared {
        _ if !SAFE_SYSCTLS.contains(&name) => "not allowlisted".to_owned(),
        (namespace, Some(true)) => format!("not allowed with host {namespace} enabled"),
        _ => return Ok(()),
    };
    Err(Rejection {
        reason: "SysctlForbidden",
        message: format!("forbidden sysctl: {name:?} {why}"),
    })
}

fn admit_volume(path: &str, volume: &Volume, allow: &HostAccess) -> Result<(), Rejection> {
    if let Some(projected) = &volume.projected {
        for (index, source) in projected.sources.iter().flatten().enumerate() {
            let source_path = format!("{path}.projected.sources[{index}]");
            let trust = source.cluster_trust_bundle.is_some();
            refuse_if(trust, &format!("{source_path}.clusterTrustBundle"))?;
            let certificate = source.pod_certificate.is_some();
            refuse_if(certificate, &format!("{source_path}.podCertificate"))?;
        }
        return Ok(());
    }
    if let Some(empty_dir) = &volume.empty_dir {
        let medium = empty_dir.medium.as_deref().unwrap_or_default();
        refuse_if(
            !matches!(medium, "" | "Memory"),
            &format!("{path}.emptyDir.medium"),
        )?;
        return Ok(());
    }
    if let Some(host_path) = volume
        .host_path
        .as_ref()
        .filter(|_| !allow.host_path.is_empty())
    {
        return match allow.host_path_root(Path::new(&host_path.path)) {
            Some(_) => Ok(()),
            None => Err(unsupported(
                &format!("{path}.hostPath.path"),
                &format!(
                    "{:?} is not in a folder that allow.host_path of this node's configuration names",
                    host_path.path
                ),
            )),
        };
    }
    if volume.image.is_some() {
        return Ok(());
    }
    if volume.config_map.is_some() || volume.secret.is_some() || volume.downward_api.is_some() {
        return Ok(());
    }
    // Every other source; the name in the JSON is the name in the message.
    let source = serde_json::to_value(volume).ok().and_then(|value| {
        value
            .as_object()?
            .keys()
            .find(|key| *key != "name")
            .cloned()
    });
    Err(unsupported(
        &format!("{path}.{}", source.unwrap_or_default()),
        NOT_SUPPORTED,
    ))
}

fn admit_container(
    path: &str,
    container: &Container,
    pod: &PodSpec,
    allow: &HostAccess,
) -> Result<(), Rejection> {
    let field = |name: &str| format!("{path}.{name}");
    refuse_if(
        container.image.as_deref().unwrap_or_default().is_empty(),
        &field("image"),
    )?;
    refuse_if(has_any(&container.volume_devices), &field("volumeDevices"))?;
    for (index, rule) in container.restart_policy_rules.iter().flatten().enumerate() {
        refuse_if(
            rule.action != "Restart",
            &field(&format!("restartPolicyRules[{index}].action")),
        )?;
    }
    for (index, port) in container.ports.iter().flatten().enumerate() {
        // In the host's network every port is the host's; the API server fills it in.
        refuse_if(
            port.host_port.unwrap_or(0) != 0 && pod.host_network != Some(true) && !allow.host_ports,
            &field(&format!("ports[{index}].hostPort")),
        )?;
    }
    for (index, env) in container.env.iter().flatten().enumerate() {
        let file = env
            .value_from
            .as_ref()
            .is_some_and(|from| from.file_key_ref.is_some());
        refuse_if(file, &field(&format!("env[{index}].valueFrom.fileKeyRef")))?;
    }
    if let Some(limits) = container.resources.as_ref().and_then(|r| r.limits.as_ref())
        && let Some(huge) = limits.keys().find(|name| name.starts_with("hugepages-"))
    {
        return Err(unsupported(
            &field(&format!("resources.limits.{huge}")),
            NOT_SUPPORTED,
        ));
    }
    let Some(security) = &container.security_context else {
        return Ok(());
    };
    refuse_if(
        security.privileged == Some(true) && !allow.privileged,
        &field("securityContext.privileged"),
    )?;
    admit_app_armor(security.app_armor_profile.as_ref())
}

/// No host enforces AppArmor: the kubelet's refusal (`pkg/security/apparmor`) of all that ask
/// for it.
fn admit_app_armor(profile: Option<&AppArmorProfile>) -> Result<(), Rejection> {
    match profile {
        Some(profile) if profile.type_ != "Unconfined" => Err(Rejection {
            reason: "AppArmor",
            message: "Cannot enforce AppArmor: AppArmor is not enabled on the host".to_owned(),
        }),
        _ => Ok(()),
    }
}

/// Annotation of what a kubelet shows of a pod from its own files.
const MIRROR: &str = "kubernetes.io/config.mirror";

const NOT_SUPPORTED: &str = "is not supported by this node";

fn has_any<T>(list: &Option<Vec<T>>) -> bool {
    list.as_ref().is_some_and(|list| !list.is_empty())
}

fn refuse_if(condition: bool, field: &str) -> Result<(), Rejection> {
    if condition {
        Err(unsupported(field, NOT_SUPPORTED))
    } else {
        Ok(())
    }
}

fn unsupported(field: &str, problem: &str) -> Rejection {
    Rejection {
        reason: UNSUPPORTED,
        message: format!("{field} {problem}"),
    }
}

/// The DaemonSet, as `namespace/name`, that a pod belongs to.
pub fn daemonset_of(pod: &Pod) -> Option<String> {
    let owner = pod
        .metadata
        .owner_references
        .iter()
        .flatten()
        .find(|owner| owner.controller == Some(true) && owner.kind == "DaemonSet")?;
    Some(format!(
        "{}/{}",
        pod.metadata.namespace.as_deref()?,
        owner.name
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn pod(spec: Value) -> Pod {
        let mut spec = spec;
        if spec.get("containers").is_none() {
            spec["containers"] = json!([{"name": "c", "image": "i"}]);
        }
        serde_json::from_value(json!({ "spec": spec })).unwrap()
    }

    #[test]
    fn refusals_name_the_field() {
        let container = |value: Value| {
            let mut container = json!({"name": "c", "image": "i"});
            container
                .as_object_mut()
                .unwrap()
                .extend(value.as_object().unwrap().clone());
            json!({ "containers": [container] })
        };
        for (spec, field) in [
            (json!({"hostNetwork": true}), "spec.hostNetwork"),
            (json!({"hostPID": true}), "spec.hostPID"),
            (json!({"hostIPC": true}), "spec.hostIPC"),
            (
                json!({"resourceClaims": [{"name": "gpu"}]}),
                "spec.resourceClaims",
            ),
            (
                json!({"volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": "c"}}]}),
                "spec.volumes[0].persistentVolumeClaim",
            ),
            (
                json!({"volumes": [{"name": "v", "csi": {"driver": "d"}}]}),
                "spec.volumes[0].csi",
            ),
            (
                json!({"volumes": [{"name": "v", "emptyDir": {}}, {"name": "w", "hostPath": {"path": "/"}}]}),
                "spec.volumes[1].hostPath",
            ),
            (
                json!({"volumes": [{"name": "v", "nfs": {"server": "s", "path": "/"}}]}),
                "spec.volumes[0].nfs",
            ),
            (
                json!({"volumes": [{"name": "v", "emptyDir": {"medium": "HugePages"}}]}),
                "spec.volumes[0].emptyDir.medium",
            ),
            (
                json!({"volumes": [{"name": "v", "projected": {"sources": [{"clusterTrustBundle": {"path": "p"}}]}}]}),
                "spec.volumes[0].projected.sources[0].clusterTrustBundle",
            ),
            (
                container(json!({"securityContext": {"privileged": true}})),
                "spec.containers[0].securityContext.privileged",
            ),
            (
                container(
                    json!({"ports": [{"containerPort": 80}, {"containerPort": 81, "hostPort": 81}]}),
                ),
                "spec.containers[0].ports[1].hostPort",
            ),
            (
                container(json!({"resources": {"limits": {"hugepages-2Mi": "2Mi"}}})),
                "spec.containers[0].resources.limits.hugepages-2Mi",
            ),
            (
                container(json!({"restartPolicy": "Never", "restartPolicyRules": [
                    {"action": "Restart", "exitCodes": {"operator": "In", "values": [1]}},
                    {"action": "RestartAllContainers"},
                ]})),
                "spec.containers[0].restartPolicyRules[1].action",
            ),
        ] {
            let rejection = admit(&pod(spec), &HostAccess::default()).unwrap_err();
            assert_eq!(rejection.reason, UNSUPPORTED, "{field}");
            assert_eq!(
                rejection.message,
                format!("{field} is not supported by this node")
            );
        }
    }

    #[test]
    fn nobody_shows_pods_of_files_that_are_not_there() {
        let mut pod = pod(json!({}));
        pod.metadata.annotations = Some([(MIRROR.to_owned(), "hash".to_owned())].into());
        let rejection = admit(&pod, &HostAccess::default()).unwrap_err();
        assert_eq!(
            rejection.message,
            "metadata.annotations[kubernetes.io/config.mirror] is not supported by this node"
        );
    }

    #[test]
    fn the_kubelets_own_refusals_keep_their_reasons() {
        for (spec, reason) in [
            (json!({"os": {"name": "windows"}}), "PodOSNotSupported"),
            (
                json!({"securityContext": {"sysctls": [{"name": "kernel.msgmax", "value": "1"}]}}),
                "SysctlForbidden",
            ),
            (
                json!({"securityContext": {"appArmorProfile": {"type": "RuntimeDefault"}}}),
                "AppArmor",
            ),
            (
                json!({"containers": [{"name": "c", "image": "i", "securityContext": {
                    "appArmorProfile": {"type": "Localhost", "localhostProfile": "p"},
                }}]}),
                "AppArmor",
            ),
        ] {
            let rejection = admit(&pod(spec), &HostAccess::default()).unwrap_err();
            assert_eq!(rejection.reason, reason);
        }
    }

    #[test]
    fn ordinary_pods_pass() {
        let spec = json!({
            "os": {"name": "linux"},
            "hostUsers": false,
            "shareProcessNamespace": true,
            "securityContext": {
                "sysctls": [{"name": "net/ipv4/tcp_syncookies", "value": "1"}], "fsGroup": 1,
                "supplementalGroupsPolicy": "Strict", "appArmorProfile": {"type": "Unconfined"},
                "seLinuxOptions": {"level": "s0:c1"}, "seLinuxChangePolicy": "Recursive",
            },
            "volumes": [
                {"name": "a", "emptyDir": {"medium": "Memory"}},
                {"name": "b", "configMap": {"name": "c"}},
                {"name": "i", "image": {"reference": "r"}},
                {"name": "d", "projected": {"sources": [{"serviceAccountToken": {"path": "token"}}]}},
            ],
            "initContainers": [{"name": "s", "image": "i", "restartPolicy": "Always"}],
            "containers": [{
                "name": "c", "image": "i",
                "ports": [{"containerPort": 80}],
                "securityContext": {"privileged": false, "seccompProfile": {"type": "RuntimeDefault"}},
                "livenessProbe": {"exec": {"command": ["true"]}},
                "lifecycle": {"preStop": {"sleep": {"seconds": 1}}},
                "volumeMounts": [{"name": "a", "mountPath": "/a", "subPathExpr": "$(X)", "mountPropagation": "None"}],
            }],
        });
        assert_eq!(admit(&pod(spec), &HostAccess::default()), Ok(()));
    }

    #[test]
    fn host_access_is_the_administrators_to_grant() {
        let allow = HostAccess {
            host_network: true,
            host_pid: true,
            host_ipc: true,
            privileged: true,
            host_ports: true,
            host_path: vec!["/srv".into()],
        };
        let spec = json!({
            "hostNetwork": true, "hostPID": true, "hostIPC": true,
            "volumes": [{"name": "v", "hostPath": {"path": "/srv/data"}}],
            "containers": [{
                "name": "c", "image": "i",
                "ports": [{"containerPort": 80, "hostPort": 80}],
                "securityContext": {"privileged": true},
            }],
        });
        assert_eq!(admit(&pod(spec), &allow), Ok(()));
        let outside = json!({"volumes": [{"name": "v", "hostPath": {"path": "/etc"}}]});
        let message = admit(&pod(outside), &allow).unwrap_err().message;
        assert!(
            message.starts_with("spec.volumes[0].hostPath.path \"/etc\" is not in a folder"),
            "{message}"
        );
        for (host, sysctl, text) in [
            ("hostNetwork", "net.ipv4.tcp_syncookies", "net"),
            ("hostIPC", "kernel.shm_rmid_forced", "ipc"),
        ] {
            let mut spec =
                json!({"securityContext": {"sysctls": [{"name": sysctl, "value": "1"}]}});
            assert_eq!(admit(&pod(spec.clone()), &allow), Ok(()));
            spec[host] = json!(true);
            let rejection = admit(&pod(spec), &allow).unwrap_err();
            assert_eq!(rejection.reason, "SysctlForbidden");
            assert_eq!(
                rejection.message,
                format!("forbidden sysctl: {sysctl:?} not allowed with host {text} enabled")
            );
        }
    }

    #[test]
    fn daemonsets_are_known_by_their_owner() {
        let pod: Pod = serde_json::from_value(json!({"metadata": {
            "namespace": "kube-system",
            "ownerReferences": [{"apiVersion": "apps/v1", "kind": "DaemonSet", "name": "kube-proxy", "uid": "u", "controller": true}],
        }}))
        .unwrap();
        assert_eq!(
            daemonset_of(&pod).as_deref(),
            Some("kube-system/kube-proxy")
        );
        assert_eq!(daemonset_of(&Pod::default()), None);
    }
}
