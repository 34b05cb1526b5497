//! `io.containerd.cgroups.v2.Metrics`.

use std::path::Path;

use containerd_shim_protos::cgroups_v2::metrics::{
    CPUStat, MemoryEvents, MemoryStat, Metrics, PidsStat,
};
use containerd_shim_protos::protobuf::MessageField;

use super::cgroup::{number, table};

pub(super) fn read(dir: &Path) -> Metrics {
    let mut metrics = Metrics::new();
    metrics.pids = MessageField::some(PidsStat {
        current: number(dir, "pids.current"),
        limit: Some(number(dir, "pids.max"))
            .filter(|max| *max != u64::MAX)
            .unwrap_or_default(),
        ..Default::default()
    });
    let values = table(dir, "cpu.stat");
    let value = |name: &str| values.get(name).copied().unwrap_or_default();
    metrics.cpu = MessageField::some(CPUStat {
        usage_usec: value("usage_usec"),
        user_usec: value("user_usec"),
        system_usec: value("system_usec"),
        nr_periods: value("nr_periods"),
        nr_throttled: value("nr_throttled"),
        throttled_usec: value("throttled_usec"),
        ..Default::default()
    });
    metrics.memory = MessageField::some(memory(dir));
    let values = table(dir, "memory.events");
    let value = |name: &str| values.get(name).copied().unwrap_or_default();
    metrics.memory_events = MessageField::some(MemoryEvents {
        low: value("low"),
        high: value("high"),
        max: value("max"),
        oom: value("oom"),
        oom_kill: value("oom_kill"),
        ..Default::default()
    });
    metrics
}

fn memory(dir: &Path) -> MemoryStat {
    let values = table(dir, "memory.stat");
    let value = |name: &str| values.get(name).copied().unwrap_or_default();
    MemoryStat {
        anon: value("anon"),
        file: value("file"),
        kernel_stack: value("kernel_stack"),
        slab: value("slab"),
        sock: value("sock"),
        shmem: value("shmem"),
        file_mapped: value("file_mapped"),
        file_dirty: value("file_dirty"),
        file_writeback: value("file_writeback"),
        anon_thp: value("anon_thp"),
        inactive_anon: value("inactive_anon"),
        active_anon: value("active_anon"),
        inactive_file: value("inactive_file"),
        active_file: value("active_file"),
        unevictable: value("unevictable"),
        slab_reclaimable: value("slab_reclaimable"),
        slab_unreclaimable: value("slab_unreclaimable"),
        pgfault: value("pgfault"),
        pgmajfault: value("pgmajfault"),
        usage: number(dir, "memory.current"),
        usage_limit: number(dir, "memory.max"),
        swap_usage: number(dir, "memory.swap.current"),
        swap_limit: number(dir, "memory.swap.max"),
        ..Default::default()
    }
}
