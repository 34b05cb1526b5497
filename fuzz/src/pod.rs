//! A pod of any author, as the OCI runtime gets it.

use std::path::{Component, Path, PathBuf};
use std::sync::LazyLock;

use k8s_openapi::api::core::v1::Pod;
use oci_spec::image::ImageConfiguration;
use oci_spec::runtime::LinuxNamespaceType;
use sandman_protocol::access::HostAccess;
use sandman_protocol::v1;
use sandman_runtime_shim::sandbox::plan::members;
use sandman_runtime_shim::sandbox::validate;
use sandman_runtime_shim::spec::{self, Accounts, Bind, HostLimits, HostValues, Prepared, caps};
use sandman_runtime_shim::volumes::EtcPaths;
use sandman_vnode::config::Config;
use sandman_vnode::pods::admit;
use sandman_vnode::pods::resolve::Resolved;
use sandman_vnode::pods::spec::sandbox;

use crate::way;

pub(crate) const WORDS: &[&[u8]] = &[
    br#""hostUsers":false"#,
    br#""hostNetwork":true"#,
    br#""privileged":true"#,
    br#""runAsUser":0"#,
    br#""runAsNonRoot":true"#,
    br#""capabilities":{"add":["ALL"],"drop":["NET_RAW"]}"#,
    br#""seccompProfile":{"type":"Localhost","localhostProfile":"../x"}"#,
    br#""mountPath":"/dev/sandman""#,
    br#""mountPath":"/a/../../etc""#,
    br#""subPath":"../x""#,
    br#""terminationMessagePath":"/../x""#,
    br#""limits":{"cpu":"1e9","memory":"9E"}"#,
    br#""requests":{"cpu":"-1"}"#,
    br#""sysctls":[{"name":"net.ipv4.tcp_syncookies","value":"1"}]"#,
    br#""workingDir":"..""#,
    br#""command":["$(A)$$(B)$(","\u0000"]"#,
    br#""restartPolicy":"Always""#,
    br#""procMount":"Unmasked""#,
    b"18446744073709551615",
    b"\\u0000",
    b"{}",
    b"[]",
    b"null",
];

const CONFIG: &str = r#"
    node_name = "node"
    kubeconfig = "kubeconfig"
    fleet = "fuzz"
    fleet_tls = "tls"
    state_dir = "state"
    [kubelet_api]
    listen = "10.90.0.3:10250"
    address = "10.90.0.3"
    client_ca = "ca.crt"
    [[hosts]]
    name = "host-0"
    address = "10.90.0.11:7443"
    pod_cidr = "10.64.0.0/18"
"#;

static NODE: LazyLock<Config> = LazyLock::new(|| {
    let file = tempfile::NamedTempFile::new().and_then(|file| {
        std::fs::write(file.path(), CONFIG)?;
        Ok(file)
    });
    let config = file
        .map_err(|error| error.to_string())
        .and_then(|file| Config::load(file.path(), false).map_err(|error| error.to_string()));
    match config {
        Ok(config) => config,
        Err(error) => panic!("the configuration of this target: {error}"),
    }
});

pub(crate) fn run(input: &[u8]) -> u64 {
    let Ok(mut pod) = serde_json::from_slice::<Pod>(input) else {
        return 0;
    };
    // The API server sees to these.
    pod.metadata.name = Some("pod".to_owned());
    pod.metadata.namespace = Some("ns".to_owned());
    pod.metadata.uid = Some("0b1d4f7e-6a37-4a53-9f0e-0d9a3c1f2b4c".to_owned());
    let access = HostAccess::default();
    let admitted = admit::admit(&pod, &access).map_err(|rejection| rejection.reason);
    let sandbox = sandbox(&NODE, &pod, "", Resolved::default());
    let checked = validate::check(&sandbox, &access, |handler| handler.is_empty());
    if checked.is_err() {
        return way(&(admitted, false));
    }
    let made: Vec<_> = members(&sandbox)
        .map(|member| make(&sandbox, member.spec))
        .collect();
    way(&(admitted, true, made))
}

/// Makes the OCI spec of a container that the host took, and looks whether it keeps the promises
/// that sandboxes rest on.
fn make(sandbox: &v1::SandboxSpec, container: &v1::Container) -> Option<(usize, bool)> {
    let host = HostLimits {
        allow_privileged: false,
        pids_limit: 100,
        cgroup_parent: "/sandman".into(),
        capabilities: caps::from_bits(u64::MAX),
        oom_floor: None,
        nofile: 1024,
        memory_bytes: 1 << 30,
        cgroup_namespace: false,
    };
    let binds: Vec<Bind> = container
        .mounts
        .iter()
        .map(|mount| Bind {
            source: "/volume".into(),
            destination: PathBuf::from(&mount.path),
            read_only: mount.read_only,
            recursive_read_only: mount.recursive_read_only,
            no_exec: false,
            propagation: mount.propagation(),
        })
        .collect();
    let namespaces = [(LinuxNamespaceType::Network, PathBuf::from("/netns"))];
    let etc = EtcPaths {
        hosts: "/etc-hosts".into(),
        hostname: "/etc-hostname".into(),
        resolv_conf: "/etc-resolv".into(),
    };
    let accounts = Accounts::default();
    let prepared = Prepared {
        container_id: "id",
        accounts: &accounts,
        namespaces: &namespaces,
        hostname: "pod",
        devices: vec![],
        values: HostValues {
            pod_ip: None,
            host_ip: None,
        },
        volumes: &binds,
        etc: &etc,
        shm: None,
        termination_file: Some(Path::new("/termination")),
        agent: Some(Path::new("/agent")),
        localhost_profile: None,
        users: None,
    };
    let image = ImageConfiguration::default();
    let spec = spec::build(&host, sandbox, container, &image, &prepared).ok()?;

    let linux = spec.linux().as_ref();
    let kinds: Vec<_> = linux
        .and_then(|linux| linux.namespaces().as_ref())
        .into_iter()
        .flatten()
        .map(|namespace| namespace.typ())
        .collect();
    for kind in [
        LinuxNamespaceType::Pid,
        LinuxNamespaceType::Mount,
        LinuxNamespaceType::Network,
        LinuxNamespaceType::Ipc,
    ] {
        assert!(kinds.contains(&kind), "no namespace of its own: {kind:?}");
    }
    let cgroup = linux.and_then(|linux| linux.cgroups_path().as_ref());
    let inside = cgroup.is_some_and(|path| path.starts_with("/sandman") && is_plain(path));
    assert!(inside, "cgroup {cgroup:?}");
    let mounts = spec.mounts().as_deref().unwrap_or_default();
    for mount in mounts {
        let path = mount.destination();
        assert!(path.is_absolute() && is_plain(path), "mount at {path:?}");
    }
    let agents = mounts
        .iter()
        .filter(|mount| mount.source().as_deref() == Some(Path::new("/agent")));
    assert_eq!(agents.count(), 1, "the agent is there once");
    let process = spec.process().as_ref();
    let seccomp = linux.is_some_and(|linux| linux.seccomp().is_some());
    let args = process.and_then(|process| process.args().as_ref());
    Some((args.map_or(0, Vec::len).min(8), seccomp))
}

fn is_plain(path: &Path) -> bool {
    path.components()
        .all(|part| matches!(part, Component::RootDir | Component::Normal(_)))
}
