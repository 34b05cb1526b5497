//! The pods of the node. A watch says what should be, the hosts say what is; a
//! worker per pod brings the two together and writes the status.
//!
//! The worker ([`sync`]) always looks at the newest state of both and can be
//! run at any time, any number of times. What it must know after a restart is
//! in the API server and on the hosts.

pub mod admit;
mod affinity;
mod ephemeral;
mod handlers;
mod ledger;
mod orphans;
pub mod placement;
mod resize;
pub mod resolve;
pub mod resources;
pub mod spec;
pub mod status;
mod store;
mod sync;
#[cfg(test)]
pub(crate) mod tests;
mod view;
mod write;

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::Duration;

use futures::StreamExt;
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{self, DefaultBackoff, Event};
use kube::{Api, Client};
use sandman_protocol::v1;
use tokio::sync::{Notify, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use self::ledger::Ledger;
use self::resolve::objects::Objects;
use self::resolve::services::Services;
use self::store::{Entry, Store};
use self::sync::SyncError;
use crate::config::Config;
use crate::errors::brief;
use crate::events::Events;
use crate::hosts::{Connection, Hosts, Observer, Uid};
use crate::metrics::{HostLabel, Metrics};
use crate::queue::Queue;
use crate::view::HostName;

/// Pods that are worked on at once. Workers mostly wait for the API server.
const WORKERS: usize = 64;
/// A run that takes longer hangs on a dead connection; it is repeated.
const SYNC_LIMIT: Duration = Duration::from_secs(60);
/// How long placement waits for hosts to connect after the start, so that the
/// first pods do not all go to the first host.
const SETTLE: Duration = Duration::from_secs(5);
/// Pods that wait for room look for it no more often than this, however many
/// others make room one by one.
const ROOM_INTERVAL: Duration = Duration::from_secs(1);

/// Runs the pods of one node.
pub struct PodController {
    config: Arc<Config>,
    client: Client,
    hosts: Arc<Hosts>,
    metrics: Metrics,
    store: Store,
    queue: Queue<Uid>,
    /// Sandboxes of each host that belong to no pod of ours, as far as known.
    orphans: HashMap<HostName, Queue<Uid>>,
    ledger: Mutex<Ledger>,
    /// Pods that wait for room.
    unplaced: Mutex<HashSet<Uid>>,
    /// There may be room for them.
    room: Notify,
    /// Pods of DaemonSets that are held back.
    held: Mutex<HashSet<Uid>>,
    objects: Objects,
    services: Services,
    runtime_handlers: Mutex<HashMap<String, String>>,
    events: Events,
    /// The Node object as it is watched.
    node: OnceLock<watch::Receiver<Option<Arc<Node>>>>,
    /// Whether the list of pods was complete once.
    listed: watch::Sender<bool>,
    /// When a worker last ended a run.
    progress: Mutex<Instant>,
    /// Set at the end: every status is written without delay.
    flushing: AtomicBool,
}

// === impl PodController ===

impl PodController {
    /// A controller that has not started.
    pub fn new(
        config: Arc<Config>,
        client: Client,
        hosts: Arc<Hosts>,
        events: Events,
        metrics: Metrics,
    ) -> Arc<Self> {
        Arc::new_cyclic(|this: &Weak<Self>| {
            let weak = Weak::clone(this);
            let on_change = move |users: &HashSet<Uid>| {
                if let Some(this) = weak.upgrade() {
                    for uid in users {
                        this.references_changed(uid);
                    }
                }
            };
            let host_names = hosts.views().into_iter().map(|view| view.name);
            Self {
                orphans: host_names.map(|name| (name, Queue::new())).collect(),
                objects: Objects::new(&client, Arc::new(on_change)),
                config,
                client,
                hosts,
                metrics,
                store: Store::default(),
                queue: Queue::new(),
                ledger: Mutex::default(),
                unplaced: Mutex::default(),
                room: Notify::new(),
                held: Mutex::default(),
                services: Services::new(),
                runtime_handlers: Mutex::default(),
                events,
                node: OnceLock::new(),
                listed: watch::Sender::new(false),
                progress: Mutex::new(Instant::now()),
                flushing: AtomicBool::new(false),
            }
        })
    }

    /// Tells where the Node object is seen. Call once, before the start.
    pub fn follow_node(&self, node: watch::Receiver<Option<Arc<Node>>>) {
        let _ = self.node.set(node);
    }

    /// Starts everything; `tasks` end after `shutdown`. Call once.
    pub fn start(self: &Arc<Self>, tasks: &TaskTracker, shutdown: &CancellationToken) {
        let run = |this: &Arc<Self>| (Arc::clone(this), shutdown.clone());
        let (this, stop) = run(self);
        tasks.spawn(async move { stop.run_until_cancelled(this.watch()).await });
        let (this, stop) = run(self);
        tasks.spawn(async move {
            stop.run_until_cancelled(this.services.run(this.client.clone()))
                .await
        });
        let (this, stop) = run(self);
        tasks.spawn(async move { stop.run_until_cancelled(this.follow_services()).await });
        let (this, stop) = run(self);
        tasks.spawn(async move { stop.run_until_cancelled(this.follow_room()).await });
        // One a host, so that one that hangs keeps the orphans of no other.
        for host in self.hosts.views() {
            let (this, stop) = run(self);
            tasks.spawn(async move {
                stop.run_until_cancelled(this.collect_orphans(&host.name))
                    .await
            });
        }
        for _ in 0..WORKERS {
            let (this, stop) = run(self);
            tasks.spawn(async move { this.work(&stop).await });
        }
    }

    /// Writes every status that waits to be written, for an orderly end. The
    /// workers must have stopped.
    pub async fn flush(self: &Arc<Self>) {
        self.flushing.store(true, Ordering::Relaxed);
        let mut writes = futures::stream::iter(self.store.all())
            .map(|entry| {
                let this = Arc::clone(self);
                async move {
                    if entry.work.lock().await.unwritten.is_some() {
                        // Best effort: the next process writes it otherwise.
                        let _ = this.sync(&entry.uid).await;
                    }
                }
            })
            .buffer_unordered(WORKERS);
        while writes.next().await.is_some() {}
    }

    /// Turns true once the pods of the node were listed.
    pub fn listed(&self) -> watch::Receiver<bool> {
        self.listed.subscribe()
    }

    /// Whether pods are being worked on; the error says what is stuck.
    ///
    /// # Errors
    /// When pods wait and no worker has ended a run for a long time.
    pub fn check_progress(&self) -> Result<(), String> {
        let idle = lock(&self.progress).elapsed();
        let waiting = self.queue.depth();
        if waiting > 0 && idle > 2 * SYNC_LIMIT {
            return Err(format!(
                "{waiting} pods wait and none was worked on for {idle:.0?}"
            ));
        }
        Ok(())
    }

    /// Follows the pods bound to this node.
    async fn watch(&self) {
        let api: Api<Pod> = Api::all(self.client.clone());
        let selector = format!("spec.nodeName={}", self.config.node_name);
        let events = watcher::watcher(api, watcher::Config::default().fields(&selector))
            .backoff(DefaultBackoff::default());
        tokio::pin!(events);
        let mut listing: HashSet<Uid> = HashSet::new();
        while let Some(event) = events.next().await {
            match event {
                Ok(Event::Init) => listing.clear(),
                Ok(Event::InitApply(pod)) => {
                    listing.extend(pod.metadata.uid.as_deref().map(Uid::from));
                    self.observe(pod);
                }
                Ok(Event::InitDone) => self.list_complete(&std::mem::take(&mut listing)),
                Ok(Event::Apply(pod)) => self.observe(pod),
                Ok(Event::Delete(pod)) => {
                    if let Some(uid) = &pod.metadata.uid {
                        self.pod_gone(uid);
                    }
                }
                Err(error) => tracing::warn!(error = brief(&error), "watching pods"),
            }
            self.metrics
                .pods
                .set(i64::try_from(self.store.len()).unwrap_or(i64::MAX));
        }
    }

    fn observe(&self, pod: Pod) {
        if let Some(entry) = self.store.observe(pod) {
            self.queue.add(Uid::clone(&entry.uid));
        }
    }

    /// Pods that are not in a complete list are gone, whatever the watch missed.
    fn list_complete(&self, listing: &HashSet<Uid>) {
        for entry in self.store.all() {
            if !listing.contains(&entry.uid) {
                self.pod_gone(&entry.uid);
            }
        }
        self.listed.send_replace(true);
        tracing::info!(pods = listing.len(), "listed the pods of the node");
        for host in self.hosts.views() {
            self.check_orphans(&host.name, &self.hosts.uids(&host.name));
        }
    }

    /// The API server has no such pod any more.
    fn pod_gone(&self, uid: &str) {
        let Some(entry) = self.store.remove(uid) else {
            return;
        };
        for host in self.hosts.reporting(uid) {
            if let Some(orphans) = self.orphans.get(&host) {
                orphans.add(Uid::clone(&entry.uid));
            }
        }
        self.release(&entry.uid);
    }

    /// Drops all that is kept for a pod besides its entry.
    fn release(&self, uid: &Uid) {
        self.objects.release(uid);
        self.queue.forget(uid);
        lock(&self.unplaced).remove(uid);
        self.release_hold(uid);
        self.room_was_made(uid);
    }

    /// Frees the pod's share of its host, and lets others have it.
    fn room_was_made(&self, uid: &str) {
        if lock(&self.ledger).release(uid).is_some() {
            self.try_unplaced();
        }
    }

    fn try_unplaced(&self) {
        self.room.notify_one();
    }

    /// Runs the pods that wait for room when there may be some.
    async fn follow_room(&self) {
        loop {
            self.room.notified().await;
            let unplaced: Vec<Uid> = lock(&self.unplaced).iter().cloned().collect();
            if unplaced.is_empty() {
                continue;
            }
            for uid in unplaced {
                self.queue.add(uid);
            }
            tokio::time::sleep(ROOM_INTERVAL).await;
        }
    }

    fn references_changed(&self, uid: &Uid) {
        if let Some(entry) = self.store.get(uid) {
            entry.changed.store(true, Ordering::Relaxed);
            self.queue.add(Uid::clone(uid));
        }
    }

    /// Pods that waited for the first list of services go on.
    async fn follow_services(&self) {
        if self
            .services
            .synced()
            .wait_for(|synced| *synced)
            .await
            .is_ok()
        {
            for entry in self.store.all() {
                self.queue.add(Uid::clone(&entry.uid));
            }
        }
    }

    /// One worker.
    async fn work(&self, stop: &CancellationToken) {
        if stop
            .run_until_cancelled(self.hosts.settled(SETTLE))
            .await
            .is_none()
        {
            return;
        }
        // A pod in work is finished before the worker stops.
        while let Some(uid) = stop.run_until_cancelled(self.queue.take()).await {
            let start = Instant::now();
            let sync = Box::pin(self.sync(&uid));
            let result = match tokio::time::timeout(SYNC_LIMIT, sync).await {
                Ok(result) => result,
                Err(_) => Err(SyncError::Late),
            };
            *lock(&self.progress) = Instant::now();
            self.metrics
                .sync_seconds
                .observe(start.elapsed().as_secs_f64());
            self.metrics
                .queue_depth
                .set(i64::try_from(self.queue.depth()).unwrap_or(i64::MAX));
            let retry = self.queue.done(&uid, result.is_ok());
            if self.store.get(&uid).is_none() {
                // It vanished meanwhile, and the run may have booked it again.
                self.release(&uid);
            }
            if let Err(error) = result {
                self.metrics.sync_failures.inc();
                let retry_ms = retry.map(|delay| delay.as_millis());
                tracing::warn!(pod_uid = &*uid, %error, ?retry_ms, "pod is not in sync yet");
            }
        }
    }

    /// The pod's host, also before its worker has looked.
    fn placed_on(&self, entry: &Entry) -> Option<HostName> {
        entry.host().or_else(|| {
            let pod = entry.api();
            self.hosts.by_ip(pod.status.as_ref()?.host_ip.as_deref()?)
        })
    }

    fn entries_on<'a>(&self, host: &'a HostName) -> impl Iterator<Item = Arc<Entry>> + use<'a> {
        self.store
            .all()
            .into_iter()
            .filter(move |entry| entry.host().as_ref() == Some(host))
    }
}

