//! Limits of the kernel and of this host's daemons that sandboxes run into together. They are
//! looked at once, at start: what may be raised is raised, never lowered; the rest is said in the
//! log with its way out and shown in metrics, and the host offers no more pods than it can hold.

mod table;

use std::fs;
use std::io;
use std::os::unix::net::UnixStream;
use std::path::Path;

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::socket::{getsockopt, sockopt::PeerCredentials};
use tracing::{debug, info, warn};

pub use self::table::Demand;
use self::table::{KNOBS, Knob, files, hard_nofile, room_for_files};

/// Where sysctls are.
const SYSCTL: &str = "/proc/sys";

/// A limit as it was found, and as it is now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// As `sysctl` names it, or `nofile` of a daemon.
    pub name: &'static str,
    /// What it was.
    pub before: u64,
    /// What it is now.
    pub value: u64,
    /// What the host's pods need.
    pub needed: u64,
    /// Pods that it has room for, if it bounds them.
    pub room: Option<u64>,
    /// What happens where it is too small, or why it could not be raised.
    note: String,
}

impl Finding {
    /// Whether less is there than needed.
    #[must_use]
    pub fn is_short(&self) -> bool {
        self.value < self.needed
    }
}

/// Tasks of one sandbox under a containerd runtime.
#[must_use]
pub fn tasks_each(runtime_type: &str) -> u64 {
    if runtime_type.starts_with("io.containerd.sandman.") {
        table::TASKS_WITH_GROUPED_SHIM
    } else {
        table::TASKS_WITH_OWN_SHIM
    }
}

/// Looks at all limits and, with `raise`, raises what is too small. What cannot be seen from
/// here, as some of the network's from a namespace, is left out.
#[must_use]
pub fn check(demand: Demand, containerd_socket: &Path, raise: bool) -> Vec<Finding> {
    let mut findings: Vec<Finding> = KNOBS
        .iter()
        .filter_map(|knob| sysctl(Path::new(SYSCTL), knob, demand, raise))
        .collect();
    findings.extend(own_files(demand));
    findings.extend(containerd_files(demand, containerd_socket));
    findings
}

/// Pods that all limits together have room for.
#[must_use]
pub fn room(findings: &[Finding]) -> u64 {
    let rooms = findings.iter().filter_map(|finding| finding.room);
    rooms.min().unwrap_or(u64::MAX)
}

/// Says once what was found.
pub fn log(findings: &[Finding]) {
    for finding in findings {
        let Finding {
            name,
            before,
            value,
            needed,
            ..
        } = finding;
        if value > before {
            info!(limit = name, before, value, "raised");
        }
        if finding.is_short() {
            warn!(
                limit = name,
                value,
                needed,
                room_for_pods = finding.room,
                "too small: {}",
                finding.note
            );
        }
    }
}

fn sysctl(root: &Path, knob: &Knob, demand: Demand, raise: bool) -> Option<Finding> {
    let path = root.join(knob.name.replace('.', "/"));
    let read = || fs::read_to_string(&path).ok()?.trim().parse::<u64>().ok();
    let Some(before) = read() else {
        debug!(
            limit = knob.name,
            "not to be seen from here; set it on the host"
        );
        return None;
    };
    let needed = (knob.needs)(demand);
    let mut value = before;
    let mut note = format!(
        "{}; set {} = {needed} in /etc/sysctl.d",
        knob.effect, knob.name
    );
    if before < needed && raise {
        if let Err(error) = fs::write(&path, needed.to_string()) {
            note = format!("{note} (this service could not: {error})");
        }
        // The kernel may have taken less, and others may have written meanwhile.
        value = read().unwrap_or(before);
    }
    Some(Finding {
        name: knob.name,
        before,
        value,
        needed,
        room: knob.room.map(|room| room(demand, value)),
        note,
    })
}

