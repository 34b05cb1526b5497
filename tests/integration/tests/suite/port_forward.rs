//! Port-forward by kubectl over both transports and by kube-rs over WebSocket
//! channels: half close, resets, ports without a listener.

use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use futures::future::try_join_all;
use k8s_openapi::api::core::v1::Pod;
use sandman_integration::{DEADLINE, PodBuilder, Scope, Transport, images};
use sha2::{Digest as _, Sha256};
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::TcpStream;
use tokio::process::Child;
use tokio::time::timeout;

/// Three servers on the pod's loopback address, which no other pod reaches. 7001 answers with the
/// digest of all that it was sent, once the client has closed its side. 7002 resets every second
/// connection after its first bytes, and answers the others. 7003 reads nothing.
const SERVERS: &str = r#"
import hashlib, socket, struct, threading

def serve(port, handle):
    server = socket.create_server(("127.0.0.1", port), backlog=128)
    def accept():
        count = 0
        while True:
            connection, _ = server.accept()
            count += 1
            threading.Thread(target=handle, args=(connection, count), daemon=True).start()
    threading.Thread(target=accept, daemon=True).start()

def digest(connection, count):
    total = hashlib.sha256()
    while data := connection.recv(65536):
        total.update(data)
    connection.sendall(total.hexdigest().encode())
    connection.close()

def reset(connection, count):
    data = connection.recv(100)
    if count % 2:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    else:
        connection.sendall(data)
    connection.close()

held = []
serve(7001, digest)
serve(7002, reset)
serve(7003, lambda connection, count: held.append(connection))
print("serving", flush=True)
threading.Event().wait()
"#;

async fn servers(scope: &Scope) -> Result<()> {
    let container = k8s_openapi::api::core::v1::Container {
        name: "main".to_owned(),
        image: Some(images::python(&scope.cluster)),
        command: Some(vec!["python3".into(), "-c".into(), SERVERS.into()]),
        ..Default::default()
    };
    let pod = PodBuilder::new("box").container(container).build();
    scope.ready_pod(&pod).await?;
    // Ready is not serving: without a probe it means that the process runs.
    let mut logs = scope.kubectl().spawn(&["logs", "-f", "box"])?;
    let mut lines = BufReader::new(logs.stdout.take().context("stdout")?).lines();
    let first = timeout(DEADLINE, lines.next_line()).await??;
    ensure!(first.as_deref() == Some("serving"), "{first:?}");
    Ok(())
}

/// A running `kubectl port-forward`.
struct Forward {
    kubectl: Child,
    /// On loopback.
    port: u16,
}

impl Forward {
    async fn start(scope: &Scope, transport: Transport, port: u16) -> Result<Self> {
        let kubectl = scope.kubectl_over(transport);
        let mapping = format!(":{port}");
        let mut child = kubectl.spawn(&["port-forward", "box", &mapping])?;
        let stdout = child.stdout.as_mut().context("stdout")?;
        let mut lines = BufReader::new(stdout).lines();
        let line = timeout(DEADLINE, lines.next_line())
            .await
            .context("kubectl does not forward")??;
        let Some(line) = line else {
            let output = child.wait_with_output().await?;
            bail!("kubectl ended: {}", String::from_utf8_lossy(&output.stderr));
        };
        // "Forwarding from 127.0.0.1:40123 -> 7001"
        let local = line
            .strip_prefix("Forwarding from 127.0.0.1:")
            .and_then(|rest| rest.split(' ').next())
            .with_context(|| line.clone())?
            .parse()?;
        Ok(Self {
            kubectl: child,
            port: local,
        })
    }

    async fn connect(&self) -> Result<TcpStream> {
        Ok(TcpStream::connect(("127.0.0.1", self.port)).await?)
    }

    /// Sends everything, closes that side, and reads the answer.
    async fn ask(&self, data: &[u8]) -> Result<String> {
        let mut stream = self.connect().await?;
        let answer = async {
            stream.write_all(data).await?;
            stream.shutdown().await?;
            let mut answer = String::new();
            stream.read_to_string(&mut answer).await?;
            anyhow::Ok(answer)
        };
        timeout(DEADLINE, answer).await.context("no answer")?
    }
}

fn noise(length: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    std::iter::repeat_with(|| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    })
    .flatten()
    .take(length)
    .collect()
}

#[test]
fn an_answer_after_the_half_close_arrives() {
    Scope::run(|scope| async move {
        servers(&scope).await?;
        let data = noise(20 << 20);
        let digest = hex::encode(Sha256::digest(&data));
        for transport in Transport::ALL {
            let forward = Forward::start(&scope, transport, 7001).await?;
            ensure!(forward.ask(&data).await? == digest, "{transport:?}");
            let empty = hex::encode(Sha256::digest(b""));
            ensure!(forward.ask(b"").await? == empty, "{transport:?}");
        }
        Ok(())
    });
}

