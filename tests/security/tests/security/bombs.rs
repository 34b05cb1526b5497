//! What takes all it can get, or does not answer, costs its neighbours nothing.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result, bail, ensure};
use k8s_openapi::api::core::v1::{EnvVar, Pod, ResourceRequirements};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use kube::api::DeleteParams;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use sandman_integration::{
    Component, DEADLINE, PodBuilder, Scope, container, container_state, images, is_phase,
    wait_gone, wait_pod,
};

/// A pod that must not notice anything, on the same hosts.
async fn neighbours(scope: &Scope) -> Result<()> {
    for host in 0..scope.cluster.hosts {
        let pod = PodBuilder::sleeper(&scope.cluster, &format!("neighbour-{host}"));
        scope.ready_pod(&pod.build()).await?;
    }
    Ok(())
}

/// They run, were never restarted, and answer.
async fn untouched(scope: &Scope) -> Result<()> {
    for host in 0..scope.cluster.hosts {
        let name = format!("neighbour-{host}");
        let exec = ["exec", &name, "--", "sh", "-c", "echo $((6 * 7))"];
        let answer = scope.kubectl().run(&exec).await?.ok()?.text();
        ensure!(answer == "42\n", "{name}: {answer:?}");
        let pod = scope.api::<Pod>().get(&name).await?;
        let status = pod.status.context("status")?;
        let restarts = status
            .container_statuses
            .iter()
            .flatten()
            .map(|one| one.restart_count);
        ensure!(restarts.sum::<i32>() == 0, "{name}: {status:?}");
    }
    Ok(())
}

async fn removed(scope: &Scope, name: &str) -> Result<()> {
    let pods = scope.api::<Pod>();
    let uid = pods.get(name).await?.metadata.uid.context("uid")?;
    pods.delete(name, &DeleteParams::default()).await?;
    wait_gone(&pods, name, &uid).await
}

fn limited(mut builder: PodBuilder, memory: &str) -> PodBuilder {
    let limits = BTreeMap::from([("memory".to_owned(), Quantity(memory.to_owned()))]);
    builder = builder.spec(|spec| {
        spec.containers[0].resources = Some(ResourceRequirements {
            limits: Some(limits),
            ..Default::default()
        });
    });
    builder
}

#[test]
#[ignore = "needs a dev cluster: see main.rs"]
fn a_memory_bomb_ends_alone() {
    Scope::run(|scope| async move {
        neighbours(&scope).await?;
        let bomb = container(&scope.cluster, "main", "tail /dev/zero");
        let bomb = PodBuilder::new("bomb")
            .restart_policy("Never")
            .container(bomb);
        scope.create_pod(&limited(bomb, "32Mi").build()).await?;
        let pod = wait_pod(&scope.api(), "bomb", "out of memory", |pod: &Pod| {
            is_phase(pod, "Failed")
        })
        .await?;
        let state = container_state(&pod, "main").and_then(|state| state.terminated.as_ref());
        let state = state.context("terminated")?;
        ensure!(state.exit_code == 137, "{state:?}");
        ensure!(state.reason.as_deref() == Some("OOMKilled"), "{state:?}");
        untouched(&scope).await
    });
}

#[test]
#[ignore = "needs a dev cluster: see main.rs"]
fn a_fork_bomb_stays_within_its_pod() {
    Scope::run(|scope| async move {
        neighbours(&scope).await?;
        // Every process waits; the shell ends once it is refused one more.
        let script = "while sleep 1000000 & do :; done; echo refused; exec sleep 1000000";
        let bomb = container(&scope.cluster, "main", script);
        let bomb = PodBuilder::new("bomb").container(bomb);
        scope.ready_pod(&limited(bomb, "64Mi").build()).await?;
        untouched(&scope).await?;
        removed(&scope, "bomb").await?;
        untouched(&scope).await
    });
}

#[test]
#[ignore = "needs a dev cluster: see main.rs"]
fn a_descriptor_bomb_stays_within_its_pod() {
    Scope::run(|scope| async move {
        neighbours(&scope).await?;
        let script = "
import os, time
children = 0
while children < 16 and os.fork():
    children += 1
else:
    if children < 16:
        try:
            while True:
                os.pipe()
        except OSError:
            pass
print('full', flush=True)
time.sleep(1000000)";
        let mut bomb = container(&scope.cluster, "main", "");
        bomb.image = Some(images::python(&scope.cluster));
        bomb.command = Some(crate::attack::words(&["python3", "-c", script]));
        scope
            .ready_pod(&PodBuilder::new("bomb").container(bomb).build())
            .await?;
        log_has(&scope, "bomb", "full").await?;
        untouched(&scope).await?;
        removed(&scope, "bomb").await
    });
}

