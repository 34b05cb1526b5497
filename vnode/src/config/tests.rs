//! Every refusal names its key.

use super::*;

/// A configuration for tests of other modules.
pub(crate) fn minimal() -> Config {
    load(GOOD).unwrap()
}

const GOOD: &str = r#"
    node_name = "sandman"
    kubeconfig = "kubeconfig"
    fleet = "dev"
    fleet_tls = "tls"
    state_dir = "state"
    daemonset_allow = ["kube-system/node-exporter"]
    [kubelet_api]
    listen = "10.90.0.3:10250"
    address = "10.90.0.3"
    client_ca = "ca.crt"
    [[hosts]]
    name = "host-0"
    address = "10.90.0.11:7443"
    pod_cidr = "10.64.0.0/18"
    [[hosts]]
    name = "host-1"
    address = "10.90.0.12:7443"
    pod_cidr = "10.64.64.0/18"
"#;

fn load(text: &str) -> Result<Config, String> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("vnode.toml");
    std::fs::write(&path, text).unwrap();
    Config::load(&path, false).map_err(|error| error.to_string())
}

#[test]
fn accepts_a_full_file_and_fills_defaults() {
    let config = load(GOOD).unwrap();
    assert_eq!(config.node.provider_id, "sandman://dev/sandman");
    assert!(config.node.taint && config.kubelet_api.websockets);
    assert_eq!(config.kubelet_api.serving, Serving::Csr);
    assert_eq!(config.cluster_domain, "cluster.local");
    assert_eq!(config.host_lost_after, Duration::from_secs(40));
    assert_eq!(config.hosts.len(), 2);
}

#[test]
fn an_election_has_defaults_and_must_be_asked_for() {
    assert_eq!(load(GOOD).unwrap().election, None);
    let election = load(&format!("{GOOD}\n[election]\n")).unwrap().election;
    let election = election.unwrap();
    assert_eq!(election.namespace, "sandman-system");
    assert_eq!(election.lease, "sandman-vnode");
    assert_eq!((election.kubeconfig, election.identity), (None, None));
    for (line, key) in [
        ("lease = \"A b\"", "election.lease"),
        ("namespace = \"\"", "election.namespace"),
        ("identity = \"\"", "election.identity"),
        ("duration_seconds = 5", "election.duration_seconds"),
        ("leese = \"a\"", "leese"),
    ] {
        let error = load(&format!("{GOOD}\n[election]\n{line}\n")).unwrap_err();
        assert!(error.contains(key), "{error}");
    }
}

#[test]
fn every_refusal_names_its_key() {
    for (from, to, key) in [
        (
            "node_name = \"sandman\"",
            "node_name = \"Sand man\"",
            "node_name",
        ),
        ("fleet = \"dev\"", "fleet = \"\"", "fleet"),
        ("fleet_tls = \"tls\"", "", "fleet_tls"),
        ("state_dir = \"state\"", "", "state_dir"),
        (
            "state_dir = \"state\"",
            "state_dir = \"state\"\nstatedir = 1",
            "statedir",
        ),
        (
            "state_dir = \"state\"",
            "state_dir = \"s\"\nhost_lost_after_seconds = 1",
            "host_lost_after_seconds",
        ),
        (
            "kube-system/node-exporter",
            "node-exporter",
            "daemonset_allow",
        ),
        (
            "state_dir = \"state\"",
            "state_dir = \"s\"\nallow = { host_path = [\"srv\"] }",
            "allow: host_path",
        ),
        (
            "state_dir = \"state\"",
            "state_dir = \"s\"\nallow = { host_paths = [] }",
            "host_paths",
        ),
        (
            "listen = \"10.90.0.3:10250\"",
            "listen = \"10.90.0.3\"",
            "listen",
        ),
        (
            "listen = \"10.90.0.3:10250\"",
            "listen = \"10.90.0.3:0\"",
            "kubelet_api.listen",
        ),
        (
            "address = \"10.90.0.3\"",
            "address = \"0.0.0.0\"",
            "kubelet_api.address",
        ),
        (
            "client_ca = \"ca.crt\"",
            "client_ca = \"a\"\ncert_file = \"c\"",
            "kubelet_api.key_file",
        ),
        (
            "client_ca = \"ca.crt\"",
            "client_ca = \"a\"\nserving = \"self\"",
            "serving",
        ),
        (
            "name = \"host-1\"",
            "name = \"host-0\"",
            "hosts.host-0.name",
        ),
        ("10.90.0.12:7443", "10.90.0.11:7443", "hosts.host-1.address"),
        ("10.64.64.0/18", "10.64.0.0/16", "hosts.host-1.pod_cidr"),
        ("10.64.64.0/18", "10.64.64.1/18", "hosts.host-1.pod_cidr"),
        ("10.64.64.0/18", "10.64.64.0", "hosts.host-1.pod_cidr"),
    ] {
        assert!(GOOD.contains(from), "{from}");
        let error = load(&GOOD.replacen(from, to, 1)).unwrap_err();
        assert!(error.contains(key), "{key} is not named in: {error}");
    }
}

#[test]
fn labels_follow_node_restriction() {
    let with = |label: &str, value: &str| {
        load(&format!("{GOOD}\n[node.labels]\n\"{label}\" = \"{value}\""))
    };
    for label in [
        "rack",
        "example.com/rack",
        "node.kubernetes.io/pool",
        "topology.kubernetes.io/zone",
    ] {
        with(label, "a1").unwrap();
    }
    for (label, value) in [
        ("kubernetes.io/role", "agent"),
        ("node-role.kubernetes.io/sandbox", ""),
        ("k8s.io/x", "y"),
        ("rack", "a b"),
        ("-rack", "a"),
    ] {
        let error = with(label, value).unwrap_err();
        assert!(error.contains(&format!("node.labels.{label}")), "{error}");
    }
}

/// The reference for operators leaves nothing out: serde itself lists the keys.
#[test]
fn every_key_is_in_the_operating_guide() {
    let guide = include_str!("../../../docs/operating.md");
    let error = toml::from_str::<File>("unknown = 1")
        .unwrap_err()
        .to_string();
    let keys: Vec<_> = error.split('`').skip(3).step_by(2).collect();
    assert!(keys.len() > 10, "{error}");
    for key in keys {
        assert!(guide.contains(&format!("`{key}`")), "{key}");
    }
}
