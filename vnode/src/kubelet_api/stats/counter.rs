//! CPU time of a node that is made of several hosts, as a counter that only goes
//! up: hosts come and go, and a host that rebooted starts again from zero.

use std::collections::BTreeMap;

use crate::view::HostName;

/// Adds up the hosts' counters.
///
/// Without it the sum would fall when a host is lost and jump when it returns,
/// and every rate over it would be wrong by the host's whole history.
#[derive(Debug, Default)]
pub(in crate::kubelet_api) struct NodeCounter {
    hosts: BTreeMap<HostName, Seen>,
}

#[derive(Debug, Default)]
struct Seen {
    /// Newest value of the host.
    last: u64,
    /// What the host had counted before it started again.
    before: u64,
}

impl NodeCounter {
    /// Takes a host's newest value.
    pub(super) fn observe(&mut self, host: &HostName, value: u64) {
        let seen = self.hosts.entry(host.clone()).or_default();
        if value < seen.last {
            seen.before = seen.before.saturating_add(seen.last);
        }
        seen.last = value;
    }

    /// The node's value.
    pub(super) fn total(&self) -> u64 {
        self.hosts.values().fold(0, |sum, seen| {
            sum.saturating_add(seen.before).saturating_add(seen.last)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn never_falls() {
        let (a, b) = (HostName::from("a"), HostName::from("b"));
        let mut counter = NodeCounter::default();
        counter.observe(&a, 100);
        counter.observe(&b, 50);
        assert_eq!(counter.total(), 150);
        // b is lost: its share stays.
        counter.observe(&a, 110);
        assert_eq!(counter.total(), 160);
        // b rebooted.
        counter.observe(&b, 5);
        assert_eq!(counter.total(), 165);
        counter.observe(&b, 6);
        assert_eq!(counter.total(), 166);
    }
}
