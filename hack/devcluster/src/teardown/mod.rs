//! Takes the cluster down from whatever state it is in. Works from what the kernel shows, not only
//! from what was recorded, and looks again at the end.

mod cgroups;
mod mounts;
mod processes;

use std::ffi::OsStr;
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context;
use nix::sys::signal::Signal;

pub(crate) use self::cgroups::hierarchies as cgroup_hierarchies;
use self::processes::Claim;
use crate::layout::Layout;
use crate::net::{NetNs, PIN_DIR};
use crate::progress::Progress;
use crate::supervise::wait_gone;

/// Time to end by itself: etcd and containerd have nothing that must be saved.
const GRACE: Duration = Duration::from_secs(3);
/// Time for the kernel to end a process that was killed.
const KILL_WITHIN: Duration = Duration::from_secs(20);
/// Whoever forks while being killed is found in the next round.
const ROUNDS: usize = 10;
/// Where containerd's shims put their sockets and runc its records, whoever runs them.
const SHARED_SOCKETS: &str = "/run/containerd/s";
const SHARED_RUNC: &str = "/run/containerd/runc/sandman";
/// Where every kubelet links the logs of its containers, and CNI keeps the results of its plugins.
const SHARED_LOG_LINKS: &str = "/var/log/containers";
const SHARED_CNI_RESULTS: &str = "/var/lib/cni/results";

/// Something that is still there.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Leftover {
    /// A process and why it is ours.
    Process(u32, String),
    /// A mount point.
    Mount(PathBuf),
    /// A network namespace, and with it its links and addresses.
    NetNs(PathBuf),
    /// A cgroup.
    Cgroup(PathBuf),
    /// A loop device and the file it shows.
    Loop(PathBuf, PathBuf),
    /// The run directory.
    Directory(PathBuf),
}

impl fmt::Display for Leftover {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Process(pid, command) => write!(f, "process {pid}: {command}"),
            Self::Mount(path) => write!(f, "mount {}", path.display()),
            Self::NetNs(path) => write!(f, "network namespace {}", path.display()),
            Self::Cgroup(path) => write!(f, "cgroup {}", path.display()),
            Self::Loop(device, file) => {
                write!(f, "loop device {} of {}", device.display(), file.display())
            }
            Self::Directory(path) => write!(f, "directory {}", path.display()),
        }
    }
}

/// Ends everything of this cluster. Gives what could not be removed.
pub(crate) async fn down(
    layout: &Layout,
    purge: bool,
    progress: Progress,
) -> anyhow::Result<Vec<Leftover>> {
    let killed = end_processes(layout, progress).await;
    if killed > 0 {
        progress.say(format_args!("ended {killed} processes"));
    }
    remove_shared_files(layout);
    for root in [layout.run_dir(), layout.state_dir()] {
        let count = mounts::unmount_below(root)?;
        if count > 0 {
            progress.say(format_args!("unmounted {count} below {}", root.display()));
        }
    }
    let namespaces = net_namespaces(layout);
    for namespace in &namespaces {
        namespace.remove()?;
    }
    if !namespaces.is_empty() {
        progress.say(format_args!(
            "removed {} network namespaces",
            namespaces.len()
        ));
    }
    let groups = cgroups::remove(&layout.cgroup_parent()).await;
    if groups > 0 {
        progress.say(format_args!("removed {groups} cgroups"));
    }
    remove_files(layout, purge)?;
    Ok(leftovers(layout))
}

/// Everything of this cluster that the kernel still shows.
pub(crate) fn leftovers(layout: &Layout) -> Vec<Leftover> {
    let mut found = Vec::new();
    for process in Claim::new(layout).processes() {
        found.push(Leftover::Process(process.identity.pid(), process.command));
    }
    for root in [layout.run_dir(), layout.state_dir()] {
        found.extend(mounts::below(root).into_iter().map(Leftover::Mount));
    }
    found.extend(
        net_namespaces(layout)
            .iter()
            .map(|ns| Leftover::NetNs(ns.path().to_owned())),
    );
    found.extend(
        cgroups::find(&layout.cgroup_parent())
            .into_iter()
            .map(Leftover::Cgroup),
    );
    found.extend(
        mounts::loop_devices(layout.state_dir())
            .into_iter()
            .map(|(device, file)| Leftover::Loop(device, file)),
    );
    if layout.run_dir().exists() {
        found.push(Leftover::Directory(layout.run_dir().to_owned()));
    }
    found
}