#[test]
fn many_connections_share_one_session() {
    Scope::run(|scope| async move {
        servers(&scope).await?;
        for transport in Transport::ALL {
            let forward = Forward::start(&scope, transport, 7001).await?;
            let asked = (0..50_u8).map(|number| {
                let data = vec![number; 100_000];
                let forward = &forward;
                async move {
                    let digest = hex::encode(Sha256::digest(&data));
                    ensure!(
                        forward.ask(&data).await? == digest,
                        "{transport:?} {number}"
                    );
                    anyhow::Ok(())
                }
            });
            try_join_all(asked).await?;
        }
        Ok(())
    });
}

#[test]
fn reset_connections_do_not_end_the_session() {
    Scope::run(|scope| async move {
        servers(&scope).await?;
        for transport in Transport::ALL {
            let mut forward = Forward::start(&scope, transport, 7002).await?;
            let mut answered = 0;
            for _ in 0..20 {
                // A reset of the pod's side shows as an end without an answer.
                if forward.ask(b"ping").await.is_ok_and(|text| text == "ping") {
                    answered += 1;
                }
            }
            ensure!(answered == 10, "{transport:?}: {answered} of 20 answered");
            ensure!(
                forward.kubectl.try_wait()?.is_none(),
                "{transport:?}: kubectl ended"
            );
        }
        Ok(())
    });
}

#[test]
fn abandoned_connections_make_room_for_others() {
    Scope::run(|scope| async move {
        servers(&scope).await?;
        for transport in Transport::ALL {
            let silent = Forward::start(&scope, transport, 7003).await?;
            // More than one session may have at a time.
            for _ in 0..600 {
                let mut stream = silent.connect().await?;
                stream.write_all(b"hello").await?;
            }
            let forward = Forward::start(&scope, transport, 7001).await?;
            let digest = hex::encode(Sha256::digest(b"x"));
            ensure!(forward.ask(b"x").await? == digest, "{transport:?}");
        }
        Ok(())
    });
}

#[test]
fn a_port_without_a_listener_is_explained() {
    Scope::run(|scope| async move {
        servers(&scope).await?;
        for transport in Transport::ALL {
            let mut forward = Forward::start(&scope, transport, 7999).await?;
            ensure!(forward.ask(b"ping").await.is_ok_and(|text| text.is_empty()));
            let stderr = forward.kubectl.stderr.take().context("stderr")?;
            let mut lines = BufReader::new(stderr).lines();
            let explained = async {
                while let Some(line) = lines.next_line().await? {
                    if line.contains("error forwarding port 7999 to pod box")
                        && line.contains("connect: connection refused")
                    {
                        return Ok(());
                    }
                }
                bail!("kubectl ended without a word")
            };
            timeout(DEADLINE, explained)
                .await
                .with_context(|| format!("{transport:?}: nothing said"))??;
        }
        Ok(())
    });
}

#[test]
fn a_pod_that_does_not_exist_is_named() {
    Scope::run(|scope| async move {
        let output = scope
            .kubectl()
            .run(&["port-forward", "nobody", ":80"])
            .await?;
        ensure!(
            output.code == 1 && output.stderr.contains("nobody"),
            "{output:?}"
        );
        Ok(())
    });
}

#[test]
fn websocket_channels_forward() {
    Scope::run(|scope| async move {
        servers(&scope).await?;
        let pods = scope.api::<Pod>();
        let mut forward = pods.portforward("box", &[7002, 7999]).await?;
        let refused = forward.take_error(7999).context("its errors")?;
        let error = timeout(DEADLINE, refused).await?.context("no error")?;
        ensure!(error.contains("connection refused"), "{error}");
        // The server answers every second connection.
        let mut answers = Vec::new();
        for _ in 0..2 {
            let mut forward = pods.portforward("box", &[7002]).await?;
            let mut stream = forward.take_stream(7002).context("its stream")?;
            stream.write_all(b"ping").await?;
            let mut answer = Vec::new();
            // A reset is an end here as well.
            let _ = timeout(DEADLINE, stream.read_to_end(&mut answer)).await?;
            answers.push(answer);
        }
        answers.sort();
        ensure!(answers == [b"".to_vec(), b"ping".to_vec()], "{answers:?}");
        Ok(())
    });
}

#[test]
fn a_stalled_connection_does_not_stop_a_session_for_ever() {
    Scope::run(|scope| async move {
        servers(&scope).await?;
        for transport in Transport::ALL {
            let silent = Forward::start(&scope, transport, 7003).await?;
            let mut stalled = silent.connect().await?;
            // Fills every buffer on the way; then the connection is given up, not the session.
            let flood = async {
                let data = noise(1 << 20);
                while stalled.write_all(&data).await.is_ok() {}
            };
            timeout(DEADLINE, flood)
                .await
                .with_context(|| format!("{transport:?}: never given up"))?;
            let mut next = silent.connect().await?;
            next.write_all(b"hello").await?;
            let mut nothing = [0];
            let silence = timeout(Duration::from_millis(500), next.read(&mut nothing)).await;
            ensure!(silence.is_err(), "{transport:?}: the session is over");
        }
        Ok(())
    });
}
