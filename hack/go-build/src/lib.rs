//! Builds Go programs for the tools in `hack/`. What Kubernetes compiles to takes minutes, so it
//! is kept outside of the checkout, under the hash of what it is made from.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::{env, fs};

use anyhow::{Context, bail};
use sha2::{Digest, Sha256};

/// Lines of output that are shown when a build fails.
const TAIL_LINES: usize = 20;

/// The source folder of a Go module of ours.
#[derive(Clone, Copy, Debug)]
pub struct Module<'a> {
    /// Where its `go.mod` is.
    pub dir: &'a Path,
    /// Names of the files in it that decide what is built.
    pub sources: &'a [&'a str],
    /// Variables for the compiler.
    pub environment: &'a [(&'a str, &'a str)],
}

/// How far a build is: packages done, and all of them.
pub type OnProgress<'a> = &'a mut dyn FnMut(usize, usize);

impl Module<'_> {
    /// The version that `go.mod` requires of `module`.
    ///
    /// # Errors
    /// There is no `go.mod`, or it does not require the module.
    pub fn required_version(&self, module: &str) -> anyhow::Result<String> {
        let path = self.dir.join("go.mod");
        let go_mod =
            fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        required_version(&go_mod, module)
            .with_context(|| format!("{} does not require {module}", path.display()))
    }

    /// Where the source of a module that `go.mod` requires is, downloaded if need be.
    ///
    /// # Errors
    /// There is no such module, or it cannot be had.
    pub fn source_of(&self, module: &str) -> anyhow::Result<PathBuf> {
        self.go(&["mod", "download", module])?;
        let dir = self.go(&["list", "-m", "-f", "{{.Dir}}", module])?;
        Ok(PathBuf::from(dir.trim()))
    }

    /// A short hash of the sources and of the compiler's version.
    ///
    /// # Errors
    /// A source file is missing, or there is no Go.
    pub fn hash(&self) -> anyhow::Result<String> {
        self.hash_with(self.go(&["env", "GOVERSION"])?.trim())
    }

    fn hash_with(&self, go_version: &str) -> anyhow::Result<String> {
        let mut hash = Sha256::new();
        hash.update(go_version);
        for name in self.sources {
            let content = fs::read(self.dir.join(name))?;
            hash.update((content.len() as u64).to_le_bytes());
            hash.update(content);
        }
        Ok(hex::encode(&hash.finalize()[..6]))
    }

    /// Runs `go` with `arguments`, such as `build -v`, for `package`, and puts what it makes at
    /// `output` once it is whole. With `-v` it tells how far it is.
    ///
    /// # Errors
    /// The build fails; the message ends with the compiler's last lines.
    pub fn build(
        &self,
        arguments: &[&str],
        package: &str,
        output: &Path,
        on_progress: OnProgress<'_>,
    ) -> anyhow::Result<()> {
        let temporary = temporary_beside(output)?;
        let total = self.go(&["list", "-deps", package])?.lines().count();
        let mut child = Command::new("go")
            .args(arguments)
            .args(["-trimpath", "-o"])
            .arg(&temporary)
            .arg(package)
            .envs(self.environment.iter().copied())
            .current_dir(self.dir)
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .context(NO_GO)?;
        // go names each package on standard error as it is done with it.
        let stderr = child.stderr.take().context("go has no output")?;
        let mut lines = Vec::new();
        for line in BufReader::new(stderr).lines() {
            lines.push(line?);
            on_progress(lines.len(), total);
        }
        if !child.wait()?.success() {
            let last = lines.split_off(lines.len().saturating_sub(TAIL_LINES));
            bail!(
                "go {} in {} failed:\n{}",
                arguments.join(" "),
                self.dir.display(),
                last.join("\n")
            );
        }
        fs::rename(&temporary, output).with_context(|| format!("cannot write {}", output.display()))
    }

    fn go(&self, arguments: &[&str]) -> anyhow::Result<String> {
        let output = Command::new("go")
            .args(arguments)
            .current_dir(self.dir)
            .output()
            .context(NO_GO)?;
        if !output.status.success() {
            bail!(
                "go {}: {}",
                arguments.join(" "),
                String::from_utf8_lossy(&output.stderr).trim()
            );
        }
        Ok(String::from_utf8(output.stdout)?)
    }
}

const NO_GO: &str = "cannot run go; install Go (hack/kube/go.mod says which)";

fn required_version(go_mod: &str, module: &str) -> Option<String> {
    go_mod
        .lines()
        .map(|line| line.trim().trim_start_matches("require "))
        .find_map(|line| line.strip_prefix(module)?.strip_prefix(' '))
        .and_then(|rest| rest.split_whitespace().next())
        .map(str::to_owned)
}

/// Where to keep what takes minutes to make and is the same for every checkout.
///
/// # Errors
/// Neither `XDG_CACHE_HOME` nor `HOME` is set.
pub fn cache_dir() -> anyhow::Result<PathBuf> {
    let base = match env::var_os("XDG_CACHE_HOME").filter(|dir| !dir.is_empty()) {
        Some(dir) => PathBuf::from(dir),
        None => PathBuf::from(env::var_os("HOME").context("HOME is not set")?).join(".cache"),
    };
    Ok(base.join("sandman"))
}

/// A name in the same folder, which is made, from which a finished file is renamed.
///
/// # Errors
/// The folder cannot be made.
pub fn temporary_beside(path: &Path) -> anyhow::Result<PathBuf> {
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent)?;
    }
    Ok(path.with_extension(format!("new-{}", std::process::id())))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const KUBERNETES: &str = "k8s.io/kubernetes";

    #[test]
    fn the_version_is_read_from_both_forms_of_require() {
        let block = "require (\n\tk8s.io/kubernetes-csi v0.1.0\n\tk8s.io/kubernetes v1.36.3\n)\n";
        assert_eq!(
            required_version(block, KUBERNETES).as_deref(),
            Some("v1.36.3")
        );
        assert_eq!(
            required_version("require k8s.io/kubernetes v1.2.3", KUBERNETES).as_deref(),
            Some("v1.2.3")
        );
        assert_eq!(required_version("module x", KUBERNETES), None);
    }

    #[test]
    fn the_hash_follows_sources_and_compiler() {
        let dir = tempfile::tempdir().unwrap();
        let module = Module {
            dir: dir.path(),
            sources: &["go.mod", "main.go"],
            environment: &[],
        };
        for name in module.sources {
            fs::write(dir.path().join(name), name).unwrap();
        }
        let first = module.hash_with("go1").unwrap();
        assert_eq!(first, module.hash_with("go1").unwrap());
        assert_ne!(first, module.hash_with("go2").unwrap());
        fs::write(dir.path().join("main.go"), "other").unwrap();
        assert_ne!(first, module.hash_with("go1").unwrap());
    }
}
