//! The dev cluster: a real control plane, registry, virtual node and hosts in network namespaces.
//! `hack/dev` builds this program and becomes it; each command looks at the machine afresh.
#![allow(
    clippy::print_stdout,
    reason = "a command line program speaks on standard output"
)]

mod artifacts;
mod cli;
mod components;
mod demo;
mod environment;
mod kube_api;
mod layout;
mod net;
mod pki;
mod progress;
mod settings;
mod status;
mod supervise;
mod teardown;
mod up;

use std::collections::VecDeque;
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command as Process, ExitCode};
use std::time::Duration;

use anyhow::{Context, bail};
use clap::Parser;
use nix::fcntl::{Flock, FlockArg};
use nix::sys::signal::Signal;
use tracing_subscriber::EnvFilter;

use self::cli::{Cli, Command, UpArgs};
use self::layout::Layout;
use self::net::{Member, NetNs};
use self::progress::Progress;
use self::settings::Settings;
use self::supervise::{ComponentFailed, Supervisor};

/// kube reports each refused request as an error, also those of an API server that is starting.
const LOG_FILTER: &str = "info,kube_client=off";
/// Lines of a log that are shown when its component fails.
const TAIL_LINES: usize = 40;

fn main() -> ExitCode {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(LOG_FILTER));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .init();
    match run(Cli::parse()) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            if let Some(failed) = error.downcast_ref::<ComponentFailed>() {
                show_tail(&failed.log);
            }
            ExitCode::FAILURE
        }
    }
}

fn run(cli: Cli) -> anyhow::Result<ExitCode> {
    // These become another program, or serve one; they know all from their arguments.
    match cli.command {
        Command::Launch(launch) => match supervise::launch(launch)? {},
        Command::Forward { forwards } => {
            net::forward::serve(forwards)?;
            return Ok(ExitCode::SUCCESS);
        }
        _ => {}
    }
    if !nix::unistd::geteuid().is_root() {
        bail!("network namespaces and mounts need root; run this with sudo");
    }
    rustls::crypto::ring::default_provider()
        .install_default()
        .map_err(|_| anyhow::anyhow!("a TLS provider is installed already"))?;
    let state_dir = cli.state_dir.unwrap_or_else(|| cli.repo.join(".dev"));
    let layout = Layout::open(&cli.repo, &state_dir)?;
    match cli.command {
        Command::Kubectl { arguments } => return kubectl(&layout, arguments),
        Command::Logs { component, follow } => return logs(&layout, &component, follow),
        Command::RunIn { namespace, argv } => return run_in(&layout, namespace, &argv),
        _ => {}
    }
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()?;
    runtime.block_on(execute(&layout, cli.command))
}

async fn execute(layout: &Layout, command: Command) -> anyhow::Result<ExitCode> {
    match command {
        Command::Up(arguments) => {
            let _lock = lock(layout)?;
            up::up(layout, options(arguments)).await?;
        }
        Command::Demo(arguments) => {
            let lock = lock(layout)?;
            up::up(layout, options(arguments)).await?;
            drop(lock);
            demo::run(layout).await?;
        }
        Command::Down { purge } => {
            let _lock = lock(layout)?;
            return down(layout, purge).await;
        }
        Command::Status { json } => {
            let well = status::print(layout, json).await?;
            return Ok(if well {
                ExitCode::SUCCESS
            } else {
                ExitCode::FAILURE
            });
        }
        Command::Env { json } => environment::print(layout, json)?,
        Command::Start { component } => {
            let _lock = lock(layout)?;
            up::start(layout, &component).await?;
        }
        Command::Stop { component } => {
            let _lock = lock(layout)?;
            up::stop(layout, &component).await?;
        }
        Command::Restart { component } => {
            let _lock = lock(layout)?;
            up::stop(layout, &component).await?;
            up::start(layout, &component).await?;
        }
        Command::Kill { component, signal } => kill(layout, &component, signal).await?,
        Command::Kubectl { .. }
        | Command::Logs { .. }
        | Command::RunIn { .. }
        | Command::Forward { .. }
        | Command::Launch(_) => unreachable!("handled before the runtime starts"),
    }
    Ok(ExitCode::SUCCESS)
}

