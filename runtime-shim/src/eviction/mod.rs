//! Keeps the host alive when pods use more than there is: conditions for the virtual node, and
//! the end of one pod after the other until the host is well again. Order, thresholds and texts
//! are the kubelet's (`pkg/kubelet/eviction`).
//!
//! `threshold` says when the host is short of what, `rank` whom that costs the place and why;
//! both are pure. `measure` and `alarm` ask the kernel.

mod alarm;
pub(crate) mod measure;
mod rank;
mod threshold;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use sandman_protocol::v1;
use tokio::sync::watch;
use tokio::time::{Instant, MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

pub(crate) use self::rank::Disk;
pub use self::threshold::Thresholds;

use self::alarm::Alarm;
use self::rank::{Candidate, Usage, has_storage_limit, message, storage_violation, victim};
use self::threshold::{Conditions, Shortage, Signal};
use crate::layers::Layers;
use crate::sandbox::Sandboxes;
use crate::sandbox::view::View;

/// Time between looks (`evictionMonitoringPeriod` of the kubelet): nothing tells that a file
/// system fills up.
const PERIOD: Duration = Duration::from_secs(10);
/// The kernel rings again and again while memory is short.
const SHORTEST: Duration = Duration::from_secs(1);
/// How long the end of one pod is waited for before the next must go (`podCleanupTimeout`).
const PATIENCE: Duration = Duration::from_secs(30);

/// The conditions of the host, as they change.
#[derive(Clone, Debug)]
pub struct Pressure(watch::Receiver<Vec<v1::HostCondition>>);

impl Pressure {
    /// As of now.
    #[must_use]
    pub fn conditions(&self) -> Vec<v1::HostCondition> {
        self.0.borrow().clone()
    }

    /// Waits for the next change; never returns once there will be none.
    pub async fn changed(&mut self) {
        if self.0.changed().await.is_err() {
            std::future::pending().await
        }
    }
}

/// Looks after the host.
pub struct Monitor {
    sandboxes: Arc<Sandboxes>,
    layers: Option<Arc<Layers>>,
    thresholds: Thresholds,
    data_dir: PathBuf,
    conditions: Conditions,
    report: watch::Sender<Vec<v1::HostCondition>>,
    /// The sandbox that goes, and until when it is waited for.
    going: Option<(String, Instant)>,
}

impl Monitor {
    /// Takes the first look, so that the host's first word is already true.
    #[must_use]
    pub fn new(
        sandboxes: Arc<Sandboxes>,
        layers: Option<Arc<Layers>>,
        thresholds: Thresholds,
        data_dir: PathBuf,
    ) -> (Self, Pressure) {
        let (report, reported) = watch::channel(Vec::new());
        let mut monitor = Self {
            sandboxes,
            layers,
            thresholds,
            data_dir,
            conditions: Conditions::default(),
            report,
            going: None,
        };
        let shortages = monitor
            .thresholds
            .shortages(&measure::levels(&monitor.data_dir, None));
        monitor.note(&shortages);
        (monitor, Pressure(reported))
    }

    /// Looks until `shutdown`.
    pub async fn run(mut self, shutdown: CancellationToken) {
        let mut alarm = Alarm::set();
        let mut tick = interval(PERIOD);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut images = None;
        loop {
            tokio::select! {
                _ = tick.tick() => {}
                () = alarm.rings() => tokio::time::sleep(SHORTEST).await,
                () = shutdown.cancelled() => return,
            }
            if images.is_none() {
                images = self.sandboxes.host().rootfs.folder().await;
            }
            self.look(images.clone()).await;
        }
    }

    async fn look(&mut self, images: Option<PathBuf>) {
        let data_dir = self.data_dir.clone();
        let layers = self.layers.clone();
        // A file system may make the caller wait.
        let levels = tokio::task::spawn_blocking(move || {
            // Layers grow as they are read, without a pull that would look after it.
            if let Some(Err(error)) = layers.map(|layers| layers.keep_limits()) {
                warn!(%error, "cannot remove layers");
            }
            measure::levels(&data_dir, images.as_deref())
        });
        let levels = match levels.await {
            Ok(levels) => levels,
            Err(error) => {
                warn!(%error, "cannot measure the host");
                return;
            }
        };
        let shortages = self.thresholds.shortages(&levels);
        self.note(&shortages);
        if self.keep_limits().await || self.waits() {
            return;
        }
        // All that are short are reported; the worst is acted upon.
        if let Some(shortage) = shortages.first() {
            self.relieve(shortage).await;
        }
    }

    fn note(&mut self, shortages: &[Shortage]) {
        let transition =
            SignedDuration::from_secs(self.thresholds.pressure_transition_seconds.into());
        let now = self
            .conditions
            .update(shortages, transition, Timestamp::now());
        self.report.send_if_modified(|before| {
            let news = *before != now;
            if news {
                let active = now.iter().filter(|condition| condition.active);
                let names: Vec<_> = active.map(|c| c.kind().as_str_name()).collect();
                info!(conditions = names.join(" "), "conditions of the host");
                *before = now;
            }
            news
        });
    }

    /// Whether the pod that was evicted last is still on its way out.
    fn waits(&mut self) -> bool {
        let Some((uid, until)) = &self.going else {
            return false;
        };
        let gone = self
            .sandboxes
            .view(uid)
            .is_none_or(|view| !matches!(view.lifecycle, v1::Lifecycle::Active));
        if gone || *until <= Instant::now() {
            self.going = None;
        }
        !gone && self.going.is_some()
    }

    /// Ends the pods that store more than they may; true if there were any.
    async fn keep_limits(&mut self) -> bool {
        let mut any = false;
        for (spec, view) in self.active() {
            if !has_storage_limit(&spec) {
                continue;
            }
            let usage = self.usage(&spec, &view, true).await;
            if let Some(message) = storage_violation(&spec, &usage) {
                self.evict(&spec, &message);
                any = true;
            }
        }
        any
    }

    async fn relieve(&mut self, shortage: &Shortage) {
        let disk = !matches!(shortage.signal, Signal::Memory | Signal::Pids);
        // What nobody uses goes before what somebody does.
        if disk && self.free_layers(shortage).await {
            return;
        }
        let mut candidates = Vec::new();
        for (spec, view) in self.active() {
            let usage = self.usage(&spec, &view, disk).await;
            candidates.push(Candidate { spec, usage });
        }
        match victim(&candidates, shortage.signal) {
            Some(candidate) => {
                let message = message(candidate, shortage);
                self.evict(&candidate.spec, &message);
                let until = Instant::now() + PATIENCE;
                self.going = Some((candidate.spec.uid.clone(), until));
            }
            None => warn!(?shortage, "the host is short, and there is no pod to evict"),
        }
    }

    /// Removes unused layers until the shortage is over; whether any was removed.
    async fn free_layers(&self, shortage: &Shortage) -> bool {
        let Some(layers) = self.layers.clone() else {
            return false;
        };
        let missing = shortage.wanted.saturating_sub(shortage.available);
        let inodes = matches!(shortage.signal, Signal::DiskInodes | Signal::ImageInodes);
        let (bytes, inodes) = if inodes { (0, missing) } else { (missing, 0) };
        let freed = tokio::task::spawn_blocking(move || layers.free(bytes, inodes)).await;
        match freed {
            Ok(Ok(pruned)) => !pruned.layers.is_empty(),
            Ok(Err(error)) => {
                warn!(%error, "cannot remove layers");
                false
            }
            Err(error) => {
                warn!(%error, "cannot remove layers");
                false
            }
        }
    }

    fn evict(&self, spec: &v1::SandboxSpec, message: &str) {
        warn!(
            pod_uid = spec.uid,
            namespace = spec.namespace,
            pod = spec.name,
            message,
            "evicting"
        );
        self.sandboxes.host().metrics.evicted();
        self.sandboxes.evict(&spec.uid, message);
    }

    /// Sandboxes of which something runs.
    fn active(&self) -> Vec<(v1::SandboxSpec, Arc<View>)> {
        let runs = |view: &View| {
            view.lifecycle == v1::Lifecycle::Active
                && view
                    .containers
                    .values()
                    .any(|container| container.running_attempt().is_some())
        };
        let all = self.sandboxes.specs().into_iter();
        all.filter_map(|spec| {
            let view = self.sandboxes.view(&spec.uid)?;
            runs(&view).then_some((spec, view))
        })
        .collect()
    }

    async fn usage(&self, spec: &v1::SandboxSpec, view: &View, disk: bool) -> Usage {
        let host = self.sandboxes.host();
        let mut usage = Usage::default();
        let cgroup = &view.cgroup;
        let figures = |path: PathBuf| host.stats.cgroup_usage(&path.to_string_lossy()).ok();
        if let Some(figures) = figures(cgroup.clone()) {
            usage.memory = figures.memory_working_set_bytes;
            usage.processes = figures.processes;
        }
        for (name, container) in &view.containers {
            let Some(attempt) = &container.attempt else {
                continue;
            };
            if let Some(figures) = figures(cgroup.join(&attempt.id)) {
                let memory = figures.memory_working_set_bytes;
                usage.container_memory.insert(name.clone(), memory);
            }
            if disk {
                let layer = host.rootfs.usage(&attempt.id).await.unwrap_or_default();
                let logs = host.logs.usage(&spec.uid, name).await.unwrap_or_default();
                let sum = Disk {
                    bytes: layer.bytes.saturating_add(logs.bytes),
                    inodes: layer.inodes.saturating_add(logs.inodes),
                };
                usage.container_disk.insert(name.clone(), sum);
            }
        }
        if disk {
            for volume in &spec.volumes {
                if matches!(&volume.source, Some(v1::volume::Source::EmptyDir(dir)) if !dir.memory)
                    && let Ok(used) = host.volumes.usage(&spec.uid, &volume.name).await
                {
                    usage.volumes.insert(volume.name.clone(), used);
                }
            }
        }
        usage
    }
}
