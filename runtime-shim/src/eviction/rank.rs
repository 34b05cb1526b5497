//! Whom to evict, and what to tell about it: order and words of the kubelet
//! (`pkg/kubelet/eviction/helpers.go`). Pure.

use std::cmp::{Ordering, Reverse};
use std::collections::BTreeMap;
use std::fmt::Write as _;

use sandman_protocol::v1;

use super::threshold::{Shortage, Signal};
use crate::sandbox::plan::members;

/// Priority from which on a pod is critical to the system and never evicted
/// (`scheduling.SystemCriticalPriority`).
const CRITICAL: i32 = 2_000_000_000;

/// Disk that something takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Disk {
    /// Bytes on disk.
    pub bytes: u64,
    /// Files and folders.
    pub inodes: u64,
}

/// What a sandbox uses. What is not known counts as nothing: a sandbox that shares its parent's
/// cgroup has no figure of its own, and must not be the first to go for that.
#[derive(Clone, Debug, Default)]
pub(super) struct Usage {
    /// Working set of all containers, in bytes.
    pub memory: u64,
    /// Processes and threads.
    pub processes: u64,
    /// Working set by container, in bytes.
    pub container_memory: BTreeMap<String, u64>,
    /// Writable layer and logs by container.
    pub container_disk: BTreeMap<String, Disk>,
    /// By emptyDir volume that is on disk.
    pub volumes: BTreeMap<String, Disk>,
}

impl Usage {
    fn disk(&self) -> Disk {
        let parts = self.container_disk.values().chain(self.volumes.values());
        parts.fold(Disk::default(), |sum, part| Disk {
            bytes: sum.bytes.saturating_add(part.bytes),
            inodes: sum.inodes.saturating_add(part.inodes),
        })
    }
}

/// A sandbox that runs.
#[derive(Clone, Debug)]
pub(super) struct Candidate {
    /// What it should be.
    pub spec: v1::SandboxSpec,
    /// What it uses.
    pub usage: Usage,
}

/// The one to evict for a shortage; `None` when there are only critical ones.
#[must_use]
pub(super) fn victim(candidates: &[Candidate], signal: Signal) -> Option<&Candidate> {
    let evictable = candidates
        .iter()
        .filter(|candidate| candidate.spec.priority < CRITICAL);
    evictable.min_by(|a, b| order(a, b, signal))
}

fn order(a: &Candidate, b: &Candidate, signal: Signal) -> Ordering {
    let key = |candidate: &Candidate| {
        let request = candidate.spec.requests.unwrap_or_default();
        let priority = candidate.spec.priority;
        let (used, requested) = match signal {
            Signal::Memory => (candidate.usage.memory, request.memory_bytes),
            Signal::Disk | Signal::Image => (
                candidate.usage.disk().bytes,
                request.ephemeral_storage_bytes,
            ),
            Signal::DiskInodes | Signal::ImageInodes => (candidate.usage.disk().inodes, 0),
            // Nobody requests process ids: only priority and number count.
            Signal::Pids => {
                return (
                    false,
                    priority,
                    Reverse(i128::from(candidate.usage.processes)),
                );
            }
        };
        let above = Reverse(i128::from(used) - i128::from(requested));
        // `false` is first: those that use more than they asked for.
        (used <= requested, priority, above)
    };
    key(a).cmp(&key(b))
}

/// Text of an eviction because the host is short of something.
#[must_use]
pub(super) fn message(candidate: &Candidate, shortage: &Shortage) -> String {
    let bytes = matches!(
        shortage.signal,
        Signal::Memory | Signal::Disk | Signal::Image
    );
    let quantity = |value| {
        if bytes {
            binary(value)
        } else {
            value.to_string()
        }
    };
    let resource = match shortage.signal {
        Signal::Memory => "memory",
        Signal::Disk | Signal::Image => "ephemeral-storage",
        Signal::DiskInodes | Signal::ImageInodes => "inodes",
        Signal::Pids => "pids",
    };
    let mut text = format!(
        "{LOW_RESOURCE}{resource}. Threshold quantity: {}, available: {}. ",
        quantity(shortage.wanted),
        quantity(shortage.available)
    );
    for container in members(&candidate.spec).map(|member| member.spec) {
        let resources = container.resources.unwrap_or_default();
        let usage = &candidate.usage;
        let (used, request) = match shortage.signal {
            Signal::Memory => (
                usage.container_memory.get(&container.name).copied(),
                resources.memory_request_bytes,
            ),
            Signal::Disk | Signal::Image => (
                usage.container_disk.get(&container.name).map(|d| d.bytes),
                resources.ephemeral_storage_request_bytes,
            ),
            _ => continue,
        };
        if let Some(used) = used.filter(|used| *used > request) {
            // Writing to a String does not fail.
            let _ = write!(
                text,
                "Container {} was using {}, request is {}, has larger consumption of {resource}. ",
                container.name,
                binary(used),
                binary(request)
            );
        }
    }
    text
}

