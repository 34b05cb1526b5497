//! cgroup values of a container, by the kubelet's formulas (pkg/kubelet/cm/helpers_linux.go and
//! pkg/kubelet/qos/policy.go).

use oci_spec::runtime::{
    LinuxCpuBuilder, LinuxDeviceCgroupBuilder, LinuxMemoryBuilder, LinuxPidsBuilder,
    LinuxResources, LinuxResourcesBuilder,
};
use sandman_protocol::v1;

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

/// What the cgroup of a whole pod is set to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PodLimits {
    /// Weight among pods.
    pub cpu_shares: u64,
    /// Microseconds per [`PERIOD`]; `None` is no limit.
    pub cpu_quota: Option<i64>,
    /// Bytes; `None` is no limit.
    pub memory: Option<u64>,
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
        let mut running = 0_u64;
        let mut peak = 0_u64;
        for container in &sandbox.init_containers {
            let value = Some(of(&container.resources.unwrap_or_default())).filter(|v| *v > 0)?;
            peak = peak.max(running.saturating_add(value));
            if container.sidecar {
                running = running.saturating_add(value);
            }
        }
        for container in &sandbox.containers {
            let value = Some(of(&container.resources.unwrap_or_default())).filter(|v| *v > 0)?;
            running = running.saturating_add(value);
        }
        Some(peak.max(running))
    };
    Some(PodLimits {
        cpu_shares: cpu_shares(sandbox.requests.unwrap_or_default().cpu_millis),
        cpu_quota: sum(|r| r.cpu_limit_millis, own.cpu_limit_millis).and_then(cpu_quota),
        memory: sum(|r| r.memory_limit_bytes, own.memory_limit_bytes),
    })
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

/// How readily the kernel kills the container when memory is short, −1000 to 1000.
#[must_use]
pub fn oom_score_adj(sandbox: &v1::SandboxSpec, request_bytes: u64, host_bytes: u64) -> i32 {
    match qos(sandbox) {
        Qos::Guaranteed => OOM_GUARANTEED,
        Qos::BestEffort => OOM_BEST_EFFORT,
        Qos::Burstable => {
            let used = u128::from(request_bytes) * 1000 / u128::from(host_bytes.max(1));
            let score = 1000 - i32::try_from(used).unwrap_or(1000).min(1000);
            score.clamp(OOM_BEST_EFFORT + OOM_GUARANTEED, OOM_BEST_EFFORT - 1)
        }
    }
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
        assert_eq!(oom_score_adj(&sandbox(&[none]), 0, 100), 1000);
        assert_eq!(oom_score_adj(&sandbox(&[full]), 1, 100), -997);
        assert_eq!(oom_score_adj(&sandbox(&[full, none]), 10, 100), 900);
        assert_eq!(oom_score_adj(&sandbox(&[full, none]), 0, 100), 999);
        assert_eq!(oom_score_adj(&sandbox(&[full, none]), 100, 100), 3);
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
