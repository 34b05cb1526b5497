//! The tests themselves and what they need, built from the Go modules that `suite/` pins.

use std::path::{Path, PathBuf};

use sandman_go_build::{Module, cache_dir};

use crate::progress::Progress;

/// What the programs are made from.
const SOURCES: [&str; 3] = ["go.mod", "go.sum", "suite.go"];

/// The programs.
#[derive(Debug)]
pub(crate) struct Suite {
    /// Kubernetes' end-to-end tests.
    pub(crate) tests: PathBuf,
    /// Runs them, many at a time.
    pub(crate) ginkgo: PathBuf,
    /// What nearly all their pods run.
    pub(crate) agnhost: PathBuf,
    /// Folder of the certificate that its TLS servers show, and of its key.
    pub(crate) certificates: PathBuf,
}

/// Finds the programs or builds them.
pub(crate) fn ensure(repo: &Path, progress: Progress) -> anyhow::Result<Suite> {
    let module = Module {
        dir: &repo.join("hack/e2e/suite"),
        sources: &SOURCES,
        environment: &[],
    };
    // Runs in images that have no libc.
    let static_module = Module {
        environment: &[("CGO_ENABLED", "0")],
        ..module
    };
    let version = module.required_version("k8s.io/kubernetes")?;
    let folder = cache_dir()?.join(format!("e2e-{version}-{}", module.hash()?));
    // The tests choose what to expect of a server by comparing its version with their own.
    let flags = format!("-s -w -X k8s.io/component-base/version.gitVersion={version}");
    let build = ["build", "-ldflags", &flags];
    // Checking the code of Kubernetes would take longer than compiling it.
    let test = ["test", "-c", "-vet=off", "-ldflags", &flags];
    let make = |module: Module<'_>, name: &str, arguments: &[&str], package: &str| {
        let program = folder.join(name);
        if !program.exists() {
            progress.say(format_args!(
                "building {name} of Kubernetes {version} (minutes on two cores, once)"
            ));
            module.build(arguments, package, &program, &mut |_, _| {})?;
        }
        anyhow::Ok(program)
    };
    let source = module.source_of("k8s.io/kubernetes")?;
    Ok(Suite {
        certificates: source.join("test/images/agnhost/porter"),
        tests: make(module, "e2e.test", &test, "k8s.io/kubernetes/test/e2e")?,
        // The version that the tests are compiled with.
        ginkgo: make(module, "ginkgo", &build, "github.com/onsi/ginkgo/v2/ginkgo")?,
        agnhost: make(
            static_module,
            "agnhost",
            &build,
            "k8s.io/kubernetes/test/images/agnhost",
        )?,
    })
}
