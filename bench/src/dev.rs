//! Runs `hack/dev`, whose progress and complaints go to standard error.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::path::PathBuf;
use std::process::{Output, Stdio};

use anyhow::{Context, bail};
use tokio::process::Command;

use crate::cli::DevArgs;

/// The dev cluster's program, bound to one cluster.
#[derive(Clone, Debug)]
pub(crate) struct Dev {
    program: PathBuf,
    state_dir: Option<PathBuf>,
}

/// What `hack/dev status` sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    /// No cluster was started here.
    Absent,
    /// There is one, but not all of it runs.
    Ailing,
    /// All runs, and a node is Ready if there are hosts.
    Up,
}

impl Dev {
    pub(crate) fn new(arguments: &DevArgs) -> Self {
        Self {
            program: arguments.dev.clone(),
            state_dir: arguments.state_dir.clone(),
        }
    }

    pub(crate) async fn state(&self) -> anyhow::Result<State> {
        let output = self.output(&["status", "--json"]).await?;
        if output.status.success() {
            return Ok(State::Up);
        }
        let status: serde_json::Value = serde_json::from_slice(&output.stdout)
            .context("`hack/dev status` does not answer; its reason is above")?;
        let absent = status.get("components").is_none();
        Ok(if absent { State::Absent } else { State::Ailing })
    }

    /// All that `hack/dev status` says.
    pub(crate) async fn status(&self) -> anyhow::Result<serde_json::Value> {
        let output = self.output(&["status", "--json"]).await?;
        serde_json::from_slice(&output.stdout)
            .context("`hack/dev status` does not answer; its reason is above")
    }

    /// Variables that describe the running cluster.
    pub(crate) async fn variables(&self) -> anyhow::Result<BTreeMap<String, String>> {
        let output = self.output(&["env", "--json"]).await?;
        if !output.status.success() {
            bail!("`hack/dev env` failed; its reason is above");
        }
        serde_json::from_slice(&output.stdout).context("`hack/dev env` does not print JSON")
    }

    /// Runs a subcommand to its end. Given up by the caller, it ends too.
    pub(crate) async fn run(&self, arguments: &[&str]) -> anyhow::Result<()> {
        let shown = arguments.join(" ");
        let output = self.output(arguments).await?;
        if !output.status.success() {
            bail!("`hack/dev {shown}` failed; its reason is above");
        }
        Ok(())
    }

    async fn output(&self, arguments: &[&str]) -> anyhow::Result<Output> {
        let mut command = Command::new(&self.program);
        command.args(arguments);
        if let Some(dir) = &self.state_dir {
            command.args([OsStr::new("--state-dir"), dir.as_os_str()]);
        }
        command
            .stdin(Stdio::null())
            .stderr(Stdio::inherit())
            .kill_on_drop(true)
            // Ctrl-C is for the bench, which then still needs this program to clean up.
            .process_group(0)
            .output()
            .await
            .with_context(|| format!("cannot run {}", self.program.display()))
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    /// A stand-in that prints this and ends with this code. Run by `sh`, for a script that was
    /// just written may not be executed while another test forks.
    async fn state(output: &str, code: u8) -> anyhow::Result<State> {
        let dir = tempfile::tempdir()?;
        let program = dir.path().join("dev");
        fs::write(
            &program,
            format!("#!/bin/sh\necho '{output}'\nexit {code}\n"),
        )?;
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755))?;
        let dev = Dev {
            program,
            state_dir: None,
        };
        dev.state().await
    }

    #[tokio::test]
    async fn states_are_told_apart() {
        assert_eq!(state("{}", 1).await.unwrap(), State::Absent);
        assert_eq!(
            state(r#"{"components": []}"#, 1).await.unwrap(),
            State::Ailing
        );
        assert_eq!(state(r#"{"components": []}"#, 0).await.unwrap(), State::Up);
        assert!(state("error", 1).await.is_err());
    }
}
