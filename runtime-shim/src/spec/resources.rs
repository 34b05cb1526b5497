//! cgroup values of a container, by the kubelet's formulas (pkg/kubelet/cm/helpers_linux.go and
//! pkg/kubelet/qos/policy.go).

use std::path::{Path, PathBuf};

use oci_spec::runtime::{
    LinuxCpuBuilder, LinuxDeviceCgroupBuilder, LinuxMemoryBuilder, LinuxPidsBuilder,
    LinuxResources, LinuxResourcesBuilder,
};
use sandman_protocol::v1;
use serde::{Deserialize, Serialize};

use super::SpecError;

const MIN_SHARES: u64 = 2;
const MAX_SHARES: u64 = 262_144;
const SHARES_PER_CPU: u64 = 1024;
/// Length of the scheduler's period in microseconds.
pub const PERIOD: u64 = 100_000;
/// Shortest quota that the kernel takes, in microseconds.
const MIN_QUOTA: u64 = 1_000;

const OOM_GUARANTEED: i32 = -997;
const OOM_BEST_EFFORT: i32 = 1000;

/// Weight among siblings for a request in thousandths of a processor.
#[must_use]
pub fn cpu_shares(millis: u64) -> u64 {
    (millis.saturating_mul(SHARES_PER_CPU) / 1000).clamp(MIN_SHARES, MAX_SHARES)
}

/// Microseconds per period for a limit in thousandths of a processor; `None` is no limit.
#[must_use]
pub fn cpu_quota(millis: u64) -> Option<i64> {
    (millis > 0).then(|| {
        let quota = (millis.saturating_mul(PERIOD) / 1000).max(MIN_QUOTA);
        i64::try_from(quota).unwrap_or(i64::MAX)
    })
}

/// Limits and weights of a container.
///
/// # Errors
/// None in practice.
pub fn limits(
    wish: &v1::ContainerResources,
    pids_limit: u32,
    all_devices: bool,
) -> Result<LinuxResources, SpecError> {
    let request = if wish.cpu_request_millis > 0 {
        wish.cpu_request_millis
    } else {
        wish.cpu_limit_millis
    };
    let mut cpu = LinuxCpuBuilder::default().shares(cpu_shares(request));
    if let Some(quota) = cpu_quota(wish.cpu_limit_millis) {
        cpu = cpu.quota(quota).period(PERIOD);
    }
    // The runtime adds the harmless nodes (null, zero, tty, ...) to whatever stands here.
    let devices = LinuxDeviceCgroupBuilder::default()
        .allow(all_devices)
        .access("rwm")
        .build()?;
    let mut resources = LinuxResourcesBuilder::default()
        .cpu(cpu.build()?)
        .devices(vec![devices]);
    if wish.memory_limit_bytes > 0 {
        let limit = i64::try_from(wish.memory_limit_bytes).unwrap_or(i64::MAX);
        resources = resources.memory(LinuxMemoryBuilder::default().limit(limit).build()?);
    }
    if pids_limit > 0 {
        resources = resources.pids(
            LinuxPidsBuilder::default()
                .limit(i64::from(pids_limit))
                .build()?,
        );
    }
    Ok(resources.build()?)
}

/// What a container's cgroup is made from: where it has no limit of its own, the pod's stands
/// (`GetLimits` of `pkg/kubelet/util`).
#[must_use]
pub fn effective(sandbox: &v1::SandboxSpec, container: &v1::Container) -> v1::ContainerResources {
    let own = container.resources.unwrap_or_default();
    let pod = sandbox.pod_resources.unwrap_or_default();
    let or = |own: u64, pod: u64| if own > 0 { own } else { pod };
    v1::ContainerResources {
        cpu_limit_millis: or(own.cpu_limit_millis, pod.cpu_limit_millis),
        memory_limit_bytes: or(own.memory_limit_bytes, pod.memory_limit_bytes),
        ..own
    }
}

/// The same as [`limits`] for a process that runs: what is without a limit now says so, because it
/// may have had one.
///
/// # Errors
/// None in practice.
pub fn change(wish: &v1::ContainerResources) -> Result<LinuxResources, SpecError> {
    let limits = limits(wish, 0, false)?;
    let mut cpu = limits.cpu().clone().unwrap_or_default();
    if cpu.quota().is_none() {
        cpu.set_quota(Some(-1)).set_period(Some(PERIOD));
    }
    let memory = match limits.memory() {
        Some(memory) => *memory,
        None => LinuxMemoryBuilder::default().limit(-1).build()?,
    };
    let mut changed = LinuxResources::default();
    changed
        .set_cpu(Some(cpu))
        .set_memory(Some(memory))
        .set_devices(None);
    Ok(changed)
}

