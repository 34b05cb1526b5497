//! Checks a spec before it becomes a record: everything that names a path, a file or another part
//! of the spec, and every count.

use std::collections::HashSet;

pub use sandman_protocol::SCHEMA;
use sandman_protocol::access::HostAccess;
use sandman_protocol::v1;

use super::plan::members;

const MAX_CONTAINERS: usize = 128;
const MAX_VOLUMES: usize = 256;
const MAX_NAME: usize = 253;

/// Why a spec is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The spec is wrong; the text names the field.
    #[error("{0}")]
    Invalid(String),
    /// The spec asks for something that this host cannot do.
    #[error("{0} is not supported by this host")]
    Unsupported(String),
}

fn invalid<T>(text: impl Into<String>) -> Result<T, Refusal> {
    Err(Refusal::Invalid(text.into()))
}

/// Whether a text can be a pod UID: it becomes part of paths and ids.
#[must_use]
pub fn is_uid(text: &str) -> bool {
    // 36 is a UUID; longer ones would not fit containerd's ids.
    (1..=36).contains(&text.len())
        && text.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-')
        && text.starts_with(|c: char| c.is_ascii_alphanumeric())
        && text.ends_with(|c: char| c.is_ascii_alphanumeric())
        && !text.contains("--")
}

fn is_label(text: &str) -> bool {
    text.len() <= 63 && is_part(text)
}

fn is_part(text: &str) -> bool {
    !text.is_empty()
        && text
            .bytes()
            .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-')
        && !text.starts_with('-')
        && !text.ends_with('-')
}

/// A DNS subdomain; its parts may be longer than a label.
fn is_name(text: &str) -> bool {
    (1..=MAX_NAME).contains(&text.len()) && text.split('.').all(is_part)
}

/// Checks a spec. `known_handler` tells which RuntimeClass handlers this host has, `allow` what
/// pods may reach of it.
///
/// # Errors
/// [`Refusal`], naming the field.
pub fn check(
    spec: &v1::SandboxSpec,
    allow: &HostAccess,
    known_handler: impl Fn(&str) -> bool,
) -> Result<(), Refusal> {
    if spec.schema == 0 || spec.schema > SCHEMA {
        return Err(Refusal::Unsupported(format!("spec.schema {}", spec.schema)));
    }
    if !is_uid(&spec.uid) {
        return invalid(format!("spec.uid: {:?} is not a pod UID", spec.uid));
    }
    if !is_name(&spec.name) {
        return invalid(format!("spec.name: {:?} is not a pod name", spec.name));
    }
    if !is_label(&spec.namespace) {
        return invalid(format!(
            "spec.namespace: {:?} is not a namespace",
            spec.namespace
        ));
    }
    if spec.hostname.is_empty() || spec.hostname.len() > 63 {
        return invalid("spec.hostname: must have 1 to 63 characters");
    }
    if !known_handler(&spec.runtime_handler) {
        return invalid(format!(
            "spec.runtime_handler: this host has no runtime {:?}",
            spec.runtime_handler
        ));
    }
    if spec.share_process_namespace {
        return Err(Refusal::Unsupported(
            "spec.share_process_namespace".to_owned(),
        ));
    }
    if spec.network() == v1::NetworkMode::Unspecified {
        return invalid("spec.network: must be POD, NONE or HOST");
    }
    check_access(spec, allow)?;
    let propagates = |container: &v1::Container| {
        let mut mounts = container.mounts.iter();
        mounts.any(|mount| mount.propagation() != v1::MountPropagation::Unspecified)
    };
    if spec.own_users && members(spec).any(|member| propagates(member.spec)) {
        return Err(Refusal::Unsupported(
            "volumeMounts[].mountPropagation together with spec.hostUsers: false".to_owned(),
        ));
    }
    for sysctl in &spec.sysctls {
        if !is_namespaced_sysctl(&sysctl.name) {
            return invalid(format!("spec.sysctls: {:?} is not namespaced", sysctl.name));
        }
    }
    for port in &spec.host_ports {
        check_host_port(port)?;
    }
    let volumes = check_volumes(spec)?;
    check_containers(spec, &volumes)
}

fn check_host_port(port: &v1::HostPort) -> Result<(), Refusal> {
    let is_port = |port: u32| (1..=65_535).contains(&port);
    let known = matches!(port.protocol.as_str(), "TCP" | "UDP" | "SCTP");
    let address = port.host_ip.is_empty() || port.host_ip.parse::<std::net::Ipv4Addr>().is_ok();
    if is_port(port.host_port) && is_port(port.container_port) && known && address {
        return Ok(());
    }
    invalid(format!(
        "spec.host_ports: {:?} port {} of {:?} to port {} cannot be forwarded",
        port.protocol, port.host_port, port.host_ip, port.container_port
    ))
}

/// Whether two pods of one host want the same port of it.
#[must_use]
pub fn same_host_port(a: &v1::HostPort, b: &v1::HostPort) -> bool {
    let any = |ip: &str| ip.is_empty() || ip == "0.0.0.0";
    (a.host_port, &a.protocol) == (b.host_port, &b.protocol)
        && (any(&a.host_ip) || any(&b.host_ip) || a.host_ip == b.host_ip)
}

