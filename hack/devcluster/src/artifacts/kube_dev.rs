//! The control plane's binary. Ten minutes of compiling on two cores, so it is kept outside of the
//! checkout, under the hash of what it is made from.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use std::{env, fs};

use anyhow::{Context, bail};
use sha2::{Digest, Sha256};

use super::{cache_dir, temporary_beside};
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
    let sources = repo.join("hack/kube");
    let version = kubernetes_version(&fs::read_to_string(sources.join("go.mod"))?)?;
    let go = go(&sources, &["env", "GOVERSION"])?;
    let hash = source_hash(&sources, go.trim())?;
    let binary = cache_dir()?
        .join(format!("kube-dev-{version}-{hash}"))
        .join("kube-dev");
    if !binary.exists() {
        progress.say(format_args!(
            "building the control plane, Kubernetes {version} (10 minutes on two cores, once)"
        ));
        build(&sources, &version, &binary, progress)?;
    }
    Ok(binary)
}

/// The version that `go.mod` requires of Kubernetes itself.
fn kubernetes_version(go_mod: &str) -> anyhow::Result<String> {
    go_mod
        .lines()
        .map(|line| line.trim().trim_start_matches("require "))
        .find_map(|line| line.strip_prefix("k8s.io/kubernetes "))
        .and_then(|rest| rest.split_whitespace().next())
        .map(str::to_owned)
        .context("hack/kube/go.mod does not require k8s.io/kubernetes")
}

fn source_hash(sources: &Path, go_version: &str) -> anyhow::Result<String> {
    let mut hash = Sha256::new();
    hash.update(go_version);
    for name in SOURCES {
        let content = fs::read(sources.join(name))?;
        hash.update((content.len() as u64).to_le_bytes());
        hash.update(content);
    }
    Ok(hex::encode(&hash.finalize()[..6]))
}

fn build(sources: &Path, version: &str, binary: &Path, progress: Progress) -> anyhow::Result<()> {
    let temporary = temporary_beside(binary)?;
    // Clients refuse a server that does not know its version.
    let flags = format!("-s -w -X k8s.io/component-base/version.gitVersion={version}");
    let total = go(sources, &["list", "-deps", "."])?.lines().count();
    let mut child = Command::new("go")
        .args(["build", "-v", "-trimpath", "-ldflags", &flags, "-o"])
        .arg(&temporary)
        .arg(".")
        .current_dir(sources)
        .stderr(Stdio::piped())
        .spawn()?;
    // go names each package on standard error as it is done with it.
    let output = child.stderr.take().context("go has no output")?;
    let (mut done, mut said) = (0, Instant::now());
    let mut tail = Vec::new();
    for line in BufReader::new(output).lines() {
        tail.push(line?);
        done += 1;
        if said.elapsed() > REPORT_EVERY {
            said = Instant::now();
            progress.say(format_args!("  compiled {done} of {total} packages"));
        }
    }
    if !child.wait()?.success() {
        let last = tail.split_off(tail.len().saturating_sub(20));
        bail!("go build of hack/kube failed:\n{}", last.join("\n"));
    }
    fs::rename(&temporary, binary).with_context(|| format!("cannot write {}", binary.display()))
}

fn go(dir: &Path, arguments: &[&str]) -> anyhow::Result<String> {
    let output = Command::new("go")
        .args(arguments)
        .current_dir(dir)
        .output()
        .context("cannot run go; install Go (hack/kube/go.mod says which) or set KUBE_DEV_BIN")?;
    if !output.status.success() {
        bail!(
            "go {}: {}",
            arguments.join(" "),
            String::from_utf8_lossy(&output.stderr).trim()
        );
    }
    Ok(String::from_utf8(output.stdout)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_version_is_read_from_both_forms_of_require() {
        let block = "require (\n\tk8s.io/kubectl v0.36.3\n\tk8s.io/kubernetes v1.36.3\n)\n";
        assert_eq!(kubernetes_version(block).unwrap(), "v1.36.3");
        assert_eq!(
            kubernetes_version("require k8s.io/kubernetes v1.2.3").unwrap(),
            "v1.2.3"
        );
        assert!(kubernetes_version("module x").is_err());
    }

    #[test]
    fn the_hash_follows_sources_and_compiler() {
        let dir = tempfile::tempdir().unwrap();
        for name in SOURCES {
            fs::write(dir.path().join(name), name).unwrap();
        }
        let first = source_hash(dir.path(), "go1").unwrap();
        assert_eq!(first, source_hash(dir.path(), "go1").unwrap());
        assert_ne!(first, source_hash(dir.path(), "go2").unwrap());
        fs::write(dir.path().join("main.go"), "other").unwrap();
        assert_ne!(first, source_hash(dir.path(), "go1").unwrap());
    }
}
