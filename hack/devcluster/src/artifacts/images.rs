//! The test images: built once for all checkouts, pushed once to each cluster's registry, whose
//! store outlives `down`.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, bail};

use crate::layout::Layout;
use crate::progress::Progress;
use crate::settings::Settings;

/// Builds and pushes what the registry does not hold yet.
pub(crate) fn ensure(
    layout: &Layout,
    settings: &Settings,
    progress: Progress,
) -> anyhow::Result<()> {
    let program = settings.artifacts.binary("sandman-images")?;
    let pushed = layout.cache_dir().join("pushed");
    let recipe = recipe(program)?;
    if fs::read_to_string(&pushed).is_ok_and(|of| of == recipe) {
        return Ok(());
    }
    let images = sandman_go_build::cache_dir()?.join("images");
    progress.say("building the test images");
    run(Command::new(program).arg("build").arg("--out").arg(&images))?;
    progress.say("pushing the test images");
    let registry = format!("127.0.0.1:{}", settings.ports.registry);
    run(Command::new(program)
        .args(["push", "--registry", &registry, "--plain-http", "--from"])
        .arg(&images))?;
    fs::write(pushed, recipe)?;
    Ok(())
}

/// The recipes are part of the program that follows them.
fn recipe(program: &Path) -> anyhow::Result<String> {
    let meta = fs::metadata(program)?;
    Ok(format!(
        "{} {}.{}",
        meta.len(),
        meta.mtime(),
        meta.mtime_nsec()
    ))
}

fn run(command: &mut Command) -> anyhow::Result<()> {
    let status = command.status().context("cannot run sandman-images")?;
    if !status.success() {
        bail!("sandman-images failed; its output is above");
    }
    Ok(())
}
