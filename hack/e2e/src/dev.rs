//! Runs `hack/dev`, whose progress and complaints go to standard error.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};

use anyhow::{Context, bail};
use tokio::process::Command;

/// One dev cluster.
#[derive(Debug, Clone)]
pub(crate) struct Dev {
    program: PathBuf,
    state_dir: Option<PathBuf>,
}

/// What `hack/dev env` says of a running cluster.
#[derive(Debug, Clone)]
pub(crate) struct Variables(BTreeMap<String, String>);

impl Dev {
    pub(crate) fn new(repo: &Path, state_dir: Option<&Path>) -> Self {
        Self {
            program: repo.join("hack/dev"),
            state_dir: state_dir.map(Path::to_owned),
        }
    }

    /// Whether there is a cluster, be it well or not.
    pub(crate) async fn exists(&self) -> anyhow::Result<bool> {
        let output = self.output(&["status", "--json"]).await?;
        let status: serde_json::Value = serde_json::from_slice(&output.stdout)
            .context("`hack/dev status` does not answer; its reason is above")?;
        Ok(status.get("components").is_some())
    }

    /// Describes the running cluster.
    pub(crate) async fn variables(&self) -> anyhow::Result<Variables> {
        let text = self.run(&["env", "--json"]).await?;
        let variables = serde_json::from_str(&text).context("`hack/dev env` prints no JSON")?;
        Ok(Variables(variables))
    }

    /// Runs a subcommand to its end and gives its output.
    pub(crate) async fn run(&self, arguments: &[&str]) -> anyhow::Result<String> {
        let output = self.output(arguments).await?;
        if !output.status.success() {
            bail!(
                "`hack/dev {}` failed; its reason is above",
                arguments.join(" ")
            );
        }
        Ok(String::from_utf8(output.stdout)?)
    }

    async fn output(&self, arguments: &[&str]) -> anyhow::Result<Output> {
        let mut command = Command::new(&self.program);
        if let Some(dir) = &self.state_dir {
            command.args([OsStr::new("--state-dir"), dir.as_os_str()]);
        }
        command
            .args(arguments)
            .stdin(Stdio::null())
            .stderr(Stdio::inherit())
            // Ctrl-C is for the runner, which still needs this program to clean up.
            .process_group(0)
            .output()
            .await
            .with_context(|| format!("cannot run {}", self.program.display()))
    }
}

impl Variables {
    /// The value of a variable.
    pub(crate) fn get(&self, name: &str) -> anyhow::Result<&str> {
        self.0
            .get(name)
            .map(String::as_str)
            .with_context(|| format!("`hack/dev env` does not know {name}"))
    }
}
