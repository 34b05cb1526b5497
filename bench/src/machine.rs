//! Processor time of the whole machine, as `/proc/stat` counts it.

use std::time::Duration;

/// Time that all processors together spent on work since boot; nothing if the kernel does not say.
pub(crate) fn busy() -> Option<Duration> {
    let ticks_per_second = nix::unistd::sysconf(nix::unistd::SysconfVar::CLK_TCK)
        .ok()
        .flatten()?;
    let ticks = parse_busy(&std::fs::read_to_string("/proc/stat").ok()?)?;
    let milliseconds = ticks.checked_mul(1000)? / u64::try_from(ticks_per_second).ok()?;
    Some(Duration::from_millis(milliseconds))
}

/// Ticks of the first line, but for idle, waiting for disks, and what the hypervisor gave to
/// others. Guest time is part of user time already.
fn parse_busy(stat: &str) -> Option<u64> {
    let fields = stat.lines().next()?.strip_prefix("cpu ")?;
    let ticks: Vec<u64> = fields
        .split_whitespace()
        .map(str::parse)
        .collect::<Result<_, _>>()
        .ok()?;
    let [user, nice, system, _idle, _iowait, irq, softirq, ..] = ticks[..] else {
        return None;
    };
    Some(user + nice + system + irq + softirq)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn idle_disk_and_stolen_time_is_not_work() {
        let stat = "cpu  1 2 4 1000 2000 8 16 4000 1 0\ncpu0 9 9 9 9 9 9 9 9 9 9\n";
        assert_eq!(parse_busy(stat), Some(31));
        assert_eq!(parse_busy("cpu 1 2"), None);
        assert_eq!(parse_busy(""), None);
    }

    #[test]
    fn time_passes_forward() {
        let before = busy().unwrap();
        assert!(busy().unwrap() >= before);
    }
}
