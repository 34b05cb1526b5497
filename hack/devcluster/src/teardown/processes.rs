//! Finds every process that belongs to the cluster. Records name the components; the rest is told
//! by namespace, cgroup or command line, which no crash of ours can lose.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

use super::net_namespaces;
use crate::layout::Layout;
use crate::supervise::{Identity, Supervisor, pids};

/// A process of the cluster.
pub(super) struct Claimed {
    pub(super) identity: Identity,
    /// Command line, for people.
    pub(super) command: String,
    /// Whether it is given time to end: components are, containers are not.
    pub(super) polite: bool,
}

/// What makes a process ours.
pub(super) struct Claim {
    recorded: BTreeSet<u32>,
    namespaces: BTreeSet<u64>,
    cgroup_parent: String,
    netns_prefix: String,
    run_dir: PathBuf,
    state_dir: PathBuf,
    own: u32,
}

/// Facts about a process, as `/proc` shows them.
#[derive(Default)]
struct Facts {
    net_namespace: Option<u64>,
    cgroups: String,
    argv: Vec<String>,
}

impl Claim {
    pub(super) fn new(layout: &Layout) -> Self {
        let recorded = Supervisor::new(layout.clone())
            .records()
            .into_iter()
            .filter(|record| record.identity.is_alive())
            .map(|record| record.identity.pid())
            .collect();
        Self {
            recorded,
            namespaces: net_namespaces(layout)
                .iter()
                .filter_map(|ns| ns.inode())
                .collect(),
            cgroup_parent: layout.cgroup_parent(),
            netns_prefix: layout.netns_prefix(),
            run_dir: layout.run_dir().to_owned(),
            state_dir: layout.state_dir().to_owned(),
            own: std::process::id(),
        }
    }

    /// All processes that are ours now.
    pub(super) fn processes(&self) -> Vec<Claimed> {
        let mut found = BTreeMap::new();
        for pid in pids().into_iter().filter(|&pid| pid != self.own) {
            // Taken before the facts: if the pid passes on in between, signalling it is a no-op.
            let Some(identity) = Identity::of(pid) else {
                continue;
            };
            let facts = Facts::read(pid);
            if let Some(polite) = self.judge(pid, &facts) {
                let command = facts.argv.join(" ").chars().take(120).collect();
                found.insert(
                    pid,
                    Claimed {
                        identity,
                        command,
                        polite,
                    },
                );
            }
        }
        found.into_values().collect()
    }

    /// Whether the process is ours and, if so, whether it may end in peace.
    fn judge(&self, pid: u32, facts: &Facts) -> Option<bool> {
        if self.recorded.contains(&pid) {
            return Some(true);
        }
        if in_cgroup(&facts.cgroups, &self.cgroup_parent) {
            return Some(false);
        }
        let mentions = |text: &str| facts.argv.iter().any(|argument| argument.contains(text));
        let run_dir = self.run_dir.to_string_lossy();
        let program = facts.argv.first().map(String::as_str).unwrap_or_default();
        let named = |name: &str| {
            program
                .rsplit('/')
                .next()
                .is_some_and(|n| n.starts_with(name))
        };
        // Shims live in the host's namespace too, but one that a test moved must not escape.
        if named("containerd-shim") && mentions(&run_dir) {
            return Some(false);
        }
        if named("sandman-devcluster") {
            // Not yet, or never, what its record says.
            let ours = match facts.argv.get(1).map(String::as_str) {
                Some("launch") => mentions(&run_dir),
                Some("forward") => mentions(&self.netns_prefix),
                _ => false,
            };
            return ours.then_some(false);
        }
        if program.starts_with(&*self.state_dir.join("bin").to_string_lossy()) {
            return Some(true);
        }
        facts
            .net_namespace
            .is_some_and(|inode| self.namespaces.contains(&inode))
            .then_some(true)
    }
}

impl Facts {
    fn read(pid: u32) -> Self {
        let proc = PathBuf::from(format!("/proc/{pid}"));
        let argv = fs::read(proc.join("cmdline")).unwrap_or_default();
        Self {
            net_namespace: fs::metadata(proc.join("ns/net"))
                .ok()
                .map(|meta| meta.ino()),
            cgroups: fs::read_to_string(proc.join("cgroup")).unwrap_or_default(),
            argv: argv
                .split(|&byte| byte == 0)
                .filter(|argument| !argument.is_empty())
                .map(|argument| String::from_utf8_lossy(argument).into_owned())
                .collect(),
        }
    }
}

/// Whether one of the lines of `/proc/PID/cgroup` is at or below this cgroup.
fn in_cgroup(cgroups: &str, parent: &str) -> bool {
    cgroups
        .lines()
        .filter_map(|line| line.splitn(3, ':').nth(2))
        .any(|path| {
            path.strip_prefix(parent)
                .is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claim() -> Claim {
        Claim {
            recorded: BTreeSet::from([7]),
            namespaces: BTreeSet::from([42]),
            cgroup_parent: "/sandman-abc".into(),
            netns_prefix: "sandman-abc-".into(),
            run_dir: "/run/sandman-abc".into(),
            state_dir: "/home/me/.dev".into(),
            own: 1,
        }
    }

    fn argv(line: &str) -> Facts {
        Facts {
            argv: line.split(' ').map(str::to_owned).collect(),
            ..Facts::default()
        }
    }

    #[test]
    fn cgroups_are_compared_by_path_element() {
        assert!(in_cgroup(
            "4:memory:/sandman-abc/host-0/pod1/c\n0::/",
            "/sandman-abc"
        ));
        assert!(in_cgroup("0::/sandman-abc", "/sandman-abc"));
        assert!(!in_cgroup("0::/sandman-abcd/x", "/sandman-abc"));
        assert!(!in_cgroup("0::/x/sandman-abc", "/sandman-abc"));
    }

    #[test]
    fn ours_are_told_from_strangers() {
        let claim = claim();
        assert_eq!(claim.judge(7, &argv("etcd")), Some(true));
        let contained = Facts {
            cgroups: "0::/sandman-abc/x".into(),
            ..Facts::default()
        };
        assert_eq!(claim.judge(8, &contained), Some(false));
        let inside = Facts {
            net_namespace: Some(42),
            ..Facts::default()
        };
        assert_eq!(claim.judge(8, &inside), Some(true));
        let shim = "/usr/bin/containerd-shim-runc-v2 -address /run/sandman-abc/h/containerd.sock";
        assert_eq!(claim.judge(8, &argv(shim)), Some(false));
        let other = "/usr/bin/containerd-shim-runc-v2 -address /run/containerd/containerd.sock";
        assert_eq!(claim.judge(8, &argv(other)), None);
        let forwarder =
            "/x/sandman-devcluster forward 127.0.0.1:1=/run/netns/sandman-abc-control=x";
        assert_eq!(claim.judge(8, &argv(forwarder)), Some(false));
        // Somebody looking at our files is not ours.
        assert_eq!(
            claim.judge(8, &argv("less /run/sandman-abc/records/etcd.json")),
            None
        );
        assert_eq!(
            claim.judge(8, &argv("sandman-devcluster up --state-dir /home/me/.dev")),
            None
        );
    }
}
