//! Host service of Sandman: makes the sandboxes of one host true through containerd.

use std::io::IsTerminal;
use std::path::PathBuf;

use anyhow::Context;
use clap::{Parser, Subcommand};
use sandman_runtime_shim::cache_commands;
use sandman_runtime_shim::config::{Config, LogFormat};
use sandman_runtime_shim::server;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;
use tracing_subscriber::EnvFilter;

/// Makes the sandboxes of one host true through containerd.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    /// Configuration file (TOML).
    #[arg(long)]
    config: PathBuf,

    /// Check the configuration and exit.
    #[arg(long)]
    check: bool,

    #[command(subcommand)]
    command: Option<Command>,
}

/// What to do instead of serving.
#[derive(Subcommand)]
enum Command {
    /// Look at the layers of a running host, and change what is kept of them.
    #[command(subcommand)]
    Cache(cache_commands::Command),
}

fn main() -> anyhow::Result<()> {
    let arguments = Arguments::parse();
    let config = Config::load(&arguments.config)?;
    if arguments.check {
        return Ok(());
    }
    if let Some(Command::Cache(command)) = &arguments.command {
        return cache_commands::run(&config, command);
    }
    log_to_stderr(config.log_format);
    rustls::crypto::ring::default_provider()
        .install_default()
        .map_err(|_| anyhow::anyhow!("another TLS provider is installed already"))?;
    tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .context("cannot start the runtime")?
        .block_on(run(config))
}

async fn run(config: Config) -> anyhow::Result<()> {
    let shutdown = CancellationToken::new();
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let token = shutdown.clone();
    tokio::spawn(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        token.cancel();
    });
    server::serve(config, shutdown).await
}

fn log_to_stderr(format: LogFormat) {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(std::io::stderr().is_terminal())
        .with_writer(std::io::stderr);
    match format {
        LogFormat::Json => builder.json().init(),
        LogFormat::Pretty => builder.init(),
    }
}
