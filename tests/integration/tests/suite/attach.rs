//! attach: to shells and to silent containers, alone and with others.

use std::process::Stdio;

use anyhow::{Context as _, Result, bail, ensure};
use k8s_openapi::api::core::v1::{Container, Pod};
use kube::api::AttachParams;
use sandman_integration::{
    DEADLINE, Kubectl, PodBuilder, Scope, Transport, container, images, is_phase, wait_pod,
};
use tokio::io::{
    AsyncBufReadExt as _, AsyncRead, AsyncReadExt as _, AsyncWriteExt as _, BufReader,
};
use tokio::process::Child;
use tokio::time::timeout;

/// A container that reads its input.
fn interactive(scope: &Scope, script: &str, tty: bool, once: bool) -> Pod {
    let container = Container {
        stdin: Some(true),
        stdin_once: Some(once),
        tty: Some(tty),
        ..container(&scope.cluster, "main", script)
    };
    PodBuilder::new("box")
        .container(container)
        .restart_policy("Never")
        .build()
}

/// kubectl with a terminal of its own.
fn in_terminal(kubectl: &Kubectl, arguments: &[&str]) -> Result<Child> {
    let command = kubectl.command(arguments);
    let command = command.as_std();
    let words: Vec<String> = std::iter::once(command.get_program())
        .chain(command.get_args())
        .map(|word| format!("'{}'", word.to_string_lossy()))
        .collect();
    let line = format!("stty rows 33 cols 99 -echo; exec {}", words.join(" "));
    tokio::process::Command::new("script")
        .args(["-qec", &line, "/dev/null"])
        .envs(command.get_envs().filter_map(|(k, v)| Some((k, v?))))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .context("start script (package bsdutils)")
}

/// Reads until `text` was seen.
async fn until(reader: &mut (impl AsyncRead + Unpin), text: &str) -> Result<String> {
    let mut seen = Vec::new();
    let reading = async {
        let mut buffer = [0; 4096];
        while !String::from_utf8_lossy(&seen).contains(text) {
            match reader.read(&mut buffer).await? {
                0 => bail!("the stream ended"),
                length => seen.extend_from_slice(&buffer[..length]),
            }
        }
        Ok(())
    };
    let outcome = timeout(DEADLINE, reading).await;
    let seen = String::from_utf8_lossy(&seen).into_owned();
    match outcome {
        Ok(Ok(())) => Ok(seen),
        Ok(Err(error)) => Err(error.context(format!("{text:?} is not in {seen:?}"))),
        Err(_) => bail!("{text:?} does not come, only {seen:?}"),
    }
}

#[test]
fn run_with_input_and_removal() {
    Scope::run(|scope| async move {
        let overrides = serde_json::json!({"spec": {
            "nodeSelector": {"type": "virtual-kubelet"},
            "tolerations": [{"key": "virtual-kubelet.io/provider", "operator": "Exists"}],
        }})
        .to_string();
        for transport in Transport::ALL {
            let name = format!("run-{transport:?}").to_lowercase();
            let image = format!("--image={}", images::busybox(&scope.cluster));
            let overrides = format!("--overrides={overrides}");
            let arguments = [
                "run",
                &name,
                "-i",
                "--rm",
                "--restart=Never",
                &image,
                &overrides,
                "--",
                "cat",
            ];
            let output = scope
                .kubectl_over(transport)
                .run_with(&arguments, b"one\ntwo\n".to_vec())
                .await?
                .ok()?;
            ensure!(
                output.text().contains("one\ntwo\n"),
                "{transport:?}: {output:?}"
            );
            ensure!(
                output.text().contains(&format!("pod \"{name}\" deleted")),
                "{transport:?}: {output:?}"
            );
        }
        Ok(())
    });
}

