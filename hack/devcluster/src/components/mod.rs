//! What runs in the dev cluster, as data: each component's command, configuration, place and sign
//! of readiness. Nothing here starts anything.

mod control_plane;
mod dns;
mod host;
mod kubelet;
mod probe;
mod registry;
mod vnode;

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context;
use sandman_certs::DevPki;
use sha2::{Digest, Sha256};

pub(crate) use self::{
    control_plane::{APISERVER_PORT, CONTROLLER_MANAGER},
    dns::DNS,
    host::HOST_API_PORT,
    kubelet::PEER,
    probe::{Probe, ProbeContext},
    registry::{PASSWORD, PRIVATE_PORT, REGISTRY_PORT, USER},
    vnode::{APPROVER, FLEET, KUBELET_API_PORT, NODE, NODES, VNODE},
};
use crate::layout::Layout;
use crate::net::{Member, NetNs, endpoint, forward::Forward};
use crate::settings::{Layers, Settings};

/// One process of the dev cluster.
#[derive(Clone, Debug)]
pub(crate) struct Component {
    /// Its name on the command line, in `status` and of its log.
    pub(crate) name: String,
    /// The namespace it runs in; the machine's own if none.
    pub(crate) member: Option<Member>,
    /// Its command.
    pub(crate) argv: Vec<String>,
    /// Variables besides the few that all get.
    pub(crate) env: Vec<(String, String)>,
    /// Configuration, written before it starts.
    pub(crate) files: Vec<(PathBuf, String)>,
    /// Folders made before it starts.
    pub(crate) dirs: Vec<PathBuf>,
    /// Files that it reads and that others write; a change means a restart.
    pub(crate) inputs: Vec<PathBuf>,
    /// When others may rely on it.
    pub(crate) ready: Probe,
    /// How long that may take.
    pub(crate) ready_within: Duration,
    /// How long it may take to end by itself.
    pub(crate) stop_grace: Duration,
}

impl Component {
    fn new(name: impl Into<String>, member: Option<Member>, argv: Vec<String>) -> Self {
        Self {
            name: name.into(),
            member,
            argv,
            env: Vec::new(),
            files: Vec::new(),
            dirs: Vec::new(),
            inputs: Vec::new(),
            ready: Probe::Alive,
            ready_within: Duration::from_secs(60),
            stop_grace: Duration::from_secs(10),
        }
    }

    /// Whether it can start before the manifests are applied.
    pub(crate) fn needs_no_api_objects(&self) -> bool {
        !matches!(self.member, Some(Member::Vnode))
            && ![APPROVER, DNS].contains(&self.name.as_str())
    }

    /// Hash of everything that decides how it runs: a difference means that what runs now is not
    /// what was asked for. Binaries and inputs count by size and time of change, and the namespace
    /// by its number, for a new one of the same name is another.
    pub(crate) fn fingerprint(&self, layout: &Layout) -> String {
        let mut hash = Sha256::new();
        let mut add = |bytes: &[u8]| {
            hash.update((bytes.len() as u64).to_le_bytes());
            hash.update(bytes);
        };
        for argument in &self.argv {
            add(argument.as_bytes());
        }
        for (name, value) in &self.env {
            add(name.as_bytes());
            add(value.as_bytes());
        }
        for (path, content) in &self.files {
            add(path.as_os_str().as_encoded_bytes());
            add(content.as_bytes());
        }
        for path in self
            .argv
            .first()
            .map(Path::new)
            .into_iter()
            .chain(self.inputs.iter().map(PathBuf::as_path))
        {
            if let Ok(meta) = fs::metadata(path) {
                for number in [
                    meta.len(),
                    meta.mtime().unsigned_abs(),
                    meta.mtime_nsec().unsigned_abs(),
                ] {
                    add(&number.to_le_bytes());
                }
            }
        }
        if let Some(member) = self.member {
            let inode = NetNs::named(&layout.netns_name(member)).inode();
            add(&inode.unwrap_or_default().to_le_bytes());
        }
        hex::encode(hash.finalize())
    }
}

/// What the components are described from.
pub(crate) struct Plan<'a> {
    /// Names and paths.
    pub(crate) layout: &'a Layout,
    /// Number of hosts, ports, binaries.
    pub(crate) settings: &'a Settings,
    /// Certificates of the control plane.
    pub(crate) pki: &'a DevPki,
}

