//! What this host is, has and can do.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use nix::sys::statvfs::statvfs;
use sandman_protocol::v1;
use tracing::warn;

use crate::config::Config;
use crate::sandbox::Host;
use crate::sandbox::validate::SCHEMA;

/// Pods of a host whose configuration names no number: what addresses allow, within reason.
const DEFAULT_PODS: u64 = 10_000;
/// Memory below which a host is short of it (the kubelet's hard eviction threshold).
const MEMORY_PRESSURE: u64 = 100 * 1024 * 1024;
/// Part of the data file system that must stay free, in percent.
const DISK_PRESSURE: u64 = 10;
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
    /// Measures the machine.
    ///
    /// # Errors
    /// `/proc` is unreadable or `data_dir` is on no file system.
    pub fn detect(config: &Config) -> std::io::Result<Self> {
        let processors = std::thread::available_parallelism()?.get() as u64;
        let storage = statvfs(&config.data_dir)?;
        let addresses = config.pod_cidr.size().saturating_sub(2);
        let wish = config.capacity;
        let capacity = v1::Resources {
            cpu_millis: wish.cpu_millis.unwrap_or(processors * 1000),
            memory_bytes: wish.memory_bytes.map_or_else(memory_total, Ok)?,
            ephemeral_storage_bytes: wish
                .ephemeral_storage_bytes
                .unwrap_or(storage.blocks().saturating_mul(storage.fragment_size())),
            pods: wish.pods.unwrap_or(DEFAULT_PODS).min(addresses),
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

/// Makes inventories.
#[derive(Clone)]
pub struct InventorySource {
    host: Arc<Host>,
    host_name: String,
    pod_cidr: String,
    data_dir: PathBuf,
    handlers: Vec<String>,
    machine: Machine,
}

impl InventorySource {
    /// For one host.
    #[must_use]
    pub fn new(host: Arc<Host>, config: &Config, machine: Machine) -> Self {
        Self {
            host,
            host_name: config.host_name.clone(),
            pod_cidr: config.pod_cidr.to_string(),
            data_dir: config.data_dir.clone(),
            handlers: config.runtimes.keys().cloned().collect(),
            machine,
        }
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
            conditions: vec![self.memory_pressure(), self.disk_pressure(), pid_pressure()],
        }
    }

    fn memory_pressure(&self) -> v1::HostCondition {
        let available = meminfo("MemAvailable").unwrap_or(u64::MAX);
        condition(
            v1::host_condition::Kind::MemoryPressure,
            available < MEMORY_PRESSURE,
            || format!("{available} bytes of memory are available"),
        )
    }

    fn disk_pressure(&self) -> v1::HostCondition {
        let free = free_percent(&self.data_dir);
        condition(
            v1::host_condition::Kind::DiskPressure,
            free < DISK_PRESSURE,
            || format!("{free} % of the data file system are free"),
        )
    }
}

fn condition(
    kind: v1::host_condition::Kind,
    active: bool,
    message: impl FnOnce() -> String,
) -> v1::HostCondition {
    // Only an active condition has a message: figures that change would look like news.
    let message = if active { message() } else { String::new() };
    v1::HostCondition {
        kind: kind as i32,
        active,
        message,
    }
}

fn pid_pressure() -> v1::HostCondition {
    let number = |path: &str| read_line(path).parse::<u64>().ok();
    let threads = read_line("/proc/loadavg")
        .split_whitespace()
        .nth(3)
        .and_then(|field| field.split_once('/'))
        .and_then(|(_, total)| total.parse::<u64>().ok());
    let limit = number("/proc/sys/kernel/pid_max")
        .into_iter()
        .chain(number("/proc/sys/kernel/threads-max"))
        .min();
    let (threads, limit) = (threads.unwrap_or(0), limit.unwrap_or(u64::MAX));
    condition(
        v1::host_condition::Kind::PidPressure,
        threads > limit / 10 * 9,
        || format!("{threads} of {limit} threads exist"),
    )
}

/// Processor architecture as OCI and Go name it.
fn architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}

fn free_percent(path: &Path) -> u64 {
    statvfs(path)
        .map(|fs| fs.blocks_available().saturating_mul(100) / fs.blocks().max(1))
        .unwrap_or(100)
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
    fn quiet_conditions_say_nothing() {
        let quiet = condition(v1::host_condition::Kind::DiskPressure, false, || "x".into());
        assert_eq!((quiet.active, quiet.message.as_str()), (false, ""));
        assert!(!pid_pressure().active);
        assert!(meminfo("MemTotal").unwrap() > 1 << 20);
        assert_eq!(meminfo("NoSuchKey"), None);
    }
}