/// Asks all to end at once, so that nothing waits for another, then kills what is left. Containers
/// are only killed: nobody is left to tell them why.
async fn end_processes(layout: &Layout, progress: Progress) -> usize {
    let mut ended = 0;
    for round in 0..ROUNDS {
        let processes = Claim::new(layout).processes();
        if processes.is_empty() {
            break;
        }
        ended += processes.len();
        let identities: Vec<_> = processes.iter().map(|process| process.identity).collect();
        let ask = |signal: Signal, polite_only: bool| {
            for process in processes.iter().filter(|p| !polite_only || p.polite) {
                if let Err(error) = process.identity.signal(signal) {
                    progress.say(format_args!("cannot signal {}: {error}", process.command));
                }
            }
        };
        if round == 0 {
            ask(Signal::SIGTERM, true);
            let polite: Vec<_> = processes
                .iter()
                .filter(|p| p.polite)
                .map(|p| p.identity)
                .collect();
            wait_gone(&polite, GRACE).await;
        }
        ask(Signal::SIGKILL, false);
        wait_gone(&identities, KILL_WITHIN).await;
    }
    ended
}

/// Files in folders that all containerds and kubelets of a machine share. Which are ours, our own
/// bundles say, and the names and paths of the cluster in them. A file that cannot be removed is
/// seen by nobody.
fn remove_shared_files(layout: &Layout) {
    // What CNI keeps is named after the network or, for loopback, after the sandbox alone.
    let mut cni_names = vec![layout.cni_network()];
    for host in entries(layout.run_dir()) {
        let tasks = host.join("containerd/io.containerd.runtime.v2.task");
        for bundle in entries(&tasks)
            .iter()
            .flat_map(|namespace| entries(namespace))
        {
            if let Ok(address) = fs::read_to_string(bundle.join("address")) {
                let socket = Path::new(address.trim().trim_start_matches("unix://"));
                // Absent if the shim could still clean up.
                if socket.parent() == Some(Path::new(SHARED_SOCKETS)) {
                    let _ = fs::remove_file(socket);
                }
            }
            if let Some(id) = bundle.file_name().and_then(OsStr::to_str) {
                let _ = fs::remove_dir_all(Path::new(SHARED_RUNC).join(id));
                cni_names.push(id.to_owned());
            }
        }
    }
    for link in entries(Path::new(SHARED_LOG_LINKS)) {
        if fs::read_link(&link).is_ok_and(|target| target.starts_with(layout.state_dir())) {
            let _ = fs::remove_file(link);
        }
    }
    for result in entries(Path::new(SHARED_CNI_RESULTS)) {
        let name = result.file_name().unwrap_or_default().to_string_lossy();
        if cni_names.iter().any(|ours| name.contains(ours.as_str())) {
            let _ = fs::remove_file(result);
        }
    }
}

/// Paths of all in a folder; none if there is no such folder.
fn entries(dir: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    entries.map(|entry| entry.path()).collect()
}

fn net_namespaces(layout: &Layout) -> Vec<NetNs> {
    let prefix = layout.netns_prefix();
    let Ok(entries) = fs::read_dir(PIN_DIR) else {
        return Vec::new();
    };
    entries
        .flatten()
        .filter_map(|entry| entry.file_name().into_string().ok())
        .filter(|name| name.starts_with(&prefix))
        .map(|name| NetNs::named(&name))
        .collect()
}

fn remove_files(layout: &Layout, purge: bool) -> anyhow::Result<()> {
    let mut paths = layout.disposable();
    paths.push(layout.run_dir().to_owned());
    if purge {
        paths.extend([layout.cache_dir(), layout.log_dir()]);
    }
    for path in paths {
        // A mount that is still there must not be emptied through.
        if !mounts::below(&path).is_empty() {
            continue;
        }
        let removed = if path.is_dir() {
            fs::remove_dir_all(&path)
        } else {
            fs::remove_file(&path)
        };
        match removed {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                return Err(error).with_context(|| format!("cannot remove {}", path.display()));
            }
            _ => {}
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
