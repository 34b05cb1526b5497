//! `GetStats`: everything that is measured, at one moment.

use sandman_protocol::v1;
use tracing::warn;

use crate::eviction::Disk;
use crate::sandbox::Sandboxes;
use crate::sandbox::facts::Phase;
use crate::sandbox::report::wire_time;

/// Thousands of small files are read: not on a thread that serves streams.
pub(super) fn collect(sandboxes: &Sandboxes) -> v1::Stats {
    let host = sandboxes.host();
    let network = host.network.counters().unwrap_or_else(|error| {
        warn!(%error, "no figures of networks");
        Default::default()
    });
    let reports = sandboxes.views().into_iter().filter_map(|(uid, view)| {
        let containers: Vec<v1::ContainerStats> = view
            .containers
            .iter()
            .filter_map(|(name, container)| {
                let attempt = container.running_attempt()?;
                let path = view.cgroup.join(&attempt.id);
                // One that ends in this moment has no figures, and is left out.
                let usage = host.stats.cgroup_usage(&path.to_string_lossy()).ok()?;
                let Phase::Running { since } = attempt.phase else {
                    return None;
                };
                Some(v1::ContainerStats {
                    name: name.clone(),
                    started_at: Some(wire_time(since)),
                    usage: Some(usage),
                    logs: host.logs.usage_now(&uid, name).ok().map(taken),
                })
            })
            .collect();
        (!containers.is_empty()).then(|| v1::SandboxStats {
            network: network.get(&uid).copied(),
            uid,
            namespace: view.namespace.clone(),
            name: view.name.clone(),
            containers,
        })
    });
    v1::Stats {
        host: host.stats.host_usage().ok(),
        sandboxes: reports.collect(),
        at: Some(wire_time(jiff::Timestamp::now())),
        files: host.stats.file_system(host.logs.root()).ok(),
    }
}

fn taken(disk: Disk) -> v1::FileUsage {
    v1::FileUsage {
        used_bytes: disk.bytes,
        inodes_used: disk.inodes,
        ..Default::default()
    }
}
