//! containerd 2 of our hosts: Debian has only 1.6. A few minutes of compiling, once for all checkouts.

use std::path::{Path, PathBuf};

use sandman_go_build::{Module, cache_dir};

use crate::progress::Progress;

/// What the programs are made from.
const SOURCES: [&str; 2] = ["go.mod", "go.sum"];
const MODULE: &str = "github.com/containerd/containerd/v2";
/// The daemon, its client for people, and the shim of runtime `io.containerd.runc.v2`.
const PROGRAMS: [&str; 3] = ["containerd", "ctr", "containerd-shim-runc-v2"];

/// Finds or builds the programs; gives the folder they are in.
pub(super) fn ensure(repo: &Path, progress: Progress) -> anyhow::Result<PathBuf> {
    let module = Module {
        dir: &repo.join("hack/containerd"),
        sources: &SOURCES,
        // Without libc, and so without the snapshotters that need headers nobody has.
        environment: &[("CGO_ENABLED", "0")],
    };
    let version = module.required_version(MODULE)?;
    let folder = cache_dir()?.join(format!("containerd-{version}-{}", module.hash()?));
    let flags = format!("-s -w -X {MODULE}/version.Version={version}");
    for name in PROGRAMS {
        let program = folder.join(name);
        if !program.exists() {
            progress.say(format_args!("building {name} {version} (minutes, once)"));
            let package = format!("{MODULE}/cmd/{name}");
            let arguments = ["build", "-ldflags", &flags];
            module.build(&arguments, &package, &program, &mut |_, _| {})?;
        }
    }
    Ok(folder)
}
