//! kubectl as a user runs it, in the test's namespace.

use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use tokio::io::AsyncWriteExt as _;
use tokio::process::{Child, Command};

use crate::Cluster;

/// How long one kubectl call may take.
const CALL_DEADLINE: Duration = Duration::from_secs(180);

/// Streaming transport that kubectl tries first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// `v5.channel.k8s.io` over WebSocket.
    WebSocket,
    /// SPDY/3.1.
    Spdy,
}

impl Transport {
    /// Both, for tests that must hold on each.
    pub const ALL: [Self; 2] = [Self::WebSocket, Self::Spdy];
}

/// A kubectl bound to one namespace and transport.
#[derive(Clone, Debug)]
pub struct Kubectl {
    program: PathBuf,
    kubeconfig: PathBuf,
    namespace: String,
    transport: Transport,
}

/// What a finished kubectl printed.
#[derive(Clone, Debug)]
pub struct Output {
    /// Exit code; 128+n for signal n.
    pub code: i32,
    /// Standard output, byte for byte.
    pub stdout: Vec<u8>,
    /// Standard error, as text.
    pub stderr: String,
}

impl Output {
    /// Standard output as text.
    #[must_use]
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.stdout).into_owned()
    }

    /// The same output, when the call succeeded.
    ///
    /// # Errors
    /// With everything that was printed.
    pub fn ok(self) -> Result<Self> {
        if self.code != 0 {
            bail!(
                "kubectl exited with {}: {}{}",
                self.code,
                self.text(),
                self.stderr
            );
        }
        Ok(self)
    }
}

impl Kubectl {
    pub(crate) fn new(cluster: &Cluster, namespace: &str, transport: Transport) -> Self {
        Self {
            program: cluster.kube_dev.clone(),
            kubeconfig: cluster.kubeconfig.clone(),
            namespace: namespace.to_owned(),
            transport,
        }
    }

    /// The command, for tests that need its pipes.
    #[must_use]
    pub fn command(&self, arguments: &[&str]) -> Command {
        let websockets = (self.transport == Transport::WebSocket).to_string();
        let mut command = Command::new(&self.program);
        command
            .arg("kubectl")
            .arg("--kubeconfig")
            .arg(&self.kubeconfig)
            .arg("--namespace")
            .arg(&self.namespace)
            .args(arguments)
            .env("KUBECTL_REMOTE_COMMAND_WEBSOCKETS", &websockets)
            .env("KUBECTL_PORT_FORWARD_WEBSOCKETS", &websockets)
            .kill_on_drop(true);
        command
    }

    /// Starts kubectl with all three streams piped.
    ///
    /// # Errors
    /// When the program cannot be started.
    pub fn spawn(&self, arguments: &[&str]) -> Result<Child> {
        self.command(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .with_context(|| format!("start {}", self.program.display()))
    }

    /// Runs to the end without input.
    ///
    /// # Errors
    /// When it cannot be started or does not end in time. An exit code other
    /// than 0 is no error here.
    pub async fn run(&self, arguments: &[&str]) -> Result<Output> {
        self.run_with(arguments, Vec::new()).await
    }

    /// Runs to the end with `input` on standard input.
    ///
    /// # Errors
    /// As [`Self::run`].
    pub async fn run_with(&self, arguments: &[&str], input: Vec<u8>) -> Result<Output> {
        let mut child = self.spawn(arguments)?;
        let mut stdin = child.stdin.take().context("stdin is piped")?;
        let feed = tokio::spawn(async move {
            // A command may end without reading everything: that is its right.
            let _ = stdin.write_all(&input).await;
        });
        let output = tokio::time::timeout(CALL_DEADLINE, child.wait_with_output())
            .await
            .with_context(|| format!("kubectl {} does not end", arguments.join(" ")))??;
        feed.await?;
        use std::os::unix::process::ExitStatusExt as _;
        let code = output
            .status
            .code()
            .unwrap_or_else(|| 128 + output.status.signal().unwrap_or(0));
        Ok(Output {
            code,
            stdout: output.stdout,
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        })
    }
}
