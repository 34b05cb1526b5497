//! Probes of each kind: what they hold back, and what their failures do.

use anyhow::{Context as _, Result, ensure};
use k8s_openapi::api::core::v1::{Container, ContainerStatus, Event, Pod, Probe};
use sandman_integration::{PodBuilder, Scope, container, is_phase, is_ready, wait_event, wait_pod};
use serde_json::{Value, json};

/// Serves `/www` on port 8080.
const SERVER: &str = "mkdir -p /www; echo ok > /www/healthz; exec httpd -f -p 8080 -h /www";

fn probe(spec: Value) -> Option<Probe> {
    serde_json::from_value(spec).ok()
}

fn main_status(pod: &Pod) -> Option<&ContainerStatus> {
    pod.status.as_ref()?.container_statuses.as_ref()?.first()
}

fn restarts(pod: &Pod) -> i32 {
    main_status(pod).map_or(0, |status| status.restart_count)
}

async fn exec(scope: &Scope, pod: &str, script: &str) -> Result<()> {
    scope
        .kubectl()
        .run(&["exec", pod, "--", "sh", "-c", script])
        .await?
        .ok()?;
    Ok(())
}

/// A pod that serves, with a port named `web`.
fn server(scope: &Scope, name: &str, change: impl FnOnce(&mut Container)) -> Pod {
    let mut main = container(&scope.cluster, "main", SERVER);
    main.ports = serde_json::from_value(json!([{"name": "web", "containerPort": 8080}])).ok();
    change(&mut main);
    PodBuilder::new(name).container(main).build()
}

#[test]
fn readiness_follows_the_server() {
    Scope::run(|scope| async move {
        let pod = server(&scope, "ready", |main| {
            main.readiness_probe = probe(json!({
                "httpGet": {"path": "/healthz", "port": "web"}, "periodSeconds": 1,
                "failureThreshold": 1,
            }));
        });
        scope.ready_pod(&pod).await?;
        exec(&scope, "ready", "mv /www/healthz /www/away").await?;
        let pod = wait_pod(&scope.api(), "ready", "not ready", |pod| !is_ready(pod)).await?;
        ensure!(
            is_phase(&pod, "Running") && restarts(&pod) == 0,
            "{:?}",
            pod.status
        );
        let events = scope.api::<Event>();
        let text = "Readiness probe failed: HTTP probe failed with statuscode: 404";
        wait_event(&events, "ready", "Unhealthy", text).await?;
        exec(&scope, "ready", "mv /www/away /www/healthz").await?;
        wait_pod(&scope.api(), "ready", "ready again", is_ready).await?;
        Ok(())
    });
}

#[test]
fn a_failed_liveness_probe_restarts_the_container() {
    Scope::run(|scope| async move {
        let mut main = container(
            &scope.cluster,
            "main",
            "touch /tmp/health; exec sleep 1000000",
        );
        main.liveness_probe = probe(json!({
            "exec": {"command": ["cat", "/tmp/health"]}, "periodSeconds": 1, "timeoutSeconds": 10,
            "failureThreshold": 2,
        }));
        let pod = PodBuilder::new("live").container(main).build();
        scope.ready_pod(&pod).await?;
        exec(&scope, "live", "rm /tmp/health").await?;
        let pod = wait_pod(&scope.api(), "live", "restarted", |pod| restarts(pod) == 1).await?;
        let last = main_status(&pod)
            .and_then(|status| status.last_state.as_ref()?.terminated.as_ref())
            .context("lastState.terminated")?;
        ensure!(last.exit_code != 0, "{last:?}");
        let events = scope.api::<Event>();
        wait_event(
            &events,
            "live",
            "Unhealthy",
            "Liveness probe failed: cat: can't open",
        )
        .await?;
        let text = "Container main failed liveness probe, will be restarted";
        wait_event(&events, "live", "Killing", text).await?;
        // The new one is well again.
        wait_pod(&scope.api(), "live", "ready again", is_ready).await?;
        Ok(())
    });
}

