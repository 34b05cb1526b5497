//! The configuration file of `sandman-vnode`. Everything is checked before
//! anything starts, and every error names the key and says what is wanted.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use sandman_protocol::identity::is_dns1123_subdomain;
use serde::Deserialize;

/// A configuration that passed every check.
#[derive(Debug, Clone)]
pub struct Config {
    /// Name of the Node object; the client certificate must be
    /// `system:node:<node_name>`.
    pub node_name: String,
    /// How to reach the API server, and as whom.
    pub kubeconfig: PathBuf,
    /// Fleet that this node and its hosts belong to.
    pub fleet: String,
    /// Folder of this node's fleet identity. Not needed for null hosts.
    pub fleet_tls: Option<PathBuf>,
    /// Folder for the serving key; only this process may read it.
    pub state_dir: PathBuf,
    /// The kubelet API.
    pub kubelet_api: KubeletApi,
    /// What the Node object says besides what hosts report.
    pub node: Node,
    /// Hosts that pods may be placed on.
    pub hosts: Vec<Host>,
    /// How long a host may be silent before it counts as lost.
    pub host_lost_after: Duration,
    /// Name servers of pods with dnsPolicy ClusterFirst.
    pub cluster_dns: Vec<IpAddr>,
    /// DNS domain of the cluster.
    pub cluster_domain: String,
    /// DaemonSets, as `namespace/name`, whose pods run here.
    pub daemonset_allow: BTreeSet<String>,
    /// Where `/metrics` and `/healthz` are served without authentication, if
    /// anywhere.
    pub metrics_listen: Option<SocketAddr>,
}

/// Settings of the kubelet API server.
#[derive(Debug, Clone)]
pub struct KubeletApi {
    /// Socket to listen on.
    pub listen: SocketAddr,
    /// Address in the Node object, at which the API server reaches `listen`.
    pub address: IpAddr,
    /// CA of client certificates, PEM.
    pub client_ca: PathBuf,
    /// Where the serving certificate comes from.
    pub serving: Serving,
    /// Whether WebSockets are served, and so declared in the Node's status.
    pub websockets: bool,
}

/// Where the serving certificate comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Serving {
    /// A CertificateSigningRequest for `kubernetes.io/kubelet-serving`.
    Csr,
    /// Files that somebody else renews; read again when they change.
    Files {
        /// Certificate chain, PEM.
        cert: PathBuf,
        /// Private key, PEM.
        key: PathBuf,
    },
}

/// Fixed parts of the Node object.
#[derive(Debug, Clone)]
pub struct Node {
    /// Labels besides the ones that every virtual node has.
    pub labels: BTreeMap<String, String>,
    /// Whether the node keeps pods away that do not tolerate it.
    pub taint: bool,
    /// `spec.providerID`.
    pub provider_id: String,
}

/// One host of the fleet.
#[derive(Debug, Clone)]
pub struct Host {
    /// Name in the fleet, equal to the name in the host's certificate.
    pub name: String,
    /// Host API. Its IP is the `hostIP` of the pods placed there.
    pub address: SocketAddr,
    /// Addresses that the host gives to pods.
    pub pod_cidr: Cidr,
}

/// Why a configuration is refused.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The operating system's error.
        source: std::io::Error,
    },
    /// Not TOML, an unknown key, a missing key or a value of the wrong type.
    #[error("{}: {source}", path.display())]
    Parse {
        /// The file.
        path: PathBuf,
        /// Names the key and the line.
        source: Box<toml::de::Error>,
    },
    /// A value that cannot be.
    #[error("{key}: {problem}")]
    Invalid {
        /// The key, as `section.key`.
        key: String,
        /// What is wrong with it and what is wanted.
        problem: String,
    },
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    node_name: String,
    kubeconfig: PathBuf,
    fleet: String,
    fleet_tls: Option<PathBuf>,
    state_dir: PathBuf,
    kubelet_api: KubeletApiFile,
    #[serde(default)]
    node: NodeFile,
    #[serde(default)]
    hosts: Vec<HostFile>,
    #[serde(default = "default_host_lost_after")]
    host_lost_after_seconds: u64,
    #[serde(default)]
    cluster_dns: Vec<IpAddr>,
    #[serde(default = "default_cluster_domain")]
    cluster_domain: String,
    #[serde(default)]
    daemonset_allow: Vec<String>,
    metrics_listen: Option<SocketAddr>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct KubeletApiFile {
    listen: SocketAddr,
    address: IpAddr,
    client_ca: PathBuf,
    serving: Option<ServingKind>,
    cert_file: Option<PathBuf>,
    key_file: Option<PathBuf>,
    #[serde(default = "yes")]
    websockets: bool,
}

