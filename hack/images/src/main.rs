//! Builds the OCI images of the dev cluster from Debian packages and pushes them.
//!
//! The images stand for what users bring: a small one, a large one of several
//! layers, one without anything but a program, and one with its own user and
//! ENTRYPOINT; a second set stands in for the images of Kubernetes' own tests.
//! Nothing here is specific to Sandman, and nothing of it is shipped.

mod build;
mod catalog;
mod conformance;
mod debian;
mod layer;
mod layout;
mod program;
mod push;
mod recipe;
mod repository;
mod supplies;
mod tree;

use std::io::IsTerminal;
use std::path::PathBuf;

use anyhow::Context;
use clap::{Parser, Subcommand};

use crate::catalog::Set;
use crate::push::Registry;
use crate::supplies::{Supplies, Supply};

/// Builds and pushes the test images.
#[derive(Debug, Parser)]
#[command(version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Build the images whose recipe has changed into an OCI image layout.
    ///
    /// Needs Debian's apt-get, dpkg-deb and git, and rustc, all found in PATH.
    Build {
        /// Folder of the image layout; made if it does not exist.
        #[arg(long, value_name = "DIR")]
        out: PathBuf,
        /// Which images.
        #[arg(long, value_enum, default_value_t = Set::Dev)]
        set: Set,
        /// A program that images hold and that was built elsewhere; may be repeated.
        #[arg(long, value_name = "NAME=FILE")]
        supply: Vec<Supply>,
        /// Build only this image; may be repeated.
        #[arg(long, value_name = "NAME")]
        only: Vec<String>,
    },
    /// Push every image of a layout to a registry.
    Push {
        /// Folder that `build` has written.
        #[arg(long, value_name = "DIR")]
        from: PathBuf,
        /// Address of the registry.
        #[arg(long, value_name = "HOST:PORT")]
        registry: String,
        /// Speak HTTP instead of HTTPS.
        #[arg(long)]
        plain_http: bool,
        /// Name for basic authentication.
        #[arg(long, requires = "password")]
        user: Option<String>,
        /// Password for basic authentication.
        #[arg(
            long,
            requires = "user",
            env = "SANDMAN_REGISTRY_PASSWORD",
            hide_env_values = true
        )]
        password: Option<String>,
    },
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> anyhow::Result<()> {
    tracing_subscriber::fmt()
        .with_env_filter(
            tracing_subscriber::EnvFilter::try_from_default_env()
                .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("info")),
        )
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .init();
    match Cli::parse().command {
        Command::Build {
            out,
            set,
            supply,
            only,
        } => build::run(&set.recipes(), &out, &only, &Supplies::read(&supply)?),
        Command::Push {
            from,
            registry,
            plain_http,
            user,
            password,
        } => {
            if rustls::crypto::ring::default_provider()
                .install_default()
                .is_err()
            {
                anyhow::bail!("a TLS provider is already installed");
            }
            let registry = Registry::new(registry, plain_http, user.zip(password));
            push::run(&from, &registry)
                .await
                .with_context(|| format!("push to {registry}"))
        }
    }
}
