//! The service's configuration file: TOML, every key checked before anything starts.
//!
//! A mistake names its key and what is allowed, because an operator meets it on a host that has
//! no other way to say what is wrong.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};

use sandman_protocol::access::HostAccess;
use serde::Deserialize;

use crate::eviction::Thresholds;
use crate::images::RegistryConfig;
use crate::layers::LayersConfig;
use crate::network::Ipv4Cidr;
use crate::users::UserIds;

/// Everything one host needs to know about itself.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// Name in the fleet; equal to the name in the host's certificate.
    pub host_name: String,
    /// Fleet whose certificates are accepted.
    pub fleet: String,
    /// Folder with `tls.crt`, `tls.key` and `ca.crt`.
    pub fleet_tls: PathBuf,
    /// Address of the host API.
    pub listen: SocketAddr,
    /// Address that pods report as `status.hostIP`.
    pub host_ip: IpAddr,
    /// Addresses given to pods.
    pub pod_cidr: Ipv4Cidr,
    /// containerd's gRPC socket.
    pub containerd_socket: PathBuf,
    /// Volatile state (tmpfs): records, namespace pins, FIFOs, secret volumes.
    pub state_dir: PathBuf,
    /// Bulk data: emptyDir volumes and logs.
    pub data_dir: PathBuf,
    /// Read-only EROFS image that holds the in-sandbox agent.
    pub daemon_image: PathBuf,
    /// Parent of every sandbox's cgroup, absolute below each hierarchy's root.
    #[serde(default = "default_cgroup_parent")]
    pub cgroup_parent: PathBuf,
    /// Plain HTTP address of `/metrics` and `/healthz`.
    pub metrics_listen: Option<SocketAddr>,
    /// Snapshotter of containerd that makes root filesystems.
    #[serde(default = "default_snapshotter")]
    pub snapshotter: String,
    /// How the layers of images are kept.
    #[serde(default)]
    pub layers: LayersConfig,
    /// Folder of `Localhost` seccomp profiles.
    pub seccomp_profiles: Option<PathBuf>,
    /// What pods may reach of this host, if the virtual node's configuration agrees.
    #[serde(default)]
    pub allow: HostAccess,
    /// Processes and threads that one container may have; 0 means no limit.
    #[serde(default = "default_pids_limit")]
    pub pids_limit: u32,
    /// Containers that may be in creation at once; 0 derives it from the processors.
    #[serde(default)]
    pub max_concurrent_creates: usize,
    /// Addresses that pods reach without translation, besides `pod_cidr`: the other hosts' pods.
    #[serde(default)]
    pub cluster_cidrs: Vec<Ipv4Cidr>,
    /// Log format of this service.
    #[serde(default)]
    pub log_format: LogFormat,
    /// Whether kernel limits that are too small for this host's pods are raised at start.
    #[serde(default = "default_raise_kernel_limits")]
    pub raise_kernel_limits: bool,
    /// Replaces what the machine offers.
    #[serde(default)]
    pub capacity: Capacity,
    /// When the host is short of something and evicts pods.
    #[serde(default)]
    pub eviction: Thresholds,
    /// Kept back from pods for the host itself.
    #[serde(default)]
    pub reserved: Reserved,
    /// Ids for pods with users of their own (`hostUsers: false`).
    #[serde(default)]
    pub user_namespaces: UserIds,
    /// RuntimeClass handlers.
    pub runtimes: BTreeMap<String, RuntimeConfig>,
    /// Handler of pods without a RuntimeClass.
    pub default_runtime: String,
    /// Settings by registry host.
    #[serde(default)]
    pub registries: BTreeMap<String, RegistryConfig>,
    /// Size at which a container's log is rotated.
    #[serde(default = "default_log_max_bytes")]
    pub log_max_bytes: u64,
    /// Log files kept of one container attempt.
    #[serde(default = "default_log_max_files")]
    pub log_max_files: u32,
}

/// How this service writes its own log.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// For people.
    #[default]
    Pretty,
    /// One JSON object a line.
    Json,
}

