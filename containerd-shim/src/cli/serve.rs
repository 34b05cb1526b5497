//! `serve`: the shim itself.
//!
//! containerd's connections end at the holder, which passes requests on: it takes a lost connection
//! for a lost task. So this process may be killed and started again, by the holder or by a service
//! manager, without containerd's notice.

use std::env;
use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, bail};
use containerd_shim_protos::ttrpc::r#async::Server;
use containerd_shim_protos::ttrpc::r#async::transport::Listener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::Notify;
use tokio_stream::StreamExt;

use super::args::Args;
use super::group::Group;
use crate::holder;
use crate::holder::client::HolderError;
use crate::holder::protocol::Code;
use crate::launch::Launcher;
use crate::task::processes::Processes;
use crate::task::{Tasks, services, sys};

/// This shim has no tasks and only tells the last events: the next one may have the holder.
static ENDING: AtomicBool = AtomicBool::new(false);

/// Threads for requests. They hardly compute.
const WORKERS: usize = 2;

pub(super) fn run(args: &Args) -> anyhow::Result<()> {
    super::log::start(args.debug);
    let inherited = args
        .inherited
        .then(|| sys::inherited(3).context("no socket as descriptor 3"))
        .transpose()?;
    if !args.inherited && !args.revived && args.socket.is_none() {
        bail!("serve wants --socket PATH, where containerd is told to find the task API");
    }
    let group = Group::new(&args.state_dir, &args.namespace, &args.address);
    group
        .make()
        .with_context(|| format!("making {}", group.dir().display()))?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(WORKERS)
        .enable_all()
        .build()
        .context("starting the runtime")?;
    let result = runtime.block_on(serve(args, Arc::new(group), inherited));
    // Nothing is left that must be finished; a copy that waits for ever must not hold us.
    runtime.shutdown_background();
    result
}

async fn serve(args: &Args, group: Arc<Group>, inherited: Option<OwnedFd>) -> anyhow::Result<()> {
    let processes = processes(group.dir()).await?;
    let done = Arc::new(Notify::new());
    let idle = {
        let (done, group) = (Arc::clone(&done), Arc::clone(&group));
        // As a service with a fixed socket it stays.
        let ends = args.socket.is_none();
        move || {
            if ends && may_end(&group) {
                done.notify_one();
            }
        }
    };
    let events = env::var("TTRPC_ADDRESS")
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
    let keeper = Arc::clone(&processes);
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
    {
        // `delete` may be at work on what is to be taken over.
        let _lock = group.lock().context("taking the lock")?;
        tasks.recover().await.context("taking over earlier tasks")?;
    }

    let (ours, theirs) = UnixStream::pair().context("connecting to the holder")?;
    ours.set_nonblocking(true)?;
    let ours = tokio::net::UnixStream::from_std(ours)?;
    let connections = tokio_stream::once(io::Result::Ok(ours)).chain(tokio_stream::pending());
    let mut server = Server::new()
        .add_listener(Listener::new(connections))
        .register_service(services(&tasks));
    server.start().await.context("serving the task API")?;
    front(args, &group, &keeper, theirs.into(), inherited).await?;
    tracing::info!(namespace = args.namespace, dir = %group.dir().display(), "serving");

    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    tokio::select! {
        () = done.notified() => {
            tracing::info!("no tasks left");
            ENDING.store(true, Ordering::Relaxed);
            // Without the holder there is nobody who could start it again either.
            drop(keeper.client().retire().await);
        }
        _ = terminate.recv() => tracing::info!("asked to end"),
        _ = interrupt.recv() => tracing::info!("asked to end"),
    }
    // Answers on their way go out.
    drop(server.shutdown().await);
    tasks.flush_events().await;
    Ok(())
}

/// Has the holder serve containerd at the listening socket, which it may have already.
async fn front(
    args: &Args,
    group: &Group,
    processes: &Processes,
    shim: OwnedFd,
    inherited: Option<OwnedFd>,
) -> anyhow::Result<()> {
    let argv = command(args)?;
    let env: Vec<Vec<u8>> = env::vars_os()
        .map(|(name, value)| [name.into_vec(), value.into_vec()].join(&b'='))
        .collect();
    let log = io::stderr();
    let client = processes.client();
    let ask = |listener| {
        let (argv, env) = (argv.clone(), env.clone());
        client.front(argv, env, shim.as_fd(), log.as_fd(), listener)
    };
    let listener = inherited.as_ref().map(AsFd::as_fd);
    match (ask(listener).await, &args.socket) {
        (Ok(()), _) => Ok(()),
        (
            Err(HolderError::Refused {
                code: Code::NotFound,
                ..
            }),
            Some(socket),
        ) => {
            let listener = OwnedFd::from(listen(group, socket)?);
            ask(Some(listener.as_fd())).await
        }
        (Err(error), _) => Err(error),
    }
    .context("serving containerd's connections")
}

/// How the holder is to start this shim again; empty where a service manager does.
fn command(args: &Args) -> anyhow::Result<Vec<Vec<u8>>> {
    if args.socket.is_some() {
        return Ok(Vec::new());
    }
    // By name rather than by what runs now: after an upgrade the new one.
    let program = match env::args_os().next() {
        Some(program) if Path::new(&program).is_absolute() => program,
        _ => env::current_exe().context("finding this program")?.into(),
    };
    let mut words: Vec<OsString> = vec![program, "serve".into()];
    for (flag, value) in [
        ("--namespace", &args.namespace),
        ("--address", &args.address),
    ] {
        words.extend([flag.into(), value.into()]);
    }
    words.extend(["--state-dir".into(), args.state_dir.clone().into()]);
    words.push("--revived".into());
    words.extend(args.debug.then(|| "--debug".into()));
    Ok(words.into_iter().map(OsString::into_vec).collect())
}

fn listen(group: &Group, socket: &Path) -> anyhow::Result<UnixListener> {
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
    if let Ok(processes) = Processes::connect(&socket, lost).await {
        return Ok(processes);
    }
    let program = env::current_exe()
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
    Processes::connect(&socket, lost)
        .await
        .context("connecting to the holder")
}

/// Either the sandboxes have ended and containerd's connections with them, which it sees to by
/// `delete`; or another shim has taken over. Whatever this one still did could only do harm.
fn lost() {
    if ENDING.load(Ordering::Relaxed) {
        return;
    }
    tracing::error!("the holder is gone, or serves another shim");
    std::process::exit(1);
}
