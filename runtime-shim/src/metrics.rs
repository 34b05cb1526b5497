//! What this service counts, in Prometheus' text format, and its health.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{EncodeLabelSet, EncodeLabelValue};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};

use crate::handler::Verdict;
use crate::sandbox::probe;

/// Part of a sandbox's creation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelValue)]
pub enum Phase {
    /// Waiting for its turn.
    Queue,
    /// Namespaces and address.
    Network,
    /// Volumes and managed files.
    Volumes,
    /// Making the image present.
    Pull,
    /// Root file system and account files.
    Mount,
    /// Record, task and start.
    Start,
}

/// How an exec ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelValue)]
pub enum ExecResult {
    /// The process ran and ended.
    Exited,
    /// It could not be started.
    Failed,
    /// The client went away first.
    Cancelled,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct PhaseLabel {
    phase: Phase,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ResultLabel {
    result: ExecResult,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct LimitLabel {
    limit: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ProbeLabel {
    probe_type: &'static str,
    result: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct StateLabel {
    state: &'static str,
}

/// The service's metrics.
#[derive(Clone, Debug)]
pub struct Metrics {
    registry: Arc<Registry>,
    phases: Family<PhaseLabel, Histogram, fn() -> Histogram>,
    execs: Family<ResultLabel, Counter>,
    sandboxes: Family<StateLabel, Gauge>,
    probes: Family<ProbeLabel, Counter>,
    runtime_errors: Counter,
    evictions: Counter,
    open_execs: Gauge,
    waiting: Gauge<f64, AtomicU64>,
    limits: Family<LimitLabel, Gauge<f64, AtomicU64>>,
    limits_needed: Family<LimitLabel, Gauge<f64, AtomicU64>>,
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}

fn seconds() -> Histogram {
    Histogram::new([
        0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 60.0,
    ])
}

impl Metrics {
    /// Counts a pod that was evicted.
    pub fn evicted(&self) {
        self.evictions.inc();
    }

    /// Empty metrics.
    #[must_use]
    pub fn new() -> Self {
        Self::with(None)
    }

    /// Empty metrics, with those of somebody else.
    #[must_use]
    pub fn with(other: Option<Box<dyn Collector>>) -> Self {
        let mut registry = Registry::with_prefix("sandman_host");
        if let Some(other) = other {
            registry.register_collector(other);
        }
        let phases = Family::new_with_constructor(seconds as fn() -> Histogram);
        registry.register_with_unit(
            "create_phase",
            "Time that each part of a sandbox's creation takes",
            Unit::Seconds,
            phases.clone(),
        );
        let execs = Family::default();
        registry.register("execs", "Execs by how they ended", execs.clone());
        let sandboxes = Family::default();
        registry.register("sandboxes", "Sandboxes by state", sandboxes.clone());
        let runtime_errors = Counter::default();
        registry.register(
            "runtime_errors",
            "Calls to the container runtime that failed",
            runtime_errors.clone(),
        );
        let probes = Family::default();
        registry.register("probes", "Probes by kind and result", probes.clone());
        let evictions = Counter::default();
        registry.register(
            "evictions",
            "Pods that were ended for the host's sake or for their storage limits",
            evictions.clone(),
        );
        let open_execs = Gauge::default();
        registry.register("open_execs", "Execs that run now", open_execs.clone());
        let waiting = Gauge::default();
        registry.register(
            "creates_waiting",
            "Creations that wait for their turn",
            waiting.clone(),
        );
        let limits = Family::default();
        registry.register(
            "limit",
            "Limits of the kernel and of daemons that sandboxes share",
            limits.clone(),
        );
        let limits_needed = Family::default();
        registry.register(
            "limit_needed",
            "What the host's capacity of pods needs of each limit",
            limits_needed.clone(),
        );
        Self {
            registry: Arc::new(registry),
            phases,
            execs,
            sandboxes,
            probes,
            runtime_errors,
            evictions,
            open_execs,
            waiting,
            limits,
            limits_needed,
        }
    }

    /// Notes how long a part of a creation took.
    pub fn phase(&self, phase: Phase, took: Duration) {
        self.phases
            .get_or_create(&PhaseLabel { phase })
            .observe(took.as_secs_f64());
    }

    /// Counts an exec that ended.
    pub fn exec(&self, result: ExecResult) {
        self.execs.get_or_create(&ResultLabel { result }).inc();
    }

    /// Execs that run now.
    #[must_use]
    pub fn open_execs(&self) -> &Gauge {
        &self.open_execs
    }

    /// Counts a probe, under the kubelet's words for its kind and its result.
    pub fn probe(&self, kind: probe::Kind, verdict: &Verdict) {
        let probe_type = match kind {
            probe::Kind::Startup => "Startup",
            probe::Kind::Liveness => "Liveness",
            probe::Kind::Readiness => "Readiness",
        };
        let result = match verdict {
            Verdict::Success | Verdict::Warning(_) => "successful",
            Verdict::Failure(_) => "failed",
            Verdict::Unknown(_) => "unknown",
        };
        let label = ProbeLabel { probe_type, result };
        self.probes.get_or_create(&label).inc();
    }

    /// Counts a failed call to the runtime.
    pub fn runtime_error(&self) {
        self.runtime_errors.inc();
    }

    /// Sets how many sandboxes are in a state.
    pub fn sandboxes(&self, state: &'static str, count: usize) {
        let count = i64::try_from(count).unwrap_or(i64::MAX);
        self.sandboxes
            .get_or_create(&StateLabel { state })
            .set(count);
    }

    /// Sets how many creations wait.
    pub fn waiting(&self, count: usize) {
        self.waiting.set(count as f64);
    }

    /// Notes a limit, and what is needed of it.
    pub fn limit(&self, limit: &'static str, value: u64, needed: u64) {
        let label = LimitLabel { limit };
        self.limits.get_or_create(&label).set(value as f64);
        self.limits_needed.get_or_create(&label).set(needed as f64);
    }

    /// Everything as text.
    ///
    /// # Errors
    /// Only if formatting fails.
    pub fn encode(&self) -> Result<String, std::fmt::Error> {
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &self.registry)?;
        Ok(text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_stable() {
        let metrics = Metrics::new();
        metrics.phase(Phase::Queue, Duration::from_millis(3));
        metrics.exec(ExecResult::Exited);
        metrics.sandboxes("active", 2);
        metrics.runtime_error();
        metrics.limit("kernel.pid_max", 32_768, 40_000);
        metrics.probe(probe::Kind::Liveness, &Verdict::Failure(String::new()));
        let text = metrics.encode().unwrap();
        for line in [
            "sandman_host_create_phase_seconds_count{phase=\"Queue\"} 1",
            "sandman_host_execs_total{result=\"Exited\"} 1",
            "sandman_host_sandboxes{state=\"active\"} 2",
            "sandman_host_runtime_errors_total 1",
            "sandman_host_limit{limit=\"kernel.pid_max\"} 32768.0",
            "sandman_host_limit_needed{limit=\"kernel.pid_max\"} 40000.0",
            "sandman_host_probes_total{probe_type=\"Liveness\",result=\"failed\"} 1",
        ] {
            assert!(text.contains(line), "{line} not in\n{text}");
        }
    }
}
