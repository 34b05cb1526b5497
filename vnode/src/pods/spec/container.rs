//! One container.

use k8s_openapi::api::core::v1::{
    Container, ContainerRestartRule, LifecycleHandler, PodSpec, Probe, ResourceRequirements,
    VolumeMount,
};
use sandman_protocol::v1;

use super::expand::expand;
use super::restart_policy;
use super::security::security;
use crate::pods::handlers;
use crate::pods::resources::is_sidecar;
use crate::quantity;

pub(super) fn container(
    spec: &PodSpec,
    container: &Container,
    env: Vec<v1::EnvVar>,
    without_agent: bool,
) -> v1::Container {
    let probe = |probe: &Option<Probe>| {
        let probe = probe.as_ref()?;
        Some(handlers::probe(container, probe))
    };
    let lifecycle = container.lifecycle.as_ref();
    let hook = |hook: Option<&LifecycleHandler>| Some(handlers::hook(container, hook?));
    v1::Container {
        name: container.name.clone(),
        image: container.image.clone().unwrap_or_default(),
        pull_policy: pull_policy(container.image_pull_policy.as_deref()).into(),
        command: container.command.clone().unwrap_or_default(),
        args: container.args.clone().unwrap_or_default(),
        working_dir: container.working_dir.clone().unwrap_or_default(),
        mounts: container
            .volume_mounts
            .iter()
            .flatten()
            .map(|wish| mount(wish, &env))
            .collect(),
        env,
        resources: Some(resources(container.resources.as_ref())),
        security: Some(security(
            spec.security_context.as_ref(),
            container.security_context.as_ref(),
        )),
        stdin: container.stdin == Some(true),
        stdin_once: container.stdin_once == Some(true),
        tty: container.tty == Some(true),
        termination_message_path: container
            .termination_message_path
            .clone()
            .unwrap_or_else(|| "/dev/termination-log".to_owned()),
        termination_message_policy: match container.termination_message_policy.as_deref() {
            Some("FallbackToLogsOnError") => v1::TerminationMessagePolicy::FallbackToLogsOnError,
            _ => v1::TerminationMessagePolicy::File,
        }
        .into(),
        sidecar: is_sidecar(container),
        without_agent,
        startup_probe: probe(&container.startup_probe),
        liveness_probe: probe(&container.liveness_probe),
        readiness_probe: probe(&container.readiness_probe),
        post_start: hook(lifecycle.and_then(|hooks| hooks.post_start.as_ref())),
        pre_stop: hook(lifecycle.and_then(|hooks| hooks.pre_stop.as_ref())),
        stop_signal: lifecycle
            .and_then(|hooks| hooks.stop_signal.clone())
            .unwrap_or_default(),
        restart_policy: restart_policy(container.restart_policy.as_deref())
            .unwrap_or_default()
            .into(),
        restart_rules: container
            .restart_policy_rules
            .iter()
            .flatten()
            .map(restart_rule)
            .collect(),
        target: String::new(),
        restart_on_cpu_resize: restarts_on_resize(container, "cpu"),
        restart_on_memory_resize: restarts_on_resize(container, "memory"),
    }
}

fn restarts_on_resize(container: &Container, resource: &str) -> bool {
    let mut policies = container.resize_policy.iter().flatten();
    policies.any(|policy| {
        policy.resource_name == resource && policy.restart_policy == "RestartContainer"
    })
}

fn restart_rule(rule: &ContainerRestartRule) -> v1::RestartRule {
    let codes = rule.exit_codes.as_ref();
    v1::RestartRule {
        exit_codes: codes
            .and_then(|codes| codes.values.clone())
            .unwrap_or_default(),
        not_in: codes.is_some_and(|codes| codes.operator == "NotIn"),
    }
}

/// The API server fills in the policy that an author leaves out.
pub(in crate::pods) fn pull_policy(name: Option<&str>) -> v1::PullPolicy {
    match name {
        Some("Always") => v1::PullPolicy::Always,
        Some("Never") => v1::PullPolicy::Never,
        _ => v1::PullPolicy::IfNotPresent,
    }
}

fn mount(mount: &VolumeMount, env: &[v1::EnvVar]) -> v1::Mount {
    let sub_path = match mount.sub_path_expr.as_deref() {
        Some(expression) if !expression.is_empty() => expand(expression, env),
        _ => mount.sub_path.clone().unwrap_or_default(),
    };
    v1::Mount {
        volume: mount.name.clone(),
        path: mount.mount_path.clone(),
        sub_path,
        read_only: mount.read_only == Some(true),
        propagation: match mount.mount_propagation.as_deref() {
            Some("HostToContainer") => v1::MountPropagation::HostToContainer,
            Some("Bidirectional") => v1::MountPropagation::Bidirectional,
            _ => v1::MountPropagation::Unspecified,
        }
        .into(),
        recursive_read_only: recursive_read_only(mount),
    }
}

/// Whether the mounts below a read-only one are read-only too. Every kernel that hosts run on can
/// do that, so "if possible" means that it is done.
pub(in crate::pods) fn recursive_read_only(mount: &VolumeMount) -> bool {
    mount.read_only == Some(true)
        && matches!(
            mount.recursive_read_only.as_deref(),
            Some("Enabled" | "IfPossible")
        )
}

/// Requests and limits in figures.
pub(in crate::pods) fn resources(
    resources: Option<&ResourceRequirements>,
) -> v1::ContainerResources {
    let requests = resources.and_then(|r| r.requests.as_ref());
    let limits = resources.and_then(|r| r.limits.as_ref());
    v1::ContainerResources {
        cpu_request_millis: requests
            .and_then(|r| r.get("cpu"))
            .and_then(quantity::millis)
            .unwrap_or(0),
        cpu_limit_millis: limits
            .and_then(|l| l.get("cpu"))
            .and_then(quantity::millis)
            .unwrap_or(0),
        memory_request_bytes: requests
            .and_then(|r| r.get("memory"))
            .and_then(quantity::units)
            .unwrap_or(0),
        memory_limit_bytes: limits
            .and_then(|l| l.get("memory"))
            .and_then(quantity::units)
            .unwrap_or(0),
        ephemeral_storage_limit_bytes: limits
            .and_then(|l| l.get("ephemeral-storage"))
            .and_then(quantity::units)
            .unwrap_or(0),
        ephemeral_storage_request_bytes: requests
            .and_then(|r| r.get("ephemeral-storage"))
            .and_then(quantity::units)
            .unwrap_or(0),
    }
}
