//! Large streams through exec are byte exact, in both directions.

use anyhow::ensure;
use sandman_integration::{PodBuilder, Scope, Transport};
use sha2::{Digest as _, Sha256};

const BYTES: usize = 100 << 20;

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
