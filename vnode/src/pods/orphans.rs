//! Sandboxes that no pod of this node stands behind: left over when a pod was
//! deleted by force, or while nobody watched. Removed, but never on a first
//! look, because the list of pods may be older than the host's.

use std::time::Duration;

use sandman_protocol::v1::Lifecycle;

use super::PodController;
use crate::hosts::{Connection, HostError, Uid};
use crate::view::HostName;

/// How long an unknown sandbox is left alone.
const PATIENCE: Duration = Duration::from_secs(10);
/// Time that the processes of a pod without an object get to end.
const GRACE: Duration = Duration::from_secs(2);

impl PodController {
    /// Looks at sandboxes that a host reports.
    pub(super) fn check_orphans(&self, host: &HostName, uids: &[Uid]) {
        let Some(orphans) = self.orphans.get(host) else {
            return;
        };
        for uid in uids.iter().filter(|uid| self.is_orphan(host, uid)) {
            orphans.add_after(Uid::clone(uid), PATIENCE);
        }
    }

    /// Whether a host has a sandbox that is not placed there.
    fn is_orphan(&self, host: &HostName, uid: &str) -> bool {
        match self.store.get(uid) {
            None => true,
            Some(entry) => self.placed_on(&entry).is_some_and(|placed| placed != *host),
        }
    }

    /// Removes the orphans of one host; ends only by being dropped.
    pub(super) async fn collect_orphans(&self, host: &HostName) {
        let Some(orphans) = self.orphans.get(host) else {
            return;
        };
        // Nothing is an orphan before it is known which pods there are.
        if self
            .listed
            .subscribe()
            .wait_for(|listed| *listed)
            .await
            .is_err()
        {
            return;
        }
        loop {
            let uid = orphans.take().await;
            let result = self.collect_orphan(host, &uid).await;
            if let Err(error) = &result {
                tracing::warn!(%host, pod_uid = &*uid, %error, "cannot remove a sandbox without a pod");
            }
            orphans.done(&uid, result.is_ok());
        }
    }

    async fn collect_orphan(&self, name: &HostName, uid: &Uid) -> Result<(), HostError> {
        let (Some(host), Some(view)) = (self.hosts.host(name), self.hosts.view(name)) else {
            return Ok(());
        };
        // A host that connects again reports it again.
        if view.connection != Connection::Synced || !self.is_orphan(name, uid) {
            return Ok(());
        }
        let Some(report) = self.hosts.report(name, uid) else {
            return Ok(());
        };
        if report.lifecycle() == Lifecycle::Removed {
            host.forget(uid).await?;
            self.hosts.forgotten(name, uid);
            return Ok(());
        }
        tracing::info!(
            host = %name, pod_uid = &**uid, namespace = report.namespace, pod = report.name,
            "removing a sandbox without a pod"
        );
        host.remove(uid, GRACE, "the pod does not exist").await
    }
}