/// Overrides of the machine's capacity; an absent value is measured.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Capacity {
    /// Thousandths of a processor.
    pub cpu_millis: Option<u64>,
    /// Bytes of memory.
    pub memory_bytes: Option<u64>,
    /// Bytes below `data_dir`.
    pub ephemeral_storage_bytes: Option<u64>,
    /// Sandboxes; never more than the host's addresses and limits have room for.
    pub pods: Option<u64>,
}

/// What pods may not have.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Reserved {
    /// Thousandths of a processor.
    #[serde(default)]
    pub cpu_millis: u64,
    /// Bytes of memory.
    #[serde(default)]
    pub memory_bytes: u64,
}

/// One RuntimeClass handler.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RuntimeConfig {
    /// containerd runtime, for example `io.containerd.runc.v2`.
    #[serde(rename = "type")]
    pub runtime_type: String,
}

/// Why a configuration was refused.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file could not be read.
    #[error("cannot read {path}: {source}")]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// It is not TOML, or a key is unknown, missing or of the wrong type.
    #[error("{path}: {source}")]
    Parse {
        /// The file.
        path: PathBuf,
        /// Position and reason.
        source: Box<toml::de::Error>,
    },
    /// A value is out of bounds.
    #[error("{key}: {reason}")]
    Value {
        /// The key, dotted.
        key: String,
        /// What is wrong and what is allowed.
        reason: String,
    },
}

fn default_cgroup_parent() -> PathBuf {
    "/sandman".into()
}

fn default_snapshotter() -> String {
    "overlayfs".into()
}

fn default_pids_limit() -> u32 {
    // Enough for builds and test runners, far from exhausting a host.
    16_384
}

fn default_raise_kernel_limits() -> bool {
    true
}

fn default_log_max_bytes() -> u64 {
    10 * 1024 * 1024
}

fn default_log_max_files() -> u32 {
    5
}

impl Config {
    /// Reads and checks a file.
    ///
    /// # Errors
    /// [`ConfigError`], naming the file or the key.
    pub fn load(path: &Path) -> Result<Self, ConfigError> {
        let text = std::fs::read_to_string(path).map_err(|source| ConfigError::Read {
            path: path.to_owned(),
            source,
        })?;
        let config: Self = toml::from_str(&text).map_err(|source| ConfigError::Parse {
            path: path.to_owned(),
            source: Box::new(source),
        })?;
        config.check()?;
        Ok(config)
    }

    fn check(&self) -> Result<(), ConfigError> {
        non_empty("host_name", &self.host_name)?;
        non_empty("fleet", &self.fleet)?;
        non_empty("snapshotter", &self.snapshotter)?;
        for (key, path) in [
            ("fleet_tls", &self.fleet_tls),
            ("containerd_socket", &self.containerd_socket),
            ("state_dir", &self.state_dir),
            ("data_dir", &self.data_dir),
            ("daemon_image", &self.daemon_image),
            ("cgroup_parent", &self.cgroup_parent),
        ] {
            if !path.is_absolute() {
                return Err(value(
                    key,
                    format!("{} is not an absolute path", path.display()),
                ));
            }
        }
        if self
            .cgroup_parent
            .components()
            .any(|c| matches!(c, std::path::Component::ParentDir))
        {
            return Err(value("cgroup_parent", "may not contain `..`"));
        }
        self.allow
            .check()
            .map_err(|reason| value("allow", reason))?;
        self.eviction
            .check()
            .map_err(|reason| value("eviction", reason))?;
        self.layers
            .check()
            .map_err(|reason| value("layers", reason))?;
        self.user_namespaces
            .check()
            .map_err(|(key, reason)| value(key, reason))?;
        if self.pod_cidr.prefix() > 30 {
            return Err(value("pod_cidr", "has no room for pods; use /30 or larger"));
        }
        if self.runtimes.is_empty() {
            return Err(value("runtimes", "needs at least one handler"));
        }
        for (name, runtime) in &self.runtimes {
            non_empty(&format!("runtimes.{name}.type"), &runtime.runtime_type)?;
        }
        if !self.runtimes.contains_key(&self.default_runtime) {
            return Err(value(
                "default_runtime",
                format!(
                    "{:?} is not one of the keys of `runtimes`",
                    self.default_runtime
                ),
            ));
        }
        if self.log_max_bytes < 64 * 1024 {
            return Err(value("log_max_bytes", "must be at least 65536"));
        }
        if self.log_max_files == 0 {
            return Err(value("log_max_files", "must be at least 1"));
        }
        for (host, registry) in &self.registries {
            if registry.username.is_some() != registry.password.is_some() {
                return Err(value(
                    &format!("registries.{host:?}"),
                    "username and password are given together or not at all",
                ));
            }
        }
        Ok(())
    }

