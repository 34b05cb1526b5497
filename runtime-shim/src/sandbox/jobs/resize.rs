//! Other sizes for processes that run.

use sandman_protocol::v1;

use super::Host;
use crate::runtime::RuntimeError;
use crate::sandbox::live::Waiting;
use crate::sandbox::resize::{Bounds, Change, Size, Update};
use crate::spec::resources::{self, PodLimits};
use crate::spec::{SpecError, sandbox_cgroup};

/// How far a resize came.
#[derive(Debug, Default)]
pub struct Resized {
    /// Containers and their attempts that have another size now.
    pub sizes: Vec<(String, u32, Size)>,
    /// What the cgroup of the sandbox is set to now, if it was changed.
    pub bounds: Option<PodLimits>,
    /// Why it is not done; what to show until the next try.
    pub trouble: Option<Waiting>,
}

/// Why a resize is not done.
#[derive(Debug, thiserror::Error)]
enum Trouble {
    #[error("cannot decrease memory limits: {0}")]
    TooMuchUsed(String),
    #[error("cannot set the limits of the pod's cgroup: {0}")]
    Bounds(std::io::Error),
    #[error("cannot resize container {0:?}: {1}")]
    Runtime(String, RuntimeError),
    #[error(transparent)]
    Spec(#[from] SpecError),
}

/// Gives what runs the sizes that it should have. The order is the kubelet's (`doPodResizeAction`):
/// room for all, then those that shrink, then those that grow, then no more room than needed.
pub async fn resize(host: &Host, spec: &v1::SandboxSpec, change: &Change) -> Resized {
    let mut done = Resized::default();
    if let Err(trouble) = carry_out(host, spec, change, &mut done).await {
        done.trouble = Some(Waiting {
            reason: "Error".to_owned(),
            message: trouble.to_string(),
        });
    }
    done
}

async fn carry_out(
    host: &Host,
    spec: &v1::SandboxSpec,
    change: &Change,
    done: &mut Resized,
) -> Result<(), Trouble> {
    check_usage(host, spec, change)?;
    let cgroup = sandbox_cgroup(&host.limits.cgroup_parent, spec);
    let bound = |limits: PodLimits| {
        let path = cgroup.to_string_lossy();
        host.stats.bound(&path, &limits).map_err(Trouble::Bounds)
    };
    if let Some(Bounds { through, .. }) = change.bounds {
        bound(through)?;
        done.bounds = Some(through);
    }
    for update in &change.updates {
        if give(host, spec, update).await? {
            done.sizes
                .push((update.container.clone(), update.attempt, update.to));
        }
    }
    if let Some(Bounds { through, to, .. }) = change.bounds
        && through != to
    {
        bound(to)?;
        done.bounds = Some(to);
    }
    Ok(())
}

/// Whether the process was there to get its size; its end is seen elsewhere.
async fn give(host: &Host, spec: &v1::SandboxSpec, update: &Update) -> Result<bool, Trouble> {
    let mut containers = spec.init_containers.iter().chain(&spec.containers);
    let Some(container) = containers.find(|container| container.name == update.container) else {
        return Ok(false);
    };
    let limits = resources::change(&resources::effective(spec, container))?;
    match host.runtime.update(&update.id, &limits).await {
        Ok(()) => Ok(true),
        Err(RuntimeError::NotFound(_)) => Ok(false),
        Err(error) => Err(Trouble::Runtime(update.container.clone(), error)),
    }
}

/// A limit below what is used would be made room for by killing (version 2) or refused (version 1).
fn check_usage(host: &Host, spec: &v1::SandboxSpec, change: &Change) -> Result<(), Trouble> {
    let cgroup = sandbox_cgroup(&host.limits.cgroup_parent, spec);
    let usage = |path: &std::path::Path| {
        let usage = host.stats.cgroup_usage(&path.to_string_lossy());
        usage.map_or(0, |usage| usage.memory_usage_bytes)
    };
    let mut above = Vec::new();
    if let Some(limit) = change.bounds.and_then(|bounds| bounds.lower_limit()) {
        let used = usage(&cgroup);
        if used >= limit {
            above.push(format!(
                "attempting to set pod memory limit ({limit}) below current usage ({used})"
            ));
        }
    }
    for update in &change.updates {
        let Some(limit) = update.lower_limit() else {
            continue;
        };
        let used = usage(&cgroup.join(&update.id));
        if used >= limit {
            above.push(format!(
                "attempting to set container {:?} memory limit ({limit}) below current usage \
                 ({used})",
                update.container
            ));
        }
    }
    match above.as_slice() {
        [] => Ok(()),
        [one] => Err(Trouble::TooMuchUsed(one.clone())),
        several => Err(Trouble::TooMuchUsed(format!("[{}]", several.join(", ")))),
    }
}