#[test]
fn run_with_a_terminal() {
    Scope::run(|scope| async move {
        let overrides = r#"--overrides={"spec":{"nodeSelector":{"type":"virtual-kubelet"},"tolerations":[{"operator":"Exists"}]}}"#;
        for transport in Transport::ALL {
            let name = format!("run-{transport:?}").to_lowercase();
            let image = format!("--image={}", images::busybox(&scope.cluster));
            let arguments = [
                "run",
                &name,
                "-it",
                "--rm",
                "--restart=Never",
                &image,
                overrides,
                "--",
                "sh",
            ];
            let mut child = in_terminal(&scope.kubectl_over(transport), &arguments)?;
            let mut stdin = child.stdin.take().context("stdin")?;
            let mut stdout = child.stdout.take().context("stdout")?;
            until(&mut stdout, "# ").await?;
            // Job control needs a terminal that is the shell's own.
            stdin.write_all(b"stty size; jobs; echo e'n'd\n").await?;
            let seen = until(&mut stdout, "end").await?;
            ensure!(seen.contains("33 99"), "{transport:?}: {seen:?}");
            ensure!(!seen.contains("job control"), "{transport:?}: {seen:?}");
            stdin.write_all(b"exit 3\n").await?;
            until(&mut stdout, &format!("pod \"{name}\" deleted")).await?;
            let ended = timeout(DEADLINE, child.wait()).await??;
            ensure!(ended.code() == Some(3), "{transport:?}: {ended}");
        }
        Ok(())
    });
}

#[test]
fn a_shell_on_a_terminal_is_joined_left_and_joined_again() {
    Scope::run(|scope| async move {
        // Nobody is attached from the start: what keeps it alive is its open input.
        scope
            .ready_pod(&interactive(&scope, "exec sh", true, false))
            .await?;
        for (number, transport) in Transport::ALL.into_iter().enumerate() {
            let kubectl = scope.kubectl_over(transport);
            let mut child = in_terminal(&kubectl, &["attach", "-it", "box"])?;
            let mut stdin = child.stdin.take().context("stdin")?;
            let mut stdout = child.stdout.take().context("stdout")?;
            // The terminal is told its size beside the input, maybe after it; and it echoes the
            // command, which must not read like the answer.
            let command = "count=$((count + 1)); echo count'='$count; \
                           until [ \"$(stty size)\" = \"$((30 + 3)) 99\" ]; do :; done; stty size\n";
            stdin.write_all(command.as_bytes()).await?;
            let seen = until(&mut stdout, "33 99").await?;
            let count = format!("count={}", number + 1);
            ensure!(seen.contains(&count), "{transport:?}: {seen:?}");
            child.start_kill()?;
            child.wait().await?;
        }
        let pod = scope.api::<Pod>().get("box").await?;
        ensure!(sandman_integration::is_ready(&pod), "{:?}", pod.status);
        Ok(())
    });
}

#[test]
fn stdin_once_ends_the_containers_input() {
    Scope::run(|scope| async move {
        let script = "cat; echo over; exit 4";
        for transport in Transport::ALL {
            let name = format!("once-{transport:?}").to_lowercase();
            let mut pod = interactive(&scope, script, false, true);
            pod.metadata.name = Some(name.clone());
            scope.ready_pod(&pod).await?;
            let output = scope
                .kubectl_over(transport)
                .run_with(&["attach", "-i", &name], b"last words\n".to_vec())
                .await?;
            ensure!(
                output.text() == "last words\nover\n",
                "{transport:?}: {output:?}"
            );
            let pods = scope.api::<Pod>();
            wait_pod(&pods, &name, "failed", |pod| is_phase(pod, "Failed")).await?;
        }
        Ok(())
    });
}

#[test]
fn input_that_stays_open_lets_the_client_go() {
    Scope::run(|scope| async move {
        scope
            .ready_pod(&interactive(&scope, "exec cat", false, false))
            .await?;
        for transport in Transport::ALL {
            // The end of a client's input is the end of its session, not of the container's.
            let input = format!("from {transport:?}\n");
            scope
                .kubectl_over(transport)
                .run_with(&["attach", "-i", "box"], input.clone().into_bytes())
                .await?
                .ok()?;
            let mut logs = scope.kubectl().spawn(&["logs", "-f", "box"])?;
            until(logs.stdout.as_mut().context("stdout")?, &input).await?;
        }
        Ok(())
    });
}