/// A virtual node alone cannot grant access to this host.
fn check_access(spec: &v1::SandboxSpec, allow: &HostAccess) -> Result<(), Refusal> {
    let privileged = members(spec).any(|member| {
        let security = member.spec.security.as_ref();
        security.is_some_and(|security| security.privileged)
    });
    let host_network = spec.network() == v1::NetworkMode::Host;
    for (wish, allowed, field, key) in [
        (
            host_network,
            allow.host_network,
            "spec.hostNetwork",
            "host_network",
        ),
        (
            !spec.host_ports.is_empty(),
            allow.host_ports,
            "ports[].hostPort",
            "host_ports",
        ),
        (spec.host_pid, allow.host_pid, "spec.hostPID", "host_pid"),
        (spec.host_ipc, allow.host_ipc, "spec.hostIPC", "host_ipc"),
        (
            privileged,
            allow.privileged,
            "securityContext.privileged",
            "privileged",
        ),
    ] {
        if wish && !allowed {
            return invalid(format!(
                "{field}: this host does not allow it (allow.{key} of its own configuration)"
            ));
        }
    }
    for volume in &spec.volumes {
        if let Some(v1::volume::Source::HostPath(wish)) = &volume.source
            && allow.host_path_root(wish.path.as_ref()).is_none()
        {
            return invalid(format!(
                "spec.volumes[{}].hostPath.path: {:?} is in no folder that this host allows \
                 (allow.host_path of its own configuration)",
                volume.name, wish.path
            ));
        }
    }
    Ok(())
}

