//! In-place resize: which sizes a sandbox may have, and what is left to change where it runs. Pure
//! (`pkg/kubelet/allocation`, kuberuntime `computePodResizeAction`).

use std::cmp::Reverse;

use sandman_protocol::v1;
use serde::{Deserialize, Serialize};

use super::facts::Facts;
use crate::spec::resources::{PodLimits, effective, pod_limits};

/// Processor and memory of a container, as its cgroup is made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Size {
    /// Thousandths of a processor; 0 is none.
    pub cpu_request_millis: u64,
    /// Thousandths of a processor; 0 is no limit.
    pub cpu_limit_millis: u64,
    /// Bytes; 0 is none.
    pub memory_request_bytes: u64,
    /// Bytes; 0 is no limit.
    pub memory_limit_bytes: u64,
}

/// A resize that was asked for and is not given.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Pending {
    /// There may be room later.
    Deferred(String),
    /// There never will be.
    Infeasible(String),
}

/// What is left to do until everything that runs has the size that it should have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    /// Processes that get another size, those that shrink first.
    pub updates: Vec<Update>,
    /// What becomes of the cgroup of the sandbox.
    pub bounds: Option<Bounds>,
}

/// Another size for a process that runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Update {
    /// The container.
    pub container: String,
    /// Its attempt.
    pub attempt: u32,
    /// The attempt's containerd id.
    pub id: String,
    /// The size that it has; not known of one that an older version started.
    pub from: Option<Size>,
    /// The size that it gets.
    pub to: Size,
}

/// Other limits for all containers together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bounds {
    /// What they are, if that is known.
    pub from: Option<PodLimits>,
    /// What they are while containers change: room for the old sizes and the new.
    pub through: PodLimits,
    /// What they are then.
    pub to: PodLimits,
}

impl Pending {
    /// The same on the wire.
    #[must_use]
    pub fn kind(&self) -> v1::resize::Pending {
        match self {
            Self::Deferred(_) => v1::resize::Pending::Deferred,
            Self::Infeasible(_) => v1::resize::Pending::Infeasible,
        }
    }

    /// For people.
    #[must_use]
    pub fn message(&self) -> &str {
        let (Self::Deferred(message) | Self::Infeasible(message)) = self;
        message
    }
}

impl Size {
    /// What a container should have.
    #[must_use]
    pub fn of(spec: &v1::SandboxSpec, container: &v1::Container) -> Self {
        let wish = effective(spec, container);
        Self {
            cpu_request_millis: wish.cpu_request_millis,
            cpu_limit_millis: wish.cpu_limit_millis,
            memory_request_bytes: wish.memory_request_bytes,
            memory_limit_bytes: wish.memory_limit_bytes,
        }
    }

    /// A container's wishes with these figures in their place. Limits that are the sandbox's are
    /// not told as the container's.
    #[must_use]
    pub fn put_into(self, wish: v1::ContainerResources) -> v1::ContainerResources {
        let own = |wished: u64, has: u64| if wished > 0 { has } else { 0 };
        v1::ContainerResources {
            cpu_request_millis: self.cpu_request_millis,
            cpu_limit_millis: own(wish.cpu_limit_millis, self.cpu_limit_millis),
            memory_request_bytes: self.memory_request_bytes,
            memory_limit_bytes: own(wish.memory_limit_bytes, self.memory_limit_bytes),
            ..wish
        }
    }

    /// Whether the change to another size needs a new process, by the container's resizePolicy.
    fn needs_restart(self, to: Self, container: &v1::Container) -> bool {
        let cpu = |size: Self| (size.cpu_request_millis, size.cpu_limit_millis);
        let memory = |size: Self| (size.memory_request_bytes, size.memory_limit_bytes);
        (cpu(self) != cpu(to) && container.restart_on_cpu_resize)
            || (memory(self) != memory(to) && container.restart_on_memory_resize)
    }
}

/// Containers whose size can change while they run: those that are not over by themselves.
fn resizable(spec: &v1::SandboxSpec) -> impl Iterator<Item = &v1::Container> {
    let sidecars = spec.init_containers.iter().filter(|c| c.sidecar);
    sidecars.chain(&spec.containers)
}

/// Whether a container that runs must be made anew, because it should have another size.
#[must_use]
pub fn must_restart(spec: &v1::SandboxSpec, facts: &Facts, container: &v1::Container) -> bool {
    let attempt = facts.attempt(&container.name).filter(|a| a.is_running());
    let size = attempt.and_then(|attempt| attempt.size);
    resizable(spec).any(|known| known.name == container.name)
        && size.is_some_and(|size| size.needs_restart(Size::of(spec, container), container))
}

/// What is left to change of what runs; `None` when nothing is. Containers that need a new process
/// are not part of it, but the sandbox keeps room for them.
#[must_use]
pub fn change(spec: &v1::SandboxSpec, facts: &Facts) -> Option<Change> {
    let mut updates = Vec::new();
    let mut restarts = false;
    for container in resizable(spec) {
        let attempt = facts.attempt(&container.name).filter(|a| a.is_running());
        let to = Size::of(spec, container);
        let Some(attempt) = attempt.filter(|attempt| attempt.size != Some(to)) else {
            continue;
        };
        if must_restart(spec, facts, container) {
            restarts = true;
            continue;
        }
        updates.push(Update {
            container: container.name.clone(),
            attempt: attempt.number,
            id: attempt.id.clone(),
            from: attempt.size,
            to,
        });
    }
    updates.sort_by_key(|update| Reverse(update.shrinks()));
    let bounds = pod_limits(spec).map(|wanted| {
        let through = facts.bounds.map_or(wanted, |has| has.join(wanted));
        Bounds {
            from: facts.bounds,
            through,
            to: if restarts { through } else { wanted },
        }
    });
    let bounds = bounds.filter(|bounds| bounds.from != Some(bounds.to));
    (!updates.is_empty() || bounds.is_some()).then_some(Change { updates, bounds })
}

