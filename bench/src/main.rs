//! Load generator and side-by-side comparison of Sandman with its peers, on the dev cluster.
//! Standard output carries one JSON object a line, for programs; a table for people goes to
//! standard error. What the bench started it also ends, however it ends.
#![allow(
    clippy::print_stdout,
    reason = "results are this program's standard output"
)]

mod api_cost;
mod audit;
mod batch;
mod burst;
mod census;
mod cli;
mod cluster;
mod ctr;
mod density;
mod dev;
mod exec;
mod host;
mod machine;
mod memory;
mod pod;
mod report;
mod soak;
mod stats;
mod stream;
mod subject;
mod timeline;
mod watch;

use std::io::IsTerminal;
use std::process::ExitCode;

use clap::Parser;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch::{Receiver, Sender};
use tracing_subscriber::EnvFilter;

use self::cli::{Cli, Command};
use self::cluster::Cluster;
use self::report::Report;

/// kube reports each refused request as an error, also those that are tried again.
const LOG_FILTER: &str = "info,kube_client=off";

#[tokio::main]
async fn main() -> ExitCode {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(LOG_FILTER));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(std::io::stderr().is_terminal())
        .with_writer(std::io::stderr)
        .init();
    match run(&Cli::parse()).await {
        Ok(report) => {
            eprint!("{}", report.table());
            print!("{}", report.json_lines());
            // The figures of a run with failures must not pass for good ones.
            if report.failed() == 0 {
                ExitCode::SUCCESS
            } else {
                ExitCode::FAILURE
            }
        }
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

async fn run(cli: &Cli) -> anyhow::Result<Report> {
    rustls::crypto::ring::default_provider()
        .install_default()
        .map_err(|_| anyhow::anyhow!("a TLS provider is installed already"))?;
    let mut cluster = Cluster::new(&cli.dev);
    let measured = measured(&mut cluster, cli).await;
    let cleaned = cluster.clean().await;
    let report = measured?;
    cleaned?;
    Ok(report)
}

/// Measures until the end or an interrupt. A bench that has something to tell before its end is
/// asked for it first.
async fn measured(cluster: &mut Cluster, cli: &Cli) -> anyhow::Result<Report> {
    let stop = Sender::new(false);
    let mut measure = Box::pin(measure(cluster, cli, stop.subscribe()));
    if matches!(cli.command, Command::Soak(_)) {
        tokio::select! {
            measured = &mut measure => return measured,
            name = interrupted() => {
                tracing::info!("{}: stopping; once more to give up", name?);
                stop.send_replace(true);
            }
        }
    }
    tokio::select! {
        measured = measure => measured,
        name = interrupted() => Err(anyhow::anyhow!("{}", name?)),
    }
}

async fn measure(cluster: &mut Cluster, cli: &Cli, stop: Receiver<bool>) -> anyhow::Result<Report> {
    let report = match &cli.command {
        Command::Burst(arguments) => burst::run(cluster, arguments).await,
        Command::Exec(arguments) => exec::run(cluster, arguments).await,
        Command::Density(arguments) => density::run(cluster, arguments).await,
        Command::Host(arguments) => Box::pin(host::run(cluster, arguments)).await,
        Command::Soak(arguments) => soak::run(cluster, arguments, stop).await,
        Command::Stream(arguments) => stream::run(cluster, arguments).await,
        Command::ApiCost(arguments) => api_cost::run(cluster, arguments).await,
    }?;
    Ok(report.with_runtime(cluster.runtime()))
}

async fn interrupted() -> anyhow::Result<&'static str> {
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    tokio::select! {
        _ = interrupt.recv() => Ok("interrupted"),
        _ = terminate.recv() => Ok("terminated"),
    }
}
