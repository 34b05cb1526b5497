//! PID 1 as the runtime sees it: exit codes, signals, orphans, start errors.

#![allow(clippy::unwrap_used)] // helpers of tests may panic like tests

mod support;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Stdio};

use nix::sched::CloneFlags;
use support::{Container, daemon, eventually, init, run, shell, spawn_as_pid1};

#[test]
fn exit_codes_pass_through() {
    for code in [0, 1, 42, 126, 127, 128, 255] {
        assert_eq!(run(shell(&format!("exit {code}"))).0, code);
    }
}

#[test]
fn death_by_signal_counts_from_128() {
    for signal in [1, 6, 9, 11, 15] {
        assert_eq!(run(shell(&format!("kill -{signal} $$"))).0, 128 + signal);
    }
}

#[test]
fn arguments_and_environment_are_untouched() {
    let mut command = init(&[
        "--",
        "sh",
        "-c",
        "printf '%s|' \"$0\" \"$@\" \"$ODD\"",
        "--",
        "",
        "a b",
    ]);
    command.env("ODD", "x=y z");
    assert_eq!(run(command).1, "--||a b|x=y z|");
}

#[test]
fn a_command_that_does_not_start_is_told_apart() {
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str, content: &str, mode| {
        let path = dir.path().join(name);
        fs::write(&path, content).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let plain = file("plain", "echo no interpreter named\n", 0o755);
    let orphaned = file("orphaned", "#!/nowhere/sh\n", 0o755);
    let locked = file("locked", "#!/bin/sh\n", 0o644);
    let report = file("report", "", 0o666);

    let cases = [
        (
            "no-such",
            127,
            "exec: \"no-such\": executable file not found in $PATH".to_owned(),
        ),
        (&plain, 126, format!("exec {plain}: exec format error")),
        (
            &orphaned,
            127,
            format!("exec {orphaned}: no such file or directory"),
        ),
        (&locked, 126, format!("exec: {locked:?}: permission denied")),
        ("/tmp", 126, "exec: \"/tmp\": is a directory".to_owned()),
        ("", 126, "exec: no command".to_owned()),
    ];
    for (command, code, message) in cases {
        let (got, out, err) = run(init(&["--report", &report, "--", command]));
        assert_eq!(
            (got, out.as_str(), err.trim_end()),
            (code, "", message.as_str())
        );
        let line = fs::read_to_string(&report).unwrap();
        let record: serde_json::Value = serde_json::from_str(&line).unwrap();
        let expected =
            serde_json::json!({ "startError": { "exitCode": code, "message": message } });
        assert_eq!(record, expected);
    }

    // The same codes of a command that did run leave no record.
    fs::write(&report, "").unwrap();
    for code in [126, 127] {
        let script = format!("exit {code}");
        assert_eq!(
            run(init(&["--report", &report, "--", "sh", "-c", &script])).0,
            code
        );
        assert_eq!(fs::read_to_string(&report).unwrap(), "");
    }
}

#[test]
fn the_command_starts_with_clean_signals() {
    let (code, status, _) = run(init(&["--", "grep", "^Sig[BI]", "/proc/self/status"]));
    assert_eq!(code, 0);
    for line in status.lines() {
        assert!(line.ends_with("\t0000000000000000"), "{line}");
    }
    assert_eq!(status.lines().count(), 2);
}

#[test]
fn every_signal_is_forwarded() {
    let names = [
        "HUP", "INT", "QUIT", "USR1", "USR2", "ALRM", "TERM", "CONT", "TSTP", "WINCH", "PWR",
    ];
    let numbers = [1, 2, 3, 10, 12, 14, 15, 18, 20, 28, 30];
    let traps: String = names
        .iter()
        .map(|name| format!("trap 'echo {name}' {name}; "))
        .collect();
    let script = format!("{traps} echo ready; while :; do read -t 0.1 line; done");
    let command = init(&["--", "bash", "-c", &script]);
    let container = Container::start(command);
    assert_eq!(container.line(), "ready");
    for (name, number) in names.into_iter().zip(numbers) {
        container.send(number);
        assert_eq!(container.line(), name);
    }
}

#[test]
fn real_time_signals_are_forwarded() {
    let script = "trap 'echo rt; exit 3' RTMIN+5; echo ready; while :; do sleep 0.05; done";
    let mut container = Container::start(init(&["--", "bash", "-c", script]));
    assert_eq!(container.line(), "ready");
    container.send(nix::libc::SIGRTMIN() + 5);
    assert_eq!(container.line(), "rt");
    assert_eq!(container.wait(), 3);
}

#[test]
fn an_unhandled_signal_ends_the_command_and_the_container() {
    for signal in [1, 2, 15] {
        let mut container = Container::start(shell("echo ready; exec sleep 1000"));
        assert_eq!(container.line(), "ready");
        container.send(signal);
        assert_eq!(container.wait(), 128 + signal);
    }
}

#[test]
fn a_signal_to_its_own_group_does_not_come_back() {
    let script = "trap 'echo term' TERM; kill -TERM 0; echo end";
    let mut container = Container::start(shell(script));
    assert_eq!(container.rest(), ["term", "end"]);
    assert_eq!(container.wait(), 0);
}

#[test]
fn kill_one_reaches_the_command() {
    let (code, out, _) = run(shell(
        "trap 'echo hup; exit 6' HUP; kill -HUP 1; sleep 1000 & wait",
    ));
    assert_eq!((code, out.as_str()), (6, "hup\n"));
}

#[test]
fn orphans_are_reaped() {
    let script =
        "i=0; while [ $i -lt 50 ]; do (sleep 0.01 &) ; i=$((i+1)); done; echo done; read x";
    let container = Container::start(shell(script));
    assert_eq!(container.line(), "done");
    eventually("orphans to be reaped", || {
        let children = container.children();
        (children.len() == 1 && children[0].1 != 'Z').then_some(())
    });
}

#[test]
fn orphans_are_reaped_without_a_namespace_of_its_own() {
    // A pod that shares its PID namespace: this process is not PID 1.
    let mut command = shell("(sleep 0.01 &) ; echo $PPID; read x");
    command.stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let output = child.stdout.take().unwrap();
    let container = Container::adopt(child, output);
    assert_eq!(container.line(), container.pid().to_string());
    eventually("orphans to be reaped", || {
        (container.children().len() == 1).then_some(())
    });
}

#[test]
fn what_the_command_leaves_behind_dies_with_it() {
    let mut container = Container::start(shell("setsid sleep 1000 & echo started; exit 3"));
    assert_eq!(container.rest(), ["started"]);
    assert_eq!(container.wait(), 3);
}

#[test]
fn idle_means_one_system_call_without_timeout() {
    let container = Container::start(shell("echo ready; read x"));
    assert_eq!(container.line(), "ready");
    // Number and arguments of the call it sleeps in; the third is the timeout.
    let call = format!("{} ", nix::libc::SYS_rt_sigtimedwait);
    eventually("PID 1 to sleep in sigwaitinfo", || {
        let line = fs::read_to_string(format!("/proc/{}/syscall", container.pid())).unwrap();
        let timeout = line.split_whitespace().nth(3).map(str::to_owned);
        (line.starts_with(&call) && timeout.as_deref() == Some("0x0")).then_some(())
    });
    let tasks = fs::read_dir(format!("/proc/{}/task", container.pid()))
        .unwrap()
        .count();
    assert_eq!(tasks, 1);
}

#[test]
fn the_log_stays_reachable_through_proc_1() {
    // Without CAP_SYS_PTRACE, as in a default container.
    let mut command = Command::new("setpriv");
    command.args([
        "--bounding-set=-sys_ptrace",
        env!("CARGO_BIN_EXE_sandman-daemon"),
        "init",
    ]);
    command
        .args(["sh", "-c"])
        .arg("mount --make-rprivate / && mount -t proc proc /proc && echo logged >/proc/1/fd/1");
    command.stdout(Stdio::piped());
    let output = spawn_as_pid1(&mut command, CloneFlags::CLONE_NEWNS)
        .wait_with_output()
        .unwrap();
    assert_eq!(String::from_utf8(output.stdout).unwrap(), "logged\n");
}

#[test]
fn a_closed_log_is_no_reason_to_end() {
    let mut command = shell("trap 'exit 5' TERM; echo ready; while :; do sleep 0.05; done");
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    command.stderr(writer);
    let mut container = Container::start(command);
    assert_eq!(container.line(), "ready");
    container.send(15);
    assert_eq!(container.wait(), 5);
}

#[test]
fn wrong_calls_are_refused() {
    for args in [&[][..], &["unknown"]] {
        let output = daemon().args(args).output().unwrap();
        assert_eq!(output.status.code(), Some(2));
        assert!(String::from_utf8_lossy(&output.stderr).contains("usage:"));
    }
}