impl Observer for PodController {
    fn sandboxes_changed(&self, host: &HostName, uids: &[Uid]) {
        for uid in uids {
            match self.store.get(uid) {
                Some(entry) if self.placed_on(&entry).is_none_or(|placed| placed == *host) => {
                    self.queue.add(Uid::clone(uid));
                }
                known => {
                    if known.is_some() {
                        let label = HostLabel {
                            host: host.to_string(),
                        };
                        self.metrics.foreign_reports.get_or_create(&label).inc();
                    }
                    self.check_orphans(host, std::slice::from_ref(uid));
                }
            }
        }
    }

    fn connection_changed(&self, host: &HostName) {
        // What was left over while the host was away is no change in its list.
        let view = self.hosts.view(host);
        if view.is_some_and(|view| view.connection == Connection::Synced) {
            self.check_orphans(host, &self.hosts.uids(host));
        }
        for entry in self.entries_on(host) {
            self.queue.add(Uid::clone(&entry.uid));
        }
        self.try_unplaced();
    }

    fn inventory_changed(&self, _: &HostName) {
        self.try_unplaced();
    }

    fn event(&self, host: &HostName, event: v1::SandboxEvent) {
        match self.store.get(&event.uid) {
            Some(entry) if self.placed_on(&entry).as_ref() == Some(host) => {
                self.events.from_host(&entry.api(), event);
            }
            _ => tracing::debug!(%host, pod_uid = event.uid, "event about a foreign sandbox"),
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
