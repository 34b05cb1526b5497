//! The images that the tests run: stand-ins made here, pushed to the cluster's registry.

use anyhow::{Context, bail};
use sandman_go_build::cache_dir;
use tokio::process::Command;

use crate::dev::Variables;
use crate::progress::Progress;
use crate::suite::Suite;

/// Builds and pushes what is missing.
pub(crate) async fn ensure(
    variables: &Variables,
    suite: &Suite,
    progress: Progress,
) -> anyhow::Result<()> {
    let program = variables.get("SANDMAN_IMAGES")?;
    let layout = cache_dir()?.join("images-conformance");
    progress.say("building the tests' images");
    let mut build = Command::new(program);
    build
        .args(["build", "--set", "conformance", "--supply"])
        .arg(format!("agnhost={}", suite.agnhost.display()));
    for name in ["localhost.crt", "localhost.key"] {
        let file = suite.certificates.join(name);
        build.args(["--supply", &format!("{name}={}", file.display())]);
    }
    build.arg("--out").arg(&layout);
    run(build).await?;
    progress.say("pushing the tests' images");
    let mut push = Command::new(program);
    push.args(["push", "--plain-http", "--registry"])
        .arg(variables.get("SANDMAN_REGISTRY_LOCAL")?)
        .arg("--from")
        .arg(&layout);
    run(push).await
}

async fn run(mut command: Command) -> anyhow::Result<()> {
    let status = command
        .status()
        .await
        .context("cannot run sandman-images")?;
    if !status.success() {
        bail!("sandman-images failed; its output is above");
    }
    Ok(())
}

/// Where the tests find their images, in the form of `KUBE_TEST_REPO_LIST`.
pub(crate) fn repositories(variables: &Variables) -> anyhow::Result<String> {
    let registry = variables.get("SANDMAN_REGISTRY")?;
    Ok(format!(
        "promoterE2eRegistry: {registry}/e2e-test-images\ngcRegistry: {registry}\n"
    ))
}
