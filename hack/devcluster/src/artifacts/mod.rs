//! Gets the programs and images that the cluster needs: from the workspace, from a cache, or by
//! building them, with progress shown.

mod cargo;
mod containerd;
mod coredns;
mod daemon_image;
pub(crate) mod images;
mod kube_dev;

use std::fs::{self, File};
use std::path::Path;

use anyhow::Context;
use sandman_go_build::temporary_beside;

use crate::layout::Layout;
use crate::progress::Progress;
use crate::settings::{Artifacts, ContainerdVersion};

/// Binaries of the workspace that a cluster with hosts runs.
const BINARIES: [&str; 8] = [
    "sandman-vnode",
    "sandman-runtime-shim",
    "sandman-layer-keeper",
    "sandman-layer-filler",
    "sandman-certs",
    "sandman-images",
    "containerd-shim-sandman-v1",
    "sandman-holder",
];

/// Builds what is missing or out of date; without a version of containerd there are no hosts.
pub(crate) fn build(
    layout: &Layout,
    profile: &str,
    containerd: Option<ContainerdVersion>,
    progress: Progress,
) -> anyhow::Result<Artifacts> {
    let mut artifacts = Artifacts {
        kube_dev: kube_dev::ensure(layout.repo(), progress)?,
        ..Artifacts::default()
    };
    if let Some(version) = containerd {
        artifacts.containerd_dir = match version {
            ContainerdVersion::Current => Some(containerd::ensure(layout.repo(), progress)?),
            ContainerdVersion::Debian => None,
        };
        artifacts.coredns = Some(coredns::ensure(layout.repo(), progress)?);
        progress.say(format_args!("building the workspace (profile {profile})"));
        for built in cargo::build(layout.repo(), profile, &BINARIES)? {
            let name = built
                .file_name()
                .context("a binary without a name")?
                .to_owned();
            let copy = layout.bin_dir().join(&name);
            copy_if_changed(&built, &copy)?;
            artifacts
                .binaries
                .insert(name.to_string_lossy().into_owned(), copy);
        }
        let daemon = cargo::build_static(layout.repo(), profile, "sandman-daemon")?;
        let image = layout.bin_dir().join("daemon.erofs");
        daemon_image::ensure(&daemon, &image)?;
        artifacts.daemon_image = Some(image);
    }
    Ok(artifacts)
}

/// Copies a binary with its time of change. Components run copies: a build in the middle of a test
/// must not change what a restart starts.
fn copy_if_changed(from: &Path, to: &Path) -> anyhow::Result<()> {
    let source = fs::metadata(from).with_context(|| format!("{} is gone", from.display()))?;
    let same = fs::metadata(to)
        .is_ok_and(|to| to.len() == source.len() && to.modified().ok() == source.modified().ok());
    if same {
        return Ok(());
    }
    let temporary = temporary_beside(to)?;
    fs::copy(from, &temporary)?;
    File::options()
        .write(true)
        .open(&temporary)?
        .set_modified(source.modified()?)?;
    fs::rename(&temporary, to).with_context(|| format!("cannot write {}", to.display()))
}
