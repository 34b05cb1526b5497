//! The pods of a bench, and what their status says. All subjects get the same ones: through the
//! scheduler, without requests and tokens, so that nothing but the node decides.

use k8s_openapi::api::core::v1::{ContainerStatus, Pod, PodStatus};
use serde_json::json;

/// Tells the pods of one turn from others.
pub(crate) const BATCH_LABEL: &str = "sandman.dev/bench-batch";
/// Name of the only container.
pub(crate) const CONTAINER: &str = "main";
/// Keep other pods away from the nodes under test.
const TAINTS: [&str; 2] = ["virtual-kubelet.io/provider", "sandman.dev/peer"];
/// `sleep` as PID 1 hears no SIGTERM, and how long a node takes to kill is not measured here.
const GRACE_SECONDS: i64 = 1;

/// A pod that sleeps.
pub(crate) fn sleeper(name: &str, batch: &str, node: &str, image: &str) -> serde_json::Value {
    let tolerations: Vec<_> = TAINTS
        .map(|key| json!({"key": key, "operator": "Exists", "effect": "NoSchedule"}))
        .into();
    json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {BATCH_LABEL: batch}},
        "spec": {
            "nodeSelector": {"kubernetes.io/hostname": node},
            "tolerations": tolerations,
            "automountServiceAccountToken": false,
            "enableServiceLinks": false,
            // The kubelet used for comparison has no cluster DNS to point pods at.
            "dnsPolicy": "Default",
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": GRACE_SECONDS,
            "containers": [{
                "name": CONTAINER,
                "image": image,
                "imagePullPolicy": "IfNotPresent",
                "command": ["sleep", "2147483647"],
            }],
        },
    })
}

/// The same with a memory limit of its own, and next to no request, so that it fits anywhere.
pub(crate) fn limited_sleeper(
    name: &str,
    batch: &str,
    node: &str,
    image: &str,
) -> serde_json::Value {
    let mut pod = sleeper(name, batch, node, image);
    pod["spec"]["containers"][0]["resources"] =
        json!({"requests": {"memory": "64Ki"}, "limits": {"memory": "64Mi"}});
    pod
}

/// What a bench wants to know of a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Progress {
    /// Not yet there; what it waits for, as far as the status says.
    Waiting(String),
    /// Ready.
    Ready,
    /// It ended, or its container did.
    Failed(String),
}

/// Reads a pod's status.
pub(crate) fn progress(pod: &Pod) -> Progress {
    let Some(status) = &pod.status else {
        return Progress::Waiting("has no status".to_owned());
    };
    let containers = status.container_statuses.as_deref().unwrap_or_default();
    if let Some(phase @ ("Failed" | "Succeeded")) = status.phase.as_deref() {
        let why = status.reason.as_deref().or(status.message.as_deref());
        let why = why.map(str::to_owned).or_else(|| ended(containers));
        return Progress::Failed(format!("{phase}: {}", why.unwrap_or_default()));
    }
    if let Some(restarts) = containers.iter().map(|c| c.restart_count).find(|&r| r > 0) {
        return Progress::Failed(format!("restarted {restarts} times"));
    }
    if condition(status, "Ready").is_some_and(|ready| ready.status == "True") {
        return Progress::Ready;
    }
    Progress::Waiting(waiting(status, containers))
}

fn waiting(status: &PodStatus, containers: &[ContainerStatus]) -> String {
    let container = containers
        .iter()
        .find_map(|c| c.state.as_ref()?.waiting.as_ref())
        .map(|w| text(w.reason.as_deref(), w.message.as_deref()));
    let unscheduled = || {
        let scheduled = condition(status, "PodScheduled").filter(|c| c.status == "False")?;
        Some(text(
            scheduled.reason.as_deref(),
            scheduled.message.as_deref(),
        ))
    };
    container
        .or_else(unscheduled)
        .or_else(|| status.phase.clone())
        .unwrap_or_default()
}

fn ended(containers: &[ContainerStatus]) -> Option<String> {
    let ended = containers
        .iter()
        .find_map(|c| c.state.as_ref()?.terminated.as_ref())?;
    let code = format!("exit code {}", ended.exit_code);
    Some(text(
        ended.reason.as_deref(),
        ended.message.as_deref().or(Some(&code)),
    ))
}

fn condition<'a>(
    status: &'a PodStatus,
    kind: &str,
) -> Option<&'a k8s_openapi::api::core::v1::PodCondition> {
    status.conditions.iter().flatten().find(|c| c.type_ == kind)
}

fn text(reason: Option<&str>, message: Option<&str>) -> String {
    let parts: Vec<_> = [reason, message].into_iter().flatten().collect();
    parts.join(": ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(status: serde_json::Value) -> Progress {
        let pod: Pod = serde_json::from_value(json!({"status": status})).unwrap();
        progress(&pod)
    }

    #[test]
    fn the_manifest_is_a_pod_that_needs_no_secrets() {
        let pod = sleeper("a-1", "a", "sandman", "r/busybox:1");
        let pod: Pod = serde_json::from_value(pod).unwrap();
        let spec = pod.spec.unwrap();
        assert_eq!(spec.automount_service_account_token, Some(false));
        assert_eq!(spec.node_name, None);
        assert!(spec.containers[0].resources.is_none());
    }

    #[test]
    fn readiness_is_the_condition() {
        let ready = |value: &str| json!({"phase": "Running", "conditions": [{"type": "Ready", "status": value}]});
        assert_eq!(read(ready("True")), Progress::Ready);
        assert_eq!(
            read(ready("False")),
            Progress::Waiting("Running".to_owned())
        );
    }

    #[test]
    fn restarts_and_ends_are_failures() {
        let restarted = json!({
            "phase": "Running",
            "conditions": [{"type": "Ready", "status": "True"}],
            "containerStatuses": [{"name": "main", "image": "", "imageID": "", "ready": true,
                "restartCount": 2}],
        });
        assert_eq!(
            read(restarted),
            Progress::Failed("restarted 2 times".to_owned())
        );
        let refused = json!({"phase": "Failed", "reason": "OutOfcpu"});
        assert_eq!(
            read(refused),
            Progress::Failed("Failed: OutOfcpu".to_owned())
        );
        let ended = json!({
            "phase": "Succeeded",
            "containerStatuses": [{"name": "main", "image": "", "imageID": "", "ready": false,
                "restartCount": 0, "state": {"terminated": {"exitCode": 0}}}],
        });
        assert_eq!(
            read(ended),
            Progress::Failed("Succeeded: exit code 0".to_owned())
        );
    }

    #[test]
    fn waiting_pods_say_what_for() {
        let unscheduled = json!({
            "phase": "Pending",
            "conditions": [{"type": "PodScheduled", "status": "False",
                "reason": "Unschedulable", "message": "no node"}],
        });
        assert_eq!(
            read(unscheduled),
            Progress::Waiting("Unschedulable: no node".to_owned())
        );
        let pulling = json!({
            "phase": "Pending",
            "containerStatuses": [{"name": "main", "image": "", "imageID": "", "ready": false,
                "restartCount": 0, "state": {"waiting": {"reason": "ErrImagePull"}}}],
        });
        assert_eq!(read(pulling), Progress::Waiting("ErrImagePull".to_owned()));
    }
}
