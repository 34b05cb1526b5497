//! Execs in real sandboxes: exit codes, streams, terminals, clients that vanish.

use std::time::{Duration, Instant};

use bytes::Bytes;
use sandman_protocol::v1;
use v1::exec_request::Message as In;
use v1::exec_response::Message as Out;

use crate::support::on_a_host;

/// Says when the terminal has its first size, then a line that was typed after the second.
const SIZES: &str = "until test \"$(stty size)\" = '24 80'; do :; done; echo first; read line; \
                     until test \"$(stty size)\" = '40 100'; do :; done; echo $TERM $line";

fn start(uid: &str, script: &str) -> v1::ExecStart {
    v1::ExecStart {
        uid: uid.into(),
        container: "main".into(),
        command: vec!["sh".into(), "-c".into(), script.into()],
        stdin: true,
        stdout: true,
        stderr: true,
        ..Default::default()
    }
}

#[test]
#[ignore = "needs root, containerd, runc and the built agent"]
fn exit_codes_streams_and_failures() {
    on_a_host(|host| async move {
        let node = host.node().await;
        let spec = node.pod("exec", "sleep 1000");
        node.apply(&spec).await;
        node.wait_running(&spec.uid).await;
        for (script, code) in [
            ("true", 0),
            ("exit 1", 1),
            ("exit 127", 127),
            ("kill -9 $$", 137),
        ] {
            let output = node.exec(&spec.uid, &["sh", "-c", script]).await;
            assert_eq!(output.code, Some(code), "{script}: {output:?}");
        }
        let output = node
            .exec(&spec.uid, &["sh", "-c", "echo out; echo err >&2; exit 3"])
            .await;
        assert_eq!((output.text().as_str(), output.code), ("out\n", Some(3)));
        assert_eq!(output.stderr, b"err\n");

        let failed = node
            .exec(&spec.uid, &["no-such-command"])
            .await
            .failed
            .unwrap();
        assert_eq!(failed.kind(), v1::exec_failed::Kind::CommandNotStarted);
        for phrase in [
            "error finding executable",
            "executable file not found in $PATH",
        ] {
            assert!(failed.message.contains(phrase), "{}", failed.message);
        }
        let failed = node.exec("no-such-uid", &["true"]).await.failed.unwrap();
        assert_eq!(failed.kind(), v1::exec_failed::Kind::ContainerNotFound);

        // The image has no tar; the agent has.
        let output = node
            .exec(&spec.uid, &["tar", "cf", "-", "/etc/passwd"])
            .await;
        assert_eq!(output.code, Some(0), "{output:?}");
        assert!(output.text().contains("app:x:1000"), "{output:?}");

        // A child that outlives the exec keeps neither it nor the client.
        let begin = Instant::now();
        let script = "sleep 500 & echo started";
        let output = node.exec(&spec.uid, &["sh", "-c", script]).await;
        assert_eq!(
            (output.text().as_str(), output.code),
            ("started\n", Some(0))
        );
        assert!(begin.elapsed() < Duration::from_secs(20));
        let output = node.exec(&spec.uid, &["ps"]).await;
        assert!(output.text().contains("sleep 500"), "{output:?}");
        node.remove_and_wait(&spec.uid).await;
        assert_eq!(host.leftovers(), Vec::<String>::new());
    });
}

#[test]
#[ignore = "needs root, containerd, runc and the built agent"]
fn large_streams_arrive_whole() {
    on_a_host(|host| async move {
        let node = host.node().await;
        let spec = node.pod("bulk", "sleep 1000");
        node.apply(&spec).await;
        node.wait_running(&spec.uid).await;
        let data: Vec<u8> = (0..32_u32 << 18).flat_map(|n| n.to_le_bytes()).collect();
        let begin = Instant::now();
        let output = node
            .exec_with(&spec.uid, &["cat"], Some(Bytes::from(data.clone())))
            .await;
        assert_eq!(output.code, Some(0));
        assert!(
            output.stdout == data,
            "{} of {} bytes",
            output.stdout.len(),
            data.len()
        );
        eprintln!(
            "{} MiB both ways in {:?}",
            data.len() >> 20,
            begin.elapsed()
        );

        // A process that does not read its input ends all the same.
        let output = node
            .exec_with(&spec.uid, &["true"], Some(Bytes::from(data)))
            .await;
        assert_eq!(output.code, Some(0));
        node.remove_and_wait(&spec.uid).await;
    });
}

#[test]
#[ignore = "needs root, containerd, runc and the built agent"]
fn terminals_have_a_size_and_hang_up() {
    on_a_host(|host| async move {
        let node = host.node().await;
        let spec = node.pod("tty", "sleep 1000");
        node.apply(&spec).await;
        node.wait_running(&spec.uid).await;
        let size = |width, height| v1::TerminalSize { width, height };
        let begin = v1::ExecStart {
            tty: true,
            size: Some(size(80, 24)),
            ..start(&spec.uid, SIZES)
        };
        let mut exec = node.start_exec(begin).await;
        let mut seen = String::new();
        while !seen.contains("first") {
            let message = exec
                .output
                .message()
                .await
                .unwrap()
                .expect("more output")
                .message;
            if let Some(Out::Stdout(data)) = message {
                seen.push_str(&String::from_utf8_lossy(&data));
            }
        }
        for message in [
            In::Resize(size(100, 40)),
            In::Stdin(Bytes::from_static(b"typed\r")),
        ] {
            exec.input
                .send(v1::ExecRequest {
                    message: Some(message),
                })
                .await
                .unwrap();
        }
        let output = exec.collect().await;
        assert!(output.text().contains("xterm typed"), "{output:?}");
        assert_eq!(output.code, Some(0));

        // Clients that vanish: with a terminal and without.
        for tty in [true, false] {
            let marker = if tty { "sleep 701" } else { "sleep 702" };
            let begin = v1::ExecStart {
                tty,
                ..start(&spec.uid, &format!("{marker}; true"))
            };
            let mut exec = node.start_exec(begin).await;
            assert!(matches!(
                exec.output.message().await.unwrap().unwrap().message,
                Some(Out::Started(_))
            ));
            drop(exec);
            let gone = async {
                while node
                    .exec(&spec.uid, &["ps"])
                    .await
                    .text()
                    .contains(&format!("{marker};"))
                {}
            };
            tokio::time::timeout(Duration::from_secs(30), gone)
                .await
                .expect(marker);
        }
        node.remove_and_wait(&spec.uid).await;
        assert_eq!(host.leftovers(), Vec::<String>::new());
    });
}
