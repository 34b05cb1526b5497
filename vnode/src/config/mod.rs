//! The configuration file of `sandman-vnode`. Everything is checked before
//! anything starts, and every error names the key and says what is wanted.

mod cidr;
mod cluster_network;
mod labels;
#[cfg(test)]
pub(crate) mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use sandman_protocol::access::HostAccess;
use sandman_protocol::identity::is_dns1123_subdomain;
use serde::Deserialize;

pub use self::cidr::Cidr;
pub use self::cluster_network::ClusterNetwork;

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
    /// How replicas choose their leader; without it this process has no rival.
    pub election: Option<Election>,
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
    /// What pods may reach of the hosts, as far as those agree.
    pub allow: HostAccess,
    /// What of the cluster's network hosts know besides addresses.
    pub cluster_network: ClusterNetwork,
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

/// Section `[election]`: how replicas of one node choose their leader.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Election {
    /// Who may write the Lease; without it the service account of this pod.
    pub kubeconfig: Option<PathBuf>,
    /// Namespace of the Lease.
    #[serde(default = "default_election_namespace")]
    pub namespace: String,
    /// Name of the Lease, which is there already; one a virtual node.
    #[serde(default = "default_election_lease")]
    pub lease: String,
    /// Name of this replica, unlike the others'; without it the host name.
    pub identity: Option<String>,
    /// How long the others wait for a leader that does not renew. It gives up
    /// itself after two thirds of that, and its process ends.
    #[serde(
        rename = "duration_seconds",
        default = "default_election_duration",
        deserialize_with = "election_duration"
    )]
    pub duration: Duration,
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
    election: Option<Election>,
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
    #[serde(default)]
    allow: HostAccess,
    #[serde(default)]
    cluster_network: ClusterNetwork,
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

fn default_election_namespace() -> String {
    "sandman-system".to_owned()
}

fn default_election_duration() -> Duration {
    Duration::from_secs(15)
}

fn election_duration<'de, D: serde::Deserializer<'de>>(from: D) -> Result<Duration, D::Error> {
    let seconds = u64::deserialize(from)?;
    if (6..=300).contains(&seconds) {
        return Ok(Duration::from_secs(seconds));
    }
    let problem = "election.duration_seconds must be between 6 and 300";
    Err(serde::de::Error::custom(problem))
}

fn default_election_lease() -> String {
    "sandman-vnode".to_owned()
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
            labels::check(label, value)?;
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
        file.allow
            .check()
            .map_err(|problem| invalid("allow", problem))?;
        if let Some(election) = &file.election {
            check_name("election.namespace", &election.namespace)?;
            check_name("election.lease", &election.lease)?;
            if election.identity.as_deref() == Some("") {
                return Err(invalid("election.identity", "may not be empty"));
            }
        }
        Ok(Self {
            election: file.election,
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
            allow: file.allow,
            cluster_network: file.cluster_network,
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
