//! Containers of one pod share network, host name and volumes, not processes.

use anyhow::{Context as _, ensure};
use k8s_openapi::api::core::v1::Pod;
use sandman_integration::{PodBuilder, Scope, container, is_phase, wait_pod};

#[test]
fn two_containers_meet_on_localhost() {
    Scope::run(|scope| async move {
        let cluster = &scope.cluster;
        let pod = PodBuilder::new("pair")
            .restart_policy("Never")
            .container(container(
                cluster,
                "server",
                "echo hello from the other side | nc -l -p 8080",
            ))
            .container(container(
                cluster,
                "client",
                "until nc 127.0.0.1 8080 < /dev/null 2> /dev/null; do sleep 0.2; done",
            ))
            .build();
        scope.create_pod(&pod).await?;
        wait_pod(&scope.api(), "pair", "succeeded", |pod: &Pod| {
            is_phase(pod, "Succeeded")
        })
        .await?;
        let text = scope
            .kubectl()
            .run(&["logs", "pair", "-c", "client"])
            .await?
            .ok()?
            .text();
        ensure!(text == "hello from the other side\n", "{text:?}");
        Ok(())
    });
}

#[test]
fn pods_reach_each_other() {
    Scope::run(|scope| async move {
        let cluster = &scope.cluster;
        let server = PodBuilder::new("server")
            .container(container(
                cluster,
                "main",
                "while true; do echo hi | nc -l -p 8080; done",
            ))
            .build();
        let server = scope.ready_pod(&server).await?;
        let ip = server
            .status
            .and_then(|status| status.pod_ip)
            .context("podIP")?;
        let script = format!("until nc {ip} 8080 < /dev/null | grep hi; do sleep 0.2; done");
        let client = PodBuilder::new("client")
            .restart_policy("Never")
            .container(container(cluster, "main", &script))
            .build();
        scope.create_pod(&client).await?;
        wait_pod(&scope.api(), "client", "succeeded", |pod: &Pod| {
            is_phase(pod, "Succeeded")
        })
        .await
        .map(drop)
    });
}

#[test]
fn the_host_name_is_the_pods() {
    Scope::run(|scope| async move {
        let pod = scope
            .ready_pod(&PodBuilder::sleeper(&scope.cluster, "named").build())
            .await?;
        let ip = pod
            .status
            .and_then(|status| status.pod_ip)
            .context("podIP")?;
        let kubectl = scope.kubectl();
        let name = kubectl
            .run(&["exec", "named", "--", "hostname"])
            .await?
            .ok()?
            .text();
        ensure!(name == "named\n", "{name:?}");
        let hosts = kubectl
            .run(&["exec", "named", "--", "cat", "/etc/hosts"])
            .await?
            .ok()?
            .text();
        ensure!(hosts.contains(&format!("{ip}\tnamed\n")), "{hosts}");
        let one = kubectl
            .run(&["exec", "named", "--", "cat", "/proc/1/comm"])
            .await?
            .ok()?
            .text();
        ensure!(
            !one.is_empty(),
            "PID 1 is visible in the sandbox's own /proc"
        );
        Ok(())
    });
}

#[test]
fn orphans_are_reaped() {
    Scope::run(|scope| async move {
        scope
            .ready_pod(&PodBuilder::sleeper(&scope.cluster, "reap").build())
            .await?;
        let kubectl = scope.kubectl();
        // A child whose parent is gone belongs to PID 1 when it ends.
        kubectl
            .run(&[
                "exec",
                "reap",
                "--",
                "sh",
                "-c",
                "(sh -c 'sleep 0.2' & ) ; sleep 1",
            ])
            .await?
            .ok()?;
        let zombies = kubectl
            .run(&[
                "exec",
                "reap",
                "--",
                "sh",
                "-c",
                "grep -l 'State:.Z' /proc/[0-9]*/status; true",
            ])
            .await?
            .ok()?
            .text();
        ensure!(zombies.is_empty(), "{zombies}");
        Ok(())
    });
}
