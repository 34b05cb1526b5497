//! States, signals, exit codes, pause, events.

use serde_json::json;

use crate::harness::{Case, Lines, Session, base, run, scenario};

/// A running container; its output is read by `ready`.
async fn running(session: &Session, script: &str) -> (Lines, std::fs::File) {
    let spec = base(session, &["/bin/sh", "-c", script]);
    session.register(&spec).await;
    let (stdout, mut out) = session.fifo("stdout");
    let created = session.create(["", &stdout, ""], false).await.map(|_| ());
    let started = session.start("").await.map(|_| ());
    let ready = session.until(&mut out, "ready").await;
    (vec![format!("{created:?} {started:?} {ready}")], out)
}

/// Kills a container that is prepared by `script`.
fn killed(name: &'static str, script: &'static str, signal: u32) -> Case {
    scenario(name, move |session| async move {
        let (mut lines, out) = running(&session, script).await;
        lines.push(format!("{:?}", session.kill("", signal, false).await));
        lines.push(format!("{:?}", session.wait("").await));
        lines.push(session.state("").await);
        lines.push(format!("{:?}", session.delete().await));
        lines.push(session.events_to_delete().await);
        lines.push(session.text("rest", out));
        lines
    })
}

pub(crate) fn cases() -> Vec<Case> {
    vec![
        run("exit-zero", "true", |_| {}).must("exit Ok(0)"),
        run("exit-code", "exit 42", |_| {}).must("exit Ok(42)"),
        run("exit-255", "exit 255", |_| {}).must("exit Ok(255)"),
        run(
            "exit-by-child-signal",
            "sh -c 'kill -9 $$'; echo $?",
            |_| {},
        )
        .must("137"),
        killed(
            "kill-term",
            "trap 'echo term; exit 5' TERM; echo ready; while :; do sleep 0.05; done",
            15,
        )
        .must("Ok(5)"),
        killed("kill-kill", "echo ready; sleep 1000", 9).must("Ok(137)"),
        killed(
            "kill-hup-default",
            "trap 'exit 9' HUP; echo ready; while :; do sleep 0.05; done",
            1,
        )
        .must("Ok(9)"),
        scenario("kill-ignored-by-init", |session| async move {
            // PID 1 of a namespace ignores what it does not handle.
            let (mut lines, _out) =
                running(&session, "echo ready; while :; do sleep 0.05; done").await;
            lines.push(format!("{:?}", session.kill("", 15, false).await));
            lines.push(session.state("").await);
            lines
        })
        .must("state Running"),
        scenario("kill-twice", |session| async move {
            let (mut lines, _out) = running(&session, "echo ready; sleep 1000").await;
            lines.push(format!("{:?}", session.kill("", 9, false).await));
            lines.push(format!("{:?}", session.wait("").await));
            lines.push(format!("{:?}", session.kill("", 9, false).await));
            lines
        })
        .must("NotFound"),
        scenario("kill-all", |session| async move {
            let script = "sleep 1000 & sleep 1000 & echo ready; wait";
            let (mut lines, _out) = running(&session, script).await;
            lines.push(format!("{:?}", session.kill("", 9, true).await));
            lines.push(format!("{:?}", session.wait("").await));
            lines
        })
        .must("Ok(137)"),
        scenario("states", |session| async move {
            let spec = base(&session, &["/bin/sleep", "1000"]);
            session.register(&spec).await;
            let mut lines = vec![session.state("").await];
            lines.push(format!(
                "{:?}",
                session.create(["", "", ""], false).await.map(|_| ())
            ));
            lines.push(session.state("").await);
            lines.push(format!("{:?}", session.start("").await.map(|_| ())));
            lines.push(session.state("").await);
            lines.push(format!("{:?}", session.delete().await.is_err()));
            lines.push(format!("{:?}", session.kill("", 9, false).await));
            lines.push(format!("{:?}", session.wait("").await));
            lines.push(session.state("").await);
            lines.push(format!("{:?}", session.delete().await));
            lines.push(session.state("").await);
            lines.push(session.events_to_delete().await);
            lines
        })
        .must("state Stopped"),
        scenario("start-twice", |session| async move {
            let (mut lines, _out) = running(&session, "echo ready; sleep 1000").await;
            lines.push(format!("refused {}", session.start("").await.is_err()));
            lines
        })
        .must("refused true"),
        scenario("created-and-deleted", |session| async move {
            let spec = base(&session, &["/bin/true"]);
            session.register(&spec).await;
            let mut lines = vec![format!(
                "{:?}",
                session.create(["", "", ""], false).await.map(|_| ())
            )];
            lines.push(format!("{:?}", session.kill("", 9, false).await));
            lines.push(format!("{:?}", session.wait("").await));
            lines.push(format!("{:?}", session.delete().await));
            lines.push(session.events_to_delete().await);
            lines
        })
        .must("Ok(137)"),
        scenario("task-again", |session| async move {
            let spec = base(&session, &["/bin/sh", "-c", "exit 3"]);
            session.register(&spec).await;
            let mut lines = Lines::new();
            for _ in 0..2 {
                lines.push(format!(
                    "{:?}",
                    session.create(["", "", ""], false).await.map(|_| ())
                ));
                lines.push(format!("{:?}", session.start("").await.map(|_| ())));
                lines.push(format!("{:?}", session.wait("").await));
                lines.push(format!("{:?}", session.delete().await));
            }
            lines
        })
        .must("Ok(3)"),
        scenario("created-twice", |session| async move {
            let (mut lines, _out) = running(&session, "echo ready; sleep 1000").await;
            lines.push(format!(
                "{:?}",
                session.create(["", "", ""], false).await.map(|_| ())
            ));
            lines
        })
        .must("AlreadyExists"),
        scenario("pause-and-resume", |session| async move {
            let (mut lines, _out) = running(&session, "echo ready; sleep 1000").await;
            lines.push(format!("{:?}", session.pause().await));
            lines.push(session.state("").await);
            lines.push(format!("{:?}", session.resume().await));
            lines.push(session.state("").await);
            lines.push(format!("{:?}", session.kill("", 9, false).await));
            lines.push(format!("{:?}", session.wait("").await));
            lines.push(format!("{:?}", session.delete().await));
            lines.push(session.events_to_delete().await);
            lines
        })
        .must("state Paused"),
        scenario("kill-while-paused", |session| async move {
            let (mut lines, _out) = running(&session, "echo ready; sleep 1000").await;
            lines.push(format!("{:?}", session.pause().await));
            lines.push(format!("{:?}", session.kill("", 9, false).await));
            lines.push(format!("{:?}", session.wait("").await));
            lines
        })
        .must("Ok(137)"),
        scenario("processes", |session| async move {
            let script = "sleep 1000 & sleep 1000 & echo ready; wait";
            let (mut lines, _out) = running(&session, script).await;
            lines.push(format!("{:?}", session.pids().await));
            lines
        })
        .must("Ok((3, 0))"),
        scenario(
            "orphans-end-with-a-shared-pid-namespace",
            |session| async move {
                let mut spec = base(&session, &["/bin/sh", "-c", "sleep 4321 & exit 4"]);
                spec["linux"]["namespaces"] = json!([
                    { "type": "ipc" }, { "type": "uts" }, { "type": "mount" }, { "type": "network" }
                ]);
                session.run_to_end(spec).await
            },
        )
        .must("exit Ok(4)"),
        run(
            "many-children",
            "i=0; while [ $i -lt 100 ]; do (true &); i=$((i+1)); done; echo done",
            |_| {},
        )
        .must("done"),
    ]
}
