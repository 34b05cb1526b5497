//! `serve`: the shim itself.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::Stdio;
use std::sync::Arc;

use anyhow::{Context, bail};
use containerd_shim_protos::ttrpc::r#async::Server;
use containerd_shim_protos::ttrpc::r#async::transport::Listener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::Notify;
use tokio_stream::wrappers::UnixListenerStream;

use super::args::Args;
use super::group::Group;
use crate::holder;
use crate::launch::Launcher;
use crate::task::processes::Processes;
use crate::task::{Tasks, services, sys};

/// Threads for requests. They hardly compute: runc does.
const WORKERS: usize = 2;

pub(super) fn run(args: &Args) -> anyhow::Result<()> {
    super::log::start(args.debug);
    let group = Group::new(&args.state_dir, &args.namespace, &args.address);
    group
        .make()
        .with_context(|| format!("making {}", group.dir().display()))?;
    let listener = listener(args, &group)?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(WORKERS)
        .enable_all()
        .build()
        .context("starting the runtime")?;
    let result = runtime.block_on(serve(args, Arc::new(group), listener));
    // Nothing is left that must be finished; a copy that waits for ever must not hold us.
    runtime.shutdown_background();
    result
}

fn listener(args: &Args, group: &Group) -> anyhow::Result<UnixListener> {
    if args.inherited {
        let listener = UnixListener::from(sys::inherited(3).context("no socket as descriptor 3")?);
        return Ok(listener);
    }
    let Some(socket) = &args.socket else {
        bail!("serve wants --socket PATH, where containerd is told to find the task API");
    };
    let _lock = group.lock().context("taking the lock")?;
    if UnixStream::connect(socket).is_ok() {
        bail!("{}: another shim serves there", socket.display());
    }
    drop(fs::remove_file(socket));
    let listener =
        UnixListener::bind(socket).with_context(|| format!("listening at {}", socket.display()))?;
    // Who can connect is root on this host.
    fs::set_permissions(socket, fs::Permissions::from_mode(0o600))?;
    // `delete` asks there.
    point_to(&group.socket(), socket)?;
    Ok(listener)
}

fn point_to(link: &Path, socket: &Path) -> anyhow::Result<()> {
    if link != socket {
        drop(fs::remove_file(link));
        std::os::unix::fs::symlink(std::path::absolute(socket)?, link)
            .with_context(|| format!("linking {}", link.display()))?;
    }
    Ok(())
}

async fn serve(args: &Args, group: Arc<Group>, listener: UnixListener) -> anyhow::Result<()> {
    listener.set_nonblocking(true)?;
    let processes = processes(group.dir()).await?;
    let done = Arc::new(Notify::new());
    let idle = {
        let (done, group) = (Arc::clone(&done), Arc::clone(&group));
        // As a service with a fixed socket it stays.
        let ends = args.inherited;
        move || {
            if ends && may_end(&group) {
                done.notify_one();
            }
        }
    };
    let events = std::env::var("TTRPC_ADDRESS")
        .ok()
        .filter(|address| !address.is_empty())
        .unwrap_or_else(|| format!("{}.ttrpc", args.address));
    let announced = Arc::clone(&group);
    let launcher = match Launcher::new() {
        Ok(launcher) => Some(launcher),
        Err(error) => {
            tracing::warn!(%error, "no launcher on this host: runc makes every container");
            None
        }
    };
    let tasks = Tasks::new(
        &args.namespace,
        group.dir(),
        &events,
        processes,
        launcher,
        idle,
    )
    .settled_by(move |id| announced.settle(id));
    let tasks = Arc::new(tasks);
    tasks.recover().await.context("taking over earlier tasks")?;

    let connections = UnixListenerStream::new(tokio::net::UnixListener::from_std(listener)?);
    let mut server = Server::new()
        .add_listener(Listener::new(connections))
        .register_service(services(&tasks));
    server.start().await.context("serving the task API")?;
    tracing::info!(namespace = args.namespace, dir = %group.dir().display(), "serving");

    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    tokio::select! {
        () = done.notified() => tracing::info!("no tasks left"),
        _ = terminate.recv() => tracing::info!("asked to end"),
        _ = interrupt.recv() => tracing::info!("asked to end"),
    }
    // Answers on their way go out.
    drop(server.shutdown().await);
    tasks.flush_events().await;
    Ok(())
}

/// Takes the address away if nobody is about to use it.
fn may_end(group: &Group) -> bool {
    let Ok(_lock) = group.lock() else {
        return false;
    };
    if group.expects() {
        return false;
    }
    fs::remove_file(group.socket()).is_ok()
}

/// The holder of this shim's folder, started if none answers.
async fn processes(dir: &Path) -> anyhow::Result<Arc<Processes>> {
    let socket = dir.join(holder::SOCKET);
    if let Ok(processes) = Processes::connect(&socket).await {
        return Ok(processes);
    }
    let program = std::env::current_exe()
        .context("finding this program")?
        .with_file_name("sandman-holder");
    // Returns when the holder, a daemon by then, accepts.
    let status = tokio::process::Command::new(&program)
        .arg(dir)
        .stdin(Stdio::null())
        .status()
        .await
        .with_context(|| format!("starting {}", program.display()))?;
    if !status.success() {
        bail!("{} did not start: {status}", program.display());
    }
    Processes::connect(&socket)
        .await
        .context("connecting to the holder")
}