#[test]
fn a_command_that_takes_too_long_has_failed() {
    Scope::run(|scope| async move {
        let mut main = container(&scope.cluster, "main", "exec sleep 1000000");
        main.liveness_probe = probe(json!({
            "exec": {"command": ["sleep", "1000"]}, "timeoutSeconds": 1, "failureThreshold": 1,
            "terminationGracePeriodSeconds": 1,
        }));
        let pod = PodBuilder::new("slow")
            .container(main)
            .spec(|spec| spec.termination_grace_period_seconds = Some(1000))
            .build();
        scope.create_pod(&pod).await?;
        // In time only with the probe's own grace period: the shell's sleep ignores nothing, but
        // PID 1 without a handler does.
        wait_pod(&scope.api(), "slow", "restarted", |pod| restarts(pod) >= 1).await?;
        let events = scope.api::<Event>();
        wait_event(&events, "slow", "Unhealthy", "timed out after 1s").await?;
        let left = scope
            .kubectl()
            .run(&["delete", "pod", "slow", "--grace-period=1"])
            .await?;
        left.ok()?;
        Ok(())
    });
}

#[test]
fn a_startup_probe_holds_back_the_others() {
    Scope::run(|scope| async move {
        let pod = server(&scope, "start", |main| {
            main.startup_probe = probe(json!({
                "exec": {"command": ["test", "-e", "/tmp/up"]}, "periodSeconds": 1,
                "failureThreshold": 1000,
            }));
            // Fails unless it is held back.
            main.liveness_probe = probe(json!({
                "exec": {"command": ["test", "-e", "/tmp/up"]}, "periodSeconds": 1,
                "failureThreshold": 1,
            }));
            main.readiness_probe = probe(json!({"tcpSocket": {"port": 8080}}));
        });
        scope.create_pod(&pod).await?;
        let events = scope.api::<Event>();
        wait_event(&events, "start", "Unhealthy", "Startup probe failed").await?;
        let pod = scope.api::<Pod>().get("start").await?;
        let main = main_status(&pod).context("status")?;
        ensure!(main.started == Some(false) && !main.ready, "{main:?}");
        exec(&scope, "start", "touch /tmp/up").await?;
        let pod = wait_pod(&scope.api(), "start", "ready", is_ready).await?;
        ensure!(restarts(&pod) == 0, "{:?}", pod.status);
        ensure!(
            main_status(&pod).context("status")?.started == Some(true),
            "started"
        );
        Ok(())
    });
}

#[test]
fn a_failed_startup_probe_ends_a_pod_that_never_restarts() {
    Scope::run(|scope| async move {
        let mut main = container(&scope.cluster, "main", "exec sleep 1000000");
        main.startup_probe = probe(json!({
            "tcpSocket": {"port": 9}, "periodSeconds": 1, "failureThreshold": 1,
        }));
        let pod = PodBuilder::new("never")
            .restart_policy("Never")
            .container(main)
            .build();
        scope.create_pod(&pod).await?;
        wait_pod(&scope.api(), "never", "failed", |pod| {
            is_phase(pod, "Failed")
        })
        .await?;
        let events = scope.api::<Event>();
        let event = wait_event(&events, "never", "Killing", "failed startup probe").await?;
        let message = event.message.unwrap_or_default();
        ensure!(
            message == "Container main failed startup probe",
            "{message}"
        );
        Ok(())
    });
}

#[test]
fn a_sidecar_starts_before_the_next_init_container() {
    Scope::run(|scope| async move {
        let cluster = &scope.cluster;
        let mut side = container(
            cluster,
            "side",
            "sleep 2; touch /data/up; exec sleep 1000000",
        );
        side.restart_policy = Some("Always".to_owned());
        side.startup_probe = probe(json!({
            "exec": {"command": ["test", "-e", "/data/up"]}, "periodSeconds": 1,
            "failureThreshold": 1000,
        }));
        let pod = PodBuilder::new("sidecar")
            .init_container(side)
            .init_container(container(cluster, "next", "test -e /data/up"))
            .container(container(cluster, "main", "exec sleep 1000000"))
            .shared_folder("/data")
            .build();
        let pod = scope.ready_pod(&pod).await?;
        let status = pod.status.context("status")?;
        let next = &status.init_container_statuses.context("init statuses")?[1];
        ensure!(
            next.restart_count == 0,
            "it ran before the sidecar was up: {next:?}"
        );
        Ok(())
    });
}

#[test]
fn an_unknown_port_is_told() {
    Scope::run(|scope| async move {
        let pod = server(&scope, "port", |main| {
            main.readiness_probe = probe(json!({"tcpSocket": {"port": "admin"}}));
        });
        scope.create_pod(&pod).await?;
        let events = scope.api::<Event>();
        let text = "Readiness probe errored and resulted in unknown state: port admin not found";
        wait_event(&events, "port", "Unhealthy", text).await?;
        Ok(())
    });
}
