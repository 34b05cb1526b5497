//! Where a dev cluster keeps its things. Every name and path derives from the state directory, so
//! that clusters of two checkouts never meet.

use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use sha2::{Digest, Sha256};

use crate::net::Member;

/// Paths and names of one dev cluster.
#[derive(Clone, Debug)]
pub(crate) struct Layout {
    repo: PathBuf,
    state: PathBuf,
    run: PathBuf,
    id: String,
}

impl Layout {
    /// Creates the state directory if needed and derives everything else from its real path.
    pub(crate) fn open(repo: &Path, state_dir: &Path) -> anyhow::Result<Self> {
        std::fs::create_dir_all(state_dir)
            .with_context(|| format!("cannot create --state-dir {}", state_dir.display()))?;
        let state = state_dir.canonicalize()?;
        let repo = repo
            .canonicalize()
            .with_context(|| format!("--repo {} is not there", repo.display()))?;
        if state.parent().is_none() || state == repo {
            bail!(
                "--state-dir {} must be a folder of its own",
                state.display()
            );
        }
        Ok(Self::derive(repo, state))
    }

    fn derive(repo: PathBuf, state: PathBuf) -> Self {
        let digest = Sha256::digest(state.as_os_str().as_encoded_bytes());
        let id = hex::encode(&digest[..3]);
        let run = PathBuf::from(format!("/run/sandman-{id}"));
        Self {
            repo,
            state,
            run,
            id,
        }
    }

    /// The checkout that is built and whose manifests are applied.
    pub(crate) fn repo(&self) -> &Path {
        &self.repo
    }

    /// Six hex digits that tell this cluster's namespaces, cgroups and sockets from others'.
    pub(crate) fn id(&self) -> &str {
        &self.id
    }

    /// The state directory itself, as a real path.
    pub(crate) fn state_dir(&self) -> &Path {
        &self.state
    }

    /// A tmpfs for sockets, process records and what hosts must not keep on disk. Short, because
    /// socket addresses are.
    pub(crate) fn run_dir(&self) -> &Path {
        &self.run
    }

    /// Name of a member's network namespace, as `ip netns` shows it.
    pub(crate) fn netns_name(&self, member: Member) -> String {
        format!("{}{member}", self.netns_prefix())
    }

    /// What the names of all our network namespaces start with.
    pub(crate) fn netns_prefix(&self) -> String {
        format!("sandman-{}-", self.id)
    }

    /// Parent of every container's cgroup, relative to the root of each hierarchy.
    pub(crate) fn cgroup_parent(&self) -> String {
        format!("/sandman-{}", self.id)
    }

    /// Name of the comparison node's pod network; part of names of files that CNI plugins keep.
    pub(crate) fn cni_network(&self) -> String {
        format!("sandman-{}", self.id)
    }

    /// Copies of the workspace binaries that the components run.
    pub(crate) fn bin_dir(&self) -> PathBuf {
        self.state.join("bin")
    }

    /// Certificates and kubeconfigs of the control plane.
    pub(crate) fn pki_dir(&self) -> PathBuf {
        self.state.join("pki")
    }

    /// Fleet CA and the identities it issued.
    pub(crate) fn fleet_dir(&self) -> PathBuf {
        self.state.join("fleet")
    }

    /// Configuration files written for the components.
    pub(crate) fn config_dir(&self) -> PathBuf {
        self.state.join("config")
    }

    /// Data that a component keeps on disk: etcd's database, containerd's content, logs of pods.
    pub(crate) fn data_dir(&self, component: &str) -> PathBuf {
        self.state.join("data").join(component)
    }

    /// Survives `down`: the store of the registries.
    pub(crate) fn cache_dir(&self) -> PathBuf {
        self.state.join("cache")
    }

    /// Output of the components; survives `down`, so that a failed run can be read.
    pub(crate) fn log_dir(&self) -> PathBuf {
        self.state.join("logs")
    }

    /// What nodes asked of the API server.
    pub(crate) fn audit_log(&self) -> PathBuf {
        self.log_dir().join("audit.jsonl")
    }

    /// Output of one component.
    pub(crate) fn log_file(&self, component: &str) -> PathBuf {
        self.log_dir().join(format!("{component}.log"))
    }

    /// Who runs as which process. On the tmpfs, so that no record outlives a reboot.
    pub(crate) fn record_dir(&self) -> PathBuf {
        self.run.join("records")
    }

    /// Number of hosts, ports and binaries chosen by the last `up`.
    pub(crate) fn settings_file(&self) -> PathBuf {
        self.state.join("cluster.json")
    }

    /// Sockets and volatile state of one host.
    pub(crate) fn host_run_dir(&self, host: Member) -> PathBuf {
        self.run.join(host.to_string())
    }

    /// containerd's socket of one host.
    pub(crate) fn containerd_socket(&self, host: Member) -> PathBuf {
        self.host_run_dir(host).join("containerd.sock")
    }

    /// Where our containerd shim of one host keeps its state. Short, because of its sockets.
    pub(crate) fn shim_dir(&self, host: Member) -> PathBuf {
        self.host_run_dir(host).join("tasks")
    }

    /// Folders that `down` removes; the rest of the state directory is cache and logs.
    pub(crate) fn disposable(&self) -> Vec<PathBuf> {
        let mut paths: Vec<_> = ["bin", "pki", "fleet", "config", "data"]
            .iter()
            .map(|name| self.state.join(name))
            .collect();
        paths.push(self.settings_file());
        paths
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout(state: &str) -> Layout {
        Layout::derive("/repo".into(), state.into())
    }

    #[test]
    fn two_state_directories_share_no_name() {
        let (a, b) = (layout("/a/.dev"), layout("/b/.dev"));
        assert_ne!(a.run_dir(), b.run_dir());
        assert_ne!(a.cgroup_parent(), b.cgroup_parent());
        assert_ne!(a.netns_name(Member::Control), b.netns_name(Member::Control));
        assert_eq!(a.id(), layout("/a/.dev").id());
    }

    #[test]
    fn sockets_stay_short_however_long_the_state_directory_is() {
        let deep = layout(&format!("/{}", "x/".repeat(200)));
        assert!(deep.containerd_socket(Member::Host(31)).as_os_str().len() < 100);
    }

    #[test]
    fn down_keeps_cache_and_logs() {
        let layout = layout("/a/.dev");
        for path in layout.disposable() {
            assert!(!layout.cache_dir().starts_with(&path));
            assert!(!layout.log_dir().starts_with(&path));
        }
    }
}
