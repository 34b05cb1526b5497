//! The phase of a pod from its containers' states (`getPhase` of
//! `pkg/kubelet/kubelet_pods.go`).

use k8s_openapi::api::core::v1::{
    Container, ContainerRestartRule, ContainerStatus, PodSpec, PodStatus,
};

use crate::pods::resources::is_sidecar;

/// What a container's status counts as.
enum Stage {
    Unknown,
    /// Never ran.
    Waiting,
    Running,
    /// Ended with that code, now or before its current wait.
    Ended(i32),
}

/// The phase. `ended` says that no container will run again.
pub(super) fn of(spec: &PodSpec, status: &PodStatus, ended: bool) -> &'static str {
    let restarts = |container: &Container, code| restarts(spec, container, code);
    let mut pending_init = 0;
    let mut pending_sidecars = 0;
    let (mut unknown, mut running, mut waiting) = (0, 0, 0);
    let (mut stopped, mut restarting, mut succeeded) = (0, 0, 0);
    for container in spec.init_containers.iter().flatten() {
        let found = find(status.init_container_statuses.as_deref(), &container.name);
        match (is_sidecar(container), stage(found)) {
            (false, Stage::Ended(code)) if code != 0 && !restarts(container, code) => {
                return "Failed";
            }
            (false, Stage::Ended(_)) => {}
            (false, _) => pending_init += 1,
            (true, Stage::Running) => {
                if found.is_none_or(|status| status.started != Some(true)) {
                    pending_sidecars += 1;
                }
                running += 1;
            }
            (true, Stage::Ended(_)) => {}
            (true, Stage::Waiting) => {
                pending_sidecars += 1;
                waiting += 1;
            }
            (true, Stage::Unknown) => unknown += 1,
        }
    }
    let mut any_started = false;
    for container in &spec.containers {
        let found = stage(find(status.container_statuses.as_deref(), &container.name));
        any_started |= matches!(found, Stage::Running | Stage::Ended(_));
        match found {
            Stage::Unknown => unknown += 1,
            Stage::Waiting => waiting += 1,
            Stage::Running => running += 1,
            Stage::Ended(code) => {
                stopped += 1;
                restarting += u32::from(restarts(container, code));
                succeeded += u32::from(code == 0);
            }
        }
    }
    if pending_init > 0 || (pending_sidecars > 0 && !any_started) || waiting > 0 {
        "Pending"
    } else if running > 0 && unknown == 0 {
        "Running"
    } else if stopped > 0 && unknown == 0 {
        match () {
            () if ended && stopped == succeeded => "Succeeded",
            () if ended => "Failed",
            () if restarting > 0 => "Running",
            () if stopped == succeeded => "Succeeded",
            () => "Failed",
        }
    } else {
        "Pending"
    }
}

/// `ContainerShouldRestart` of `pkg/api/v1/pod`: a container's rules, then its
/// own policy, then the pod's.
pub(in crate::pods) fn restarts(spec: &PodSpec, container: &Container, code: i32) -> bool {
    let matches = |rule: &ContainerRestartRule| {
        rule.exit_codes.as_ref().is_some_and(|codes| {
            let listed = codes.values.iter().flatten().any(|value| *value == code);
            listed != (codes.operator == "NotIn")
        })
    };
    if container.restart_policy_rules.iter().flatten().any(matches) {
        return true;
    }
    let policy = container
        .restart_policy
        .as_ref()
        .or(spec.restart_policy.as_ref());
    match policy.map(String::as_str) {
        Some("Never") => false,
        Some("OnFailure") => code != 0,
        _ => true,
    }
}

fn find<'a>(statuses: Option<&'a [ContainerStatus]>, name: &str) -> Option<&'a ContainerStatus> {
    statuses?.iter().find(|status| status.name == name)
}

fn stage(status: Option<&ContainerStatus>) -> Stage {
    let Some(status) = status else {
        return Stage::Unknown;
    };
    let Some(state) = &status.state else {
        return Stage::Unknown;
    };
    if state.running.is_some() {
        return Stage::Running;
    }
    if let Some(terminated) = &state.terminated {
        return Stage::Ended(terminated.exit_code);
    }
    if state.waiting.is_none() {
        return Stage::Unknown;
    }
    match status
        .last_state
        .as_ref()
        .and_then(|last| last.terminated.as_ref())
    {
        Some(terminated) => Stage::Ended(terminated.exit_code),
        None => Stage::Waiting,
    }
}
