//! What one host reports about its sandboxes, within limits. A host may be
//! broken or hostile, and a pod's author decides how many containers a report
//! is about: neither may fill the memory of the node.

use std::collections::HashMap;
use std::sync::Arc;

use prost::Message;
use sandman_protocol::v1;

use super::limits::clip;
use super::state::{ProtocolError, Uid};

/// Most sandboxes that one host may report.
const MAX_REPORTS: usize = 200_000;
/// Most memory that one report takes; a usual one takes one or two KiB.
const MAX_REPORT_BYTES: usize = 256 << 10;
/// Most memory that all reports of a host take.
const MAX_TOTAL_BYTES: usize = 512 << 20;
/// Kubernetes UIDs are 36 characters; static pods have 32.
const MAX_UID: usize = 64;
/// What is kept of a text in a report that is too large.
const MAX_TEXT: usize = 1024;

/// Reports by UID.
#[derive(Debug, Default)]
pub(super) struct Reports {
    by_uid: HashMap<Uid, Arc<v1::SandboxReport>>,
    bytes: usize,
}

// === impl Reports ===

impl Reports {
    /// Takes a report. Returns the UID when it differs from the last.
    ///
    /// # Errors
    /// When the host says what no host can have to say.
    pub(super) fn insert(
        &mut self,
        mut report: v1::SandboxReport,
    ) -> Result<Option<Uid>, ProtocolError> {
        if report.uid.is_empty() || report.uid.len() > MAX_UID {
            return Err(ProtocolError::Uid);
        }
        let mut size = bytes(&report);
        if size > MAX_REPORT_BYTES {
            strip(&mut report);
            size = bytes(&report);
        }
        let old = self.by_uid.get(report.uid.as_str());
        if old.is_some_and(|old| **old == report) {
            return Ok(None);
        }
        let total = self.bytes - old.map_or(0, |old| bytes(old)) + size;
        if total > MAX_TOTAL_BYTES || (old.is_none() && self.by_uid.len() >= MAX_REPORTS) {
            return Err(ProtocolError::TooMany);
        }
        self.bytes = total;
        let uid: Uid = report.uid.as_str().into();
        self.by_uid.insert(Arc::clone(&uid), Arc::new(report));
        Ok(Some(uid))
    }

    pub(super) fn remove(&mut self, uid: &str) {
        if let Some(report) = self.by_uid.remove(uid) {
            self.bytes -= bytes(&report);
        }
    }

    pub(super) fn get(&self, uid: &str) -> Option<&Arc<v1::SandboxReport>> {
        self.by_uid.get(uid)
    }

    pub(super) fn uids(&self) -> impl Iterator<Item = &Uid> {
        self.by_uid.keys()
    }

    /// UIDs that are not in both, or whose reports differ.
    pub(super) fn difference(&self, other: &Self) -> Vec<Uid> {
        let vanished = other.uids().filter(|uid| !self.by_uid.contains_key(*uid));
        let changed = self.by_uid.iter();
        let changed = changed.filter(|(uid, report)| other.by_uid.get(*uid) != Some(*report));
        vanished
            .chain(changed.map(|(uid, _)| uid))
            .cloned()
            .collect()
    }
}

/// About what a report takes in memory: an empty container is two bytes on the
/// wire and some hundred here.
fn bytes(report: &v1::SandboxReport) -> usize {
    let containers =
        report.containers.len() + report.init_containers.len() + report.ephemeral_containers.len();
    report.encoded_len()
        + size_of::<v1::SandboxReport>()
        + containers * size_of::<v1::ContainerReport>()
}

/// Keeps what a sandbox needs to be told apart and to be ended.
fn strip(report: &mut v1::SandboxReport) {
    for text in [
        &mut report.namespace,
        &mut report.name,
        &mut report.pod_ip,
        &mut report.reason,
        &mut report.message,
    ] {
        clip(text, MAX_TEXT);
    }
    report.init_containers = Vec::new();
    report.containers = Vec::new();
    report.ephemeral_containers = Vec::new();
    report.waiting_reason = "ReportTooLarge".to_owned();
    report.waiting_message =
        format!("the host's report about this pod is larger than {MAX_REPORT_BYTES} bytes");
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(uid: &str, containers: usize, message: usize) -> v1::SandboxReport {
        v1::SandboxReport {
            uid: uid.to_owned(),
            lifecycle: v1::Lifecycle::Active.into(),
            message: "ü".repeat(message / 2),
            containers: vec![v1::ContainerReport::default(); containers],
            ..Default::default()
        }
    }

    #[test]
    fn a_report_that_is_too_large_keeps_what_matters() {
        let mut reports = Reports::default();
        for (uid, containers, message) in [("a", 1_000_000, 0), ("b", 1, 2_000_000)] {
            let uid = reports.insert(report(uid, containers, message)).unwrap();
            let kept = reports.get(&uid.unwrap()).unwrap();
            assert!(bytes(kept) < 8 << 10);
            assert_eq!(kept.lifecycle(), v1::Lifecycle::Active);
            assert_eq!(kept.waiting_reason, "ReportTooLarge");
        }
        let usual = report("c", 20, 1000);
        reports.insert(usual.clone()).unwrap();
        assert_eq!(**reports.get("c").unwrap(), usual);
    }

    #[test]
    fn all_reports_together_have_a_limit() {
        let mut reports = Reports::default();
        let large = report("a", 0, 200 << 10);
        reports.insert(large.clone()).unwrap();
        let one = reports.bytes;
        reports.bytes = MAX_TOTAL_BYTES - 10;
        assert_eq!(reports.insert(large), Ok(None), "nothing new");
        assert_eq!(
            reports.insert(report("b", 0, 100)),
            Err(ProtocolError::TooMany)
        );
        // Another report in place of one of the same UID.
        reports.insert(report("a", 0, 100)).unwrap();
        assert!(reports.bytes < MAX_TOTAL_BYTES - one / 2);
        reports.bytes = bytes(reports.get("a").unwrap());
        reports.remove("a");
        assert_eq!(reports.bytes, 0);
    }
}