/// How much a pod was promised (`v1qos.ComputePodQOS`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Qos {
    /// All that it may use.
    Guaranteed,
    /// Some of it.
    Burstable,
    /// Nothing.
    BestEffort,
}

impl Qos {
    /// Every class.
    pub const ALL: [Self; 3] = [Self::Guaranteed, Self::Burstable, Self::BestEffort];

    /// The cgroup between the pods' parent and the pod (`pkg/kubelet/cm/qos_container_manager_linux.go`).
    #[must_use]
    pub fn cgroup(self) -> Option<&'static str> {
        match self {
            Self::Guaranteed => None,
            Self::Burstable => Some("burstable"),
            Self::BestEffort => Some("besteffort"),
        }
    }
}

/// The memory cgroup that sandboxes without requests and limits share: those of a sandbox of its
/// own would cost the kernel more than the sandbox does, and bound nothing. Their class never
/// changes, so none of them is ever given a limit.
#[must_use]
pub fn shared_memory(parent: &Path, sandbox: &v1::SandboxSpec) -> Option<PathBuf> {
    (qos(sandbox) == Qos::BestEffort).then(|| shared_cgroup(parent))
}

/// The cgroup of the class whose sandboxes share their memory cgroup.
#[must_use]
pub fn shared_cgroup(parent: &Path) -> PathBuf {
    parent.join(Qos::BestEffort.cgroup().unwrap_or_default())
}

/// What the cgroup of a whole pod is set to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PodLimits {
    /// Weight among pods.
    pub cpu_shares: u64,
    /// Microseconds per [`PERIOD`]; `None` is no limit.
    pub cpu_quota: Option<i64>,
    /// Bytes; `None` is no limit.
    pub memory: Option<u64>,
}

impl PodLimits {
    /// Limits under which both fit.
    #[must_use]
    pub fn join(self, other: Self) -> Self {
        Self {
            cpu_shares: self.cpu_shares.max(other.cpu_shares),
            cpu_quota: self.cpu_quota.zip(other.cpu_quota).map(|(a, b)| a.max(b)),
            memory: self.memory.zip(other.memory).map(|(a, b)| a.max(b)),
        }
    }
}

/// The limits of a pod's cgroup (`ResourceConfigForPod` of `pkg/kubelet/cm/helpers_linux.go`).
/// `None` for a pod that was promised nothing: it needs no cgroup of its own.
#[must_use]
pub fn pod_limits(sandbox: &v1::SandboxSpec) -> Option<PodLimits> {
    if qos(sandbox) == Qos::BestEffort {
        return None;
    }
    let own = sandbox.pod_resources.unwrap_or_default();
    // A limit for the pod counts only if no container is without.
    let sum = |of: fn(&v1::ContainerResources) -> u64, own: u64| {
        if own > 0 {
            return Some(own);
        }
        let all = sandbox.init_containers.iter().chain(&sandbox.containers);
        let mut all = all.map(|container| of(&container.resources.unwrap_or_default()));
        all.all(|value| value > 0).then(|| aggregate(sandbox, of))
    };
    Some(PodLimits {
        cpu_shares: cpu_shares(sandbox.requests.unwrap_or_default().cpu_millis),
        cpu_quota: sum(|r| r.cpu_limit_millis, own.cpu_limit_millis).and_then(cpu_quota),
        memory: sum(|r| r.memory_limit_bytes, own.memory_limit_bytes),
    })
}

/// What all containers need at once: regular ones and sidecars together, each init container beside
/// the sidecars before it (`k8s.io/component-helpers/resource`).
fn aggregate(sandbox: &v1::SandboxSpec, of: fn(&v1::ContainerResources) -> u64) -> u64 {
    let value = |container: &v1::Container| of(&container.resources.unwrap_or_default());
    let mut running = 0_u64;
    let mut peak = 0_u64;
    for container in &sandbox.init_containers {
        let value = value(container);
        peak = peak.max(running.saturating_add(value));
        if container.sidecar {
            running = running.saturating_add(value);
        }
    }
    for container in &sandbox.containers {
        running = running.saturating_add(value(container));
    }
    peak.max(running)
}

