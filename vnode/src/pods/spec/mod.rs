//! A pod and its resolved values as the sandbox that a host makes. Pure.

mod container;
mod dns;
mod expand;
mod names;
mod security;

use std::time::Duration;

use k8s_openapi::api::core::v1::{Container, Pod, PodSpec};
use prost_types::Duration as ProtoDuration;
use sandman_protocol::{SCHEMA, v1};

pub(super) use self::container::{pull_policy, recursive_read_only, resources};
pub(super) use self::expand::expand;
use super::ephemeral;
use super::resolve::Resolved;
use super::resources::{is_sidecar, requests};
use crate::config::Config;

/// Annotation of pods whose image must be PID 1 itself, as systemd must.
pub const WITHOUT_AGENT: &str = "sandman.dev/without-agent";

/// Builds the specification. `handler` is the runtime of the pod's
/// RuntimeClass, empty for the default.
pub fn sandbox(config: &Config, pod: &Pod, handler: &str, resolved: Resolved) -> v1::SandboxSpec {
    let empty = PodSpec::default();
    let spec = pod.spec.as_ref().unwrap_or(&empty);
    let metadata = &pod.metadata;
    let names = names::names(config, pod, spec);
    let mut resolved = resolved;
    let without_agent = annotation(pod, WITHOUT_AGENT) == Some("true");
    let mut container = |container: &Container| {
        let env = resolved.env.remove(&container.name).unwrap_or_default();
        container::container(spec, container, env, without_agent)
    };
    let init_containers = spec
        .init_containers
        .iter()
        .flatten()
        .map(&mut container)
        .collect();
    let containers = spec.containers.iter().map(&mut container).collect();
    let ephemeral_containers = ephemeral::containers(spec)
        .map(|(ephemeral, own)| v1::Container {
            target: ephemeral.target_container_name.clone().unwrap_or_default(),
            ..container(&own)
        })
        .collect();
    let security = spec.security_context.as_ref();
    v1::SandboxSpec {
        schema: SCHEMA,
        uid: metadata.uid.clone().unwrap_or_default(),
        namespace: metadata.namespace.clone().unwrap_or_default(),
        name: metadata.name.clone().unwrap_or_default(),
        generation: metadata.generation.unwrap_or(0),
        labels: metadata
            .labels
            .clone()
            .unwrap_or_default()
            .into_iter()
            .collect(),
        runtime_handler: handler.to_owned(),
        restart_policy: restart_policy(spec.restart_policy.as_deref())
            .unwrap_or(v1::RestartPolicy::Always)
            .into(),
        termination_grace_period: Some(seconds(
            spec.termination_grace_period_seconds.unwrap_or(30),
        )),
        active_deadline: spec.active_deadline_seconds.map(seconds),
        hostname: names.hostname,
        host_aliases: spec
            .host_aliases
            .iter()
            .flatten()
            .map(|alias| v1::HostAlias {
                ip: alias.ip.clone(),
                hostnames: alias.hostnames.clone().unwrap_or_default(),
            })
            .collect(),
        fqdn: names.fqdn,
        dns: Some(dns::dns(config, pod, spec)),
        network: network(spec).into(),
        host_pid: spec.host_pid == Some(true),
        host_ipc: spec.host_ipc == Some(true),
        priority: spec.priority.unwrap_or(0),
        host_ports: host_ports(spec),
        pod_resources: spec.resources.as_ref().map(|own| resources(Some(own))),
        share_process_namespace: spec.share_process_namespace == Some(true),
        sysctls: security
            .and_then(|s| s.sysctls.as_ref())
            .into_iter()
            .flatten()
            .map(|s| v1::Sysctl {
                name: s.name.replace('/', "."),
                value: s.value.clone(),
            })
            .collect(),
        requests: Some(requests(pod)),
        own_users: spec.host_users == Some(false),
        init_containers,
        containers,
        ephemeral_containers,
        volumes: resolved.volumes,
        fs_group: security.and_then(|s| s.fs_group).and_then(id),
        registry_credentials: resolved.credentials,
        await_policies: config.cluster_network.policies,
    }
}

/// How long a pod may take to end.
pub fn grace_period(pod: &Pod) -> Duration {
    let spec = pod
        .spec
        .as_ref()
        .and_then(|spec| spec.termination_grace_period_seconds);
    let deletion = pod.metadata.deletion_grace_period_seconds;
    Duration::from_secs(u64::try_from(deletion.or(spec).unwrap_or(30)).unwrap_or(0))
}

fn annotation<'a>(pod: &'a Pod, name: &str) -> Option<&'a str> {
    pod.metadata
        .annotations
        .as_ref()?
        .get(name)
        .map(String::as_str)
}

