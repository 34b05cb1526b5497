//! The text formats of `/proc` and of cgroup files. Pure.

use sandman_protocol::v1::Usage;

/// Value of `key` in lines of `key value`, as in `memory.stat` and `cpu.stat`.
pub(super) fn keyed(text: &str, key: &str) -> Option<u64> {
    text.lines().find_map(|line| {
        let (name, value) = line.split_once(' ')?;
        (name == key).then(|| value.trim().parse().ok()).flatten()
    })
}

/// A file of one number; `max` is none.
pub(super) fn single(text: &str) -> Option<u64> {
    text.trim().parse().ok()
}

/// Pages of `/proc/PID/statm` that are in memory and no file's.
pub(super) fn anonymous_pages(statm: &str) -> Option<u64> {
    let mut fields = statm.split_whitespace().skip(1);
    let mut pages = || fields.next()?.parse::<u64>().ok();
    let (resident, shared) = (pages()?, pages()?);
    resident.checked_sub(shared)
}

/// Value in bytes of a line such as `MemTotal:  1024 kB`.
fn meminfo(text: &str, key: &str) -> Option<u64> {
    text.lines().find_map(|line| {
        let (name, value) = line.split_once(':')?;
        let kibibytes: u64 = value.split_whitespace().next()?.parse().ok()?;
        (name == key).then_some(kibibytes * 1024)
    })
}

/// Usage of a host by `/proc/stat`, `/proc/meminfo` and `/proc/loadavg`.
pub(super) fn host_usage(
    stat: &str,
    memory: &str,
    load: &str,
    ticks_per_second: u64,
) -> Option<Usage> {
    // user nice system idle iowait irq softirq steal; guest time is in user.
    let cpu: Vec<u64> = stat
        .lines()
        .find_map(|line| line.strip_prefix("cpu "))?
        .split_whitespace()
        .map_while(|number| number.parse().ok())
        .take(8)
        .collect();
    let busy = cpu
        .iter()
        .enumerate()
        .filter(|(index, _)| !matches!(index, 3 | 4 | 7));
    let ticks: u64 = busy.map(|(_, ticks)| *ticks).sum();

    let total = meminfo(memory, "MemTotal")?;
    let used = total.saturating_sub(meminfo(memory, "MemFree")?);
    let inactive_file = meminfo(memory, "Inactive(file)").unwrap_or_default();
    let swap = meminfo(memory, "SwapTotal").unwrap_or_default();
    // "0.20 0.18 0.12 1/80 11206": running and all scheduling entities.
    let processes = load
        .split_whitespace()
        .nth(3)
        .and_then(|text| text.split('/').nth(1)?.parse().ok());
    Some(Usage {
        cpu_nanos: nanos(ticks, ticks_per_second),
        memory_working_set_bytes: used.saturating_sub(inactive_file),
        memory_usage_bytes: used,
        memory_rss_bytes: meminfo(memory, "AnonPages").unwrap_or_default(),
        swap_bytes: swap.saturating_sub(meminfo(memory, "SwapFree").unwrap_or_default()),
        processes: processes.unwrap_or_default(),
        ..Default::default()
    })
}

fn nanos(ticks: u64, ticks_per_second: u64) -> u64 {
    ticks.saturating_mul(1_000_000_000 / ticks_per_second.max(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_a_host() {
        let stat = "cpu  100 0 50 9999 7 1 2 3 0 0\ncpu0 1 1 1 1\n";
        let memory = "MemTotal: 1000 kB\nMemFree: 400 kB\nInactive(file): 100 kB\n\
                      AnonPages: 50 kB\nSwapTotal: 10 kB\nSwapFree: 4 kB\n";
        let usage = host_usage(stat, memory, "0.2 0.1 0.1 1/80 11206\n", 100).unwrap();
        let expected = Usage {
            cpu_nanos: 1_530_000_000,
            memory_working_set_bytes: 500 * 1024,
            memory_usage_bytes: 600 * 1024,
            memory_rss_bytes: 50 * 1024,
            swap_bytes: 6 * 1024,
            processes: 80,
            ..Default::default()
        };
        assert_eq!(usage, expected);
        assert_eq!(host_usage("", memory, "", 100), None);
    }

    #[test]
    fn reads_cgroup_files() {
        assert_eq!(keyed("anon 1\nfile 2\n", "file"), Some(2));
        assert_eq!(keyed("anon 1\nfile_x 2\n", "file"), None);
        assert_eq!(single("42\n"), Some(42));
        assert_eq!(single("max\n"), None);
    }
}