/// The class of a sandbox.
#[must_use]
pub fn qos(sandbox: &v1::SandboxSpec) -> Qos {
    let all = || {
        // Resources of the pod itself decide alone.
        let own = sandbox.pod_resources;
        let containers = sandbox.init_containers.iter().chain(&sandbox.containers);
        let containers = containers.filter(move |_| own.is_none());
        let containers = containers.map(|c| c.resources.unwrap_or_default());
        own.into_iter().chain(containers)
    };
    let guaranteed = |r: &v1::ContainerResources| {
        r.cpu_limit_millis > 0
            && r.memory_limit_bytes > 0
            && r.cpu_request_millis == r.cpu_limit_millis
            && r.memory_request_bytes == r.memory_limit_bytes
    };
    let nothing = |r: &v1::ContainerResources| {
        let v1::ContainerResources {
            cpu_request_millis,
            cpu_limit_millis,
            memory_request_bytes,
            memory_limit_bytes,
            ephemeral_storage_limit_bytes: _,
            ephemeral_storage_request_bytes: _,
        } = r;
        [
            cpu_request_millis,
            cpu_limit_millis,
            memory_request_bytes,
            memory_limit_bytes,
        ]
        .into_iter()
        .all(|value| *value == 0)
    };
    if all().all(|r| nothing(&r)) {
        Qos::BestEffort
    } else if all().all(|r| guaranteed(&r)) {
        Qos::Guaranteed
    } else {
        Qos::Burstable
    }
}

/// How readily the kernel kills a container when memory is short, −1000 to 1000
/// (`GetContainerOOMScoreAdjust` of `pkg/kubelet/qos/policy.go`).
#[must_use]
pub fn oom_score_adj(sandbox: &v1::SandboxSpec, container: &v1::Container, host_bytes: u64) -> i32 {
    match qos(sandbox) {
        Qos::Guaranteed => OOM_GUARANTEED,
        Qos::BestEffort => OOM_BEST_EFFORT,
        Qos::Burstable => {
            let mut bytes = memory_request(container);
            if container.sidecar {
                // It is not killed before those that it serves.
                let served = sandbox.containers.iter().map(memory_request).min();
                bytes = bytes.max(served.unwrap_or(0));
            }
            let bytes = bytes.saturating_add(share_of_the_rest(sandbox));
            let used = u128::from(bytes) * 1000 / u128::from(host_bytes.max(1));
            let score = 1000 - i32::try_from(used).unwrap_or(1000).min(1000);
            score.clamp(OOM_BEST_EFFORT + OOM_GUARANTEED, OOM_BEST_EFFORT - 1)
        }
    }
}

fn memory_request(container: &v1::Container) -> u64 {
    container
        .resources
        .map_or(0, |resources| resources.memory_request_bytes)
}

