//! What this host is, has and can do.

use std::sync::Arc;

use nix::sys::statvfs::statvfs;
use sandman_protocol::v1;
use tracing::warn;

use crate::config::Config;
use crate::eviction::Pressure;
use crate::sandbox::Host;
use crate::sandbox::validate::SCHEMA;

/// Pods of a host whose configuration names no number: what addresses allow, within reason.
const DEFAULT_PODS: u64 = 10_000;
/// Images listed, largest first; a node's status takes no more either.
const MAX_IMAGES: usize = 50;

/// Facts about the machine that do not change while it runs.
#[derive(Clone, Debug, Default)]
pub struct Machine {
    /// Capacity less overrides.
    pub capacity: v1::Resources,
    /// Capacity less what the host keeps.
    pub allocatable: v1::Resources,
    kernel_version: String,
    os_image: String,
    boot_id: String,
    machine_id: String,
}

impl Machine {
    /// Measures the machine. It offers no more pods than `room`.
    ///
    /// # Errors
    /// `/proc` is unreadable or `data_dir` is on no file system.
    pub fn detect(config: &Config, room: u64) -> std::io::Result<Self> {
        let processors = std::thread::available_parallelism()?.get() as u64;
        let storage = statvfs(&config.data_dir)?;
        let wish = config.capacity;
        let capacity = v1::Resources {
            cpu_millis: wish.cpu_millis.unwrap_or(processors * 1000),
            memory_bytes: wish.memory_bytes.map_or_else(memory_total, Ok)?,
            ephemeral_storage_bytes: wish
                .ephemeral_storage_bytes
                .unwrap_or(storage.blocks().saturating_mul(storage.fragment_size())),
            pods: pods_wanted(config).min(room),
        };
        let allocatable = v1::Resources {
            cpu_millis: capacity
                .cpu_millis
                .saturating_sub(config.reserved.cpu_millis),
            memory_bytes: capacity
                .memory_bytes
                .saturating_sub(config.reserved.memory_bytes),
            ..capacity
        };
        Ok(Self {
            capacity,
            allocatable,
            kernel_version: read_line("/proc/sys/kernel/osrelease"),
            os_image: os_image(),
            boot_id: read_line("/proc/sys/kernel/random/boot_id"),
            machine_id: read_line("/etc/machine-id"),
        })
    }
}

/// Pods that the host shall offer, if its limits have room for them.
#[must_use]
pub fn pods_wanted(config: &Config) -> u64 {
    let addresses = config.pod_cidr.size().saturating_sub(2);
    config.capacity.pods.unwrap_or(DEFAULT_PODS).min(addresses)
}

/// Makes inventories.
#[derive(Clone)]
pub struct InventorySource {
    host: Arc<Host>,
    host_name: String,
    pod_cidr: String,
    handlers: Vec<String>,
    machine: Machine,
    pressure: Pressure,
}

impl InventorySource {
    /// For one host.
    #[must_use]
    pub fn new(host: Arc<Host>, config: &Config, machine: Machine, pressure: Pressure) -> Self {
        Self {
            host,
            host_name: config.host_name.clone(),
            pod_cidr: config.pod_cidr.to_string(),
            handlers: config.runtimes.keys().cloned().collect(),
            machine,
            pressure,
        }
    }

    /// The conditions as they change.
    pub(super) fn pressure(&self) -> Pressure {
        self.pressure.clone()
    }

    /// The inventory at this moment.
    pub async fn inventory(&self, term: u64) -> v1::Inventory {
        let runtime_version = self.host.runtime.version().await.unwrap_or_else(|error| {
            self.host.metrics.runtime_error();
            warn!(%error, "cannot ask containerd for its version");
            "containerd://unknown".to_owned()
        });
        let mut images = self.host.images.list().await.unwrap_or_else(|error| {
            warn!(%error, "cannot list images");
            vec![]
        });
        images.sort_by(|a, b| {
            b.size_bytes
                .cmp(&a.size_bytes)
                .then_with(|| a.names.cmp(&b.names))
        });
        images.truncate(MAX_IMAGES);
        v1::Inventory {
            host_name: self.host_name.clone(),
            schema: SCHEMA,
            capacity: Some(self.machine.capacity),
            allocatable: Some(self.machine.allocatable),
            pod_cidr: self.pod_cidr.clone(),
            architecture: architecture().to_owned(),
            operating_system: "linux".to_owned(),
            kernel_version: self.machine.kernel_version.clone(),
            os_image: self.machine.os_image.clone(),
            boot_id: self.machine.boot_id.clone(),
            machine_id: self.machine.machine_id.clone(),
            runtime_version,
            images,
            runtime_handlers: self.handlers.clone(),
            term,
            conditions: self.pressure.conditions(),
            user_namespaces: self.host.users.is_ok(),
        }
    }
}

/// Processor architecture as OCI and Go name it.
fn architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}

fn memory_total() -> std::io::Result<u64> {
    meminfo("MemTotal").ok_or_else(|| std::io::Error::other("no MemTotal in /proc/meminfo"))
}

/// A line of `/proc/meminfo`, in bytes.
fn meminfo(key: &str) -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix(key)?.strip_prefix(':'))?;
    let kilobytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kilobytes * 1024)
}

fn read_line(path: &str) -> String {
    std::fs::read_to_string(path)
        .unwrap_or_default()
        .trim()
        .to_owned()
}

fn os_image() -> String {
    let text = std::fs::read_to_string("/etc/os-release").unwrap_or_default();
    let name = text
        .lines()
        .find_map(|line| line.strip_prefix("PRETTY_NAME="));
    name.map_or_else(
        || "Linux".to_owned(),
        |name| name.trim_matches('"').to_owned(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_machine_has_memory() {
        assert!(meminfo("MemTotal").unwrap() > 1 << 20);
        assert_eq!(meminfo("NoSuchKey"), None);
    }
}