/// How texts of evictions for a shortage begin.
const LOW_RESOURCE: &str = "The node was low on resource: ";

/// Why a sandbox must go for what it stored, whatever the host has left.
#[must_use]
pub(super) fn storage_violation(spec: &v1::SandboxSpec, usage: &Usage) -> Option<String> {
    for volume in &spec.volumes {
        if let Some(v1::volume::Source::EmptyDir(empty_dir)) = &volume.source
            && let Some(used) = usage.volumes.get(&volume.name)
            && empty_dir.size_limit_bytes > 0
            && used.bytes > empty_dir.size_limit_bytes
        {
            return Some(format!(
                "Usage of EmptyDir volume {:?} exceeds the limit {:?}. ",
                volume.name,
                binary(empty_dir.size_limit_bytes)
            ));
        }
    }
    let limit = |container: &v1::Container| {
        let resources = container.resources.unwrap_or_default();
        Some(resources.ephemeral_storage_limit_bytes).filter(|limit| *limit > 0)
    };
    let limits: Vec<u64> = spec.containers.iter().filter_map(limit).collect();
    let total = limits
        .iter()
        .fold(0_u64, |sum, limit| sum.saturating_add(*limit));
    if !limits.is_empty() && usage.disk().bytes > total {
        return Some(format!(
            "Pod ephemeral local storage usage exceeds the total limit of containers {}. ",
            binary(total)
        ));
    }
    members(spec)
        .map(|member| member.spec)
        .find_map(|container| {
            let limit = limit(container)?;
            let used = usage.container_disk.get(&container.name)?.bytes;
            (used > limit).then(|| {
                format!(
                    "Container {} exceeded its local ephemeral storage limit {:?}. ",
                    container.name,
                    binary(limit)
                )
            })
        })
}

/// Whether anything of a sandbox's storage has a limit that somebody must look after.
#[must_use]
pub(super) fn has_storage_limit(spec: &v1::SandboxSpec) -> bool {
    let volume = spec.volumes.iter().any(|volume| {
        matches!(&volume.source, Some(v1::volume::Source::EmptyDir(dir)) if !dir.memory && dir.size_limit_bytes > 0)
    });
    volume
        || members(spec).any(|member| {
            let resources = member.spec.resources.unwrap_or_default();
            resources.ephemeral_storage_limit_bytes > 0
        })
}