    /// The containerd runtime of a RuntimeClass handler; "" is the default handler.
    #[must_use]
    pub fn runtime_type(&self, handler: &str) -> Option<&str> {
        let handler = if handler.is_empty() {
            &self.default_runtime
        } else {
            handler
        };
        self.runtimes
            .get(handler)
            .map(|runtime| runtime.runtime_type.as_str())
    }
}

fn value(key: &str, reason: impl Into<String>) -> ConfigError {
    ConfigError::Value {
        key: key.to_owned(),
        reason: reason.into(),
    }
}

fn non_empty(key: &str, text: &str) -> Result<(), ConfigError> {
    if text.is_empty() {
        Err(value(key, "may not be empty"))
    } else {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = r#"
        host_name = "host-0"
        fleet = "dev"
        fleet_tls = "/etc/sandman/tls"
        listen = "10.90.0.11:7443"
        host_ip = "10.90.0.11"
        pod_cidr = "10.64.0.0/18"
        containerd_socket = "/run/containerd/containerd.sock"
        state_dir = "/run/sandman"
        data_dir = "/var/lib/sandman"
        daemon_image = "/usr/lib/sandman/daemon.erofs"
        default_runtime = "sandman"
        [runtimes.sandman]
        type = "io.containerd.runc.v2"
        [registries."registry.sandman:5000"]
        plain_http = true
    "#;

    fn parse(text: &str) -> Result<Config, String> {
        let config: Config = toml::from_str(text).map_err(|e| e.to_string())?;
        config.check().map_err(|e| e.to_string())?;
        Ok(config)
    }

    #[test]
    fn a_small_file_is_enough() {
        let config = parse(GOOD).unwrap();
        assert_eq!(config.runtime_type(""), Some("io.containerd.runc.v2"));
        assert_eq!(config.runtime_type("gvisor"), None);
        assert_eq!(config.log_max_files, 5);
    }

    #[test]
    fn mistakes_name_their_key() {
        for (from, to, key) in [
            ("10.64.0.0/18", "10.64.0.1/18", "pod_cidr"),
            ("10.64.0.0/18", "10.64.0.0/31", "pod_cidr"),
            ("\"/run/sandman\"", "\"run/sandman\"", "state_dir"),
            (
                "default_runtime = \"sandman\"",
                "default_runtime = \"x\"",
                "default_runtime",
            ),
            ("host_name", "hostname", "hostname"),
            (
                "default_runtime = \"sandman\"",
                "default_runtime = \"sandman\"\nallow = { host_path = [\"a\"] }",
                "allow: host_path",
            ),
            (
                "default_runtime = \"sandman\"",
                "default_runtime = \"sandman\"\neviction = { disk_available_percent = 200 }",
                "eviction: disk_available_percent",
            ),
            (
                "default_runtime = \"sandman\"",
                "default_runtime = \"sandman\"\nlayers = { folder = \"a\" }",
                "layers: folder",
            ),
            (
                "plain_http = true",
                "username = \"u\"",
                "registry.sandman:5000",
            ),
        ] {
            let error = parse(&GOOD.replace(from, to)).unwrap_err();
            assert!(error.contains(key), "{to}: {error}");
        }
    }

    /// The reference for operators leaves nothing out: serde itself lists the keys.
    #[test]
    fn every_key_is_in_the_operating_guide() {
        let guide = include_str!("../../docs/operating.md");
        let error = toml::from_str::<Config>("unknown = 1")
            .unwrap_err()
            .to_string();
        let keys: Vec<_> = error.split('`').skip(3).step_by(2).collect();
        assert!(keys.len() > 10, "{error}");
        for key in keys {
            assert!(guide.contains(&format!("`{key}`")), "{key}");
        }
    }
}
