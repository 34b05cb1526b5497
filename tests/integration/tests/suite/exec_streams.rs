//! Large streams through exec are byte exact, in both directions.

use anyhow::{Context as _, Result, ensure};
use futures::future::try_join_all;
use k8s_openapi::api::core::v1::Pod;
use kube::api::AttachParams;
use sandman_integration::{DEADLINE, Kubectl, PodBuilder, Scope, Transport};
use sha2::{Digest as _, Sha256};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::time::timeout;

const BYTES: usize = 100 << 20;
const GIBIBYTE: u64 = 1 << 30;
/// Execs with input at one time.
const AT_ONCE: usize = 50;

/// Bytes that do not repeat, so that a lost or doubled block changes the digest.
fn noise(length: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut bytes = Vec::with_capacity(length);
    while bytes.len() < length {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes.truncate(length);
    bytes
}

#[test]
fn a_hundred_mebibytes_in_and_out() {
    Scope::run(|scope| async move {
        scope
            .ready_pod(&PodBuilder::sleeper(&scope.cluster, "box").build())
            .await?;
        let data = noise(BYTES);
        let digest = hex::encode(Sha256::digest(&data));
        for transport in Transport::ALL {
            let kubectl = scope.kubectl_over(transport);
            kubectl
                .run_with(
                    &["exec", "-i", "box", "--", "sh", "-c", "cat > /tmp/data"],
                    data.clone(),
                )
                .await?
                .ok()?;
            let sum = kubectl
                .run(&["exec", "box", "--", "sha256sum", "/tmp/data"])
                .await?
                .ok()?
                .text();
            ensure!(
                sum.starts_with(&digest),
                "{transport:?} in: {sum}, want {digest}"
            );
            let output = kubectl
                .run(&["exec", "box", "--", "cat", "/tmp/data"])
                .await?
                .ok()?;
            ensure!(
                output.stdout.len() == BYTES,
                "{transport:?} out: {}",
                output.stdout.len()
            );
            ensure!(
                hex::encode(Sha256::digest(&output.stdout)) == digest,
                "{transport:?}: output differs"
            );
        }
        Ok(())
    });
}

#[test]
fn a_command_that_ignores_its_input_ends() {
    Scope::run(|scope| async move {
        scope
            .ready_pod(&PodBuilder::sleeper(&scope.cluster, "box").build())
            .await?;
        for transport in Transport::ALL {
            let output = scope
                .kubectl_over(transport)
                .run_with(
                    &["exec", "-i", "box", "--", "sh", "-c", "exit 7"],
                    noise(16 << 20),
                )
                .await?;
            ensure!(output.code == 7, "{transport:?}: {output:?}");
        }
        Ok(())
    });
}

/// A gibibyte that is nowhere whole: into a file, its digest there, and back out. Each of the
/// blocks has its number in it.
async fn a_gibibyte(kubectl: &Kubectl) -> Result<()> {
    let block = noise(1 << 20);
    let numbered = |number: u64| {
        let mut block = block.clone();
        block[..8].copy_from_slice(&number.to_le_bytes());
        block
    };
    let blocks = GIBIBYTE / block.len() as u64;
    let mut upload = kubectl.spawn(&["exec", "-i", "box", "--", "sh", "-c", "cat > /tmp/data"])?;
    let mut stdin = upload.stdin.take().context("stdin")?;
    let mut sent = Sha256::new();
    for number in 0..blocks {
        let block = numbered(number);
        sent.update(&block);
        stdin.write_all(&block).await?;
    }
    drop(stdin);
    let output = upload.wait_with_output().await?;
    ensure!(output.status.success(), "in: {output:?}");
    let digest = hex::encode(sent.finalize());
    let sum = kubectl
        .run(&["exec", "box", "--", "sha256sum", "/tmp/data"])
        .await?
        .ok()?
        .text();
    ensure!(sum.starts_with(&digest), "in: {sum}, want {digest}");

    let mut download = kubectl.spawn(&["exec", "box", "--", "cat", "/tmp/data"])?;
    let mut stdout = download.stdout.take().context("stdout")?;
    let (mut received, mut length) = (Sha256::new(), 0);
    let mut buffer = vec![0; 1 << 20];
    loop {
        let read = stdout.read(&mut buffer).await?;
        if read == 0 {
            break;
        }
        received.update(&buffer[..read]);
        length += read as u64;
    }
    ensure!(download.wait().await?.success(), "out: no success");
    ensure!(length == GIBIBYTE, "out: {length} bytes");
    ensure!(hex::encode(received.finalize()) == digest, "out: differs");
    Ok(())
}

#[test]
#[ignore = "takes minutes: hack/test --matrix"]
fn a_gibibyte_in_and_out() {
    Scope::run(|scope| async move {
        scope
            .ready_pod(&PodBuilder::sleeper(&scope.cluster, "box").build())
            .await?;
        for transport in Transport::ALL {
            a_gibibyte(&scope.kubectl_over(transport))
                .await
                .with_context(|| format!("{transport:?}"))?;
        }
        Ok(())
    });
}

#[test]
fn many_execs_with_input_at_once() {
    Scope::run(|scope| async move {
        scope
            .ready_pod(&PodBuilder::sleeper(&scope.cluster, "box").build())
            .await?;
        let pods = scope.api::<Pod>();
        let execs = (0..AT_ONCE).map(|number| {
            let pods = &pods;
            async move {
                let data = noise(300_000 + number);
                let params = AttachParams::default().stdin(true).stderr(false);
                let mut exec = pods.exec("box", ["cat"], &params).await?;
                let mut stdin = exec.stdin().context("stdin")?;
                let mut stdout = exec.stdout().context("stdout")?;
                let feed = async {
                    stdin.write_all(&data).await?;
                    anyhow::Ok(stdin.shutdown().await?)
                };
                let mut echo = Vec::new();
                let both = async {
                    tokio::try_join!(feed, async { Ok(stdout.read_to_end(&mut echo).await?) })
                };
                timeout(DEADLINE, both)
                    .await
                    .with_context(|| format!("exec {number} does not end"))??;
                let status = exec.take_status().context("status")?;
                let status = status.await.context("no status")?;
                ensure!(status.status.as_deref() == Some("Success"), "{status:?}");
                ensure!(echo == data, "exec {number}: {} bytes", echo.len());
                anyhow::Ok(())
            }
        });
        try_join_all(execs).await?;
        Ok(())
    });
}
