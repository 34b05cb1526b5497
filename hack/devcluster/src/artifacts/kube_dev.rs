//! The control plane's binary. Ten minutes of compiling on two cores, once for all checkouts.

use std::env;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::Context;
use sandman_go_build::{Module, cache_dir};

use crate::progress::Progress;

/// Names a ready binary instead of building one.
const OVERRIDE: &str = "KUBE_DEV_BIN";
/// What the binary is made from.
const SOURCES: [&str; 3] = ["go.mod", "go.sum", "main.go"];
/// Pause between two lines of progress.
const REPORT_EVERY: Duration = Duration::from_secs(15);

/// Finds the binary or builds it.
pub(super) fn ensure(repo: &Path, progress: Progress) -> anyhow::Result<PathBuf> {
    if let Some(ready) = env::var_os(OVERRIDE) {
        return Path::new(&ready)
            .canonicalize()
            .with_context(|| format!("{OVERRIDE}={} is not there", ready.display()));
    }
    let module = Module {
        dir: &repo.join("hack/kube"),
        sources: &SOURCES,
        environment: &[],
    };
    let version = module.required_version("k8s.io/kubernetes")?;
    let binary = cache_dir()?
        .join(format!("kube-dev-{version}-{}", module.hash()?))
        .join("kube-dev");
    if !binary.exists() {
        progress.say(format_args!(
            "building the control plane, Kubernetes {version} (10 minutes on two cores, once)"
        ));
        // Clients refuse a server that does not know its version.
        let flags = format!("-s -w -X k8s.io/component-base/version.gitVersion={version}");
        let mut said = Instant::now();
        module.build(
            &["build", "-v", "-ldflags", &flags],
            ".",
            &binary,
            &mut |done, total| {
                if said.elapsed() > REPORT_EVERY {
                    said = Instant::now();
                    progress.say(format_args!("  compiled {done} of {total} packages"));
                }
            },
        )?;
    }
    Ok(binary)
}