#[derive(Debug, Deserialize, Clone, Copy, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
enum ServingKind {
    Csr,
    Files,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct NodeFile {
    labels: BTreeMap<String, String>,
    taint: bool,
    provider_id: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct HostFile {
    name: String,
    address: SocketAddr,
    pod_cidr: String,
}

impl Default for NodeFile {
    fn default() -> Self {
        Self {
            labels: BTreeMap::new(),
            taint: true,
            provider_id: None,
        }
    }
}

fn yes() -> bool {
    true
}

fn default_host_lost_after() -> u64 {
    40
}

fn default_cluster_domain() -> String {
    "cluster.local".to_owned()
}

// === impl Config ===

impl Config {
    /// Reads and checks a configuration file. `null_hosts` says that the hosts
    /// are simulated, so that no fleet identity is needed.
    ///
    /// # Errors
    /// The first problem found, with the key it is about.
    pub fn load(path: &Path, null_hosts: bool) -> Result<Self, ConfigError> {
        let text = std::fs::read_to_string(path).map_err(|source| ConfigError::Read {
            path: path.to_owned(),
            source,
        })?;
        let file: File = toml::from_str(&text).map_err(|source| ConfigError::Parse {
            path: path.to_owned(),
            source: source.into(),
        })?;
        Self::check(file, null_hosts)
    }

    fn check(file: File, null_hosts: bool) -> Result<Self, ConfigError> {
        check_name("node_name", &file.node_name)?;
        check_name("fleet", &file.fleet)?;
        check_name("cluster_domain", &file.cluster_domain)?;
        if file.fleet_tls.is_none() && !null_hosts {
            return Err(invalid(
                "fleet_tls",
                "is missing: name the folder with tls.crt, tls.key and ca.crt",
            ));
        }
        if !(5..=3600).contains(&file.host_lost_after_seconds) {
            return Err(invalid(
                "host_lost_after_seconds",
                "must be between 5 and 3600",
            ));
        }
        if file.cluster_dns.len() > 3 {
            return Err(invalid(
                "cluster_dns",
                "a resolver takes at most 3 name servers",
            ));
        }
        let provider_id = match file.node.provider_id {
            Some(id) if id.contains("://") => id,
            Some(id) => {
                return Err(invalid(
                    "node.provider_id",
                    format!("{id:?} is not of the form scheme://..."),
                ));
            }
            None => format!("sandman://{}/{}", file.fleet, file.node_name),
        };
        for (label, value) in &file.node.labels {
            check_label(label, value)?;
        }
        for entry in &file.daemonset_allow {
            let valid = entry
                .split_once('/')
                .is_some_and(|(ns, name)| is_dns1123_subdomain(ns) && is_dns1123_subdomain(name));
            if !valid {
                return Err(invalid(
                    "daemonset_allow",
                    format!("{entry:?} is not namespace/name"),
                ));
            }
        }
        Ok(Self {
            kubelet_api: file.kubelet_api.check()?,
            hosts: check_hosts(file.hosts)?,
            node: Node {
                labels: file.node.labels,
                taint: file.node.taint,
                provider_id,
            },
            node_name: file.node_name,
            kubeconfig: file.kubeconfig,
            fleet: file.fleet,
            fleet_tls: file.fleet_tls,
            state_dir: file.state_dir,
            host_lost_after: Duration::from_secs(file.host_lost_after_seconds),
            cluster_dns: file.cluster_dns,
            cluster_domain: file.cluster_domain,
            daemonset_allow: file.daemonset_allow.into_iter().collect(),
            metrics_listen: file.metrics_listen,
        })
    }
}

// === impl KubeletApiFile ===

impl KubeletApiFile {
    fn check(self) -> Result<KubeletApi, ConfigError> {
        if self.address.is_unspecified() {
            return Err(invalid(
                "kubelet_api.address",
                "must be the address that the API server connects to",
            ));
        }
        if self.listen.port() == 0 {
            return Err(invalid(
                "kubelet_api.listen",
                "needs a port; it is published in the Node object",
            ));
        }
        let serving = match (self.serving, self.cert_file, self.key_file) {
            (None | Some(ServingKind::Csr), None, None) => Serving::Csr,
            (None | Some(ServingKind::Files), Some(cert), Some(key)) => {
                Serving::Files { cert, key }
            }
            (Some(ServingKind::Csr), ..) => {
                return Err(invalid(
                    "kubelet_api.serving",
                    "\"csr\" does not go together with cert_file and key_file",
                ));
            }
            (_, None, _) => return Err(invalid("kubelet_api.cert_file", "is missing")),
            (_, _, None) => return Err(invalid("kubelet_api.key_file", "is missing")),
        };
        Ok(KubeletApi {
            listen: self.listen,
            address: self.address,
            client_ca: self.client_ca,
            serving,
            websockets: self.websockets,
        })
    }
}

fn check_hosts(files: Vec<HostFile>) -> Result<Vec<Host>, ConfigError> {
    if files.is_empty() {
        return Err(invalid("hosts", "name at least one [[hosts]]"));
    }
    let mut names = BTreeSet::new();
    let mut addresses = BTreeSet::new();
    let mut ranges: Vec<(Cidr, String)> = Vec::new();
    let mut hosts = Vec::with_capacity(files.len());
    for file in files {
        let key = |field: &str| format!("hosts.{}.{field}", file.name);
        check_name("hosts.name", &file.name)?;
        if !names.insert(file.name.clone()) {
            return Err(invalid(&key("name"), "is used twice"));
        }
        // A pod's hostIP names its host, so two hosts cannot share one.
        if file.address.ip().is_unspecified() || !addresses.insert(file.address.ip()) {
            return Err(invalid(
                &key("address"),
                "must be an address that no other host has",
            ));
        }
        let cidr = Cidr::parse(&file.pod_cidr).ok_or_else(|| {
            invalid(
                &key("pod_cidr"),
                format!("{:?} is not of the form 10.64.0.0/18", file.pod_cidr),
            )
        })?;
        if let Some((_, other)) = ranges.iter().find(|(range, _)| range.overlaps(&cidr)) {
            return Err(invalid(
                &key("pod_cidr"),
                format!("overlaps the range of {other}"),
            ));
        }
        ranges.push((cidr, file.name.clone()));
        hosts.push(Host {
            name: file.name,
            address: file.address,
            pod_cidr: cidr,
        });
    }
    Ok(hosts)
}

/// An address range, kept as the first address and the mask's length.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cidr {
    base: u128,
    prefix: u32,
    bits: u32,
}

impl std::fmt::Display for Cidr {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.address(0), self.prefix)
    }
}

