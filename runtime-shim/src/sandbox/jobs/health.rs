//! Probes and hooks: the parts that take time.

use sandman_protocol::v1;
use tracing::info;

use super::{About, Host};
use crate::handler::{self, Hooked, Target, Verdict};
use crate::sandbox::identity::Kind;
use crate::sandbox::probe;
use crate::spec::pod_label;

/// Which hook.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HookKind {
    /// After the start.
    PostStart,
    /// Before the stop signal.
    PreStop,
}

/// One run of a probe.
#[derive(Clone, Debug)]
pub struct Probing {
    /// The container.
    pub container: String,
    /// The attempt.
    pub attempt: u32,
    /// Which of its probes.
    pub kind: probe::Kind,
}

/// Runs a probe once.
pub async fn run_probe(probe: &v1::Probe, target: &Target) -> Verdict {
    let nothing = v1::Handler::default();
    let handler = probe.handler.as_ref().unwrap_or(&nothing);
    handler::probe(handler, target, probe::timeout(probe)).await
}

/// Runs a hook; true when it succeeded. What it said goes to our log only: it may be secret, and
/// events are read by more people than pods are.
pub async fn run_hook(
    host: &Host,
    spec: &v1::SandboxSpec,
    (name, kind): (&str, Kind),
    hook: HookKind,
    handler: &v1::Handler,
    target: &Target,
) -> bool {
    match handler::hook(handler, target).await {
        Ok(Hooked::Done) => true,
        Ok(Hooked::FellBack) => {
            let message =
                "request to HTTPS lifecycle hook got HTTP response, retry with HTTP succeeded";
            host.event(
                spec,
                About::sandbox_trouble(),
                "LifecycleHTTPFallback",
                message,
            );
            true
        }
        Err(error) => {
            info!(
                pod_uid = spec.uid,
                pod = pod_label(spec),
                container = name,
                error,
                "a lifecycle hook failed"
            );
            let (reason, message) = match hook {
                HookKind::PostStart => ("FailedPostStartHook", "PostStartHook failed"),
                HookKind::PreStop => ("FailedPreStopHook", "PreStopHook failed"),
            };
            host.event(spec, About::trouble(name, kind), reason, message);
            false
        }
    }
}