impl Plan<'_> {
    /// All components that `up` starts, but for those that need the API server to describe.
    /// The order is that of starting.
    pub(crate) fn components(&self) -> anyhow::Result<Vec<Component>> {
        let mut all = vec![self.forwarder()?, self.etcd(), self.apiserver()];
        all.extend([self.controller_manager(), self.scheduler()]);
        all.extend(self.registries());
        for host in Member::hosts(self.settings.hosts) {
            all.push(self.containerd(host));
            if self.settings.layers != Layers::Containerd {
                all.push(self.layer_keeper(host)?);
            }
            all.push(self.runtime_shim(host)?);
        }
        if self.settings.hosts > 0 {
            all.push(self.approver()?);
            all.push(self.dns());
            all.push(self.vnode()?);
        }
        Ok(all)
    }

    /// Loopback ports of the machine for what lives in namespaces.
    fn forwarder(&self) -> anyhow::Result<Component> {
        let ports = self.settings.ports;
        let forwards = [
            (ports.apiserver, Member::Control, APISERVER_PORT),
            (ports.registry, Member::Registry, REGISTRY_PORT),
            (ports.private_registry, Member::Registry, PRIVATE_PORT),
            (ports.kubelet_api, Member::Vnode, KUBELET_API_PORT),
        ];
        let mut argv = vec![
            std::env::current_exe()?.display().to_string(),
            "forward".to_owned(),
        ];
        for (port, member, to) in forwards {
            let namespace = NetNs::named(&self.layout.netns_name(member));
            let forward = Forward {
                listen: ([127, 0, 0, 1], port).into(),
                namespace: namespace.path().to_owned(),
                to: endpoint(member, to).into(),
            };
            argv.push(forward.to_string());
        }
        let mut component = Component::new(FORWARDER, None, argv);
        // Part of the description, as the namespaces of other components are.
        component.inputs = forwards
            .iter()
            .map(|&(_, member, _)| {
                NetNs::named(&self.layout.netns_name(member))
                    .path()
                    .to_owned()
            })
            .collect();
        component.ready = Probe::Tcp(([127, 0, 0, 1], ports.apiserver).into());
        Ok(component)
    }

    /// What a name on the command line stands for, in the order of starting: one component, or the
    /// two of the comparison node.
    pub(crate) fn named(&self, name: &str) -> anyhow::Result<Vec<Component>> {
        if name == PEER {
            return Ok(self.kubelet_peer().into());
        }
        Ok(vec![self.component(name)?])
    }

    /// A component by name; also those that only run when started by name.
    pub(crate) fn component(&self, name: &str) -> anyhow::Result<Component> {
        let mut all = self.components()?;
        all.extend(self.kubelet_peer());
        if self.settings.hosts > 0 {
            all.push(self.null_vnode()?);
            all.push(self.standby()?);
        }
        let names: Vec<_> = all.iter().map(|component| component.name.clone()).collect();
        all.into_iter()
            .find(|component| component.name == name)
            .with_context(|| format!("no component {name:?}; there are {}", names.join(", ")))
    }

    /// Whether `up` starts a component of this name.
    pub(crate) fn is_part(&self, name: &str) -> bool {
        self.components()
            .is_ok_and(|all| all.iter().any(|component| component.name == name))
    }

    fn kube(&self, subcommand: &str) -> Vec<String> {
        vec![
            self.settings.artifacts.kube_dev.display().to_string(),
            subcommand.to_owned(),
        ]
    }

    fn config(&self, name: &str) -> PathBuf {
        self.layout.config_dir().join(name)
    }
}

/// Name of the component that serves loopback ports.
pub(crate) const FORWARDER: &str = "forwarder";

/// A value in TOML.
fn toml_string(value: impl std::fmt::Display) -> String {
    toml::Value::String(value.to_string()).to_string()
}

/// A path in TOML.
fn toml_path(path: &Path) -> String {
    toml_string(path.display())
}

fn flag(name: &str, value: impl std::fmt::Display) -> String {
    format!("--{name}={value}")
}

fn path_flag(name: &str, path: &Path) -> String {
    flag(name, path.display())
}

#[cfg(test)]
mod tests;
