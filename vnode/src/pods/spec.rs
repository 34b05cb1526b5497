//! A pod and its resolved values as the sandbox that a host makes. Pure.

use std::collections::BTreeSet;
use std::time::Duration;

use k8s_openapi::api::core::v1::{
    Container, ContainerRestartRule, LifecycleHandler, Pod, PodSecurityContext, PodSpec, Probe,
    ResourceRequirements, SeccompProfile, SecurityContext, VolumeMount,
};
use prost_types::Duration as ProtoDuration;
use sandman_protocol::v1::env_var::Value;
use sandman_protocol::v1::seccomp::Kind as SeccompKind;
use sandman_protocol::{SCHEMA, v1};

use super::resolve::Resolved;
use super::resources::{is_sidecar, requests};
use super::{ephemeral, handlers};
use crate::config::Config;
use crate::quantity;

/// Annotation of pods whose image must be PID 1 itself, as systemd must.
pub const WITHOUT_AGENT: &str = "sandman.dev/without-agent";
/// Longest host name that Linux takes.
const MAX_HOSTNAME: usize = 63;

/// Builds the specification. `handler` is the runtime of the pod's
/// RuntimeClass, empty for the default.
pub fn sandbox(config: &Config, pod: &Pod, handler: &str, resolved: Resolved) -> v1::SandboxSpec {
    let empty = PodSpec::default();
    let spec = pod.spec.as_ref().unwrap_or(&empty);
    let metadata = &pod.metadata;
    let names = names(config, pod, spec);
    let mut resolved = resolved;
    let without_agent = annotation(pod, WITHOUT_AGENT) == Some("true");
    let mut container = |container: &Container| {
        let env = resolved.env.remove(&container.name).unwrap_or_default();
        self::container(spec, container, env, without_agent)
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
        dns: Some(dns(config, pod, spec)),
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
        init_containers,
        containers,
        ephemeral_containers,
        volumes: resolved.volumes,
        fs_group: security.and_then(|s| s.fs_group).and_then(id),
        registry_credentials: resolved.credentials,
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

fn restart_rule(rule: &ContainerRestartRule) -> v1::RestartRule {
    let codes = rule.exit_codes.as_ref();
    v1::RestartRule {
        exit_codes: codes
            .and_then(|codes| codes.values.clone())
            .unwrap_or_default(),
        not_in: codes.is_some_and(|codes| codes.operator == "NotIn"),
    }
}

struct Names {
    hostname: String,
    fqdn: String,
}

/// `GeneratePodHostNameAndDomain` of `pkg/kubelet/kubelet_pods.go`.
fn names(config: &Config, pod: &Pod, spec: &PodSpec) -> Names {
    if let Some(name) = spec
        .hostname_override
        .as_ref()
        .filter(|name| !name.is_empty())
    {
        return Names {
            hostname: name.clone(),
            fqdn: String::new(),
        };
    }
    let name = pod.metadata.name.as_deref().unwrap_or_default();
    let hostname = match spec.hostname.as_deref() {
        Some(hostname) if !hostname.is_empty() => hostname,
        _ => name
            .get(..MAX_HOSTNAME)
            .unwrap_or(name)
            .trim_end_matches(['-', '.']),
    };
    let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
    let fqdn = match spec.subdomain.as_deref() {
        Some(subdomain) if !subdomain.is_empty() => {
            format!(
                "{hostname}.{subdomain}.{namespace}.svc.{}",
                config.cluster_domain
            )
        }
        _ => String::new(),
    };
    let hostname = if spec.set_hostname_as_fqdn == Some(true) && !fqdn.is_empty() {
        fqdn.clone()
    } else {
        hostname.to_owned()
    };
    Names { hostname, fqdn }
}

/// `GetPodDNS` of `pkg/kubelet/network/dns`.
fn dns(config: &Config, pod: &Pod, spec: &PodSpec) -> v1::Dns {
    let mut dns = match spec.dns_policy.as_deref() {
        Some("None") => v1::Dns::default(),
        // Without a cluster DNS there is only the host's; nor does a pod in the host's network
        // ask the cluster's, unless it says so.
        policy
            if policy == Some("Default")
                || config.cluster_dns.is_empty()
                || (spec.host_network == Some(true)
                    && policy != Some("ClusterFirstWithHostNet")) =>
        {
            v1::Dns {
                from_host: true,
                ..v1::Dns::default()
            }
        }
        _ => {
            let domain = &config.cluster_domain;
            let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
            v1::Dns {
                servers: config.cluster_dns.iter().map(ToString::to_string).collect(),
                searches: vec![
                    format!("{namespace}.svc.{domain}"),
                    format!("svc.{domain}"),
                    domain.clone(),
                ],
                options: vec!["ndots:5".to_owned()],
                from_host: false,
            }
        }
    };
    let Some(own) = &spec.dns_config else {
        return dns;
    };
    extend_unique(&mut dns.servers, own.nameservers.as_deref());
    extend_unique(&mut dns.searches, own.searches.as_deref());
    for option in own.options.iter().flatten() {
        let Some(name) = &option.name else { continue };
        dns.options
            .retain(|known| known.split(':').next() != Some(name));
        dns.options.push(match &option.value {
            Some(value) if !value.is_empty() => format!("{name}:{value}"),
            _ => name.clone(),
        });
    }
    dns
}

fn extend_unique(list: &mut Vec<String>, more: Option<&[String]>) {
    let mut seen: BTreeSet<String> = list.iter().cloned().collect();
    list.extend(
        more.into_iter()
            .flatten()
            .filter(|item| seen.insert((*item).clone()))
            .cloned(),
    );
}

fn container(
    spec: &PodSpec,
    container: &Container,
    env: Vec<v1::EnvVar>,
    without_agent: bool,
) -> v1::Container {
    let probe = |probe: &Option<Probe>| {
        let probe = probe.as_ref()?;
        Some(handlers::probe(container, probe))
    };
    let lifecycle = container.lifecycle.as_ref();
    let hook = |hook: Option<&LifecycleHandler>| Some(handlers::hook(container, hook?));
    v1::Container {
        name: container.name.clone(),
        image: container.image.clone().unwrap_or_default(),
        pull_policy: pull_policy(container.image_pull_policy.as_deref()).into(),
        command: container.command.clone().unwrap_or_default(),
        args: container.args.clone().unwrap_or_default(),
        working_dir: container.working_dir.clone().unwrap_or_default(),
        mounts: container
            .volume_mounts
            .iter()
            .flatten()
            .map(|mount| self::mount(mount, &env))
            .collect(),
        env,
        resources: Some(resources(container.resources.as_ref())),
        security: Some(security(
            spec.security_context.as_ref(),
            container.security_context.as_ref(),
        )),
        stdin: container.stdin == Some(true),
        stdin_once: container.stdin_once == Some(true),
        tty: container.tty == Some(true),
        termination_message_path: container
            .termination_message_path
            .clone()
            .unwrap_or_else(|| "/dev/termination-log".to_owned()),
        termination_message_policy: match container.termination_message_policy.as_deref() {
            Some("FallbackToLogsOnError") => v1::TerminationMessagePolicy::FallbackToLogsOnError,
            _ => v1::TerminationMessagePolicy::File,
        }
        .into(),
        sidecar: is_sidecar(container),
        without_agent,
        startup_probe: probe(&container.startup_probe),
        liveness_probe: probe(&container.liveness_probe),
        readiness_probe: probe(&container.readiness_probe),
        post_start: hook(lifecycle.and_then(|hooks| hooks.post_start.as_ref())),
        pre_stop: hook(lifecycle.and_then(|hooks| hooks.pre_stop.as_ref())),
        stop_signal: lifecycle
            .and_then(|hooks| hooks.stop_signal.clone())
            .unwrap_or_default(),
        restart_policy: restart_policy(container.restart_policy.as_deref())
            .unwrap_or_default()
            .into(),
        restart_rules: container
            .restart_policy_rules
            .iter()
            .flatten()
            .map(restart_rule)
            .collect(),
        target: String::new(),
    }
}

/// The API server fills in the policy that an author leaves out.
pub(super) fn pull_policy(name: Option<&str>) -> v1::PullPolicy {
    match name {
        Some("Always") => v1::PullPolicy::Always,
        Some("Never") => v1::PullPolicy::Never,
        _ => v1::PullPolicy::IfNotPresent,
    }
}

fn mount(mount: &VolumeMount, env: &[v1::EnvVar]) -> v1::Mount {
    let sub_path = match mount.sub_path_expr.as_deref() {
        Some(expression) if !expression.is_empty() => expand(expression, env),
        _ => mount.sub_path.clone().unwrap_or_default(),
    };
    v1::Mount {
        volume: mount.name.clone(),
        path: mount.mount_path.clone(),
        sub_path,
        read_only: mount.read_only == Some(true),
        propagation: match mount.mount_propagation.as_deref() {
            Some("HostToContainer") => v1::MountPropagation::HostToContainer,
            Some("Bidirectional") => v1::MountPropagation::Bidirectional,
            _ => v1::MountPropagation::Unspecified,
        }
        .into(),
        recursive_read_only: recursive_read_only(mount),
    }
}

/// Whether the mounts below a read-only one are read-only too. Every kernel that hosts run on can
/// do that, so "if possible" means that it is done.
pub(super) fn recursive_read_only(mount: &VolumeMount) -> bool {
    mount.read_only == Some(true)
        && matches!(
            mount.recursive_read_only.as_deref(),
            Some("Enabled" | "IfPossible")
        )
}

/// Expands `$(VAR)` as `k8s.io/kubernetes/third_party/forked/golang/expansion`
/// does: `$$` is a dollar, unknown names stay as they are. So do names whose
/// value only the host knows.
pub(super) fn expand(text: &str, env: &[v1::EnvVar]) -> String {
    let mut known: Vec<(&str, String)> = Vec::new();
    for variable in env {
        known.retain(|(name, _)| *name != variable.name);
        if let Some(Value::Literal(value)) = &variable.value {
            let value = expand_with(value, &known);
            known.push((&variable.name, value));
        }
    }
    expand_with(text, &known)
}

fn expand_with(text: &str, known: &[(&str, String)]) -> String {
    let mut expanded = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find('$') {
        expanded.push_str(&rest[..at]);
        rest = &rest[at + 1..];
        if let Some(after) = rest.strip_prefix('$') {
            expanded.push('$');
            rest = after;
        } else if let Some((name, after)) = rest.strip_prefix('(').and_then(|r| r.split_once(')')) {
            match known.iter().find(|(known, _)| *known == name) {
                Some((_, value)) => expanded.push_str(value),
                None => {
                    expanded.push_str("$(");
                    expanded.push_str(name);
                    expanded.push(')');
                }
            }
            rest = after;
        } else {
            expanded.push('$');
        }
    }
    expanded.push_str(rest);
    expanded
}

fn resources(resources: Option<&ResourceRequirements>) -> v1::ContainerResources {
    let requests = resources.and_then(|r| r.requests.as_ref());
    let limits = resources.and_then(|r| r.limits.as_ref());
    v1::ContainerResources {
        cpu_request_millis: requests
            .and_then(|r| r.get("cpu"))
            .and_then(quantity::millis)
            .unwrap_or(0),
        cpu_limit_millis: limits
            .and_then(|l| l.get("cpu"))
            .and_then(quantity::millis)
            .unwrap_or(0),
        memory_request_bytes: requests
            .and_then(|r| r.get("memory"))
            .and_then(quantity::units)
            .unwrap_or(0),
        memory_limit_bytes: limits
            .and_then(|l| l.get("memory"))
            .and_then(quantity::units)
            .unwrap_or(0),
        ephemeral_storage_limit_bytes: limits
            .and_then(|l| l.get("ephemeral-storage"))
            .and_then(quantity::units)
            .unwrap_or(0),
        ephemeral_storage_request_bytes: requests
            .and_then(|r| r.get("ephemeral-storage"))
            .and_then(quantity::units)
            .unwrap_or(0),
    }
}

/// The container's settings, with the pod's where it has none.
fn security(
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
mod tests {
    use super::*;
    use serde_json::{Value as Json, json};

    fn config() -> Config {
        Config {
            cluster_dns: vec!["10.96.0.10".parse().unwrap()],
            ..crate::config::tests::minimal()
        }
    }

    fn build(spec: Json) -> v1::SandboxSpec {
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
    fn host_names() {
        for (spec, hostname, fqdn) in [
            (json!({}), "web-1", ""),
            (json!({"hostname": "h"}), "h", ""),
            (
                json!({"hostname": "h", "subdomain": "s"}),
                "h",
                "h.s.ns.svc.cluster.local",
            ),
            (
                json!({"subdomain": "s", "setHostnameAsFQDN": true}),
                "web-1.s.ns.svc.cluster.local",
                "web-1.s.ns.svc.cluster.local",
            ),
            (json!({"setHostnameAsFQDN": true}), "web-1", ""),
            (
                json!({"hostname": "h", "hostnameOverride": "other.example"}),
                "other.example",
                "",
            ),
        ] {
            let built = build(spec.clone());
            assert_eq!(
                (built.hostname.as_str(), built.fqdn.as_str()),
                (hostname, fqdn),
                "{spec}"
            );
        }
    }

    #[test]
    fn resolver_settings() {
        let dns = build(json!({"dnsPolicy": "ClusterFirst"})).dns.unwrap();
        assert_eq!(dns.servers, ["10.96.0.10"]);
        assert_eq!(
            dns.searches,
            ["ns.svc.cluster.local", "svc.cluster.local", "cluster.local"]
        );
        assert_eq!(dns.options, ["ndots:5"]);
        assert!(
            build(json!({"dnsPolicy": "Default"}))
                .dns
                .unwrap()
                .from_host
        );
        let of_host = |policy: &str| {
            let spec = json!({"hostNetwork": true, "dnsPolicy": policy});
            build(spec).dns.unwrap().from_host
        };
        assert!(of_host("ClusterFirst") && !of_host("ClusterFirstWithHostNet"));
        let own = json!({
            "nameservers": ["10.96.0.10", "1.1.1.1"],
            "searches": ["example.com", "cluster.local"],
            "options": [{"name": "ndots", "value": "1"}, {"name": "edns0"}],
        });
        let dns = build(json!({"dnsConfig": own})).dns.unwrap();
        assert_eq!(dns.servers, ["10.96.0.10", "1.1.1.1"]);
        assert_eq!(dns.searches.last().unwrap(), "example.com");
        assert_eq!(dns.options, ["ndots:1", "edns0"]);
        let none = build(json!({"dnsPolicy": "None", "dnsConfig": own}))
            .dns
            .unwrap();
        assert_eq!((none.servers.len(), none.searches.len()), (2, 2));
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

    #[test]
    fn expansion_follows_the_order_of_definition() {
        let literal = |name: &str, value: &str| v1::EnvVar {
            name: name.into(),
            value: Some(Value::Literal(value.into())),
        };
        let env = [
            literal("A", "a"),
            literal("B", "$(A)-$(C)"),
            literal("C", "c"),
            literal("RAW", "$$(A)"),
            v1::EnvVar {
                name: "IP".into(),
                value: Some(Value::HostField(v1::HostField::PodIp.into())),
            },
        ];
        for (text, expanded) in [
            ("$(A)/$(B)", "a/a-$(C)"),
            ("$(RAW)", "$(A)"),
            ("$$(A) $ $x $(", "$(A) $ $x $("),
            ("$(IP)/$(NONE)", "$(IP)/$(NONE)"),
            ("$$$(A)", "$a"),
        ] {
            assert_eq!(expand(text, &env), expanded, "{text}");
        }
    }
}
