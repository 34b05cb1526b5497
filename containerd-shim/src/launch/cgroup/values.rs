//! OCI resources as the kernel's files have them; pure. Follows runc's libcontainer/cgroups.

use oci_spec::runtime::LinuxResources;

/// One value of one file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Write {
    pub(super) controller: &'static str,
    pub(super) file: &'static str,
    pub(super) value: String,
}

fn push(out: &mut Vec<Write>, controller: &'static str, file: &'static str, value: String) {
    out.push(Write {
        controller,
        file,
        value,
    });
}

/// Values of 0 mean nothing was said.
fn said(value: Option<i64>) -> Option<i64> {
    value.filter(|value| *value != 0)
}

/// Files of cgroup v1.
pub(super) fn legacy(resources: &LinuxResources) -> Vec<Write> {
    let mut out = Vec::new();
    if let Some(memory) = resources.memory() {
        if let Some(limit) = said(memory.limit()) {
            push(
                &mut out,
                "memory",
                "memory.limit_in_bytes",
                limit.to_string(),
            );
        }
        if let Some(swap) = said(memory.swap()) {
            push(
                &mut out,
                "memory",
                "memory.memsw.limit_in_bytes",
                swap.to_string(),
            );
        }
        if let Some(reservation) = said(memory.reservation()) {
            push(
                &mut out,
                "memory",
                "memory.soft_limit_in_bytes",
                reservation.to_string(),
            );
        }
    }
    if let Some(cpu) = resources.cpu() {
        if let Some(shares) = cpu.shares().filter(|shares| *shares != 0) {
            push(&mut out, "cpu", "cpu.shares", shares.to_string());
        }
        if let Some(period) = cpu.period().filter(|period| *period != 0) {
            push(&mut out, "cpu", "cpu.cfs_period_us", period.to_string());
        }
        if let Some(quota) = said(cpu.quota()) {
            push(&mut out, "cpu", "cpu.cfs_quota_us", quota.to_string());
        }
    }
    if let Some(limit) = resources
        .pids()
        .as_ref()
        .and_then(|pids| said(Some(pids.limit())))
    {
        push(&mut out, "pids", "pids.max", maximum(limit));
    }
    out
}

/// Files of cgroup v2.
pub(super) fn unified(resources: &LinuxResources) -> Vec<Write> {
    let mut out = Vec::new();
    if let Some(memory) = resources.memory() {
        if let Some(limit) = said(memory.limit()) {
            push(&mut out, "memory", "memory.max", maximum(limit));
        }
        if let Some(reservation) = said(memory.reservation()) {
            push(&mut out, "memory", "memory.low", maximum(reservation));
        }
        // v1 counts memory and swap together, v2 swap alone.
        match (said(memory.swap()), said(memory.limit())) {
            (Some(swap), _) if swap < 0 => {
                push(&mut out, "memory", "memory.swap.max", maximum(swap));
            }
            (Some(swap), Some(limit)) if limit > 0 => {
                push(
                    &mut out,
                    "memory",
                    "memory.swap.max",
                    (swap - limit).max(0).to_string(),
                );
            }
            _ => {}
        }
    }
    if let Some(cpu) = resources.cpu() {
        if let Some(shares) = cpu.shares().filter(|shares| *shares != 0) {
            push(&mut out, "cpu", "cpu.weight", weight(shares).to_string());
        }
        let quota = said(cpu.quota());
        let period = cpu.period().filter(|period| *period != 0);
        if quota.is_some() || period.is_some() {
            let quota = quota.map_or("max".to_owned(), maximum);
            push(
                &mut out,
                "cpu",
                "cpu.max",
                format!("{quota} {}", period.unwrap_or(100_000)),
            );
        }
    }
    if let Some(limit) = resources
        .pids()
        .as_ref()
        .and_then(|pids| said(Some(pids.limit())))
    {
        push(&mut out, "pids", "pids.max", maximum(limit));
    }
    out
}

fn maximum(value: i64) -> String {
    if value < 0 {
        "max".to_owned()
    } else {
        value.to_string()
    }
}

/// v1 shares (2 to 262144) as a v2 weight (1 to 10000).
fn weight(shares: u64) -> u64 {
    1 + (shares.clamp(2, 262_144) - 2) * 9_999 / 262_142
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resources(json: serde_json::Value) -> LinuxResources {
        serde_json::from_value(json).unwrap()
    }

    fn text(writes: Vec<Write>) -> Vec<String> {
        writes
            .iter()
            .map(|w| format!("{} {} {}", w.controller, w.file, w.value))
            .collect()
    }

    #[test]
    fn limits_become_files() {
        let all = resources(serde_json::json!({
            "memory": {"limit": 1000, "swap": 1500, "reservation": 500},
            "cpu": {"shares": 1024, "quota": 50000, "period": 100000},
            "pids": {"limit": 64},
        }));
        assert_eq!(
            text(legacy(&all)),
            [
                "memory memory.limit_in_bytes 1000",
                "memory memory.memsw.limit_in_bytes 1500",
                "memory memory.soft_limit_in_bytes 500",
                "cpu cpu.shares 1024",
                "cpu cpu.cfs_period_us 100000",
                "cpu cpu.cfs_quota_us 50000",
                "pids pids.max 64",
            ]
        );
        assert_eq!(
            text(unified(&all)),
            [
                "memory memory.max 1000",
                "memory memory.low 500",
                "memory memory.swap.max 500",
                "cpu cpu.weight 39",
                "cpu cpu.max 50000 100000",
                "pids pids.max 64",
            ]
        );
    }

    #[test]
    fn no_limit_is_said_as_each_version_says_it() {
        let none = resources(serde_json::json!({
            "memory": {"limit": -1, "swap": -1},
            "cpu": {"quota": -1},
            "pids": {"limit": -1},
        }));
        assert_eq!(
            text(legacy(&none)),
            [
                "memory memory.limit_in_bytes -1",
                "memory memory.memsw.limit_in_bytes -1",
                "cpu cpu.cfs_quota_us -1",
                "pids pids.max max",
            ]
        );
        assert_eq!(
            text(unified(&none)),
            [
                "memory memory.max max",
                "memory memory.swap.max max",
                "cpu cpu.max max 100000",
                "pids pids.max max",
            ]
        );
        assert!(
            legacy(&LinuxResources::default())
                .iter()
                .all(|w| w.controller != "memory")
        );
    }

    #[test]
    fn weights_span_their_range() {
        assert_eq!((weight(2), weight(262_144), weight(0)), (1, 10_000, 1));
    }
}
