//! Packs the in-sandbox agent into a read-only EROFS image. Containers get it as a mount, so that
//! root inside one cannot change it for the others.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, bail};
use sandman_go_build::temporary_beside;

/// Any fixed value: the same agent makes the same image.
const UUID: &str = "53414e44-4d41-4e00-8000-000000000001";
/// Name of the agent in the image.
const NAME: &str = "daemon";

/// Makes the image unless it is newer than the agent.
pub(super) fn ensure(daemon: &Path, image: &Path) -> anyhow::Result<()> {
    let changed = |path: &Path| fs::metadata(path).and_then(|meta| meta.modified());
    let built = changed(daemon).with_context(|| format!("{} is gone", daemon.display()))?;
    if changed(image).is_ok_and(|packed| packed >= built) {
        return Ok(());
    }
    let temporary = temporary_beside(image)?;
    let tree = temporary.with_extension("tree");
    fs::create_dir_all(&tree)?;
    let copy = tree.join(NAME);
    fs::copy(daemon, &copy)?;
    fs::set_permissions(&copy, std::os::unix::fs::PermissionsExt::from_mode(0o555))?;
    let output = Command::new("mkfs.erofs")
        .args(["-T0", "-U", UUID, "--all-root", "-x-1"])
        .args([&temporary, &tree])
        .output()
        .context("cannot run mkfs.erofs; install erofs-utils")?;
    if !output.status.success() {
        bail!(
            "mkfs.erofs failed: {}",
            String::from_utf8_lossy(&output.stderr).trim()
        );
    }
    fs::remove_dir_all(&tree)?;
    // A mount of the old image keeps its old file.
    fs::rename(&temporary, image).with_context(|| format!("cannot write {}", image.display()))
}
