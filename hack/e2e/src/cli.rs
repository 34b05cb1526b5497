//! The command line of `hack/conformance`.

use std::num::NonZeroU16;
use std::path::PathBuf;

use clap::{Parser, ValueEnum};

use crate::selection::Mode;

/// Runs Kubernetes' own end-to-end tests against the virtual node, and compares the outcome with
/// tests/conformance/expected.txt.
///
/// Uses the running dev cluster, brought up to date, or starts one and ends it.
#[derive(Debug, Parser)]
#[command(name = "hack/conformance", version)]
pub(crate) struct Cli {
    /// Run all tests, those of kubectl's streams included.
    #[arg(long, group = "mode")]
    full: bool,
    /// Run those that take no longer than a minute each; the default.
    #[arg(long, group = "mode")]
    ci: bool,
    /// Run those whose names match.
    #[arg(long, group = "mode", value_name = "REGEX")]
    focus: Option<String>,
    /// Run them on another node of the cluster too, and compare.
    #[arg(long, value_enum)]
    pub(crate) peer: Option<Peer>,
    /// Leave the cluster up, if it was started here, and what tests left in it.
    #[arg(long)]
    pub(crate) keep: bool,
    /// Use what was built last; the cluster must run.
    #[arg(long)]
    pub(crate) no_build: bool,
    /// Tests that run at the same time. They wait more than they compute.
    #[arg(long, default_value = "16")]
    pub(crate) procs: NonZeroU16,
    /// How often a test may run until it passes; one that needs more than one is named.
    #[arg(long, default_value = "1")]
    pub(crate) attempts: NonZeroU16,
    /// Folder of the dev cluster; reports go to `conformance` in it [default: .dev in the checkout].
    #[arg(long, env = "SANDMAN_STATE_DIR")]
    pub(crate) state_dir: Option<PathBuf>,
    /// The checkout.
    #[arg(long, env = "SANDMAN_REPO", hide = true,
          default_value = concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))]
    pub(crate) repo: PathBuf,
}

/// A node to compare with.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum Peer {
    /// A real kubelet with containerd and runc.
    Kubelet,
}

impl Cli {
    /// Which tests to run.
    pub(crate) fn mode(&self) -> Mode<'_> {
        match &self.focus {
            Some(regex) => Mode::Focus(regex),
            None if self.full => Mode::Full,
            None => Mode::Ci,
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_definition_is_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn there_is_one_mode() {
        let parse =
            |arguments: &[&str]| Cli::try_parse_from([&["conformance"], arguments].concat());
        assert!(matches!(
            parse(&[]).map(|cli| matches!(cli.mode(), Mode::Ci)),
            Ok(true)
        ));
        assert!(matches!(
            parse(&["--focus", "x"]).map(|cli| matches!(cli.mode(), Mode::Focus("x"))),
            Ok(true)
        ));
        assert!(parse(&["--full", "--ci"]).is_err());
    }
}
