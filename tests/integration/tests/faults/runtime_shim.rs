//! The host service killed: containers run on and are adopted by the next one.

use anyhow::{Context as _, ensure};
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, DeleteParams};
use sandman_integration::{Component, PodBuilder, Scope, container, is_ready, wait_gone, wait_pod};

use crate::identity::{identities, same};

async fn kill_all(scope: &Scope) -> anyhow::Result<()> {
    for host in 0..scope.cluster.hosts {
        scope.cluster.kill(Component::RuntimeShim(host)).await?;
    }
    Ok(())
}

async fn start_all(scope: &Scope) -> anyhow::Result<()> {
    for host in 0..scope.cluster.hosts {
        scope.cluster.start(Component::RuntimeShim(host)).await?;
    }
    Ok(())
}

#[test]
fn running_containers_are_adopted() {
    Scope::run(|scope| async move {
        let pods: Api<Pod> = scope.api();
        for index in 0..4 {
            let pod = PodBuilder::sleeper(&scope.cluster, &format!("keep-{index}")).build();
            scope.create_pod(&pod).await?;
        }
        for index in 0..4 {
            wait_pod(&pods, &format!("keep-{index}"), "ready", is_ready).await?;
        }
        let before = identities(&pods).await?;
        kill_all(&scope).await?;
        start_all(&scope).await?;
        for index in 0..4 {
            let name = format!("keep-{index}");
            wait_pod(&pods, &name, "ready again", is_ready).await?;
            scope
                .kubectl()
                .run(&["exec", &name, "--", "true"])
                .await?
                .ok()?;
        }
        same(&before, &identities(&pods).await?)
    });
}

#[test]
fn what_probes_found_is_kept_over_a_restart() {
    Scope::run(|scope| async move {
        let pods: Api<Pod> = scope.api();
        let mut main = container(&scope.cluster, "main", "touch /tmp/up; exec sleep 1000000");
        let probe = |period: i32| {
            serde_json::from_value(serde_json::json!({
                "exec": {"command": ["test", "-e", "/tmp/up"]}, "periodSeconds": period,
                "failureThreshold": 100,
            }))
            .ok()
        };
        (main.startup_probe, main.readiness_probe) = (probe(1), probe(600));
        let pod = PodBuilder::new("probed").container(main).build();
        scope.ready_pod(&pod).await?;
        let ready_since = |pod: &Pod| {
            let status = pod.status.clone().unwrap_or_default();
            let mut conditions = status.conditions.into_iter().flatten();
            let ready = conditions.find(|condition| condition.type_ == "Ready");
            ready.and_then(|ready| ready.last_transition_time)
        };
        let before = pods.get("probed").await?;
        kill_all(&scope).await?;
        start_all(&scope).await?;
        // Once the node has heard of this one, it has heard of the other.
        scope
            .ready_pod(&PodBuilder::sleeper(&scope.cluster, "later").build())
            .await?;
        let after = wait_pod(&pods, "probed", "ready", is_ready).await?;
        ensure!(
            ready_since(&before) == ready_since(&after),
            "{:?}",
            after.status
        );
        Ok(())
    });
}

#[test]
fn no_log_line_is_lost_over_a_restart() {
    Scope::run(|scope| async move {
        let script = "i=0; while [ ! -e /tmp/stop ]; do i=$((i+1)); echo $i; sleep 0.01; done; exec sleep 1000000";
        let pod = PodBuilder::new("talk")
            .container(container(&scope.cluster, "main", script))
            .build();
        scope.ready_pod(&pod).await?;
        kill_all(&scope).await?;
        start_all(&scope).await?;
        wait_pod(&scope.api(), "talk", "ready again", is_ready).await?;
        scope
            .kubectl()
            .run(&["exec", "talk", "--", "touch", "/tmp/stop"])
            .await?
            .ok()?;
        let text = scope.kubectl().run(&["logs", "talk"]).await?.ok()?.text();
        let numbers: Vec<u64> = text.lines().map(str::parse).collect::<Result<_, _>>()?;
        ensure!(!numbers.is_empty(), "no lines");
        ensure!(
            numbers
                .iter()
                .enumerate()
                .all(|(index, &number)| number == index as u64 + 1),
            "lines are missing or doubled in {} lines",
            numbers.len()
        );
        Ok(())
    });
}

#[test]
fn creations_and_deletions_in_flight_are_finished() {
    Scope::run(|scope| async move {
        let pods: Api<Pod> = scope.api();
        let mut old = Vec::new();
        for index in 0..6 {
            let pod = PodBuilder::sleeper(&scope.cluster, &format!("old-{index}")).build();
            scope.create_pod(&pod).await?;
        }
        for index in 0..6 {
            let name = format!("old-{index}");
            let pod = wait_pod(&pods, &name, "ready", is_ready).await?;
            old.push((name, pod.metadata.uid.context("uid")?));
        }
        for index in 0..10 {
            let pod = PodBuilder::sleeper(&scope.cluster, &format!("new-{index}")).build();
            scope.create_pod(&pod).await?;
        }
        for (name, _) in &old {
            pods.delete(name, &DeleteParams::default()).await?;
        }
        kill_all(&scope).await?;
        start_all(&scope).await?;
        for index in 0..10 {
            let pod = wait_pod(&pods, &format!("new-{index}"), "ready", is_ready).await?;
            let restarts = pod
                .status
                .iter()
                .flat_map(|status| status.container_statuses.iter().flatten())
                .map(|status| status.restart_count)
                .sum::<i32>();
            ensure!(
                restarts == 0,
                "a create that was cut short counts as a restart: {pod:?}"
            );
        }
        for (name, uid) in &old {
            wait_gone(&pods, name, uid).await?;
        }
        Ok(())
    });
}

#[test]
fn a_containers_input_stays_open_over_a_restart() {
    Scope::run(|scope| async move {
        let mut main = container(&scope.cluster, "main", "exec cat");
        main.stdin = Some(true);
        scope
            .ready_pod(&PodBuilder::new("cat").container(main).build())
            .await?;
        kill_all(&scope).await?;
        start_all(&scope).await?;
        let pods: Api<Pod> = scope.api();
        wait_pod(&pods, "cat", "ready again", is_ready).await?;
        let params = kube::api::AttachParams::default().stdin(true).stderr(false);
        let mut attached = pods.attach("cat", &params).await?;
        let mut stdin = attached.stdin().context("stdin")?;
        tokio::io::AsyncWriteExt::write_all(&mut stdin, b"hello\n").await?;
        let mut stdout = attached.stdout().context("stdout")?;
        let mut echo = [0; 6];
        let read = tokio::io::AsyncReadExt::read_exact(&mut stdout, &mut echo);
        tokio::time::timeout(sandman_integration::DEADLINE, read)
            .await
            .context("no echo")??;
        ensure!(&echo == b"hello\n", "{echo:?}");
        Ok(())
    });
}
