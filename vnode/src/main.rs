//! `sandman-vnode`: one process that is a node of the cluster.

use std::net::IpAddr;
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

    /// Address at which the API server reaches this process, instead of the
    /// file's `kubelet_api.address`: replicas share one file.
    #[arg(long, value_parser = reachable)]
    kubelet_address: Option<IpAddr>,

    /// Check the configuration and exit.
    #[arg(long)]
    check: bool,

    /// Log lines as JSON.
    #[arg(long)]
    log_json: bool,
}

fn reachable(text: &str) -> Result<IpAddr, String> {
    match text.parse::<IpAddr>() {
        Ok(address) if !address.is_unspecified() => Ok(address),
        Ok(_) => Err("must be the address that the API server connects to".to_owned()),
        Err(error) => Err(error.to_string()),
    }
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
    let mut config = Config::load(&arguments.config, arguments.null_hosts)?;
    if let Some(address) = arguments.kubelet_address {
        config.kubelet_api.address = address;
    }
    if arguments.check {
        return Ok(());
    }
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()?;
    runtime.block_on(sandman_vnode::run(config, arguments.null_hosts))
}
