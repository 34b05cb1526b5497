//! Debian packages: the closure of what is asked for, downloaded and unpacked.
//!
//! apt resolves against an empty status file in a folder of its own, so the
//! answer does not depend on what the machine has installed and nothing on the
//! machine changes. Packages are unpacked, not installed: their scripts never run.

use std::collections::BTreeSet;
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, bail};

use crate::tree::Tree;

/// Paths that no container reads: documentation, translations, and checks of the
/// distribution's own. The copyright files stay.
const LEFT_OUT: &[&str] = &[
    "usr/share/bug/",
    "usr/share/doc-base/",
    "usr/share/gitweb/",
    "usr/share/info/",
    "usr/share/lintian/",
    "usr/share/locale/",
    "usr/share/man/",
];

/// Top-level directories that are links into `usr` in a merged layout. Packages
/// still ship files through the old names.
const MERGED: &[&str] = &["bin", "lib", "lib32", "lib64", "libx32", "sbin"];

/// Packages of the machine's distribution, for one image.
#[derive(Debug)]
pub(crate) struct Debian {
    folder: PathBuf,
    /// Packages in the layers so far.
    held: BTreeSet<PathBuf>,
}

impl Debian {
    /// Works in `folder`, which must be empty and the caller's to delete.
    pub(crate) fn new(folder: &Path) -> anyhow::Result<Self> {
        // apt says nothing of a missing one and downloads nowhere.
        fs::create_dir_all(folder.join("archives/partial"))?;
        fs::write(folder.join("status"), "")?;
        Ok(Self {
            folder: folder.to_owned(),
            held: BTreeSet::new(),
        })
    }

    /// The package files for `packages` and all they depend on, except those that
    /// an earlier call has returned.
    pub(crate) fn fetch(&mut self, packages: &[&str]) -> anyhow::Result<Vec<PathBuf>> {
        self.download(packages)?;
        // In the order of their names: the folder's own order is arbitrary.
        let mut files = BTreeSet::new();
        for entry in fs::read_dir(self.folder.join("archives"))? {
            let path = entry?.path();
            if path.extension().is_some_and(|extension| extension == "deb") {
                files.insert(path);
            }
        }
        Ok(files
            .into_iter()
            .filter(|file| self.held.insert(file.clone()))
            .collect())
    }

    fn download(&self, packages: &[&str]) -> anyhow::Result<()> {
        let folder = self.folder.display();
        let mut command = Command::new("apt-get");
        command
            .args(["--quiet", "--yes", "--no-install-recommends"])
            .args(["-o", &format!("Dir::State::status={folder}/status")])
            .args(["-o", &format!("Dir::Cache={folder}")])
            // The folder is ours alone, and no other user needs to read it.
            .args(["-o", "Debug::NoLocking=1", "-o", "APT::Sandbox::User=root"])
            .args(["--download-only", "install"])
            .args(packages)
            .stdin(Stdio::null())
            .env("LC_ALL", "C")
            .env("DEBIAN_FRONTEND", "noninteractive");
        let output = command
            .output()
            .context("cannot run apt-get: these images need Debian")?;
        if !output.status.success() {
            bail!(
                "apt-get cannot get {}: run `apt-get update` if its lists are missing or old\n{}",
                packages.join(" "),
                String::from_utf8_lossy(&output.stderr).trim_end()
            );
        }
        Ok(())
    }
}

/// Puts the files of the package `file` into `tree`.
pub(crate) fn unpack(file: &Path, tree: &mut Tree) -> anyhow::Result<()> {
    let mut child = Command::new("dpkg-deb")
        .arg("--fsys-tarfile")
        .arg(file)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .context("cannot run dpkg-deb")?;
    let mut output = child.stdout.take().context("dpkg-deb without output")?;
    let unpacked = tree.unpack(&mut output, place);
    // What follows the end mark, or dpkg-deb dies of a closed pipe.
    std::io::copy(&mut output.by_ref(), &mut std::io::sink())?;
    let status = child.wait()?;
    unpacked.with_context(|| format!("{}", file.display()))?;
    if !status.success() {
        bail!("dpkg-deb --fsys-tarfile {}: {status}", file.display());
    }
    Ok(())
}

/// Where a package's member goes in the merged layout, if anywhere.
fn place(name: &str) -> Option<String> {
    let path = name.trim_start_matches("./").trim_matches('/');
    if path.is_empty()
        || LEFT_OUT
            .iter()
            .any(|prefix| format!("{path}/").starts_with(prefix))
    {
        return None;
    }
    if path.starts_with("usr/share/doc/") && !path.ends_with("/copyright") {
        return None;
    }
    let top = path.split('/').next().unwrap_or(path);
    Some(if MERGED.contains(&top) {
        format!("usr/{path}")
    } else {
        path.to_owned()
    })
}

#[cfg(test)]
mod tests {
    use super::place;

    #[test]
    fn members_go_to_the_merged_layout() {
        for (name, expected) in [
            ("./", None),
            ("./bin/", Some("usr/bin")),
            ("./bin/bash", Some("usr/bin/bash")),
            ("./lib64/ld.so", Some("usr/lib64/ld.so")),
            ("./library/x", Some("library/x")),
            ("./usr/bin/git", Some("usr/bin/git")),
            ("./usr/share/man/man1/git.1.gz", None),
            ("./usr/share/man/", None),
            ("./usr/share/manual", Some("usr/share/manual")),
            ("./usr/share/doc/git/README", None),
            (
                "./usr/share/doc/git/copyright",
                Some("usr/share/doc/git/copyright"),
            ),
        ] {
            assert_eq!(place(name).as_deref(), expected, "{name}");
        }
    }
}
