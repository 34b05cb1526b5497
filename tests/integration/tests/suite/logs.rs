//! `kubectl logs` and its options.

use anyhow::{Context as _, Result, ensure};
use k8s_openapi::api::core::v1::Pod;
use sandman_integration::{PodBuilder, Scope, container, is_phase, wait_pod};
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, BufReader};

async fn finished(scope: &Scope, name: &str, script: &str) -> Result<()> {
    let pod = PodBuilder::new(name)
        .restart_policy("Never")
        .container(container(&scope.cluster, "main", script))
        .build();
    scope.create_pod(&pod).await?;
    wait_pod(&scope.api(), name, "succeeded", |pod: &Pod| {
        is_phase(pod, "Succeeded")
    })
    .await
    .map(drop)
}

#[test]
fn every_line_is_there() {
    Scope::run(|scope| async move {
        finished(
            &scope,
            "count",
            "for i in $(seq 1 5000); do echo line $i; done",
        )
        .await?;
        let text = scope.kubectl().run(&["logs", "count"]).await?.ok()?.text();
        let want: String = (1..=5000).map(|i| format!("line {i}\n")).collect();
        ensure!(text == want, "{} lines of 5000", text.lines().count());

        let tail = scope
            .kubectl()
            .run(&["logs", "count", "--tail=2"])
            .await?
            .ok()?
            .text();
        ensure!(tail == "line 4999\nline 5000\n", "{tail:?}");
        let none = scope
            .kubectl()
            .run(&["logs", "count", "--tail=0"])
            .await?
            .ok()?
            .text();
        ensure!(none.is_empty(), "{none:?}");
        let cut = scope
            .kubectl()
            .run(&["logs", "count", "--limit-bytes=9"])
            .await?
            .ok()?
            .text();
        ensure!(cut == "line 1\nli", "{cut:?}");
        let stamped = scope
            .kubectl()
            .run(&["logs", "count", "--tail=1", "--timestamps"])
            .await?
            .ok()?
            .text();
        let (stamp, rest) = stamped.split_once(' ').context("a timestamp and a line")?;
        stamp.parse::<jiff::Timestamp>()?;
        ensure!(rest == "line 5000\n", "{stamped:?}");
        let old = scope
            .kubectl()
            .run(&["logs", "count", "--since-time=2100-01-01T00:00:00Z"])
            .await?
            .ok()?;
        ensure!(old.stdout.is_empty(), "{old:?}");
        Ok(())
    });
}

#[test]
fn the_last_line_needs_no_newline() {
    Scope::run(|scope| async move {
        finished(&scope, "partial", "echo first; printf last").await?;
        let text = scope
            .kubectl()
            .run(&["logs", "partial"])
            .await?
            .ok()?
            .text();
        ensure!(text == "first\nlast", "{text:?}");
        Ok(())
    });
}

#[test]
fn a_long_line_stays_one_line() {
    Scope::run(|scope| async move {
        finished(
            &scope,
            "long",
            "head -c 100000 /dev/zero | tr '\\0' x; echo; echo end",
        )
        .await?;
        let text = scope.kubectl().run(&["logs", "long"]).await?.ok()?.text();
        let lines: Vec<&str> = text.lines().collect();
        ensure!(
            lines.len() == 2 && lines[0].len() == 100_000 && lines[1] == "end",
            "{}",
            lines.len()
        );
        Ok(())
    });
}

#[test]
fn following_sees_lines_as_they_come_and_ends_with_the_container() {
    Scope::run(|scope| async move {
        let pod = PodBuilder::new("talk")
            .restart_policy("Never")
            .container(container(
                &scope.cluster,
                "main",
                "echo ready; while [ ! -e /tmp/go ]; do sleep 0.1; done; echo bye",
            ))
            .build();
        scope.ready_pod(&pod).await?;
        let mut follow = scope.kubectl().spawn(&["logs", "-f", "talk"])?;
        let mut lines = BufReader::new(follow.stdout.take().context("stdout")?);
        let mut first = String::new();
        lines.read_line(&mut first).await?;
        ensure!(first == "ready\n", "{first:?}");
        scope
            .kubectl()
            .run(&["exec", "talk", "--", "touch", "/tmp/go"])
            .await?
            .ok()?;
        let mut rest = String::new();
        tokio::time::timeout(
            sandman_integration::DEADLINE,
            lines.read_to_string(&mut rest),
        )
        .await
        .context("logs -f does not end")??;
        ensure!(rest == "bye\n", "{rest:?}");
        ensure!(follow.wait().await?.success());
        Ok(())
    });
}

#[test]
fn previous_is_the_last_terminated_instance() {
    Scope::run(|scope| async move {
        let pod = PodBuilder::new("twice")
            .container(container(
                &scope.cluster,
                "main",
                "if [ -e /data/second ]; then echo two; exec sleep 1000000; fi; touch /data/second; echo one",
            ))
            .shared_folder("/data")
            .build();
        scope.create_pod(&pod).await?;
        wait_pod(&scope.api(), "twice", "restarted once", |pod: &Pod| {
            sandman_integration::is_ready(pod)
                && pod.status.as_ref().is_some_and(|status| {
                    status
                        .container_statuses
                        .iter()
                        .flatten()
                        .any(|main| main.restart_count == 1)
                })
        })
        .await?;
        let previous = scope
            .kubectl()
            .run(&["logs", "twice", "--previous"])
            .await?
            .ok()?
            .text();
        ensure!(previous == "one\n", "{previous:?}");
        let current = scope.kubectl().run(&["logs", "twice"]).await?.ok()?.text();
        ensure!(current == "two\n", "{current:?}");
        Ok(())
    });
}

#[test]
fn a_container_without_a_previous_instance_says_so() {
    Scope::run(|scope| async move {
        scope
            .ready_pod(&PodBuilder::sleeper(&scope.cluster, "once").build())
            .await?;
        let output = scope.kubectl().run(&["logs", "once", "--previous"]).await?;
        ensure!(output.code != 0, "{output:?}");
        ensure!(
            output
                .stderr
                .contains("previous terminated container \"main\" in pod \"once\" not found"),
            "{output:?}"
        );
        Ok(())
    });
}
