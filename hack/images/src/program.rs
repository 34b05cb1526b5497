//! Programs that go into images: compiled here, or asked what they hold.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, bail};

/// The static executable that rustc makes of `source`.
pub(crate) fn compile(source: &str, folder: &Path) -> anyhow::Result<Vec<u8>> {
    let file = folder.join("program.rs");
    let executable = folder.join("program");
    fs::write(&file, source)?;
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let output = Command::new(rustc)
        .args([
            "--edition",
            "2024",
            "-C",
            "opt-level=s",
            "-C",
            "panic=abort",
            "-C",
            "strip=symbols",
        ])
        // One file that needs no loader: glibc's static libraries are enough.
        .args([
            "-C",
            "target-feature=+crt-static",
            "-C",
            "relocation-model=static",
        ])
        .args([file.as_os_str(), "-o".as_ref(), executable.as_os_str()])
        .output()
        .context("cannot run rustc")?;
    if !output.status.success() {
        bail!(
            "rustc: {}",
            String::from_utf8_lossy(&output.stderr).trim_end()
        );
    }
    fs::read(&executable).context("rustc made no program")
}

/// Makes `program` executable, runs it, and returns the lines that it prints.
pub(crate) fn lines(program: &Path, args: &[&str]) -> anyhow::Result<Vec<String>> {
    fs::set_permissions(program, fs::Permissions::from_mode(0o755))?;
    let output = Command::new(program)
        .args(args)
        .output()
        .with_context(|| format!("cannot run {}", program.display()))?;
    if !output.status.success() {
        bail!(
            "{} {}: {}",
            program.display(),
            args.join(" "),
            output.status
        );
    }
    Ok(String::from_utf8(output.stdout)?
        .lines()
        .map(str::to_owned)
        .collect())
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_program_needs_no_loader() {
        let folder = tempfile::tempdir().unwrap();
        let bytes = super::compile(include_str!("../programs/static.rs"), folder.path()).unwrap();
        assert_eq!(&bytes[..4], b"\x7fELF");
        // An interpreter would be named by its path.
        let loader = b"/ld-linux";
        assert!(!bytes.windows(loader.len()).any(|window| window == loader));
    }
}