/// In the host's own network every port is the host's already.
fn host_ports(spec: &PodSpec) -> Vec<v1::HostPort> {
    if spec.host_network == Some(true) {
        return Vec::new();
    }
    let sidecars = spec.init_containers.iter().flatten();
    let containers = sidecars.filter(|c| is_sidecar(c)).chain(&spec.containers);
    let ports = containers.flat_map(|container| container.ports.iter().flatten());
    ports
        .filter_map(|port| {
            Some(v1::HostPort {
                host_ip: port.host_ip.clone().unwrap_or_default(),
                host_port: u32::try_from(port.host_port?)
                    .ok()
                    .filter(|port| *port > 0)?,
                container_port: u32::try_from(port.container_port).ok()?,
                protocol: port.protocol.clone().unwrap_or_else(|| "TCP".to_owned()),
            })
        })
        .collect()
}

fn network(spec: &PodSpec) -> v1::NetworkMode {
    if spec.host_network == Some(true) {
        v1::NetworkMode::Host
    } else {
        v1::NetworkMode::Pod
    }
}

fn restart_policy(name: Option<&str>) -> Option<v1::RestartPolicy> {
    match name {
        Some("Always") => Some(v1::RestartPolicy::Always),
        Some("Never") => Some(v1::RestartPolicy::Never),
        Some("OnFailure") => Some(v1::RestartPolicy::OnFailure),
        _ => None,
    }
}

fn id(id: i64) -> Option<u32> {
    u32::try_from(id).ok()
}

fn seconds(seconds: i64) -> ProtoDuration {
    ProtoDuration {
        seconds: seconds.max(0),
        nanos: 0,
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use sandman_protocol::v1::seccomp::Kind as SeccompKind;
    use serde_json::{Value as Json, json};

    fn config() -> Config {
        Config {
            cluster_dns: vec!["10.96.0.10".parse().unwrap()],
            ..crate::config::tests::minimal()
        }
    }

    pub(in crate::pods::spec) fn build(spec: Json) -> v1::SandboxSpec {
        let mut spec = spec;
        if spec.get("containers").is_none() {
            spec["containers"] = json!([{"name": "c", "image": "i"}]);
        }
        let pod: Pod = serde_json::from_value(json!({
            "metadata": {
                "name": "web-1", "namespace": "ns", "uid": "u-1", "generation": 3,
                "labels": {"app": "web"},
            },
            "spec": spec,
        }))
        .unwrap();
        sandbox(&config(), &pod, "", Resolved::default())
    }

    #[test]
    fn identity_and_defaults() {
        let spec = build(json!({}));
        assert_eq!(
            (spec.uid.as_str(), spec.generation, spec.schema),
            ("u-1", 3, SCHEMA)
        );
        assert_eq!(spec.restart_policy(), v1::RestartPolicy::Always);
        assert_eq!(spec.termination_grace_period.unwrap().seconds, 30);
        assert_eq!(spec.active_deadline, None);
        assert_eq!(spec.network(), v1::NetworkMode::Pod);
        let container = &spec.containers[0];
        assert_eq!(container.termination_message_path, "/dev/termination-log");
        let security = container.security.as_ref().unwrap();
        assert_eq!(
            security.seccomp.as_ref().unwrap().kind(),
            SeccompKind::RuntimeDefault
        );
        assert!(!security.no_new_privileges && security.run_as_user.is_none());
    }

    #[test]
    fn access_to_the_host() {
        let ports = json!([{"name": "c", "image": "i", "ports": [
            {"containerPort": 80},
            {"containerPort": 81, "hostPort": 8081, "protocol": "UDP", "hostIP": "10.0.0.1"},
        ]}]);
        let port = v1::HostPort {
            host_ip: "10.0.0.1".into(),
            host_port: 8081,
            container_port: 81,
            protocol: "UDP".into(),
        };
        assert_eq!(build(json!({"containers": ports})).host_ports, [port]);
        let on_host = build(json!({"hostNetwork": true, "containers": ports}));
        assert!(on_host.host_ports.is_empty());
        let spec = build(json!({"hostNetwork": true, "hostPID": true, "hostIPC": true}));
        assert_eq!(spec.network(), v1::NetworkMode::Host);
        assert!(spec.host_pid && spec.host_ipc);
        let spec = build(
            json!({"containers": [{"name": "c", "image": "i", "volumeMounts": [
                {"name": "v", "mountPath": "/a", "mountPropagation": "Bidirectional"},
                {"name": "v", "mountPath": "/b", "readOnly": true, "recursiveReadOnly": "IfPossible"},
                {"name": "v", "mountPath": "/c", "readOnly": true, "recursiveReadOnly": "Disabled"},
            ]}]}),
        );
        let mounts = &spec.containers[0].mounts;
        assert_eq!(mounts[0].propagation(), v1::MountPropagation::Bidirectional);
        let recursive: Vec<_> = mounts.iter().map(|m| m.recursive_read_only).collect();
        assert_eq!(recursive, [false, true, false]);
    }
}
