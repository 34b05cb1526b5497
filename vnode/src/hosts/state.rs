//! What is known about one host and its sandboxes. Pure: the connection feeds
//! messages in and learns which sandboxes changed.

use std::sync::Arc;
use std::time::SystemTime;

use sandman_protocol::v1;

use super::limits;
use super::reports::Reports;

/// UID of a pod.
pub type Uid = Arc<str>;

/// Where the connection to a host stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Connection {
    /// There is none.
    Down,
    /// Connected; the list of sandboxes is not complete yet.
    Listing,
    /// Every sandbox of the host is known.
    Synced,
}

/// A host that does not keep to the protocol.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProtocolError {
    /// Reports that are too many, or too large together.
    #[error("reports more sandboxes than a host can have")]
    TooMany,
    /// A report whose UID cannot be one.
    #[error("reports a sandbox with a malformed UID")]
    Uid,
}

/// Facts about one host.
#[derive(Debug)]
pub struct HostState {
    connection: Connection,
    /// Counts complete lists; commands given before are to be repeated.
    epoch: u64,
    lost: bool,
    /// When the connection went down, or the process started.
    down_since: SystemTime,
    inventory: Option<Arc<v1::Inventory>>,
    reports: Reports,
    /// Reports of a list that is not complete yet.
    listing: Reports,
}

impl HostState {
    /// A host that was never heard of.
    pub fn new(now: SystemTime) -> Self {
        Self {
            connection: Connection::Down,
            epoch: 0,
            lost: false,
            down_since: now,
            inventory: None,
            reports: Reports::default(),
            listing: Reports::default(),
        }
    }

    /// A connection was made; its list begins.
    pub fn connected(&mut self, inventory: v1::Inventory) {
        self.connection = Connection::Listing;
        self.listing = Reports::default();
        self.inventory = Some(Arc::new(limits::inventory(inventory)));
    }

    /// The connection ended. What was reported stays the best knowledge.
    pub fn disconnected(&mut self, now: SystemTime) {
        if self.connection == Connection::Synced {
            self.down_since = now;
        }
        self.connection = Connection::Down;
        self.listing = Reports::default();
    }

    /// Takes a report. Returns the UID when it changes what is known.
    ///
    /// # Errors
    /// When the host does not keep to the protocol; its connection is of no use.
    pub fn report(&mut self, report: v1::SandboxReport) -> Result<Option<Uid>, ProtocolError> {
        if self.connection == Connection::Synced {
            return self.reports.insert(report);
        }
        self.listing.insert(report)?;
        Ok(None)
    }

    /// The list is complete: it replaces what was known. Returns the UIDs that
    /// appeared, changed or vanished.
    pub fn synced(&mut self) -> Vec<Uid> {
        let old = std::mem::replace(&mut self.reports, std::mem::take(&mut self.listing));
        self.connection = Connection::Synced;
        self.epoch += 1;
        self.reports.difference(&old)
    }

    /// Takes an inventory. Returns whether it differs from the last.
    pub fn inventory_changed(&mut self, inventory: v1::Inventory) -> bool {
        let inventory = limits::inventory(inventory);
        if self.inventory.as_deref() == Some(&inventory) {
            return false;
        }
        self.inventory = Some(Arc::new(inventory));
        true
    }

    /// The host has dropped its record.
    pub fn forget(&mut self, uid: &str) {
        self.reports.remove(uid);
    }

    /// Marks the host lost, or found. Returns whether that is news.
    pub fn set_lost(&mut self, lost: bool) -> bool {
        std::mem::replace(&mut self.lost, lost) != lost
    }

    /// Where the connection stands.
    pub fn connection(&self) -> Connection {
        self.connection
    }

    /// Number of the newest complete list; 0 before the first.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Whether the host was silent for so long that its pods are not ready.
    pub fn lost(&self) -> bool {
        self.lost
    }

    /// Since when there is no connection.
    pub fn down_since(&self) -> SystemTime {
        self.down_since
    }

    /// What the host has, as last heard.
    pub fn inventory(&self) -> Option<&Arc<v1::Inventory>> {
        self.inventory.as_ref()
    }

    /// The newest report about a sandbox.
    pub fn report_of(&self, uid: &str) -> Option<&Arc<v1::SandboxReport>> {
        self.reports.get(uid)
    }

    /// UIDs of all reported sandboxes.
    pub fn uids(&self) -> impl Iterator<Item = &Uid> {
        self.reports.uids()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(uid: &str, message: &str) -> v1::SandboxReport {
        v1::SandboxReport {
            uid: uid.into(),
            message: message.into(),
            ..Default::default()
        }
    }

    fn synced(reports: &[(&str, &str)]) -> HostState {
        let mut state = HostState::new(SystemTime::UNIX_EPOCH);
        state.connected(v1::Inventory::default());
        for (uid, message) in reports {
            assert_eq!(
                state.report(report(uid, message)),
                Ok(None),
                "silent while listing"
            );
        }
        state.synced();
        state
    }

    #[test]
    fn old_reports_stay_visible_until_the_new_list_is_complete() {
        let mut state = synced(&[("a", "1"), ("b", "1"), ("c", "1")]);
        state.disconnected(SystemTime::UNIX_EPOCH);
        assert_eq!(state.report_of("a").unwrap().message, "1");
        state.connected(v1::Inventory::default());
        state.report(report("b", "1")).unwrap();
        state.report(report("c", "2")).unwrap();
        assert_eq!(state.report_of("c").unwrap().message, "1");
        assert_eq!(state.epoch(), 1);

        let mut changed = state.synced();
        changed.sort();
        assert_eq!(changed, [Uid::from("a"), Uid::from("c")]);
        assert!(state.report_of("a").is_none());
        assert_eq!(state.epoch(), 2);
    }

    #[test]
    fn a_broken_list_leaves_nothing_behind() {
        let mut state = synced(&[("a", "1")]);
        state.disconnected(SystemTime::UNIX_EPOCH);
        state.connected(v1::Inventory::default());
        state.report(report("stale", "1")).unwrap();
        state.disconnected(SystemTime::UNIX_EPOCH);
        state.connected(v1::Inventory::default());
        state.report(report("a", "1")).unwrap();
        assert_eq!(state.synced(), Vec::<Uid>::new());
        assert!(state.report_of("stale").is_none());
    }

    #[test]
    fn the_same_report_twice_is_no_change() {
        let mut state = synced(&[("a", "1")]);
        assert_eq!(state.report(report("a", "1")), Ok(None));
        assert_eq!(state.report(report("a", "2")), Ok(Some(Uid::from("a"))));
    }

    #[test]
    fn down_since_counts_from_the_last_synced_moment() {
        let at = |seconds| SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(seconds);
        let mut state = synced(&[]);
        state.disconnected(at(10));
        state.connected(v1::Inventory::default());
        state.disconnected(at(20));
        assert_eq!(
            state.down_since(),
            at(10),
            "a session that never synced is no contact"
        );
    }

    #[test]
    fn malformed_uids_are_refused() {
        let mut state = synced(&[]);
        assert_eq!(state.report(report("", "")), Err(ProtocolError::Uid));
        assert_eq!(
            state.report(report(&"a".repeat(65), "")),
            Err(ProtocolError::Uid)
        );
    }
}