fn options(arguments: UpArgs) -> up::Options {
    up::Options {
        hosts: arguments.hosts,
        websockets: arguments.websockets,
        runtime: arguments.runtime,
        containerd: arguments.containerd,
        layers: arguments.layers,
        build: !arguments.no_build,
        profile: arguments.profile,
    }
}

/// Commands that change the cluster take turns.
fn lock(layout: &Layout) -> anyhow::Result<Flock<File>> {
    let path = layout.state_dir().join("lock");
    let open = || File::create(&path).with_context(|| format!("cannot open {}", path.display()));
    if let Ok(lock) = Flock::lock(open()?, FlockArg::LockExclusiveNonblock) {
        return Ok(lock);
    }
    eprintln!("waiting for another hack/dev that changes this cluster");
    Flock::lock(open()?, FlockArg::LockExclusive)
        .map_err(|(_, error)| anyhow::anyhow!("cannot lock {}: {error}", path.display()))
}

async fn down(layout: &Layout, purge: bool) -> anyhow::Result<ExitCode> {
    let progress = Progress::start();
    let left = teardown::down(layout, purge, progress).await?;
    if left.is_empty() {
        progress.say("nothing remains: no process, mount, namespace, cgroup or address");
        return Ok(ExitCode::SUCCESS);
    }
    progress.say("these remain:");
    for leftover in &left {
        progress.say(format_args!("  {leftover}"));
    }
    Ok(ExitCode::FAILURE)
}

async fn kill(layout: &Layout, component: &str, signal: Signal) -> anyhow::Result<()> {
    let supervisor = Supervisor::new(layout.clone());
    let record = supervisor
        .running(component)
        .with_context(|| format!("{component} does not run; see `hack/dev status`"))?;
    record.identity.signal(signal)?;
    let within = Duration::from_secs(10);
    if signal == Signal::SIGKILL && !supervise::wait_gone(&[record.identity], within).await {
        bail!(
            "{component} (pid {}) survived SIGKILL",
            record.identity.pid()
        );
    }
    Ok(())
}

fn kubectl(layout: &Layout, arguments: Vec<OsString>) -> anyhow::Result<ExitCode> {
    let settings = Settings::require(layout)?;
    let error = Process::new(&settings.artifacts.kube_dev)
        .arg("kubectl")
        .args(arguments)
        .env("KUBECONFIG", pki::admin_kubeconfig_path(layout))
        .exec();
    Err(error).with_context(|| format!("cannot run {}", settings.artifacts.kube_dev.display()))
}

fn logs(layout: &Layout, component: &str, follow: bool) -> anyhow::Result<ExitCode> {
    let path = layout.log_file(component);
    let known = || {
        let entries = fs::read_dir(layout.log_dir())
            .into_iter()
            .flatten()
            .flatten();
        let mut names: Vec<_> = entries
            .filter_map(|entry| Some(entry.path().file_stem()?.to_str()?.to_owned()))
            .collect();
        names.sort();
        names.join(", ")
    };
    let mut file = File::open(&path)
        .with_context(|| format!("no log of {component:?}; there are: {}", known()))?;
    if follow {
        let error = Process::new("tail")
            .args(["-n", "+1", "-F"])
            .arg(&path)
            .exec();
        return Err(error).context("cannot run tail");
    }
    std::io::copy(&mut file, &mut std::io::stdout().lock())?;
    Ok(ExitCode::SUCCESS)
}

fn run_in(layout: &Layout, member: Member, argv: &[OsString]) -> anyhow::Result<ExitCode> {
    net::enter(&NetNs::named(&layout.netns_name(member)).open()?)?;
    let error = Process::new(&argv[0]).args(&argv[1..]).exec();
    Err(error).with_context(|| format!("cannot run {}", argv[0].display()))
}

fn show_tail(log: &Path) {
    let Ok(file) = File::open(log) else { return };
    let mut tail = VecDeque::with_capacity(TAIL_LINES);
    for line in BufReader::new(file).lines().map_while(Result::ok) {
        if tail.len() == TAIL_LINES {
            tail.pop_front();
        }
        tail.push_back(line);
    }
    eprintln!("last lines of {}:", log.display());
    for line in tail {
        eprintln!("  {line}");
    }
}
