//! The flows, as a client's program would have them.

use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use kube::api::{AttachParams, AttachedProcess, LogParams};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

use super::bytes::{Comparison, DIR, MIB, block, log_text};
use super::{Moved, RETRY_AFTER};
use crate::pod::CONTAINER;

/// Bytes read or written at once.
const PIECE: usize = 256 << 10;
/// Where the pod listens.
const PORT_OUT: u16 = 9100;
const PORT_IN: u16 = 9101;
/// The pod listens within this.
const LISTENS_WITHIN: Duration = Duration::from_secs(30);

/// Ways into and out of one pod.
pub(super) struct Pipes {
    pods: Api<Pod>,
    pod: String,
}

impl Pipes {
    pub(super) fn new(pods: Api<Pod>, pod: String) -> Self {
        Self { pods, pod }
    }

    /// Sends blocks to a command that writes them to a file, until it has ended.
    pub(super) async fn exec_in(&self, mib: u64) -> anyhow::Result<()> {
        // Ends by itself: not every protocol can tell the end of the input.
        let command = format!("dd of={DIR}/in bs=1M count={mib} iflag=fullblock 2>/dev/null");
        let mut process = self.start(&command, true).await?;
        let input = process.stdin().context("exec gives no input")?;
        send(input, mib).await?;
        finish(process).await
    }

    /// Reads back what [`Pipes::exec_in`] sent.
    pub(super) async fn exec_out(&self, mib: u64) -> anyhow::Result<()> {
        let mut process = self.start(&format!("exec cat {DIR}/in"), false).await?;
        let output = process.stdout().context("exec gives no output")?;
        receive(output, mib).await?.end()?;
        finish(process).await
    }

    /// Reads the same from a port.
    pub(super) async fn forward_out(&self, mib: u64) -> anyhow::Result<Moved> {
        let server = self.start(&listen(PORT_OUT, "in", None), false).await?;
        let deadline = Instant::now() + LISTENS_WITHIN;
        loop {
            let mut forwarder = self.pods.portforward(&self.pod, &[PORT_OUT]).await?;
            let stream = forwarder.take_stream(PORT_OUT).context("no stream")?;
            let begun = Instant::now();
            // Nothing at all is a port at which nobody listens yet.
            match receive_exactly(stream, mib).await? {
                None if Instant::now() < deadline => tokio::time::sleep(RETRY_AFTER).await,
                None => bail!("nobody listens at port {PORT_OUT} of the pod"),
                Some(()) => {
                    let took = begun.elapsed();
                    drop(forwarder);
                    finish(server).await?;
                    return Ok(Moved {
                        bytes: mib * MIB,
                        took,
                    });
                }
            }
        }
    }

    /// Sends the same to a port, and compares what arrived in the pod.
    pub(super) async fn forward_in(&self, mib: u64) -> anyhow::Result<Moved> {
        let server = self.start(&listen(PORT_IN, "", Some("out")), false).await?;
        self.wait_for_listener(PORT_IN).await?;
        let mut forwarder = self.pods.portforward(&self.pod, &[PORT_IN]).await?;
        let mut stream = forwarder.take_stream(PORT_IN).context("no stream")?;
        let begun = Instant::now();
        send(&mut stream, mib).await?;
        // It answers nothing, and is done when all has arrived.
        stream.shutdown().await?;
        drop(stream);
        finish(server).await?;
        let took = begun.elapsed();
        let same = self
            .start(&format!("cmp {DIR}/in {DIR}/out"), false)
            .await?;
        finish(same)
            .await
            .context("other bytes arrived than were sent")?;
        Ok(Moved {
            bytes: mib * MIB,
            took,
        })
    }

    /// Reads the container's log.
    pub(super) async fn read_log(&self) -> anyhow::Result<()> {
        let parameters = LogParams {
            container: Some(CONTAINER.to_owned()),
            ..LogParams::default()
        };
        let log = self.pods.logs(&self.pod, &parameters).await?;
        if log != log_text() {
            bail!("the log is {} bytes of other text", log.len());
        }
        Ok(())
    }

    /// Asks the kernel of the pod: a connection to find out would be the only one that is taken.
    async fn wait_for_listener(&self, port: u16) -> anyhow::Result<()> {
        let command = format!(
            "until grep -q ':{port:04X} .* 0A ' /proc/net/tcp /proc/net/tcp6; do usleep 20000; done"
        );
        let process = self.start(&command, false).await?;
        match tokio::time::timeout(LISTENS_WITHIN, finish(process)).await {
            Ok(result) => result,
            Err(_) => bail!("nobody listens at port {port} of the pod"),
        }
    }

    async fn start(&self, command: &str, stdin: bool) -> anyhow::Result<AttachedProcess> {
        let parameters = AttachParams::default()
            .container(CONTAINER)
            .stdin(stdin)
            .stderr(false);
        let command = ["sh", "-c", command];
        Ok(self.pods.exec(&self.pod, command, &parameters).await?)
    }
}

/// One connection, then the end.
fn listen(port: u16, from: &str, to: Option<&str>) -> String {
    let from = match from {
        "" => "/dev/null".to_owned(),
        name => format!("{DIR}/{name}"),
    };
    let to = to.map_or_else(|| "/dev/null".to_owned(), |name| format!("{DIR}/{name}"));
    format!("exec nc -l -p {port} <{from} >{to}")
}

async fn send(mut to: impl AsyncWrite + Unpin, mib: u64) -> anyhow::Result<()> {
    for number in 0..mib {
        to.write_all(&block(number)).await?;
    }
    Ok(to.flush().await?)
}

async fn receive(mut from: impl AsyncRead + Unpin, mib: u64) -> anyhow::Result<Comparison> {
    let mut comparison = Comparison::new(mib);
    let mut piece = vec![0; PIECE];
    loop {
        match from.read(&mut piece).await? {
            0 => return Ok(comparison),
            length => comparison.take(&piece[..length])?,
        }
    }
}

/// Reads until all has come, whether or not the stream then ends; nothing if nothing came.
async fn receive_exactly(mut from: impl AsyncRead + Unpin, mib: u64) -> anyhow::Result<Option<()>> {
    let mut comparison = Comparison::new(mib);
    let mut piece = vec![0; PIECE];
    let mut nothing = true;
    while !comparison.is_complete() {
        match from.read(&mut piece).await {
            Ok(0) | Err(_) if nothing => return Ok(None),
            Ok(0) => {
                comparison.end()?;
                break;
            }
            Ok(length) => comparison.take(&piece[..length])?,
            Err(error) => return Err(error.into()),
        }
        nothing = false;
    }
    Ok(Some(()))
}

/// Waits for a command's success.
async fn finish(mut process: AttachedProcess) -> anyhow::Result<()> {
    let status = process.take_status().context("exec gives no status")?;
    let status = status.await.context("exec ended without a status")?;
    process.join().await?;
    if status.status.as_deref() != Some("Success") {
        bail!(
            "{}",
            status.message.unwrap_or_else(|| "no reason".to_owned())
        );
    }
    Ok(())
}