/// What the pod asks for beyond its containers, in equal parts for each of them.
fn share_of_the_rest(sandbox: &v1::SandboxSpec) -> u64 {
    let pod = sandbox.pod_resources.unwrap_or_default();
    let asked = aggregate(sandbox, |resources| resources.memory_request_bytes);
    let count = sandbox.init_containers.len() + sandbox.containers.len();
    let count = u64::try_from(count.max(1)).unwrap_or(u64::MAX);
    pod.memory_request_bytes.saturating_sub(asked) / count
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formulas_are_the_kubelets() {
        for (millis, shares) in [
            (0, 2),
            (1, 2),
            (100, 102),
            (1000, 1024),
            (1_000_000, 262_144),
        ] {
            assert_eq!(cpu_shares(millis), shares, "{millis}");
        }
        for (millis, quota) in [
            (0, None),
            (1, Some(1000)),
            (100, Some(10_000)),
            (2500, Some(250_000)),
        ] {
            assert_eq!(cpu_quota(millis), quota, "{millis}");
        }
    }

    fn sandbox(resources: &[v1::ContainerResources]) -> v1::SandboxSpec {
        let containers = resources.iter().map(|r| v1::Container {
            resources: Some(*r),
            ..Default::default()
        });
        v1::SandboxSpec {
            containers: containers.collect(),
            ..Default::default()
        }
    }

    #[test]
    fn oom_scores_follow_the_qos_class() {
        let none = v1::ContainerResources::default();
        let full = v1::ContainerResources {
            cpu_request_millis: 1,
            cpu_limit_millis: 1,
            memory_request_bytes: 1,
            memory_limit_bytes: 1,
            ..none
        };
        let with = |request: u64| v1::ContainerResources {
            memory_request_bytes: request,
            ..full
        };
        let score = |sandbox: &v1::SandboxSpec| oom_score_adj(sandbox, &sandbox.containers[0], 100);
        assert_eq!(score(&sandbox(&[none])), 1000);
        assert_eq!(score(&sandbox(&[full])), -997);
        assert_eq!(score(&sandbox(&[with(10), none])), 900);
        assert_eq!(score(&sandbox(&[with(0), none])), 999);
        assert_eq!(score(&sandbox(&[with(100), none])), 3);
        // Half of what the pod asks for beyond its containers.
        let mut spec = sandbox(&[with(10), none]);
        spec.pod_resources = Some(with(30));
        assert_eq!(score(&spec), 800);
        // A sidecar has at least what the smallest of the others has.
        let mut sidecar = sandbox(&[none]).containers.remove(0);
        sidecar.sidecar = true;
        let mut spec = sandbox(&[with(10), with(20)]);
        spec.init_containers = vec![sidecar.clone()];
        assert_eq!(oom_score_adj(&spec, &sidecar, 100), 900);
    }

    #[test]
    fn a_pod_is_bounded_when_all_in_it_are() {
        let none = v1::ContainerResources::default();
        let bounded = v1::ContainerResources {
            cpu_request_millis: 100,
            cpu_limit_millis: 200,
            memory_limit_bytes: 10,
            ..none
        };
        assert_eq!(pod_limits(&sandbox(&[none])), None);
        let mut spec = sandbox(&[bounded, bounded]);
        spec.requests = Some(v1::Resources {
            cpu_millis: 200,
            ..Default::default()
        });
        let limits = pod_limits(&spec).unwrap();
        assert_eq!(limits.cpu_shares, 204);
        assert_eq!((limits.cpu_quota, limits.memory), (Some(40_000), Some(20)));
        let open = pod_limits(&sandbox(&[bounded, none])).unwrap();
        assert_eq!((open.cpu_quota, open.memory), (None, None));
        // The pod's own limit counts whatever its containers say.
        spec.pod_resources = Some(v1::ContainerResources {
            memory_limit_bytes: 15,
            memory_request_bytes: 5,
            ..none
        });
        let limits = pod_limits(&spec).unwrap();
        assert_eq!((limits.cpu_quota, limits.memory), (Some(40_000), Some(15)));
        // An init container that needs more than the others together.
        spec.pod_resources = None;
        spec.init_containers = vec![v1::Container {
            resources: Some(v1::ContainerResources {
                memory_limit_bytes: 100,
                ..bounded
            }),
            ..Default::default()
        }];
        assert_eq!(pod_limits(&spec).unwrap().memory, Some(100));
    }

    #[test]
    fn the_pods_own_resources_decide_its_class() {
        let none = v1::ContainerResources::default();
        let mut spec = sandbox(&[none]);
        assert_eq!(qos(&spec), Qos::BestEffort);
        spec.pod_resources = Some(v1::ContainerResources {
            memory_request_bytes: 1,
            ..none
        });
        assert_eq!(qos(&spec), Qos::Burstable);
    }

    #[test]
    fn a_container_without_a_limit_has_the_pods() {
        let bounded = v1::ContainerResources {
            cpu_limit_millis: 200,
            ..Default::default()
        };
        let mut spec = sandbox(&[bounded]);
        spec.pod_resources = Some(v1::ContainerResources {
            cpu_limit_millis: 900,
            memory_limit_bytes: 10,
            ..Default::default()
        });
        let effective = effective(&spec, &spec.containers[0]);
        assert_eq!(
            (effective.cpu_limit_millis, effective.memory_limit_bytes),
            (200, 10)
        );
    }

    #[test]
    fn a_change_takes_limits_away_too() {
        let change = change(&v1::ContainerResources::default()).unwrap();
        assert_eq!(change.cpu().as_ref().unwrap().quota(), Some(-1));
        assert_eq!(change.memory().as_ref().unwrap().limit(), Some(-1));
        assert!(change.devices().is_none() && change.pids().is_none());
    }

    #[test]
    fn what_is_joined_is_as_wide_as_both() {
        let limits = |shares, quota, memory| PodLimits {
            cpu_shares: shares,
            cpu_quota: quota,
            memory,
        };
        let joined = limits(2, Some(5), None).join(limits(7, Some(3), Some(1)));
        assert_eq!(joined, limits(7, Some(5), None));
    }

    #[test]
    fn absent_limits_stay_absent() {
        let plain = limits(&v1::ContainerResources::default(), 0, false).unwrap();
        assert!(plain.memory().is_none() && plain.pids().is_none());
        assert_eq!(plain.cpu().as_ref().unwrap().quota(), None);
        let wish = v1::ContainerResources {
            cpu_limit_millis: 500,
            memory_limit_bytes: 1 << 20,
            ..Default::default()
        };
        let bounded = limits(&wish, 64, false).unwrap();
        assert_eq!(bounded.cpu().as_ref().unwrap().shares(), Some(512));
        assert_eq!(bounded.memory().as_ref().unwrap().limit(), Some(1 << 20));
        assert_eq!(bounded.pids().as_ref().unwrap().limit(), 64);
    }
}
