//! postStart and preStop hooks: when they run, and what their failures do.

use anyhow::{Context as _, ensure};
use k8s_openapi::api::core::v1::{Event, Lifecycle, Pod};
use kube::api::{Api, DeleteParams};
use sandman_integration::{
    PodBuilder, Scope, container, container_state, is_phase, is_ready, wait_event, wait_gone,
    wait_pod,
};
use serde_json::{Value, json};

fn lifecycle(hooks: Value) -> Option<Lifecycle> {
    serde_json::from_value(hooks).ok()
}

#[test]
fn post_start_is_over_before_the_container_is_ready() {
    Scope::run(|scope| async move {
        let mut main = container(&scope.cluster, "main", "exec sleep 1000000");
        main.lifecycle = lifecycle(json!({"postStart": {"exec": {"command": [
            "sh", "-c", "while [ ! -e /tmp/go ]; do sleep 0.1; done; touch /tmp/done"]}}}));
        let pods: Api<Pod> = scope.api();
        let pod = PodBuilder::new("post").container(main).build();
        scope.create_pod(&pod).await?;
        wait_event(&scope.api::<Event>(), "post", "Started", "").await?;
        let pod = wait_pod(&pods, "post", "on its host", |pod: &Pod| {
            container_state(pod, "main").is_some_and(|state| state.waiting.is_some())
        })
        .await?;
        ensure!(is_phase(&pod, "Pending"), "{:?}", pod.status);
        let kubectl = scope.kubectl();
        kubectl
            .run(&["exec", "post", "--", "touch", "/tmp/go"])
            .await?
            .ok()?;
        wait_pod(&pods, "post", "ready", is_ready).await?;
        kubectl
            .run(&["exec", "post", "--", "test", "-e", "/tmp/done"])
            .await?
            .ok()?;
        Ok(())
    });
}

#[test]
fn a_failed_post_start_ends_the_container() {
    Scope::run(|scope| async move {
        let mut main = container(&scope.cluster, "main", "exec sleep 1000000");
        main.lifecycle = lifecycle(json!({"postStart": {"exec": {"command": ["false"]}}}));
        let pod = PodBuilder::new("fails")
            .restart_policy("Never")
            .container(main)
            .build();
        scope.create_pod(&pod).await?;
        wait_pod(&scope.api(), "fails", "failed", |pod| {
            is_phase(pod, "Failed")
        })
        .await?;
        let events = scope.api::<Event>();
        wait_event(
            &events,
            "fails",
            "FailedPostStartHook",
            "PostStartHook failed",
        )
        .await?;
        wait_event(&events, "fails", "Killing", "FailedPostStartHook").await?;
        Ok(())
    });
}

#[test]
fn pre_stop_runs_before_the_signal() {
    Scope::run(|scope| async move {
        // Says in its last words whether the hook had run when the signal came.
        let script = "trap 'cat /tmp/hook > /dev/termination-log; exit 0' TERM; \
                      touch /tmp/armed; while :; do sleep 0.1; done";
        let mut main = container(&scope.cluster, "main", script);
        main.lifecycle = lifecycle(json!({"preStop": {"exec": {"command": [
            "sh", "-c", "sleep 1; echo hook > /tmp/hook"]}}}));
        main.readiness_probe = serde_json::from_value(json!({
            "exec": {"command": ["test", "-e", "/tmp/armed"]}, "periodSeconds": 1,
        }))
        .ok();
        let pods: Api<Pod> = scope.api();
        let pod = PodBuilder::new("pre")
            .container(main)
            .metadata(|metadata| metadata.finalizers = Some(vec!["example.com/hold".to_owned()]))
            .spec(|spec| spec.termination_grace_period_seconds = Some(60))
            .build();
        scope.ready_pod(&pod).await?;
        pods.delete("pre", &DeleteParams::default()).await?;
        let pod = wait_pod(&pods, "pre", "over", |pod| is_phase(pod, "Succeeded")).await;
        let release = json!({"metadata": {"finalizers": null}});
        pods.patch(
            "pre",
            &Default::default(),
            &kube::api::Patch::Merge(release),
        )
        .await?;
        let pod = pod?;
        let end = container_state(&pod, "main")
            .and_then(|state| state.terminated.as_ref())
            .context("terminated")?;
        ensure!(
            end.message.as_deref().map(str::trim) == Some("hook"),
            "{end:?}"
        );
        Ok(())
    });
}

#[test]
fn a_pre_stop_that_fails_or_does_not_end_holds_up_nothing() {
    Scope::run(|scope| async move {
        let pods: Api<Pod> = scope.api();
        for (name, command) in [("fails", "exit 3"), ("hangs", "exec sleep 1000000")] {
            let mut main = container(&scope.cluster, "main", "exec sleep 1000000");
            main.lifecycle =
                lifecycle(json!({"preStop": {"exec": {"command": ["sh", "-c", command]}}}));
            let pod = PodBuilder::new(name)
                .container(main)
                .spec(|spec| spec.termination_grace_period_seconds = Some(3))
                .build();
            scope.ready_pod(&pod).await?;
        }
        for name in ["fails", "hangs"] {
            let uid = pods.get(name).await?.metadata.uid.context("uid")?;
            pods.delete(name, &DeleteParams::default()).await?;
            wait_gone(&pods, name, &uid).await?;
        }
        let events = scope.api::<Event>();
        wait_event(&events, "fails", "FailedPreStopHook", "PreStopHook failed").await?;
        Ok(())
    });
}

#[test]
fn a_hook_may_sleep_and_ends_with_its_container() {
    Scope::run(|scope| async move {
        let pods: Api<Pod> = scope.api();
        // Ends by itself soon after it was told by a file.
        let script = "while [ ! -e /tmp/go ]; do sleep 0.1; done";
        let mut main = container(&scope.cluster, "main", script);
        main.lifecycle = lifecycle(json!({"preStop": {"sleep": {"seconds": 1000}}}));
        let pod = PodBuilder::new("sleeps")
            .container(main)
            .spec(|spec| spec.termination_grace_period_seconds = Some(1000))
            .build();
        let pod = scope.ready_pod(&pod).await?;
        pods.delete("sleeps", &DeleteParams::default()).await?;
        wait_event(&scope.api::<Event>(), "sleeps", "Killing", "").await?;
        scope
            .kubectl()
            .run(&["exec", "sleeps", "--", "touch", "/tmp/go"])
            .await?
            .ok()?;
        wait_gone(&pods, "sleeps", pod.metadata.uid.as_deref().context("uid")?).await
    });
}