#[test]
fn clients_share_the_output_and_see_the_end() {
    Scope::run(|scope| async move {
        let script = "while [ ! -e /tmp/go ]; do echo tick; sleep 0.1; done; \
                      echo out; echo err >&2; read word; exit 7";
        scope
            .ready_pod(&interactive(&scope, script, false, false))
            .await?;
        let mut watching = Vec::new();
        for transport in Transport::ALL {
            let mut child = scope.kubectl_over(transport).spawn(&["attach", "box"])?;
            until(child.stdout.as_mut().context("stdout")?, "tick\n").await?;
            watching.push(child);
        }
        let pods = scope.api::<Pod>();
        let everything = AttachParams::default().stdin(true).stderr(true);
        let mut talking = pods.attach("box", &everything).await?;
        let mut stdout = talking.stdout().context("stdout")?;
        until(&mut stdout, "tick\n").await?;
        scope
            .kubectl()
            .run(&["exec", "box", "--", "touch", "/tmp/go"])
            .await?
            .ok()?;
        until(&mut stdout, "out\n").await?;
        until(&mut talking.stderr().context("stderr")?, "err\n").await?;
        let status = talking.take_status().context("status")?;
        let mut stdin = talking.stdin().context("stdin")?;
        stdin.write_all(b"end\n").await?;
        // Of the session: the pod tells how its container ended.
        let status = timeout(DEADLINE, status).await?.context("no status")?;
        ensure!(status.status.as_deref() == Some("Success"), "{status:?}");
        for child in watching {
            let output = timeout(DEADLINE, child.wait_with_output()).await??;
            ensure!(output.status.success(), "{output:?}");
            let text = String::from_utf8_lossy(&output.stdout).into_owned();
            ensure!(text.ends_with("out\n"), "{text:?}");
            let errors = String::from_utf8_lossy(&output.stderr).into_owned();
            ensure!(errors.contains("err\n"), "{errors:?}");
        }
        wait_pod(&pods, "box", "failed", |pod| is_phase(pod, "Failed")).await?;
        Ok(())
    });
}

#[test]
fn a_client_that_does_not_read_holds_up_nothing() {
    Scope::run(|scope| async move {
        // Far more than all buffers on the way to a client hold.
        let script = "read go; yes 0123456789abcdef | head -c 67108864; echo; echo finished; exec sleep 1000000";
        scope
            .ready_pod(&interactive(&scope, script, false, false))
            .await?;
        let pods = scope.api::<Pod>();
        let stuck = pods.attach("box", &AttachParams::default()).await?;
        let mut talking = pods
            .attach("box", &AttachParams::default().stdin(true).stderr(false))
            .await?;
        let mut lines = BufReader::new(talking.stdout().context("stdout")?).lines();
        talking.stdin().context("stdin")?.write_all(b"go\n").await?;
        let others = async {
            while let Some(line) = lines.next_line().await? {
                if line == "finished" {
                    return Ok(());
                }
            }
            bail!("another client lost its session")
        };
        timeout(DEADLINE, others)
            .await
            .context("another client is held up")??;
        let logs = scope
            .kubectl()
            .run(&["logs", "--tail=1", "box"])
            .await?
            .ok()?;
        ensure!(logs.text() == "finished\n", "{logs:?}");
        drop(stuck);
        Ok(())
    });
}

#[test]
fn a_container_without_input_is_watched() {
    Scope::run(|scope| async move {
        let script = "while [ ! -e /tmp/go ]; do sleep 0.1; done; echo seen; exit 0";
        let pod = PodBuilder::new("box")
            .container(container(&scope.cluster, "main", script))
            .restart_policy("Never")
            .build();
        scope.ready_pod(&pod).await?;
        let mut attached = scope
            .api::<Pod>()
            .attach("box", &AttachParams::default())
            .await?;
        let mut stdout = attached.stdout().context("stdout")?;
        scope
            .kubectl()
            .run(&["exec", "box", "--", "touch", "/tmp/go"])
            .await?
            .ok()?;
        until(&mut stdout, "seen\n").await?;
        // It has ended: there is nothing to attach to.
        let pods = scope.api::<Pod>();
        wait_pod(&pods, "box", "over", |pod| is_phase(pod, "Succeeded")).await?;
        let output = scope.kubectl().run(&["attach", "box"]).await?;
        ensure!(output.code == 1, "{output:?}");
        Ok(())
    });
}
