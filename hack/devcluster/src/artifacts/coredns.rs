//! The cluster's DNS. Minutes of compiling, once for all checkouts.

use std::path::{Path, PathBuf};

use sandman_go_build::{Module, cache_dir};

use crate::progress::Progress;

/// What the binary is made from.
const SOURCES: [&str; 3] = ["go.mod", "go.sum", "main.go"];

/// Finds the binary or builds it.
pub(super) fn ensure(repo: &Path, progress: Progress) -> anyhow::Result<PathBuf> {
    let module = Module {
        dir: &repo.join("hack/coredns"),
        sources: &SOURCES,
        environment: &[("CGO_ENABLED", "0")],
    };
    let version = module.required_version("github.com/coredns/coredns")?;
    let binary = cache_dir()?
        .join(format!("coredns-{version}-{}", module.hash()?))
        .join("coredns");
    if !binary.exists() {
        progress.say(format_args!("building CoreDNS {version} (minutes, once)"));
        let arguments = ["build", "-ldflags", "-s -w"];
        module.build(&arguments, ".", &binary, &mut |_, _| {})?;
    }
    Ok(binary)
}