/// Follows a log until it holds `word`.
async fn log_has(scope: &Scope, pod: &str, word: &str) -> Result<()> {
    use tokio::io::{AsyncBufReadExt as _, BufReader};
    let mut child = scope.kubectl().spawn(&["logs", "--follow", pod])?;
    let mut lines = BufReader::new(child.stdout.take().context("stdout is piped")?).lines();
    let found = async {
        while let Some(line) = lines.next_line().await? {
            if line.contains(word) {
                return Ok(());
            }
        }
        bail!("the log of {pod} ends without {word:?}")
    };
    tokio::time::timeout(DEADLINE, found)
        .await
        .with_context(|| format!("no {word:?} in time"))?
}

#[test]
#[ignore = "needs a dev cluster: see main.rs"]
fn floods_of_output_hold_nobody_up() {
    Scope::run(|scope| async move {
        neighbours(&scope).await?;
        // Into the log, and into two execs: one that is read, one whose reader is asleep.
        let flood = container(&scope.cluster, "main", "timeout 20 yes; exec sleep 1000000");
        scope
            .ready_pod(&PodBuilder::new("flood").container(flood).build())
            .await?;
        let kubectl = scope.kubectl();
        let stalled = kubectl.spawn(&["exec", "flood", "--", "yes"])?;
        let read = [
            "exec",
            "flood",
            "--",
            "sh",
            "-c",
            "yes | head -c 50000000 | wc -c",
        ];
        let count = kubectl.run(&read).await?.ok()?.text();
        ensure!(count.trim() == "50000000", "{count}");
        untouched(&scope).await?;
        // The flooded one answers, too, and goes when it is told to.
        let echo = kubectl
            .run(&["exec", "flood", "--", "echo", "here"])
            .await?
            .ok()?
            .text();
        ensure!(echo == "here\n", "{echo:?}");
        removed(&scope, "flood").await?;
        drop(stalled);
        untouched(&scope).await
    });
}

/// PID 1 of the sandbox whose environment holds `token`, as this machine numbers it.
fn pid_1(token: &str) -> Result<Pid> {
    for entry in std::fs::read_dir("/proc")? {
        let path = entry?.path();
        let Some(pid) = path
            .file_name()
            .and_then(|name| name.to_str()?.parse().ok())
        else {
            continue;
        };
        let environment = std::fs::read(path.join("environ")).unwrap_or_default();
        let status = std::fs::read_to_string(path.join("status")).unwrap_or_default();
        let inner = status.lines().find_map(|line| line.strip_prefix("NSpid:"));
        let first = inner.is_some_and(|pids| pids.split_whitespace().last() == Some("1"));
        let found = environment
            .windows(token.len())
            .any(|part| part == token.as_bytes());
        if first && found {
            return Ok(Pid::from_raw(pid));
        }
    }
    bail!("no PID 1 with {token} in its environment")
}

#[test]
#[ignore = "needs a dev cluster: see main.rs"]
fn a_stopped_agent_holds_nobody_up() {
    Scope::run(|scope| async move {
        neighbours(&scope).await?;
        let token = format!("token-{}", uuid::Uuid::new_v4().simple());
        let variable = EnvVar {
            name: "TOKEN".to_owned(),
            value: Some(token.clone()),
            ..Default::default()
        };
        let pod = PodBuilder::sleeper(&scope.cluster, "stopped")
            .spec(|spec| spec.containers[0].env = Some(vec![variable]));
        scope.ready_pod(&pod.build()).await?;
        kill(pid_1(&token)?, Signal::SIGSTOP)?;
        untouched(&scope).await?;
        let echo = ["exec", "stopped", "--", "echo", "here"];
        let echo = scope.kubectl().run(&echo).await?.ok()?.text();
        ensure!(echo == "here\n", "{echo:?}");
        // A signal to it waits for ever: the grace period ends it.
        removed(&scope, "stopped").await?;
        ensure!(pid_1(&token).is_err(), "it is still there");
        // The host's service has nothing left to wait for.
        let log = scope
            .cluster
            .log_tail(&Component::RuntimeShim(0).name())
            .await;
        ensure!(!log.contains("panicked"), "{log}");
        untouched(&scope).await
    });
}
