//! exec over both transports: output, exit codes, stdin, terminals.

use anyhow::{Context as _, Result, ensure};
use futures::SinkExt as _;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{AttachParams, TerminalSize};
use sandman_integration::{DEADLINE, PodBuilder, Scope, Transport, images};
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};

async fn with_pod(scope: &Scope) -> Result<()> {
    scope
        .ready_pod(&PodBuilder::sleeper(&scope.cluster, "box").build())
        .await
        .map(drop)
}

#[test]
fn output_goes_to_its_own_stream() {
    Scope::run(|scope| async move {
        with_pod(&scope).await?;
        for transport in Transport::ALL {
            let output = scope
                .kubectl_over(transport)
                .run(&["exec", "box", "--", "sh", "-c", "echo out; echo err >&2"])
                .await?
                .ok()?;
            ensure!(output.text() == "out\n", "{transport:?}: {output:?}");
            ensure!(output.stderr.contains("err\n"), "{transport:?}: {output:?}");
        }
        Ok(())
    });
}

#[test]
fn exit_codes_arrive() {
    Scope::run(|scope| async move {
        with_pod(&scope).await?;
        for transport in Transport::ALL {
            for (script, code) in [
                ("exit 0", 0),
                ("exit 1", 1),
                ("exit 3", 3),
                ("no-such-command", 127),
                ("/etc/passwd", 126),
                ("kill -KILL $$", 137),
                ("kill -TERM $$", 143),
                ("exit 255", 255),
            ] {
                let output = scope
                    .kubectl_over(transport)
                    .run(&["exec", "box", "--", "sh", "-c", script])
                    .await?;
                ensure!(output.code == code, "{transport:?} {script:?}: {output:?}");
            }
        }
        Ok(())
    });
}

#[test]
fn a_missing_command_is_explained() {
    Scope::run(|scope| async move {
        with_pod(&scope).await?;
        for transport in Transport::ALL {
            let output = scope
                .kubectl_over(transport)
                .run(&["exec", "box", "--", "no-such-command"])
                .await?;
            ensure!(output.code == 1, "{transport:?}: {output:?}");
            ensure!(
                output.stderr.contains("executable file not found in $PATH"),
                "{transport:?}: {output:?}"
            );
        }
        Ok(())
    });
}

#[test]
fn an_unknown_container_is_named() {
    Scope::run(|scope| async move {
        with_pod(&scope).await?;
        let output = scope
            .kubectl()
            .run(&["exec", "box", "-c", "nobody", "--", "true"])
            .await?;
        ensure!(output.code == 1, "{output:?}");
        ensure!(output.stderr.contains("nobody"), "{output:?}");
        Ok(())
    });
}

#[test]
fn stdin_ends_with_the_pipe() {
    Scope::run(|scope| async move {
        with_pod(&scope).await?;
        for transport in Transport::ALL {
            for input in ["", "foo", "two\nlines\n"] {
                let output = scope
                    .kubectl_over(transport)
                    .run_with(&["exec", "-i", "box", "--", "cat"], input.into())
                    .await?
                    .ok()?;
                ensure!(
                    output.text() == input,
                    "{transport:?} {input:?}: {output:?}"
                );
            }
        }
        Ok(())
    });
}

#[test]
fn a_background_child_does_not_hold_the_exec() {
    Scope::run(|scope| async move {
        with_pod(&scope).await?;
        for transport in Transport::ALL {
            let kubectl = scope.kubectl_over(transport);
            let output = kubectl
                .run(&["exec", "box", "--", "sh", "-c", "sleep 3456 & echo $!"])
                .await?
                .ok()?;
            let pid = output.text().trim().to_owned();
            ensure!(!pid.is_empty(), "{transport:?}: {output:?}");
            // It outlives the exec that started it.
            kubectl
                .run(&["exec", "box", "--", "kill", &pid])
                .await?
                .ok()?;
        }
        Ok(())
    });
}

#[test]
fn a_terminal_has_its_size_and_is_resized() {
    Scope::run(|scope| async move {
        with_pod(&scope).await?;
        for transport in Transport::ALL {
            // kubectl takes a terminal only from a terminal: `script` makes one.
            let command = scope.kubectl_over(transport).command(&[
                "exec",
                "-it",
                "box",
                "--",
                "sh",
                "-c",
                "stty size; read line; stty size",
            ]);
            let words: Vec<String> = std::iter::once(command.as_std().get_program())
                .chain(command.as_std().get_args())
                .map(|word| format!("'{}'", word.to_string_lossy()))
                .collect();
            let line = format!("stty rows 33 cols 99; {}", words.join(" "));
            let mut child = tokio::process::Command::new("script")
                .args(["-qec", &line, "/dev/null"])
                .envs(
                    command
                        .as_std()
                        .get_envs()
                        .filter_map(|(k, v)| Some((k, v?))),
                )
                .stdin(std::process::Stdio::piped())
                .stdout(std::process::Stdio::piped())
                .kill_on_drop(true)
                .spawn()
                .context("start script (package bsdutils)")?;
            let mut stdin = child.stdin.take().context("stdin")?;
            let mut lines = BufReader::new(child.stdout.take().context("stdout")?);
            let mut first = String::new();
            lines.read_line(&mut first).await?;
            ensure!(first.contains("33 99"), "{transport:?}: {first:?}");
            stdin.write_all(b"\n").await?;
            let mut rest = String::new();
            lines.read_to_string(&mut rest).await?;
            ensure!(rest.contains("33 99"), "{transport:?}: {rest:?}");
            ensure!(child.wait().await?.success(), "{transport:?}");
        }
        Ok(())
    });
}

#[test]
fn a_terminal_follows_its_clients_size() {
    Scope::run(|scope| async move {
        with_pod(&scope).await?;
        let script = "trap 'stty size' WINCH; echo up; while true; do sleep 0.1; done";
        let mut attached = scope
            .api::<Pod>()
            .exec(
                "box",
                ["sh", "-c", script],
                &AttachParams::interactive_tty(),
            )
            .await?;
        let mut lines = BufReader::new(attached.stdout().context("stdout")?).lines();
        ensure!(lines.next_line().await?.as_deref() == Some("up"));
        let mut sizes = attached.terminal_size().context("sizes")?;
        sizes
            .send(TerminalSize {
                width: 101,
                height: 37,
            })
            .await?;
        let seen = async {
            while let Some(line) = lines.next_line().await? {
                if line.contains("37 101") {
                    return Ok(());
                }
            }
            anyhow::bail!("the session ended before the size came")
        };
        tokio::time::timeout(DEADLINE, seen)
            .await
            .context("the size does not arrive")??;
        attached.abort();
        Ok(())
    });
}

#[test]
fn a_static_image_without_a_shell_is_usable() {
    Scope::run(|scope| async move {
        let container = k8s_openapi::api::core::v1::Container {
            name: "main".to_owned(),
            image: Some(images::scratch(&scope.cluster)),
            ..Default::default()
        };
        scope
            .ready_pod(&PodBuilder::new("scratch").container(container).build())
            .await?;
        let output = scope
            .kubectl()
            .run(&["exec", "scratch", "--", "sh"])
            .await?;
        ensure!(output.code == 1, "{output:?}");
        ensure!(
            output.stderr.contains("executable file not found in $PATH"),
            "{output:?}"
        );
        Ok(())
    });
}
