//! One run of the tests against the cluster's one open node.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use tokio::io::{AsyncBufReadExt, AsyncRead, AsyncWriteExt, BufReader};
use tokio::process::{Child, Command};
use tokio::signal::unix::{SignalKind, signal};

use crate::progress::Progress;
use crate::report::{self, Report};
use crate::selection::Filter;
use crate::suite::Suite;

/// A whole run takes twelve minutes on two idle cores.
const TIMEOUT: &str = "60m";
/// Pause between two lines of progress.
const REPORT_EVERY: Duration = Duration::from_secs(30);
/// What ginkgo prints for each test that ended.
const MARK: &[u8] = "•".as_bytes();

/// What a run needs.
#[derive(Debug)]
pub(crate) struct Run<'a> {
    pub(crate) suite: &'a Suite,
    pub(crate) filter: &'a Filter,
    /// Tests at the same time.
    pub(crate) procs: u16,
    /// How often a test may run until it passes.
    pub(crate) attempts: u16,
    pub(crate) kubeconfig: &'a str,
    /// A program whose subcommand is kubectl of the tests' own version.
    pub(crate) kube_dev: &'a str,
    /// Where images are, as `KUBE_TEST_REPO_LIST` has it.
    pub(crate) repositories: &'a str,
    /// Nodes with these taints are no reason to wait.
    pub(crate) other_taints: &'a str,
    /// Gets the reports and the log; replaced.
    pub(crate) out: &'a Path,
    pub(crate) progress: Progress,
}

/// What came of it.
#[derive(Debug)]
pub(crate) struct Outcome {
    pub(crate) report: Report,
    /// By the clock.
    pub(crate) wall: Duration,
}

impl Run<'_> {
    /// Runs the tests.
    ///
    /// # Errors
    /// They did not start, or a signal ended them.
    pub(crate) async fn run(&self) -> anyhow::Result<Outcome> {
        if self.out.exists() {
            fs::remove_dir_all(self.out)?;
        }
        fs::create_dir_all(self.out)?;
        let kubectl = self.write_kubectl()?;
        let repositories = self.out.join("repositories.yaml");
        fs::write(&repositories, self.repositories)?;
        let begun = Instant::now();
        let mut child = self.command(&kubectl, &repositories).spawn()?;
        let output = child.stdout.take().context("ginkgo has no output")?;
        let log = tokio::fs::File::create(self.out.join("suite.log")).await?;
        tokio::select! {
            copied = self.copy(output, log) => copied?,
            stopped = stop_asked() => {
                kill(&mut child).await?;
                bail!("stopped by {}", stopped?);
            }
        }
        // It fails when a test does; the report says which.
        child.wait().await?;
        let log = self.out.join("suite.log");
        let report = report::read(&self.out.join("report.json"))
            .with_context(|| format!("the tests did not run; see {}", log.display()))?;
        Ok(Outcome {
            report,
            wall: begun.elapsed(),
        })
    }

    fn command(&self, kubectl: &Path, repositories: &Path) -> Command {
        let mut command = Command::new(&self.suite.ginkgo);
        command
            .arg(format!("--procs={}", self.procs))
            .arg(format!("--flake-attempts={}", self.attempts))
            .arg(format!("--focus={}", self.filter.focus))
            .arg(format!("--skip={}", self.filter.skip))
            .arg(format!("--timeout={TIMEOUT}"))
            .args(["--no-color", "--silence-skips"])
            .args(["--json-report=report.json", "--junit-report=junit.xml"])
            .arg(format!("--output-dir={}", self.out.display()))
            .arg(&self.suite.tests)
            .args(["--", "--provider=skeleton", "--num-nodes=1"])
            .arg(format!("--kubeconfig={}", self.kubeconfig))
            .arg(format!("--kubectl-path={}", kubectl.display()))
            .arg(format!("--non-blocking-taints={}", self.other_taints))
            .args([
                "--node-schedulable-timeout=2m",
                "--allowed-not-ready-nodes=0",
            ])
            .args(["--dump-logs-on-failure=false", "--disable-log-dump"])
            .env("KUBE_TEST_REPO_LIST", repositories)
            .current_dir(self.out)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            // Its workers with it: they outlive a signal to ginkgo alone.
            .process_group(0)
            .kill_on_drop(true);
        command
    }

    /// The tests run kubectl by path.
    fn write_kubectl(&self) -> anyhow::Result<PathBuf> {
        let path = self.out.join("kubectl");
        let program = self.kube_dev.replace('\'', r"'\''");
        fs::write(
            &path,
            format!("#!/bin/sh\nexec '{program}' kubectl \"$@\"\n"),
        )?;
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755))?;
        Ok(path)
    }

    /// Keeps what ginkgo prints, and tells how many tests it is done with.
    async fn copy(
        &self,
        output: impl AsyncRead + Unpin,
        mut log: tokio::fs::File,
    ) -> anyhow::Result<()> {
        let mut output = BufReader::new(output);
        let (mut done, mut said) = (0, Instant::now());
        let mut piece = Vec::new();
        while output.read_until(MARK[MARK.len() - 1], &mut piece).await? > 0 {
            done += usize::from(piece.ends_with(MARK));
            log.write_all(&piece).await?;
            piece.clear();
            if said.elapsed() > REPORT_EVERY {
                said = Instant::now();
                self.progress.say(format_args!("  {done} tests done"));
            }
        }
        log.flush().await?;
        Ok(())
    }
}

/// Ends ginkgo and its workers. They clean up for minutes when asked to end; what they leave in
/// the cluster is the caller's to remove.
async fn kill(child: &mut Child) -> anyhow::Result<()> {
    if let Some(pid) = child.id() {
        killpg(Pid::from_raw(i32::try_from(pid)?), Signal::SIGKILL)?;
    }
    child.wait().await?;
    Ok(())
}

/// Name of the signal that asks this program to end.
async fn stop_asked() -> anyhow::Result<&'static str> {
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    tokio::select! {
        _ = interrupt.recv() => Ok("SIGINT"),
        _ = terminate.recv() => Ok("SIGTERM"),
    }
}
