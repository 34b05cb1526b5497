//! Life of a pod from create to delete: phases, conditions, status, events.

use anyhow::{Context as _, ensure};
use k8s_openapi::api::core::v1::{Event, Node, Pod};
use kube::api::{Api, DeleteParams};
use sandman_integration::{
    PodBuilder, Scope, condition, container, container_state, is_phase, wait_event, wait_gone,
    wait_pod,
};

#[test]
fn a_pod_runs_and_goes() {
    Scope::run(|scope| async move {
        let pod = scope
            .ready_pod(&PodBuilder::sleeper(&scope.cluster, "life").build())
            .await?;
        let status = pod.status.as_ref().context("status")?;
        for name in [
            "PodScheduled",
            "PodReadyToStartContainers",
            "Initialized",
            "ContainersReady",
            "Ready",
        ] {
            ensure!(
                condition(&pod, name) == "True",
                "condition {name}: {status:?}"
            );
        }
        ensure!(
            status.host_ip.as_deref().is_some_and(|ip| !ip.is_empty()),
            "hostIP"
        );
        ensure!(
            status.pod_ip.as_deref().is_some_and(|ip| !ip.is_empty()),
            "podIP"
        );
        ensure!(
            status.pod_ips.as_ref().is_some_and(|ips| ips.len() == 1),
            "podIPs: {:?}",
            status.pod_ips
        );
        ensure!(status.start_time.is_some(), "startTime");
        ensure!(
            status.qos_class.as_deref() == Some("BestEffort"),
            "qosClass"
        );
        let main = &status
            .container_statuses
            .as_ref()
            .context("containerStatuses")?[0];
        ensure!(
            main.ready && main.started == Some(true) && main.restart_count == 0,
            "{main:?}"
        );
        ensure!(
            main.image_id.contains("@sha256:"),
            "imageID {}",
            main.image_id
        );
        ensure!(
            main.container_id
                .as_deref()
                .is_some_and(|id| id.starts_with("containerd://")),
            "containerID {:?}",
            main.container_id
        );

        let events: Api<Event> = scope.api();
        for reason in ["Pulled", "Created", "Started"] {
            wait_event(&events, "life", reason, "").await?;
        }

        let pods: Api<Pod> = scope.api();
        pods.delete("life", &DeleteParams::default()).await?;
        wait_event(&events, "life", "Killing", "main").await?;
        wait_gone(&pods, "life", pod.metadata.uid.as_deref().context("uid")?).await
    });
}

#[test]
fn a_pod_that_ends_succeeds_or_fails() {
    Scope::run(|scope| async move {
        for (name, script, phase, reason, code) in [
            ("good", "exit 0", "Succeeded", "Completed", 0),
            ("bad", "exit 3", "Failed", "Error", 3),
        ] {
            let pod = PodBuilder::new(name)
                .restart_policy("Never")
                .container(container(&scope.cluster, "main", script))
                .build();
            scope.create_pod(&pod).await?;
            let pod = wait_pod(&scope.api(), name, phase, |pod: &Pod| is_phase(pod, phase)).await?;
            let ended = container_state(&pod, "main")
                .and_then(|state| state.terminated.as_ref())
                .context("terminated")?;
            ensure!(ended.exit_code == code, "{ended:?}");
            ensure!(ended.reason.as_deref() == Some(reason), "{ended:?}");
            ensure!(
                ended.started_at.is_some() && ended.finished_at.is_some(),
                "{ended:?}"
            );
            ensure!(condition(&pod, "Ready") == "False", "{:?}", pod.status);
        }
        Ok(())
    });
}

#[test]
fn the_termination_message_is_reported() {
    Scope::run(|scope| async move {
        let pod = PodBuilder::new("message")
            .restart_policy("Never")
            .container(container(
                &scope.cluster,
                "main",
                "echo -n it is over > /dev/termination-log; exit 1",
            ))
            .build();
        scope.create_pod(&pod).await?;
        let pod = wait_pod(&scope.api(), "message", "failed", |pod: &Pod| {
            is_phase(pod, "Failed")
        })
        .await?;
        let ended = container_state(&pod, "main")
            .and_then(|state| state.terminated.as_ref())
            .context("terminated")?;
        ensure!(ended.message.as_deref() == Some("it is over"), "{ended:?}");
        Ok(())
    });
}

#[test]
fn without_a_message_the_log_speaks_for_a_failure() {
    Scope::run(|scope| async move {
        let command = "echo said before; echo the last word; exit 3";
        let pod = PodBuilder::new("last-words")
            .restart_policy("Never")
            .container(container(&scope.cluster, "main", command))
            .spec(|spec| {
                let policy = Some("FallbackToLogsOnError".to_owned());
                spec.containers[0].termination_message_policy = policy;
            })
            .build();
        scope.create_pod(&pod).await?;
        let pod = wait_pod(&scope.api(), "last-words", "failed", |pod: &Pod| {
            is_phase(pod, "Failed")
        })
        .await?;
        let ended = container_state(&pod, "main")
            .and_then(|state| state.terminated.as_ref())
            .context("terminated")?;
        let message = ended.message.as_deref().unwrap_or_default();
        ensure!(message.trim_end().ends_with("the last word"), "{ended:?}");
        Ok(())
    });
}

#[test]
fn the_active_deadline_ends_a_pod() {
    Scope::run(|scope| async move {
        let pod = PodBuilder::sleeper(&scope.cluster, "deadline")
            .spec(|spec| spec.active_deadline_seconds = Some(2))
            .build();
        scope.create_pod(&pod).await?;
        let pod = wait_pod(&scope.api(), "deadline", "failed", |pod: &Pod| {
            is_phase(pod, "Failed")
        })
        .await?;
        let reason = pod
            .status
            .as_ref()
            .and_then(|status| status.reason.as_deref());
        ensure!(reason == Some("DeadlineExceeded"), "{:?}", pod.status);
        Ok(())
    });
}

#[test]
fn the_node_looks_like_a_node() {
    Scope::run(|scope| async move {
        let node = Api::<Node>::all(scope.client.clone())
            .get(&scope.cluster.node)
            .await?;
        let status = node.status.context("status")?;
        let types: Vec<&str> = status
            .conditions
            .iter()
            .flatten()
            .map(|condition| condition.type_.as_str())
            .collect();
        ensure!(
            types.last() == Some(&"Ready"),
            "conditions in order: {types:?}"
        );
        let capacity = status.capacity.context("capacity")?;
        for resource in ["cpu", "memory", "ephemeral-storage", "pods"] {
            ensure!(
                capacity.contains_key(resource),
                "capacity has no {resource}"
            );
        }
        ensure!(
            status
                .declared_features
                .iter()
                .flatten()
                .any(|f| f == "ExtendWebSocketsToKubelet"),
            "declaredFeatures {:?}",
            status.declared_features
        );
        let labels = node.metadata.labels.context("labels")?;
        ensure!(
            labels.get("type").map(String::as_str) == Some("virtual-kubelet"),
            "{labels:?}"
        );
        let taints = node.spec.and_then(|spec| spec.taints).context("taints")?;
        ensure!(
            taints
                .iter()
                .any(|taint| taint.key == "virtual-kubelet.io/provider"),
            "{taints:?}"
        );
        Ok(())
    });
}
