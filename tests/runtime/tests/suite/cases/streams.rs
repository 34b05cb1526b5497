//! Standard streams: FIFOs, files, loggers, terminals.

use std::fs;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;

use serde_json::json;

use crate::harness::{Case, Lines, Session, base, run, scenario};

async fn finish(session: &Session, lines: &mut Lines) {
    lines.push(format!("{:?}", session.start("").await.map(|_| ())));
    lines.push(format!("{:?}", session.wait("").await));
    lines.push(format!("{:?}", session.delete().await));
}

pub(crate) fn cases() -> Vec<Case> {
    vec![
        run("outputs-apart", "echo out; echo err >&2", |_| {}).must("stderr:\nerr"),
        run("last-words", "printf 'no newline'", |_| {}).must("no newline"),
        run("no-input", "cat; echo $?; readlink /proc/self/fd/0", |_| {}).must("/dev/null"),
        run(
            "kinds-of-stream",
            "stat -Lc %F /proc/self/fd/1 /proc/self/fd/2",
            |_| {},
        )
        .must("fifo"),
        scenario("input", |session| async move {
            let spec = base(&session, &["/bin/sh", "-c", "cat; echo end"]);
            session.register(&spec).await;
            let (stdin, mut input) = session.fifo("stdin");
            let (stdout, out) = session.fifo("stdout");
            let mut lines = vec![format!(
                "{:?}",
                session
                    .create([&stdin, &stdout, ""], false)
                    .await
                    .map(|_| ())
            )];
            lines.push(format!("{:?}", session.start("").await.map(|_| ())));
            input.write_all(b"typed\n").unwrap();
            drop(input);
            lines.push(format!("{:?}", session.close_stdin("").await));
            lines.push(format!("{:?}", session.wait("").await));
            lines.push(format!("{:?}", session.delete().await));
            lines.push(session.text("stdout", out));
            lines
        })
        .must("typed\nend"),
        scenario("no-streams", |session| async move {
            let script = "for i in 0 1 2; do readlink /proc/self/fd/$i; done >/tmp/seen";
            let spec = base(&session, &["/bin/sh", "-c", script]);
            session.register(&spec).await;
            let mut lines = vec![format!(
                "{:?}",
                session.create(["", "", ""], false).await.map(|_| ())
            )];
            finish(&session, &mut lines).await;
            lines.push(format!(
                "{:?}",
                fs::read_to_string(session.path("upper/tmp/seen"))
            ));
            lines
        })
        .must("/dev/null"),
        scenario("file", |session| async move {
            let script = "yes 0123456789 | head -c 1000000; echo end >&2";
            let spec = base(&session, &["/bin/sh", "-c", script]);
            session.register(&spec).await;
            let url = format!("file://{}", session.path("data/log"));
            let mut lines = vec![format!(
                "{:?}",
                session.create(["", &url, &url], false).await.map(|_| ())
            )];
            finish(&session, &mut lines).await;
            let log = fs::read(session.path("data/log")).unwrap_or_default();
            lines.push(format!(
                "{} bytes, end {}",
                log.len(),
                log.windows(4).any(|w| w == b"end\n")
            ));
            lines
        })
        .must("1000004 bytes, end true"),
        scenario("logger", |session| async move {
            let logger = session.path("data/logger");
            let copy = session.path("data/copy");
            // containerd's own shim sends SIGTERM when the container is deleted.
            let text = format!(
                "#!/bin/sh\ntrap '' TERM\nexec 5>&-\n(echo id $CONTAINER_ID ns $CONTAINER_NAMESPACE args \"$@\"; \
                 cat <&3; cat <&4) >{copy}.new\nmv {copy}.new {copy}\n"
            );
            fs::write(&logger, text).unwrap();
            fs::set_permissions(&logger, fs::Permissions::from_mode(0o755)).unwrap();
            let spec = base(&session, &["/bin/sh", "-c", "echo out; echo err >&2"]);
            session.register(&spec).await;
            let url = format!("binary://{logger}?key=value");
            let mut lines = vec![format!(
                "{:?}",
                session.create(["", &url, &url], false).await.map(|_| ())
            )];
            finish(&session, &mut lines).await;
            let deadline = tokio::time::Instant::now() + std::time::Duration::from_secs(20);
            while !fs::exists(&copy).unwrap() && tokio::time::Instant::now() < deadline {
                tokio::time::sleep(std::time::Duration::from_millis(10)).await;
            }
            let seen = fs::read_to_string(&copy).unwrap_or_else(|error| error.to_string());
            lines.push(seen.replace("-ours", "").replace("-runc", ""));
            lines
        })
        .must("args key value\nout\nerr"),
        scenario("terminal", |session| async move {
            let script = "tty; test -t 0 && test -t 1 && test -t 2 && echo terminal; stty size";
            let mut spec = base(&session, &["/bin/sh", "-c", script]);
            spec["process"]["terminal"] = json!(true);
            spec["process"]["consoleSize"] = json!({ "height": 33, "width": 77 });
            session.run_to_end(spec).await
        })
        .must("terminal"),
        scenario("terminal-resized", |session| async move {
            let script = "trap 'stty size; exit 0' WINCH; echo ready; while :; do sleep 0.05; done";
            let mut spec = base(&session, &["/bin/sh", "-c", script]);
            spec["process"]["terminal"] = json!(true);
            session.register(&spec).await;
            let (stdout, mut out) = session.fifo("stdout");
            let mut lines = vec![format!(
                "{:?}",
                session.create(["", &stdout, ""], true).await.map(|_| ())
            )];
            lines.push(format!("{:?}", session.start("").await.map(|_| ())));
            lines.push(session.until(&mut out, "ready").await);
            lines.push(format!("{:?}", session.resize("", 101, 42).await));
            lines.push(format!("{:?}", session.wait("").await));
            lines.push(format!("{:?}", session.delete().await));
            lines.push(session.text("stdout", out));
            lines
        })
        .must("42 101"),
        scenario("terminal-input", |session| async move {
            let mut spec = base(
                &session,
                &["/bin/sh", "-c", "echo ready; read x; echo got $x"],
            );
            spec["process"]["terminal"] = json!(true);
            session.register(&spec).await;
            let (stdin, mut input) = session.fifo("stdin");
            let (stdout, mut out) = session.fifo("stdout");
            let mut lines = vec![format!(
                "{:?}",
                session
                    .create([&stdin, &stdout, ""], true)
                    .await
                    .map(|_| ())
            )];
            lines.push(format!("{:?}", session.start("").await.map(|_| ())));
            lines.push(session.until(&mut out, "ready").await);
            input.write_all(b"hello\n").unwrap();
            lines.push(format!("{:?}", session.wait("").await));
            lines.push(format!("{:?}", session.delete().await));
            lines.push(session.text("stdout", out));
            lines
        })
        .must("got hello"),
        scenario("background-holds-output", |session| async move {
            // What is left behind must not hold up the deletion for ever.
            let mut spec = base(&session, &["/bin/sh", "-c", "echo out; exit 6"]);
            spec["process"]["terminal"] = json!(false);
            session.run_to_end(spec).await
        })
        .must("out"),
    ]
}
