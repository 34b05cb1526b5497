//! Restart policies, back-off and what the status says meanwhile.

use anyhow::{Context as _, ensure};
use k8s_openapi::api::core::v1::{ContainerStatus, Event, Pod};
use sandman_integration::{
    PodBuilder, Scope, container, container_state, is_phase, wait_event, wait_pod,
};

fn main_status(pod: &Pod) -> Option<&ContainerStatus> {
    pod.status.as_ref()?.container_statuses.as_ref()?.first()
}

fn restarts(pod: &Pod) -> i32 {
    main_status(pod).map_or(0, |status| status.restart_count)
}

#[test]
fn always_restarts_with_back_off() {
    Scope::run(|scope| async move {
        let pod = PodBuilder::new("loop")
            .container(container(&scope.cluster, "main", "exit 5"))
            .build();
        scope.create_pod(&pod).await?;
        let pod = wait_pod(&scope.api(), "loop", "in CrashLoopBackOff", |pod: &Pod| {
            container_state(pod, "main")
                .and_then(|state| state.waiting.as_ref())
                .is_some_and(|waiting| waiting.reason.as_deref() == Some("CrashLoopBackOff"))
                && restarts(pod) >= 1
        })
        .await?;
        ensure!(
            is_phase(&pod, "Running"),
            "a pod that will restart runs: {:?}",
            pod.status
        );
        let last = main_status(&pod)
            .and_then(|status| status.last_state.as_ref())
            .and_then(|state| state.terminated.as_ref())
            .context("lastState.terminated")?;
        ensure!(last.exit_code == 5, "{last:?}");
        wait_event(
            &scope.api::<Event>(),
            "loop",
            "BackOff",
            "Back-off restarting failed container main in pod loop",
        )
        .await?;
        Ok(())
    });
}

#[test]
fn always_restarts_after_success_too() {
    Scope::run(|scope| async move {
        let pod = PodBuilder::new("again")
            .container(container(&scope.cluster, "main", "exit 0"))
            .build();
        scope.create_pod(&pod).await?;
        wait_pod(&scope.api(), "again", "restarted", |pod: &Pod| {
            restarts(pod) >= 1
        })
        .await
        .map(drop)
    });
}

#[test]
fn on_failure_restarts_until_success() {
    Scope::run(|scope| async move {
        let pod = PodBuilder::new("retry")
            .restart_policy("OnFailure")
            .container(container(
                &scope.cluster,
                "main",
                "test -e /data/done && exit 0; touch /data/done; exit 1",
            ))
            .shared_folder("/data")
            .build();
        scope.create_pod(&pod).await?;
        let pod = wait_pod(&scope.api(), "retry", "succeeded", |pod: &Pod| {
            is_phase(pod, "Succeeded")
        })
        .await?;
        ensure!(restarts(&pod) == 1, "{:?}", pod.status);
        Ok(())
    });
}

#[test]
fn never_does_not_restart() {
    Scope::run(|scope| async move {
        let pod = PodBuilder::new("once")
            .restart_policy("Never")
            // Kubernetes itself turns `$$` into `$`.
            .container(container(&scope.cluster, "main", "kill -KILL $$$$"))
            .build();
        scope.create_pod(&pod).await?;
        let pod = wait_pod(&scope.api(), "once", "failed", |pod: &Pod| {
            is_phase(pod, "Failed")
        })
        .await?;
        ensure!(restarts(&pod) == 0, "{:?}", pod.status);
        let ended = container_state(&pod, "main")
            .and_then(|state| state.terminated.as_ref())
            .context("terminated")?;
        ensure!(ended.exit_code == 137, "{ended:?}");
        Ok(())
    });
}

#[test]
fn a_command_that_cannot_start_is_explained() {
    Scope::run(|scope| async move {
        let mut main = container(&scope.cluster, "main", "");
        main.command = Some(vec!["/no/such/file".to_owned()]);
        let pod = PodBuilder::new("typo")
            .restart_policy("Never")
            .container(main)
            .build();
        scope.create_pod(&pod).await?;
        let pod = wait_pod(&scope.api(), "typo", "failed", |pod: &Pod| {
            is_phase(pod, "Failed")
        })
        .await?;
        let ended = container_state(&pod, "main")
            .and_then(|state| state.terminated.as_ref())
            .context("terminated")?;
        ensure!(ended.reason.as_deref() == Some("StartError"), "{ended:?}");
        ensure!(
            ended
                .message
                .as_deref()
                .is_some_and(|message| message.contains("/no/such/file")),
            "{ended:?}"
        );
        Ok(())
    });
}

#[test]
fn a_containers_own_rules_come_before_its_pods_policy() {
    Scope::run(|scope| async move {
        let cluster = &scope.cluster;
        let script = "test -e /data/again && exit 0; touch /data/again; exit 42";
        let mut main = container(cluster, "main", script);
        main.restart_policy = Some("Never".to_owned());
        main.restart_policy_rules = serde_json::from_value(serde_json::json!([
            {"action": "Restart", "exitCodes": {"operator": "In", "values": [42]}},
        ]))
        .ok();
        let pod = PodBuilder::new("rules")
            .container(main)
            .shared_folder("/data")
            .build();
        scope.create_pod(&pod).await?;
        let pod = wait_pod(&scope.api(), "rules", "over", |pod| {
            is_phase(pod, "Succeeded")
        })
        .await?;
        ensure!(restarts(&pod) == 1, "{:?}", pod.status);
        Ok(())
    });
}

#[test]
fn another_image_takes_the_place_of_a_container_that_stays_ready() {
    Scope::run(|scope| async move {
        let pods = scope.api::<Pod>();
        let pod = PodBuilder::sleeper(&scope.cluster, "image").build();
        let before = scope.ready_pod(&pod).await?;
        let image = sandman_integration::images::python(&scope.cluster);
        let patch = serde_json::json!({"spec": {"containers": [{"name": "main", "image": image}]}});
        pods.patch(
            "image",
            &kube::api::PatchParams::default(),
            &kube::api::Patch::Strategic(patch),
        )
        .await?;
        let pod = wait_pod(&pods, "image", "of the new image", |pod| {
            main_status(pod).is_some_and(|main| main.image == image && main.restart_count == 1)
        })
        .await?;
        let since = |pod: &Pod| {
            let conditions = pod.status.clone().unwrap_or_default().conditions;
            let mut conditions = conditions.into_iter().flatten();
            let ready = conditions.find(|condition| condition.type_ == "Ready")?;
            Some((ready.status, ready.last_transition_time))
        };
        ensure!(since(&before) == since(&pod), "{:?}", pod.status);
        Ok(())
    });
}
