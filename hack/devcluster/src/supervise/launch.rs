//! The last steps in a component's process before it becomes the component: own session, own
//! network namespace, record, exec. Being exec'd, this needs none of the care that code between
//! fork and exec does.

use std::convert::Infallible;
use std::ffi::OsString;
use std::fs::{self, File};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;

use anyhow::Context;
use nix::sys::resource::{Resource, getrlimit, setrlimit};

use super::{Identity, Record};
use crate::net::enter;

/// How to become a component.
#[derive(Debug, clap::Args)]
pub(crate) struct Launch {
    /// Name of the component.
    #[arg(long)]
    name: String,
    /// Where records are kept.
    #[arg(long)]
    record_dir: PathBuf,
    /// Hash of all that the component is started with.
    #[arg(long)]
    fingerprint: String,
    /// File that pins the network namespace to enter.
    #[arg(long)]
    netns: Option<PathBuf>,
    /// The component's command.
    #[arg(last = true, required = true)]
    argv: Vec<OsString>,
}

/// Becomes the component; returns only on failure.
pub(crate) fn run(launch: Launch) -> anyhow::Result<Infallible> {
    // A terminal that closes, or Ctrl-C during `up`, must not reach the cluster.
    nix::unistd::setsid().context("cannot start a session")?;
    if let Some(path) = &launch.netns {
        let file = File::open(path).with_context(|| format!("cannot open {}", path.display()))?;
        enter(&file)?;
    }
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    setrlimit(Resource::RLIMIT_NOFILE, hard, hard).context("cannot raise the limit of files")?;
    fs::create_dir_all(&launch.record_dir)?;
    let record = Record {
        name: launch.name,
        identity: Identity::own().context("/proc does not show this process")?,
        fingerprint: launch.fingerprint,
    };
    record.write(&launch.record_dir)?;
    let error = Command::new(&launch.argv[0]).args(&launch.argv[1..]).exec();
    Err(error).with_context(|| format!("cannot run {}", launch.argv[0].display()))
}