/// Whether something that runs has another size than it should have.
#[must_use]
pub fn is_in_progress(spec: &v1::SandboxSpec, facts: &Facts) -> bool {
    let outgrown = resizable(spec).any(|container| {
        let attempt = facts.attempt(&container.name).filter(|a| a.is_current());
        let size = attempt.and_then(|attempt| attempt.size);
        size.is_some_and(|size| size != Size::of(spec, container))
    });
    let bounds = facts.bounds.zip(pod_limits(spec));
    outgrown || bounds.is_some_and(|(has, wanted)| has != wanted)
}

impl Update {
    fn shrinks(&self) -> bool {
        self.from
            .is_some_and(|from| from.memory_limit_bytes > self.to.memory_limit_bytes)
    }

    /// The memory limit, if it is one that the process might be above already.
    #[must_use]
    pub fn lower_limit(&self) -> Option<u64> {
        let before = self.from.map_or(0, |from| from.memory_limit_bytes);
        let limit = Some(self.to.memory_limit_bytes).filter(|limit| *limit > 0)?;
        (before == 0 || limit < before).then_some(limit)
    }
}

impl Bounds {
    /// The memory limit, if it is one that the sandbox might be above already.
    #[must_use]
    pub fn lower_limit(&self) -> Option<u64> {
        let limit = self.to.memory?;
        let before = self.from.and_then(|from| from.memory);
        before.is_none_or(|before| limit < before).then_some(limit)
    }
}

/// Whether a sandbox has another size in the new spec than in the old.
#[must_use]
pub fn is_resize(old: &v1::SandboxSpec, new: &v1::SandboxSpec) -> bool {
    // Known from its labels only: it has no size yet.
    if old.schema == 0 {
        return false;
    }
    let before = |name: &str| lasting(old).find(|container| container.name == name);
    let pod = |spec: &v1::SandboxSpec| Some(sizes_only(spec.pod_resources?));
    pod(old) != pod(new)
        || lasting(new).any(|container| {
            before(&container.name)
                .is_some_and(|before| Size::of(old, before) != Size::of(new, container))
        })
}

/// All containers but ephemeral ones, which have no size.
fn lasting(spec: &v1::SandboxSpec) -> impl Iterator<Item = &v1::Container> {
    spec.init_containers.iter().chain(&spec.containers)
}

fn sizes_only(resources: v1::ContainerResources) -> v1::ContainerResources {
    v1::ContainerResources {
        ephemeral_storage_limit_bytes: 0,
        ephemeral_storage_request_bytes: 0,
        ..resources
    }
}

/// The new spec with the sizes of the old.
#[must_use]
pub fn keep_sizes(old: &v1::SandboxSpec, mut new: v1::SandboxSpec) -> v1::SandboxSpec {
    new.requests = old.requests;
    new.pod_resources = old.pod_resources;
    for container in new.init_containers.iter_mut().chain(&mut new.containers) {
        if let Some(before) = lasting(old).find(|before| before.name == container.name) {
            container.resources = before.resources;
        }
    }
    new
}

/// Whether more is asked for of anything than a sandbox has.
#[must_use]
pub fn grows(has: v1::Resources, asked: v1::Resources) -> bool {
    asked.cpu_millis > has.cpu_millis || asked.memory_bytes > has.memory_bytes
}

/// Whether a sandbox may ask for so much, beside what the others have. What does not grow is always
/// given.
///
/// # Errors
/// Why it may not, in the kubelet's words: those of Kubernetes 1.35 where the host is too small even
/// when empty, which later kubelets call deferred too although they wait for nothing.
pub fn fits(
    asked: v1::Resources,
    has: v1::Resources,
    others: v1::Resources,
    allocatable: v1::Resources,
) -> Result<(), Pending> {
    let figures = |of: fn(&v1::Resources) -> u64| [&asked, &has, &others, &allocatable].map(of);
    let each = [
        ("cpu", figures(|r| r.cpu_millis)),
        ("memory", figures(|r| r.memory_bytes)),
    ];
    let growing = each.iter().filter(|(_, [asked, has, ..])| asked > has);
    for (name, [asked, _, _, total]) in growing.clone() {
        if asked > total {
            return Err(Pending::Infeasible(format!(
                "Node didn't have enough capacity: {name}, requested: {asked}, capacity: {total}"
            )));
        }
    }
    for (name, [asked, _, used, total]) in growing {
        if *asked > total.saturating_sub(*used) {
            return Err(Pending::Deferred(format!(
                "Node didn't have enough resource: {name}, requested: {asked}, used: {used}, \
                 capacity: {total}"
            )));
        }
    }
    Ok(())
}

#[cfg(test)]
#[path = "resize_tests.rs"]
mod tests;
