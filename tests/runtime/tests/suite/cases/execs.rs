//! Further processes.

use std::io::Write;

use serde_json::{Value, json};

use crate::harness::{Case, Lines, Session, base, scenario};

fn process(args: &[&str]) -> Value {
    json!({
        "user": { "uid": 0, "gid": 0 },
        "args": args,
        "env": ["PATH=/bin", "EXEC=yes"],
        "cwd": "/",
        "noNewPrivileges": true
    })
}

/// A running container.
async fn running(session: &Session) -> Lines {
    let spec = base(session, &["/bin/sleep", "1000"]);
    session.register(&spec).await;
    let created = session.create(["", "", ""], false).await.map(|_| ());
    let started = session.start("").await.map(|_| ());
    vec![format!("{created:?} {started:?}")]
}

/// An exec that runs to its end.
fn exec(name: &'static str, script: &'static str, edit: fn(&mut Value)) -> Case {
    scenario(name, move |session| async move {
        let mut lines = running(&session).await;
        let mut process = process(&["/bin/sh", "-c", script]);
        edit(&mut process);
        let terminal = process["terminal"] == true;
        let (stdout, out) = session.fifo("exec-out");
        let (stderr, err) = session.fifo("exec-err");
        let stderr = if terminal { "" } else { &stderr };
        lines.push(format!(
            "{:?}",
            session
                .exec("e1", &process, ["", &stdout, stderr], terminal)
                .await
        ));
        lines.push(session.state("e1").await);
        let last_event = match session.start("e1").await {
            Ok(_) => {
                lines.push(format!("exit {:?}", session.wait("e1").await));
                "/tasks/exit"
            }
            Err(error) => {
                lines.push(format!("start: {error}"));
                "/tasks/exec-added"
            }
        };
        lines.push(format!("{:?}", session.delete_exec("e1").await.is_ok()));
        lines.push(session.state("").await);
        lines.push(session.text("stdout", out));
        lines.push(session.text("stderr", err));
        lines.push(session.events_until(last_event).await);
        lines
    })
}

