//! The pods as the kubelet API sees them.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures::future::join_all;
use k8s_openapi::api::core::v1::Pod;
use sandman_protocol::v1;
use sandman_protocol::v1::host_client::HostClient;
use tonic::transport::Channel;

use super::PodController;
use crate::hosts::{Connection, Host};
use crate::view::{HostName, HostStreams, PodView, StreamError};

/// Usage that comes later than this is left out.
const STATS_LIMIT: Duration = Duration::from_secs(5);
/// A host that went away no longer ago than this may be restarting its service.
const RESTARTS_WITHIN: Duration = Duration::from_secs(10);

impl PodView for PodController {
    fn pods(&self) -> Vec<Arc<Pod>> {
        self.store.all().iter().map(|entry| entry.shown()).collect()
    }

    fn find(&self, namespace: &str, name: &str) -> Option<Arc<Pod>> {
        self.store.find(namespace, name).map(|entry| entry.shown())
    }

    fn find_by_uid(&self, uid: &str) -> Option<Arc<Pod>> {
        self.store.get(uid).map(|entry| entry.shown())
    }

    fn host_of(&self, uid: &str) -> Option<HostName> {
        let entry = self.store.get(uid)?;
        self.placed_on(&entry)
    }

    fn running_pods(&self) -> Vec<Arc<Pod>> {
        let running = |host: &HostName, uid: &str| {
            let lifecycle = self
                .hosts
                .report(host, uid)
                .map(|report| report.lifecycle());
            matches!(
                lifecycle,
                Some(v1::Lifecycle::Active | v1::Lifecycle::Terminating)
            )
        };
        let entries = self.store.all().into_iter();
        entries
            .filter(|entry| {
                self.placed_on(entry)
                    .is_some_and(|host| running(&host, &entry.uid))
            })
            .map(|entry| entry.shown())
            .collect()
    }
}

impl PodController {
    /// A host that is connected, or connects again soon: its service may be in the middle of an
    /// upgrade, which no exec should notice. One that is away for longer is not waited for, so its
    /// clients get their answer at once and not when a dial has failed.
    async fn connected_host(&self, name: &HostName) -> Option<Arc<dyn Host>> {
        let mut changes = self.hosts.changes();
        let away = self.hosts.view(name)?.down_since.elapsed();
        let connected = async {
            while self.hosts.view(name)?.connection != Connection::Synced {
                changes.changed().await.ok()?;
            }
            self.hosts.host(name)
        };
        // A host that is connected is found by the first look, which even no time allows.
        let patience = RESTARTS_WITHIN.saturating_sub(away.unwrap_or_default());
        tokio::time::timeout(patience, connected).await.ok()?
    }
}

#[async_trait]
impl HostStreams for PodController {
    async fn client(&self, uid: &str) -> Result<HostClient<Channel>, StreamError> {
        let name = PodView::host_of(self, uid).ok_or(StreamError::NotPlaced)?;
        let host = self.connected_host(&name).await;
        let host = host.ok_or_else(|| StreamError::Unreachable(name.clone()))?;
        host.streams().await
    }

    async fn stats(&self) -> Vec<(HostName, v1::Stats)> {
        let synced = |view: &crate::hosts::HostView| view.connection == Connection::Synced;
        let views = self.hosts.views().into_iter().filter(synced);
        let asked = views.filter_map(|view| {
            let host = self.hosts.host(&view.name)?;
            Some(async move {
                let stats = tokio::time::timeout(STATS_LIMIT, host.stats()).await;
                match stats {
                    Ok(Ok(stats)) => Some((view.name, stats)),
                    Ok(Err(error)) => {
                        tracing::debug!(host = %view.name, %error, "no usage");
                        None
                    }
                    Err(_) => None,
                }
            })
        });
        join_all(asked).await.into_iter().flatten().collect()
    }
}
