//! The shim's log: a file in its folder, of bounded size.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use anyhow::Context;
use tracing_subscriber::EnvFilter;

/// A log that is longer at the start of a shim is moved aside, in place of an earlier one.
const MAX: u64 = 8 << 20;

/// Opens the log at `path` to append to.
pub(super) fn open(path: &Path) -> anyhow::Result<File> {
    if path.metadata().is_ok_and(|metadata| metadata.len() > MAX) {
        std::fs::rename(path, path.with_extension("old"))
            .with_context(|| format!("moving {}", path.display()))?;
    }
    OpenOptions::new()
        .append(true)
        .create(true)
        .mode(0o600)
        .open(path)
        .with_context(|| format!("opening {}", path.display()))
}

/// Logs to stderr from now on.
pub(super) fn start(debug: bool) {
    let default = if debug { "debug" } else { "info" };
    let filter = EnvFilter::try_from_env("SANDMAN_SHIM_LOG")
        .unwrap_or_else(|_| EnvFilter::new(format!("warn,sandman_containerd_shim={default}")));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(false)
        .with_writer(std::io::stderr)
        .init();
}
