//! Which of several replicas leads. One Lease, claimed by a guarded write, as in
//! `k8s.io/client-go/tools/leaderelection`; the others watch it. Each claim has a
//! number that is larger than all before it, and hosts obey only the largest
//! they have seen, so a leader that does not know yet that it was replaced
//! changes nothing.
//!
//! This is not the node's heartbeat: that Lease belongs to the node's own
//! identity, this one to a ServiceAccount that may touch nothing else.

mod record;

use std::future::Future;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use anyhow::Context;
use futures::StreamExt;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::jiff::Timestamp;
use kube::api::{PostParams, WatchEvent, WatchParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Api, Client};
use tokio::time::Instant;

use self::record::{Observed, Standing, Timing};
use crate::backoff::Backoff;
use crate::config;
use crate::errors::brief;

/// Delay before a renewal that failed is tried again.
const RETRY: Duration = Duration::from_secs(1);
const FIRST_RETRY: Duration = Duration::from_millis(500);
const MAX_RETRY: Duration = Duration::from_secs(5);
/// Longest watch, in seconds; the API server allows less than five minutes.
const WATCH_SECONDS: u32 = 240;

/// A candidate.
pub struct Election {
    api: Api<Lease>,
    lease: String,
    me: String,
    timing: Timing,
}

/// Somebody who leads, or did.
pub struct Leader {
    election: Election,
    term: u64,
    /// The newest copy, and when the write of it was begun.
    held: Mutex<(Lease, Instant)>,
}

/// Why a leader does not lead any more.
#[derive(Debug, thiserror::Error)]
pub enum Lost {
    /// Another one claimed the Lease.
    #[error("{0} leads now")]
    Replaced(String),
    /// Nobody may be assumed to know that this process still leads.
    #[error("the election Lease {0} could not be renewed in time")]
    NotRenewed(String),
}

// === impl Election ===

impl Election {
    /// A candidate who has not done anything yet.
    ///
    /// # Errors
    /// When there are no credentials.
    pub async fn new(config: &config::Election) -> anyhow::Result<Self> {
        let mut client = match &config.kubeconfig {
            Some(path) => {
                let context = || format!("election.kubeconfig: {}", path.display());
                let file = Kubeconfig::read_from(path).with_context(context)?;
                kube::Config::from_custom_kubeconfig(file, &KubeConfigOptions::default())
                    .await
                    .with_context(context)?
            }
            None => kube::Config::incluster().context(
                "election.kubeconfig is not given, and there is no service account of a pod",
            )?,
        };
        let timing = Timing {
            duration: config.duration,
        };
        client.connect_timeout = Some(timing.call());
        let client = Client::try_from(client).context("election")?;
        let me = match &config.identity {
            Some(identity) => identity.clone(),
            None => host_name().context("election.identity is not given")?,
        };
        Ok(Self {
            api: Api::namespaced(client, &config.namespace),
            lease: config.lease.clone(),
            me,
            timing,
        })
    }

    /// Waits, for as long as it takes, until this process leads.
    pub async fn win(self) -> Leader {
        let mut backoff = Backoff::new(FIRST_RETRY, MAX_RETRY);
        let mut seen = Observed::default();
        let mut waiting = false;
        loop {
            match self.try_win(&mut seen, &mut waiting).await {
                Ok(Some((lease, at))) => {
                    let term = record::term(&lease);
                    tracing::info!(identity = self.me, term, "leads");
                    return Leader {
                        election: self,
                        term,
                        held: Mutex::new((lease, at)),
                    };
                }
                // The watch ended, as watches do, or another candidate was faster.
                Ok(None) => backoff.reset(),
                Err(error) => {
                    self.explain(&error);
                    tokio::time::sleep(backoff.step()).await;
                }
            }
        }
    }

    /// One look at the Lease and one watch of it. `None` asks for another.
    async fn try_win(
        &self,
        seen: &mut Observed,
        waiting: &mut bool,
    ) -> Result<Option<(Lease, Instant)>, kube::Error> {
        let lease = self.bounded(self.api.get(&self.lease)).await?;
        let version = lease.metadata.resource_version.clone().unwrap_or_default();
        seen.see(lease, Instant::now());
        let params = WatchParams::default()
            .fields(&format!("metadata.name={}", self.lease))
            .timeout(WATCH_SECONDS);
        let watch = self.bounded(self.api.watch(&params, &version)).await?;
        tokio::pin!(watch);
        loop {
            let until = match seen.standing(&self.me, Instant::now()) {
                Standing::Free => return self.claim(seen).await,
                Standing::Held { until } => until,
            };
            if !std::mem::replace(waiting, true) {
                let leader = seen.newest().and_then(record::holder);
                tracing::info!(leader, identity = self.me, "stands by");
            }
            tokio::select! {
                event = watch.next() => match event {
                    Some(Ok(WatchEvent::Added(lease) | WatchEvent::Modified(lease))) => {
                        seen.see(lease, Instant::now());
                    }
                    Some(Ok(_)) | None => return Ok(None),
                    Some(Err(error)) => return Err(error),
                },
                () = tokio::time::sleep_until(until) => {}
            }
        }
    }