/// Bytes as Kubernetes prints a quantity in binary units: the largest that leaves no rest.
fn binary(bytes: u64) -> String {
    let mut value = bytes;
    let mut unit = "";
    for next in ["Ki", "Mi", "Gi", "Ti", "Pi", "Ei"] {
        if value == 0 || !value.is_multiple_of(1024) {
            break;
        }
        (value, unit) = (value / 1024, next);
    }
    format!("{value}{unit}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidate(name: &str, priority: i32, memory_request: u64, memory: u64) -> Candidate {
        let container = v1::Container {
            name: "c".into(),
            resources: Some(v1::ContainerResources {
                memory_request_bytes: memory_request,
                ..Default::default()
            }),
            ..Default::default()
        };
        Candidate {
            spec: v1::SandboxSpec {
                name: name.into(),
                priority,
                requests: Some(v1::Resources {
                    memory_bytes: memory_request,
                    ..Default::default()
                }),
                containers: vec![container],
                ..Default::default()
            },
            usage: Usage {
                memory,
                container_memory: [("c".to_owned(), memory)].into(),
                ..Usage::default()
            },
        }
    }

    fn evicted(candidates: &[Candidate], signal: Signal) -> &str {
        victim(candidates, signal).map_or("", |c| c.spec.name.as_str())
    }

    #[test]
    fn memory_goes_by_excess_priority_and_amount() {
        let within = candidate("within", -5, 100, 100);
        let low = candidate("low", 0, 10, 20);
        let high = candidate("high", 7, 10, 500);
        let more = candidate("more", 0, 10, 30);
        let critical = candidate("critical", CRITICAL, 0, 1000);
        let all = [
            within.clone(),
            critical.clone(),
            high.clone(),
            low.clone(),
            more,
        ];
        assert_eq!(evicted(&all, Signal::Memory), "more");
        assert_eq!(evicted(&all[..4], Signal::Memory), "low");
        assert_eq!(evicted(&all[..3], Signal::Memory), "high");
        assert_eq!(
            evicted(&[within, critical.clone()], Signal::Memory),
            "within"
        );
        assert!(victim(&[critical], Signal::Memory).is_none());
        assert!(victim(&[], Signal::Memory).is_none());
    }

    #[test]
    fn disk_counts_layers_logs_and_volumes() {
        let mut a = candidate("a", 0, 0, 0);
        let mut b = candidate("b", 0, 0, 0);
        let disk = |bytes, inodes| Disk { bytes, inodes };
        a.usage.container_disk = [("c".to_owned(), disk(10, 9))].into();
        b.usage.container_disk = [("c".to_owned(), disk(6, 1))].into();
        b.usage.volumes = [("v".to_owned(), disk(6, 1))].into();
        let pair = [a, b];
        assert_eq!(evicted(&pair, Signal::Disk), "b");
        assert_eq!(evicted(&pair, Signal::Image), "b");
        assert_eq!(evicted(&pair, Signal::DiskInodes), "a");
    }

    #[test]
    fn processes_go_by_priority_and_number() {
        let mut a = candidate("a", 0, 0, 0);
        let mut b = candidate("b", 1, 0, 0);
        let mut c = candidate("c", 0, 0, 0);
        (a.usage.processes, b.usage.processes, c.usage.processes) = (5, 500, 6);
        assert_eq!(evicted(&[a, b, c], Signal::Pids), "c");
    }

    #[test]
    fn messages_are_the_kubelets() {
        let shortage = Shortage {
            signal: Signal::Memory,
            wanted: 100 << 20,
            available: (99 << 20) + 1024,
        };
        assert_eq!(
            message(&candidate("p", 0, 10 << 20, 12 << 20), &shortage),
            "The node was low on resource: memory. Threshold quantity: 100Mi, \
             available: 101377Ki. Container c was using 12Mi, request is 10Mi, \
             has larger consumption of memory. "
        );
        let pids = Shortage {
            signal: Signal::Pids,
            wanted: 3276,
            available: 7,
        };
        assert_eq!(
            message(&candidate("p", 0, 0, 0), &pids),
            "The node was low on resource: pids. Threshold quantity: 3276, available: 7. "
        );
    }

    #[test]
    fn own_limits_are_kept_whatever_the_host_has() {
        let mut spec = candidate("p", 0, 0, 0).spec;
        assert!(!has_storage_limit(&spec));
        let mut usage = Usage::default();
        let big = Disk {
            bytes: 20 << 20,
            inodes: 1,
        };
        usage.container_disk.insert("c".into(), big);
        usage.volumes.insert("v".into(), big);
        assert_eq!(storage_violation(&spec, &usage), None);

        let limited = |bytes| v1::ContainerResources {
            ephemeral_storage_limit_bytes: bytes,
            ..Default::default()
        };
        spec.containers[0].resources = Some(limited(30 << 20));
        assert!(has_storage_limit(&spec));
        assert_eq!(
            storage_violation(&spec, &usage).unwrap(),
            "Pod ephemeral local storage usage exceeds the total limit of containers 30Mi. "
        );
        let other = v1::Container {
            name: "other".into(),
            resources: Some(limited(1 << 30)),
            ..Default::default()
        };
        spec.containers.push(other);
        assert_eq!(storage_violation(&spec, &usage), None);
        spec.containers[0].resources = Some(limited(10 << 20));
        assert_eq!(
            storage_violation(&spec, &usage).unwrap(),
            "Container c exceeded its local ephemeral storage limit \"10Mi\". "
        );
        spec.volumes = vec![v1::Volume {
            name: "v".into(),
            source: Some(v1::volume::Source::EmptyDir(v1::EmptyDir {
                memory: false,
                size_limit_bytes: 1 << 20,
            })),
        }];
        assert_eq!(
            storage_violation(&spec, &usage).unwrap(),
            "Usage of EmptyDir volume \"v\" exceeds the limit \"1Mi\". "
        );
    }

    #[test]
    fn quantities_read_as_in_kubernetes() {
        for (bytes, text) in [
            (0, "0"),
            (1023, "1023"),
            (1024, "1Ki"),
            (1536, "1536"),
            (1536 << 20, "1536Mi"),
            (1 << 60, "1Ei"),
        ] {
            assert_eq!(binary(bytes), text);
        }
    }
}