/// The soft limit of this process becomes the hard one. The hard one is the unit's to set: it is
/// what containers get as well.
fn own_files(demand: Demand) -> Option<Finding> {
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE).ok()?;
    let value = match setrlimit(Resource::RLIMIT_NOFILE, hard, hard) {
        Ok(()) => hard,
        Err(_) => soft,
    };
    Some(daemon(
        "nofile of sandman-runtime-shim",
        soft,
        value,
        demand,
    ))
}

fn containerd_files(demand: Demand, socket: &Path) -> Option<Finding> {
    match peer_limit(socket) {
        Ok(value) => Some(daemon("nofile of containerd", value, value, demand)),
        Err(error) => {
            debug!(%error, "cannot see containerd's limit of open files");
            None
        }
    }
}

/// Limit of open files of the process that listens there.
fn peer_limit(socket: &Path) -> io::Result<u64> {
    let stream = UnixStream::connect(socket)?;
    let peer = getsockopt(&stream, PeerCredentials)?;
    // 0 is a process of another PID namespace.
    if peer.pid() == 0 {
        return Err(io::Error::other(
            "it runs where its processes are not to be seen",
        ));
    }
    let limits = fs::read_to_string(format!("/proc/{}/limits", peer.pid()))?;
    hard_nofile(&limits).ok_or_else(|| io::Error::other("no limit in /proc"))
}

fn daemon(name: &'static str, before: u64, value: u64, demand: Demand) -> Finding {
    let needed = files(demand);
    Finding {
        name,
        before,
        value,
        needed,
        room: Some(room_for_files(value)),
        note: format!(
            "no further container can be started; set LimitNOFILE={needed} in its unit, or fewer \
             capacity.pods"
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEMAND: Demand = Demand {
        pods: 1000,
        tasks_each: 4,
    };

    fn kernel(pid_max: &str) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("kernel")).unwrap();
        fs::write(dir.path().join("kernel/pid_max"), pid_max).unwrap();
        dir
    }

    fn pid_max() -> &'static Knob {
        KNOBS
            .iter()
            .find(|knob| knob.name == "kernel.pid_max")
            .unwrap()
    }

    #[test]
    fn what_is_too_small_is_raised() {
        let root = kernel("9000\n");
        let finding = sysctl(root.path(), pid_max(), DEMAND, true).unwrap();
        assert_eq!((finding.before, finding.value), (9000, finding.needed));
        assert!(!finding.is_short());
        let again = sysctl(root.path(), pid_max(), DEMAND, true).unwrap();
        assert_eq!(again.before, again.value);
    }

    #[test]
    fn what_is_enough_is_never_lowered() {
        let root = kernel("4194304\n");
        let finding = sysctl(root.path(), pid_max(), DEMAND, true).unwrap();
        assert_eq!((finding.before, finding.value), (4_194_304, 4_194_304));
    }

    #[test]
    fn what_may_not_be_raised_bounds_the_pods_and_names_the_way_out() {
        let root = kernel("9000\n");
        let finding = sysctl(root.path(), pid_max(), DEMAND, false).unwrap();
        assert!(finding.is_short());
        assert_eq!(finding.value, 9000);
        assert_eq!(room(std::slice::from_ref(&finding)), (9000 - 8192) / 4);
        assert!(finding.note.contains("kernel.pid_max = "));
    }

    #[test]
    fn what_cannot_be_seen_bounds_nothing() {
        let root = tempfile::tempdir().unwrap();
        assert_eq!(sysctl(root.path(), pid_max(), DEMAND, true), None);
        assert_eq!(room(&[]), u64::MAX);
    }

    #[test]
    fn the_listener_at_a_socket_is_found() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let _listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
        assert_eq!(peer_limit(&path).unwrap(), hard);
        assert!(peer_limit(&dir.path().join("none")).is_err());
    }

    #[test]
    fn shims_of_their_own_cost_more_tasks() {
        assert!(tasks_each("io.containerd.runc.v2") > tasks_each("io.containerd.sandman.v1"));
    }
}