/// Sysctls that belong to the sandbox's own namespaces.
fn is_namespaced_sysctl(name: &str) -> bool {
    let safe = name
        .bytes()
        .all(|b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-' | b'/'));
    let ipc = name.starts_with("kernel.shm")
        || name.starts_with("kernel.msg")
        || name == "kernel.sem"
        || name.starts_with("fs.mqueue.");
    safe && !name.contains("..") && (ipc || name.starts_with("net."))
}

fn check_volumes(spec: &v1::SandboxSpec) -> Result<HashSet<&str>, Refusal> {
    if spec.volumes.len() > MAX_VOLUMES {
        return invalid(format!("spec.volumes: more than {MAX_VOLUMES}"));
    }
    let mut names = HashSet::new();
    for volume in &spec.volumes {
        if !is_label(&volume.name) {
            return invalid(format!(
                "spec.volumes: {:?} is not a volume name",
                volume.name
            ));
        }
        if volume.source.is_none() {
            return Err(Refusal::Unsupported(format!(
                "the source of volume {:?}",
                volume.name
            )));
        }
        if !names.insert(volume.name.as_str()) {
            return invalid(format!("spec.volumes: {:?} appears twice", volume.name));
        }
    }
    Ok(names)
}

fn check_containers(spec: &v1::SandboxSpec, volumes: &HashSet<&str>) -> Result<(), Refusal> {
    if spec.containers.is_empty() {
        return invalid("spec.containers: must not be empty");
    }
    if members(spec).count() > MAX_CONTAINERS {
        return invalid(format!("spec.containers: more than {MAX_CONTAINERS}"));
    }
    let mut names = HashSet::new();
    for container in members(spec).map(|member| member.spec) {
        let name = &container.name;
        if !is_label(name) {
            return invalid(format!("spec.containers: {name:?} is not a container name"));
        }
        if !names.insert(name.as_str()) {
            return invalid(format!("spec.containers: {name:?} appears twice"));
        }
        if container.image.is_empty() {
            return invalid(format!("spec.containers[{name}].image: must not be empty"));
        }
        for mount in &container.mounts {
            if !volumes.contains(mount.volume.as_str()) {
                return invalid(format!(
                    "spec.containers[{name}].mounts: there is no volume {:?}",
                    mount.volume
                ));
            }
        }
        for variable in &container.env {
            if variable.name.is_empty() || variable.name.contains(['=', '\0']) {
                return invalid(format!(
                    "spec.containers[{name}].env: {:?} is not a variable name",
                    variable.name
                ));
            }
        }
    }
    if spec.containers.iter().any(|container| container.sidecar) {
        return invalid("spec.containers: only init containers can be sidecars");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec() -> v1::SandboxSpec {
        v1::SandboxSpec {
            schema: SCHEMA,
            uid: "0b1d4f7e-6a37-4a53-9f0e-0d9a3c1f2b4c".into(),
            namespace: "default".into(),
            name: "pod.1".into(),
            hostname: "pod".into(),
            network: v1::NetworkMode::Pod as i32,
            containers: vec![v1::Container {
                name: "c".into(),
                image: "busybox".into(),
                ..Default::default()
            }],
            ..Default::default()
        }
    }

    fn host_port(ip: &str, port: u32) -> v1::HostPort {
        v1::HostPort {
            host_ip: ip.into(),
            host_port: port,
            container_port: 80,
            protocol: "TCP".into(),
        }
    }

    #[test]
    fn ports_of_the_host_collide_by_address() {
        let udp = v1::HostPort {
            protocol: "UDP".into(),
            ..host_port("", 80)
        };
        for (a, b, same) in [
            (host_port("", 80), host_port("", 80), true),
            (host_port("", 80), host_port("", 81), false),
            (host_port("", 80), udp, false),
            (host_port("", 80), host_port("10.0.0.1", 80), true),
            (host_port("0.0.0.0", 80), host_port("10.0.0.1", 80), true),
            (host_port("10.0.0.2", 80), host_port("10.0.0.1", 80), false),
        ] {
            assert_eq!(same_host_port(&a, &b), same, "{a:?} {b:?}");
        }
        assert!(check_host_port(&host_port("", 80)).is_ok());
        for bad in [
            host_port("", 0),
            host_port("::1", 80),
            host_port("", 70_000),
        ] {
            assert!(check_host_port(&bad).is_err(), "{bad:?}");
        }
    }

    fn error(change: impl FnOnce(&mut v1::SandboxSpec)) -> String {
        let mut spec = spec();
        change(&mut spec);
        check(&spec, &HostAccess::default(), |handler| handler.is_empty())
            .unwrap_err()
            .to_string()
    }

    #[test]
    fn a_plain_spec_passes() {
        assert_eq!(check(&spec(), &HostAccess::default(), |_| true), Ok(()));
    }

    #[test]
    fn this_host_has_the_last_word_on_access() {
        let host_path = |path: &str| v1::Volume {
            name: "v".into(),
            source: Some(v1::volume::Source::HostPath(v1::HostPath {
                path: path.into(),
                r#type: 0,
            })),
        };
        let mut wish = spec();
        wish.network = v1::NetworkMode::Host as i32;
        wish.volumes = vec![host_path("/srv/x")];
        wish.containers[0].security = Some(v1::SecurityContext {
            privileged: true,
            ..Default::default()
        });
        (wish.host_pid, wish.host_ipc) = (true, true);
        wish.host_ports = vec![host_port("", 80)];
        let all = HostAccess {
            host_network: true,
            host_pid: true,
            host_ipc: true,
            privileged: true,
            host_ports: true,
            host_path: vec!["/srv".into()],
        };
        assert_eq!(check(&wish, &all, |_| true), Ok(()));
        for (deny, key) in [
            (
                (|a| a.host_network = false) as fn(&mut HostAccess),
                "allow.host_network",
            ),
            (|a| a.host_ports = false, "allow.host_ports"),
            (|a| a.host_pid = false, "allow.host_pid"),
            (|a| a.host_ipc = false, "allow.host_ipc"),
            (|a| a.privileged = false, "allow.privileged"),
            (|a| a.host_path.clear(), "allow.host_path"),
        ] {
            let mut some = all.clone();
            deny(&mut some);
            let text = check(&wish, &some, |_| true).unwrap_err().to_string();
            assert!(text.contains(key), "{key}: {text}");
        }
    }

    #[test]
    fn mistakes_name_their_field() {
        let mount = |volume: &str| v1::Mount {
            volume: volume.into(),
            ..Default::default()
        };
        for (text, field) in [
            (error(|s| s.schema = SCHEMA + 1), "schema"),
            (error(|s| s.schema = 0), "schema"),
            (error(|s| s.uid = "../x".into()), "uid"),
            (error(|s| s.uid = "a--b".into()), "uid"),
            (error(|s| s.name = "Pod".into()), "name"),
            (error(|s| s.namespace = "a/b".into()), "namespace"),
            (error(|s| s.hostname.clear()), "hostname"),
            (error(|s| s.runtime_handler = "gvisor".into()), "gvisor"),
            (
                error(|s| s.share_process_namespace = true),
                "share_process_namespace",
            ),
            (error(|s| s.network = 0), "network"),
            (
                error(|s| {
                    s.sysctls = vec![v1::Sysctl {
                        name: "vm.swappiness".into(),
                        value: "1".into(),
                    }]
                }),
                "sysctls",
            ),
            (error(|s| s.containers.clear()), "containers"),
            (error(|s| s.containers[0].image.clear()), "image"),
            (
                error(|s| s.containers[0].mounts = vec![mount("v")]),
                "\"v\"",
            ),
            (error(|s| s.containers[0].sidecar = true), "sidecar"),
            (error(|s| s.init_containers = s.containers.clone()), "twice"),
            (
                error(|s| {
                    s.containers[0].env = vec![v1::EnvVar {
                        name: "A=B".into(),
                        value: None,
                    }]
                }),
                "env",
            ),
            (
                error(|s| {
                    s.volumes = vec![v1::Volume {
                        name: "v".into(),
                        source: None,
                    }]
                }),
                "volume",
            ),
        ] {
            assert!(text.contains(field), "{field}: {text}");
        }
    }
}