pub(crate) fn cases() -> Vec<Case> {
    vec![
        exec("exec", "echo out; echo err >&2; exit 7", |_| {}).must("exit Ok(7)"),
        exec("exec-environment", "env | sort; pwd", |p| {
            p["cwd"] = json!("/tmp")
        })
        .must("EXEC=yes"),
        exec(
            "exec-user",
            "grep -E '^(Uid|Gid|Groups|Cap)' /proc/self/status",
            |p| {
                p["user"] = json!({ "uid": 1000, "gid": 1000, "additionalGids": [2000] });
            },
        )
        .must("2000"),
        exec(
            "exec-capabilities",
            "grep -E '^Cap' /proc/self/status",
            |p| {
                let set = json!(["CAP_CHOWN"]);
                p["capabilities"] = json!({ "bounding": set, "effective": set, "permitted": set });
            },
        )
        .must("CapEff:\t0000000000000001"),
        exec(
            "exec-sees-the-container",
            "cat /proc/1/comm; hostname; cat /proc/self/oom_score_adj",
            |_| {},
        )
        .must("sleep")
        .must("case")
        .differs(
            "without a score of its own an exec has its maker's: containerd's shim makes that 1",
        ),
        exec("exec-rlimits", "ulimit -n", |p| {
            p["rlimits"] = json!([{ "type": "RLIMIT_NOFILE", "hard": 64, "soft": 64 }]);
        })
        .must("64"),
        exec("exec-terminal", "test -t 0 && tty", |p| {
            p["terminal"] = json!(true)
        })
        .must("/dev/pts/0"),
        exec("exec-missing", "", |p| {
            p["args"] = json!(["no-such-command"])
        })
        .must("no-such-command"),
        exec("exec-not-executable", "", |p| {
            p["args"] = json!(["/etc/plain"])
        })
        .must("denied"),
        exec("exec-wrong-folder", "true", |p| p["cwd"] = json!("/absent")).must("absent"),
        scenario("exec-killed", |session| async move {
            let mut lines = running(&session).await;
            let process = process(&["/bin/sleep", "1000"]);
            lines.push(format!(
                "{:?}",
                session.exec("e1", &process, ["", "", ""], false).await
            ));
            lines.push(format!("{:?}", session.kill("e1", 9, false).await));
            lines.push(format!("{:?}", session.start("e1").await.map(|_| ())));
            lines.push(format!("{:?}", session.pids().await));
            lines.push(format!("{:?}", session.kill("e1", 9, false).await));
            lines.push(format!("{:?}", session.wait("e1").await));
            lines.push(session.state("e1").await);
            lines.push(format!("{:?}", session.kill("e1", 9, false).await));
            lines.push(format!("{:?}", session.delete_exec("e1").await));
            lines
        })
        .must("Ok((2, 1))"),
        scenario("exec-input", |session| async move {
            let mut lines = running(&session).await;
            let (stdin, mut input) = session.fifo("exec-in");
            let (stdout, out) = session.fifo("exec-out");
            let process = process(&["/bin/cat"]);
            lines.push(format!(
                "{:?}",
                session
                    .exec("e1", &process, [&stdin, &stdout, ""], false)
                    .await
            ));
            lines.push(format!("{:?}", session.start("e1").await.map(|_| ())));
            input.write_all(b"typed\n").unwrap();
            drop(input);
            lines.push(format!("{:?}", session.close_stdin("e1").await));
            lines.push(format!("{:?}", session.wait("e1").await));
            lines.push(format!("{:?}", session.delete_exec("e1").await));
            lines.push(session.text("stdout", out));
            lines
        })
        .must("typed"),
        scenario("exec-twice-by-one-name", |session| async move {
            let mut lines = running(&session).await;
            let process = process(&["/bin/true"]);
            for _ in 0..2 {
                lines.push(format!(
                    "{:?}",
                    session.exec("e1", &process, ["", "", ""], false).await
                ));
            }
            lines
        })
        .must("AlreadyExists"),
        scenario("execs-end-with-the-container", |session| async move {
            let mut lines = running(&session).await;
            let process = process(&["/bin/sleep", "1000"]);
            lines.push(format!(
                "{:?}",
                session.exec("e1", &process, ["", "", ""], false).await
            ));
            lines.push(format!("{:?}", session.start("e1").await.map(|_| ())));
            lines.push(format!("{:?}", session.kill("", 9, false).await));
            lines.push(format!("{:?}", session.wait("").await));
            lines.push(format!("{:?}", session.wait("e1").await));
            lines
        })
        .must("Ok(137)"),
        scenario("exec-in-an-ended-container", |session| async move {
            let spec = base(&session, &["/bin/true"]);
            session.register(&spec).await;
            let created = session.create(["", "", ""], false).await.map(|_| ());
            let started = session.start("").await.map(|_| ());
            let mut lines = vec![format!(
                "{created:?} {started:?} {:?}",
                session.wait("").await
            )];
            let process = process(&["/bin/true"]);
            let added = session.exec("e1", &process, ["", "", ""], false).await;
            let refused = added.is_err() || session.start("e1").await.is_err();
            lines.push(format!("refused {refused}"));
            lines
        })
        .must("refused true"),
        scenario("exec-unknown", |session| async move {
            let mut lines = running(&session).await;
            lines.push(format!(
                "{}",
                session
                    .start("nope")
                    .await
                    .unwrap_err()
                    .starts_with("NotFound")
            ));
            lines.push(format!(
                "{}",
                session
                    .kill("nope", 9, false)
                    .await
                    .unwrap_err()
                    .starts_with("NotFound")
            ));
            lines
        })
        .must("true"),
        scenario("execs-at-once", |session| async move {
            let mut lines = running(&session).await;
            let process = process(&["/bin/sh", "-c", "exit 3"]);
            let all = (0..8).map(|number| {
                let (session, process) = (session.clone(), process.clone());
                async move {
                    let name = format!("e{number}");
                    session.exec(&name, &process, ["", "", ""], false).await?;
                    session.start(&name).await?;
                    let exit = session.wait(&name).await?;
                    session.delete_exec(&name).await?;
                    Ok::<_, String>(exit)
                }
            });
            lines.push(format!("{:?}", futures::future::join_all(all).await));
            lines
        })
        .must("Ok(3)"),
    ]
}
