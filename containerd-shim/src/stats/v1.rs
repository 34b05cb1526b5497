//! `io.containerd.cgroups.v1.Metrics`.

use std::fs;
use std::path::Path;

use containerd_shim_protos::cgroups::metrics::{
    BlkIOEntry, BlkIOStat, CPUStat, CPUUsage, MemoryEntry, MemoryOomControl, MemoryStat, Metrics,
    PidsStat, Throttle,
};
use containerd_shim_protos::protobuf::MessageField;

use super::cgroup::{Cgroups, number, table};

pub(super) fn read(cgroups: &Cgroups) -> Metrics {
    let mut metrics = Metrics::new();
    if let Some(dir) = cgroups.controller("pids") {
        metrics.pids = MessageField::some(PidsStat {
            current: number(dir, "pids.current"),
            // No limit is 0 here.
            limit: Some(number(dir, "pids.max"))
                .filter(|max| *max != u64::MAX)
                .unwrap_or_default(),
            ..Default::default()
        });
    }
    if let Some(dir) = cgroups.controller("cpuacct") {
        metrics.cpu = MessageField::some(cpu(dir, cgroups.controller("cpu")));
    }
    if let Some(dir) = cgroups.controller("memory") {
        metrics.memory = MessageField::some(memory(dir));
        metrics.memory_oom_control = MessageField::some(oom_control(dir));
    }
    if let Some(dir) = cgroups.controller("blkio") {
        metrics.blkio = MessageField::some(blkio(dir));
    }
    metrics
}

fn cpu(accounting: &Path, scheduler: Option<&Path>) -> CPUStat {
    /// Of the unit in which `cpuacct.stat` counts, USER_HZ.
    const NANOSECONDS: u64 = 10_000_000;
    let parts = table(accounting, "cpuacct.stat");
    let part = |name: &str| parts.get(name).copied().unwrap_or_default() * NANOSECONDS;
    let usage = CPUUsage {
        total: number(accounting, "cpuacct.usage"),
        user: part("user"),
        kernel: part("system"),
        per_cpu: fs::read_to_string(accounting.join("cpuacct.usage_percpu"))
            .unwrap_or_default()
            .split_whitespace()
            .filter_map(|cpu| cpu.parse().ok())
            .collect(),
        ..Default::default()
    };
    let throttling = scheduler.map(|dir| {
        let values = table(dir, "cpu.stat");
        let value = |name: &str| values.get(name).copied().unwrap_or_default();
        Throttle {
            periods: value("nr_periods"),
            throttled_periods: value("nr_throttled"),
            throttled_time: value("throttled_time"),
            ..Default::default()
        }
    });
    CPUStat {
        usage: MessageField::some(usage),
        throttling: throttling.into(),
        ..Default::default()
    }
}

fn memory(dir: &Path) -> MemoryStat {
    let values = table(dir, "memory.stat");
    let value = |name: &str| values.get(name).copied().unwrap_or_default();
    let entry = |prefix: &str| {
        let file = |suffix: &str| number(dir, &format!("{prefix}.{suffix}"));
        MessageField::some(MemoryEntry {
            limit: file("limit_in_bytes"),
            usage: file("usage_in_bytes"),
            max: file("max_usage_in_bytes"),
            failcnt: file("failcnt"),
            ..Default::default()
        })
    };
    MemoryStat {
        cache: value("cache"),
        rss: value("rss"),
        rss_huge: value("rss_huge"),
        mapped_file: value("mapped_file"),
        dirty: value("dirty"),
        writeback: value("writeback"),
        pg_pg_in: value("pgpgin"),
        pg_pg_out: value("pgpgout"),
        pg_fault: value("pgfault"),
        pg_maj_fault: value("pgmajfault"),
        inactive_anon: value("inactive_anon"),
        active_anon: value("active_anon"),
        inactive_file: value("inactive_file"),
        active_file: value("active_file"),
        unevictable: value("unevictable"),
        hierarchical_memory_limit: value("hierarchical_memory_limit"),
        hierarchical_swap_limit: value("hierarchical_memsw_limit"),
        total_cache: value("total_cache"),
        total_rss: value("total_rss"),
        total_rss_huge: value("total_rss_huge"),
        total_mapped_file: value("total_mapped_file"),
        total_dirty: value("total_dirty"),
        total_writeback: value("total_writeback"),
        total_pg_pg_in: value("total_pgpgin"),
        total_pg_pg_out: value("total_pgpgout"),
        total_pg_fault: value("total_pgfault"),
        total_pg_maj_fault: value("total_pgmajfault"),
        total_inactive_anon: value("total_inactive_anon"),
        total_active_anon: value("total_active_anon"),
        total_inactive_file: value("total_inactive_file"),
        total_active_file: value("total_active_file"),
        total_unevictable: value("total_unevictable"),
        usage: entry("memory"),
        swap: entry("memory.memsw"),
        kernel: entry("memory.kmem"),
        kernel_tcp: entry("memory.kmem.tcp"),
        ..Default::default()
    }
}

fn oom_control(dir: &Path) -> MemoryOomControl {
    let values = table(dir, "memory.oom_control");
    let value = |name: &str| values.get(name).copied().unwrap_or_default();
    MemoryOomControl {
        oom_kill_disable: value("oom_kill_disable"),
        under_oom: value("under_oom"),
        oom_kill: value("oom_kill"),
        ..Default::default()
    }
}

fn blkio(dir: &Path) -> BlkIOStat {
    BlkIOStat {
        io_service_bytes_recursive: blkio_entries(dir, "blkio.throttle.io_service_bytes_recursive"),
        io_serviced_recursive: blkio_entries(dir, "blkio.throttle.io_serviced_recursive"),
        ..Default::default()
    }
}

fn blkio_entries(dir: &Path, file: &str) -> Vec<BlkIOEntry> {
    let text = fs::read_to_string(dir.join(file)).unwrap_or_default();
    text.lines().filter_map(blkio_entry).collect()
}

/// `major:minor Operation number`; the last line has a total without device.
fn blkio_entry(line: &str) -> Option<BlkIOEntry> {
    let mut words = line.split_whitespace();
    let (major, minor) = words.next()?.split_once(':')?;
    Some(BlkIOEntry {
        major: major.parse().ok()?,
        minor: minor.parse().ok()?,
        op: words.next()?.to_owned(),
        value: words.next()?.parse().ok()?,
        ..Default::default()
    })
}
