//! `sandman-vnode`: one process that is a node of the cluster.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use sandman_vnode::config::Config;
use tracing_subscriber::EnvFilter;

/// Virtual node for Sandman hosts.
#[derive(Debug, Parser)]
#[command(version)]
struct Arguments {
    /// Configuration file (TOML).
    #[arg(long)]
    config: PathBuf,

    /// Simulate the configured hosts in this process: pods run at once and do
    /// nothing. Measures the control plane and the node itself.
    #[arg(long)]
    null_hosts: bool,

    /// Check the configuration and exit.
    #[arg(long)]
    check: bool,

    /// Log lines as JSON.
    #[arg(long)]
    log_json: bool,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let filter = EnvFilter::try_from_default_env()
        .unwrap_or_else(|_| EnvFilter::new("info,kube_client=warn,kube_runtime=warn"));
    let log = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr);
    if arguments.log_json {
        log.json().init();
    } else {
        log.init();
    }
    match run(&arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &Arguments) -> anyhow::Result<()> {
    // Fails only if a provider is there already, which is as good.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let config = Config::load(&arguments.config, arguments.null_hosts)?;
    if arguments.check {
        return Ok(());
    }
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()?;
    runtime.block_on(sandman_vnode::run(config, arguments.null_hosts))
}
