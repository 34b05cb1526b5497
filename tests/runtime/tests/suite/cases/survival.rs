//! Our shim, its zygote or its holder killed in the middle: of the first two containerd notices
//! nothing, so all is as with runc, where nobody is killed.

use std::fs;
use std::io::Write;

use serde_json::json;

use crate::harness::{Case, Lines, Part, Session, base, scenario};

/// A running shell that waits for lines of its input.
async fn shell(session: &Session, terminal: bool) -> (Lines, fs::File, fs::File) {
    let script = "echo ready; while read word; do echo got $word; [ $word = end ] && exit 3; done";
    let mut spec = base(session, &["/bin/sh", "-c", script]);
    spec["process"]["terminal"] = json!(terminal);
    session.register(&spec).await;
    let (stdin, input) = session.fifo("stdin");
    let (stdout, mut output) = session.fifo("stdout");
    let created = session.create([&stdin, &stdout, ""], terminal).await;
    let started = session.start("").await.map(|_| ());
    let seen = session.until(&mut output, "ready").await;
    let lines = vec![format!("{:?} {started:?} {seen}", created.map(|_| ()))];
    (lines, input, output)
}

/// The shell's other half: it is told to end and does.
async fn to_the_end(
    session: &Session,
    mut lines: Lines,
    mut input: fs::File,
    mut output: fs::File,
) -> Lines {
    lines.push(session.state("").await);
    input.write_all(b"one\n").unwrap();
    lines.push(session.until(&mut output, "got one").await);
    input.write_all(b"end\n").unwrap();
    lines.push(session.until(&mut output, "got end").await);
    lines.push(format!("{:?}", session.wait("").await));
    lines.push(format!("{:?}", session.delete().await));
    lines.push(session.events_to_delete().await);
    lines
}

pub(crate) fn cases() -> Vec<Case> {
    vec![
        scenario("shim-killed", |session| async move {
            let (lines, input, output) = shell(&session, false).await;
            session.kill_part(Part::Shim).await;
            to_the_end(&session, lines, input, output).await
        })
        .must("got end"),
        scenario("shim-killed-often", |session| async move {
            let (lines, input, output) = shell(&session, false).await;
            for _ in 0..5 {
                session.kill_part(Part::Shim).await;
            }
            to_the_end(&session, lines, input, output).await
        })
        .must("got end"),
        scenario("shim-killed-terminal", |session| async move {
            let (lines, input, output) = shell(&session, true).await;
            session.kill_part(Part::Shim).await;
            let lines = to_the_end(&session, lines, input, output).await;
            // The echo may come before or after the answer.
            lines
                .into_iter()
                .map(|line| line.replace("\r\n", " "))
                .collect()
        })
        .must("got end")
        .differs("when the terminal's echo is read depends on the moment"),
        scenario("shim-killed-while-waited-for", |session| async move {
            let (mut lines, mut input, _output) = shell(&session, false).await;
            let waiting = session.clone();
            let waiter = tokio::spawn(async move { waiting.wait("").await });
            // Answered after the wait has arrived, if not by then.
            lines.push(session.state("").await);
            session.kill_part(Part::Shim).await;
            input.write_all(b"end\n").unwrap();
            lines.push(format!("{:?}", waiter.await.unwrap()));
            lines
        })
        .must("Ok(3)"),
        scenario("shim-killed-before-the-start", |session| async move {
            let spec = base(&session, &["/bin/sh", "-c", "exit 5"]);
            session.register(&spec).await;
            let created = session.create(["", "", ""], false).await.map(|_| ());
            session.kill_part(Part::Shim).await;
            let mut lines = vec![format!("{created:?}"), session.state("").await];
            lines.push(format!("{:?}", session.start("").await.map(|_| ())));
            lines.push(format!("{:?}", session.wait("").await));
            lines.push(format!("{:?}", session.delete().await));
            lines
        })
        .must("Ok(5)"),
        scenario("shim-killed-with-the-container", |session| async move {
            let (mut lines, _input, _output) = shell(&session, false).await;
            let killed = session.kill("", 9, false).await;
            session.kill_part(Part::Shim).await;
            lines.push(format!("{killed:?} {:?}", session.wait("").await));
            lines.push(session.state("").await);
            lines.push(format!("{:?}", session.delete().await));
            lines
        })
        .must("Ok(137)"),
        scenario("shim-killed-while-paused", |session| async move {
            let (mut lines, input, output) = shell(&session, false).await;
            lines.push(format!("{:?}", session.pause().await));
            session.kill_part(Part::Shim).await;
            lines.push(session.state("").await);
            lines.push(format!("{:?}", session.resume().await));
            to_the_end(&session, lines, input, output).await
        })
        .must("state Paused")
        .must("got end")
        .must("/tasks/exit")
        .differs("events that have not been sent are lost with a shim, but for ends"),
        scenario("shim-killed-with-an-exec", |session| async move {
            let (mut lines, _input, _output) = shell(&session, false).await;
            let (stdin, mut input) = session.fifo("exec-in");
            let (stdout, mut output) = session.fifo("exec-out");
            let process = json!({
                "user": { "uid": 0, "gid": 0 }, "env": ["PATH=/bin"], "cwd": "/",
                "args": ["/bin/sh", "-c", "echo begun; read word; echo $word; exit 6"]
            });
            let added = session
                .exec("e1", &process, [&stdin, &stdout, ""], false)
                .await;
            let started = session.start("e1").await.map(|_| ());
            lines.push(format!("{added:?} {started:?}"));
            lines.push(session.until(&mut output, "begun").await);
            session.kill_part(Part::Shim).await;
            lines.push(session.state("e1").await);
            input.write_all(b"word\n").unwrap();
            lines.push(session.until(&mut output, "word").await);
            lines.push(format!("{:?}", session.wait("e1").await));
            lines.push(format!("{:?}", session.delete_exec("e1").await));
            lines.push(
                session
                    .state("e1")
                    .await
                    .starts_with("NotFound")
                    .to_string(),
            );
            lines
        })
        .must("Ok(6)"),
        scenario("zygote-killed", |session| async move {
            let (lines, input, output) = shell(&session, false).await;
            session.kill_part(Part::Zygote).await;
            let mut lines = to_the_end(&session, lines, input, output).await;
            let created = session.create(["", "", ""], false).await.map(|_| ());
            lines.push(format!("{created:?}"));
            lines
        })
        .must("got end"),
        scenario("holder-killed", |session| async move {
            let (_, _input, _output) = shell(&session, false).await;
            let waiting = session.clone();
            let waiter = tokio::spawn(async move { waiting.wait("").await });
            session.state("").await;
            if session.is_ours() {
                session.kill_part(Part::Holder).await;
            } else {
                drop(session.kill("", 9, false).await);
                drop(session.wait("").await);
                drop(session.delete().await);
            }
            let events = session.events_to_delete().await;
            drop(waiter.await);
            // containerd tells the end in its shim's place, and forgets the task.
            vec![
                format!("exit told {}", events.contains("/tasks/exit")),
                format!("gone {}", session.state("").await.starts_with("NotFound")),
            ]
        })
        .must("exit told true")
        .must("gone true"),
        scenario("after-the-holder", |session| async move {
            let (lines, input, output) = shell(&session, false).await;
            to_the_end(&session, lines, input, output).await
        })
        .must("got end"),
    ]
}
