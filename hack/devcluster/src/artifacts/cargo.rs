//! Builds workspace binaries with cargo, whose progress goes to the terminal.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, bail};
use serde::Deserialize;

/// Builds these binaries; gives their paths. They are picked from the whole workspace: picked by
/// package they would get other features of their dependencies than the tests, and all would be
/// compiled twice.
pub(super) fn build(repo: &Path, profile: &str, binaries: &[&str]) -> anyhow::Result<Vec<PathBuf>> {
    let mut command = cargo(repo, profile);
    command.arg("--workspace");
    for binary in binaries {
        command.args(["--bin", binary]);
    }
    run(command)
}

/// Builds one package as a static program with fixed addresses, which runs in any image. A target
/// is named so that the flags stay away from build scripts, which cannot be static.
pub(super) fn build_static(repo: &Path, profile: &str, package: &str) -> anyhow::Result<PathBuf> {
    let target = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
    let mut command = cargo(repo, profile);
    command.args(["--bins", "--package", package, "--target", &target]);
    command.env(
        "RUSTFLAGS",
        "-C target-feature=+crt-static -C relocation-model=static",
    );
    run(command)?
        .pop()
        .with_context(|| format!("{package} has no binary"))
}

fn cargo(repo: &Path, profile: &str) -> Command {
    let mut command = Command::new("cargo");
    command.args([
        "build",
        "--locked",
        "--message-format=json-render-diagnostics",
    ]);
    command.args(["--profile", profile]).current_dir(repo);
    command
}

fn run(mut command: Command) -> anyhow::Result<Vec<PathBuf>> {
    /// The part of cargo's messages that names binaries.
    #[derive(Deserialize)]
    struct Message {
        reason: String,
        executable: Option<PathBuf>,
    }

    let mut cargo = command
        .stdout(Stdio::piped())
        .spawn()
        .context("cannot run cargo; install Rust with rustup")?;
    let output = cargo.stdout.take().context("cargo has no output")?;
    let mut binaries = Vec::new();
    for line in BufReader::new(output).lines() {
        let Ok(message) = serde_json::from_str::<Message>(&line?) else {
            continue;
        };
        if message.reason == "compiler-artifact" {
            binaries.extend(message.executable);
        }
    }
    if !cargo.wait()?.success() {
        bail!("cargo build failed; its output is above");
    }
    Ok(binaries)
}