impl Cidr {
    fn parse(text: &str) -> Option<Self> {
        let (address, prefix) = text.split_once('/')?;
        let (base, bits) = match address.parse().ok()? {
            IpAddr::V4(v4) => (u128::from(u32::from(v4)), 32),
            IpAddr::V6(v6) => (u128::from(v6), 128),
        };
        let prefix: u32 = prefix.parse().ok()?;
        let cidr = Self { base, prefix, bits };
        (prefix <= bits && cidr.network(prefix) == base).then_some(cidr)
    }

    /// Whether an address is in the range.
    pub fn contains(&self, address: IpAddr) -> bool {
        let (base, bits) = match address {
            IpAddr::V4(v4) => (u128::from(u32::from(v4)), 32),
            IpAddr::V6(v6) => (u128::from(v6), 128),
        };
        let other = Self {
            base,
            prefix: bits,
            bits,
        };
        self.overlaps(&other)
    }

    /// The address that many places after the first.
    pub fn address(&self, index: u128) -> IpAddr {
        let address = self.base.wrapping_add(index);
        if self.bits == 32 {
            // The upper bits of a 32-bit range are zero.
            IpAddr::from(((address & u128::from(u32::MAX)) as u32).to_be_bytes())
        } else {
            IpAddr::from(address.to_be_bytes())
        }
    }

    fn network(&self, prefix: u32) -> u128 {
        let host_bits = self.bits - prefix;
        self.base
            .checked_shr(host_bits)
            .unwrap_or(0)
            .checked_shl(host_bits)
            .unwrap_or(0)
    }

    fn overlaps(&self, other: &Self) -> bool {
        let prefix = self.prefix.min(other.prefix);
        self.bits == other.bits && self.network(prefix) == other.network(prefix)
    }
}

/// Labels that a node may not set on itself are refused here, because the API
/// server would refuse the whole Node (NodeRestriction).
fn check_label(label: &str, value: &str) -> Result<(), ConfigError> {
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

fn check_name(key: &str, name: &str) -> Result<(), ConfigError> {
    if is_dns1123_subdomain(name) {
        return Ok(());
    }
    Err(invalid(
        key,
        format!("{name:?} is not a name: lower case letters, digits, '-' and '.'"),
    ))
}

fn invalid(key: &str, problem: impl Into<String>) -> ConfigError {
    ConfigError::Invalid {
        key: key.to_owned(),
        problem: problem.into(),
    }
}

#[cfg(test)]
pub(crate) mod tests {
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
    fn ranges_know_their_addresses() {
        let cidr = Cidr::parse("10.64.0.0/18").unwrap();
        assert_eq!(cidr.to_string(), "10.64.0.0/18");
        for (ip, inside) in [
            ("10.64.0.0", true),
            ("10.64.63.255", true),
            ("10.64.64.0", false),
            ("::a40:0", false),
        ] {
            assert_eq!(cidr.contains(ip.parse().unwrap()), inside, "{ip}");
        }
        assert_eq!(cidr.address(258).to_string(), "10.64.1.2");
        let v6 = Cidr::parse("fd00::/64").unwrap();
        assert!(
            v6.contains("fd00::1".parse().unwrap())
                && !v6.contains("fd00:0:0:1::".parse().unwrap())
        );
        assert!(
            Cidr::parse("0.0.0.0/0")
                .unwrap()
                .contains("1.2.3.4".parse().unwrap())
        );
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
}