    async fn claim(&self, seen: &Observed) -> Result<Option<(Lease, Instant)>, kube::Error> {
        let Some(lease) = seen.newest().cloned() else {
            return Ok(None);
        };
        let at = Instant::now();
        let claim = record::claimed(lease, &self.me, self.timing, Timestamp::now());
        match self.put(&claim).await {
            Ok(lease) => Ok(Some((lease, at))),
            Err(error) if is(&error, 409) => Ok(None),
            Err(error) => Err(error),
        }
    }

    async fn put(&self, lease: &Lease) -> Result<Lease, kube::Error> {
        let params = PostParams::default();
        self.bounded(self.api.replace(&self.lease, &params, lease))
            .await
    }

    async fn bounded<T>(
        &self,
        call: impl Future<Output = Result<T, kube::Error>>,
    ) -> Result<T, kube::Error> {
        match tokio::time::timeout(self.timing.call(), call).await {
            Ok(result) => result,
            Err(elapsed) => Err(kube::Error::Service(elapsed.into())),
        }
    }

    fn explain(&self, error: &kube::Error) {
        let hint = match error {
            error if is(error, 404) => "; apply manifests/base, which has the Lease",
            error if is(error, 403) => "; apply manifests/base, which has the Role",
            _ => "",
        };
        let error = brief(error);
        tracing::warn!(
            lease = self.lease,
            error,
            "cannot stand for election{hint}; no pod of this node is looked after until then"
        );
    }
}

// === impl Leader ===

impl Leader {
    /// The number of this claim, which hosts compare.
    pub fn term(&self) -> u64 {
        self.term
    }

    /// Renews until this process leads no more. To be stopped by being dropped.
    pub async fn lead(&self) -> Lost {
        let timing = self.election.timing;
        loop {
            let renewed = self.held().1;
            tokio::time::sleep_until(renewed + timing.renew()).await;
            match tokio::time::timeout_at(renewed + timing.renew_deadline(), self.renew()).await {
                Ok(Ok(())) => {}
                Ok(Err(lost)) => return lost,
                Err(_) => return Lost::NotRenewed(self.election.lease.clone()),
            }
        }
    }

    /// Lets another one lead at once, for an orderly end. What was begun as a
    /// leader must have ended.
    pub async fn release(&self) {
        let (lease, _) = self.held();
        let lease = record::released(lease, Timestamp::now());
        if let Err(error) = self.election.put(&lease).await {
            // The others wait a little longer.
            tracing::info!(
                error = brief(&error),
                "could not release the election Lease"
            );
        }
    }

    /// One renewal, tried until it succeeds.
    async fn renew(&self) -> Result<(), Lost> {
        let election = &self.election;
        let (mut lease, _) = self.held();
        loop {
            let at = Instant::now();
            let error = match election
                .put(&record::renewed(lease.clone(), Timestamp::now()))
                .await
            {
                Ok(lease) => {
                    self.hold(lease, at);
                    return Ok(());
                }
                Err(error) => error,
            };
            // Written by another one, or by this process in a call that seemed to fail.
            if is(&error, 409)
                && let Ok(newest) = election.bounded(election.api.get(&election.lease)).await
            {
                if record::term(&newest) != self.term
                    || record::holder(&newest) != Some(&election.me)
                {
                    let holder = record::holder(&newest).unwrap_or("nobody");
                    return Err(Lost::Replaced(holder.to_owned()));
                }
                lease = newest;
                continue;
            }
            tracing::warn!(error = brief(&error), "cannot renew the election Lease");
            tokio::time::sleep(RETRY).await;
        }
    }

    fn held(&self) -> (Lease, Instant) {
        self.held
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    fn hold(&self, lease: Lease, at: Instant) {
        *self.held.lock().unwrap_or_else(PoisonError::into_inner) = (lease, at);
    }
}

fn is(error: &kube::Error, code: u16) -> bool {
    matches!(error, kube::Error::Api(status) if status.code == code)
}

/// The machine's name; in a pod it is the pod's.
fn host_name() -> std::io::Result<String> {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname")?;
    Ok(name.trim().to_owned())
}
