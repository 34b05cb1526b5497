//! What one `up` chose and the next must know: how many hosts, which loopback ports, which
//! binaries. Everything else is derived.

use std::collections::BTreeMap;
use std::fs;
use std::net::{Ipv4Addr, TcpListener};
use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::ValueEnum;
use serde::{Deserialize, Serialize};

use crate::layout::Layout;

/// Choices of the last `up`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Settings {
    /// Hosts of the cluster.
    pub(crate) hosts: u8,
    /// Loopback ports.
    pub(crate) ports: Ports,
    /// Whether the virtual node takes WebSockets; else the API server speaks SPDY to it.
    pub(crate) websockets: bool,
    /// The containerd of the hosts.
    #[serde(default)]
    pub(crate) containerd: ContainerdVersion,
    /// Who keeps the layers of images.
    #[serde(default)]
    pub(crate) layers: Layers,
    /// What makes the sandboxes of pods that do not ask for a runtime.
    #[serde(default)]
    pub(crate) runtime: DefaultRuntime,
    /// What the components run.
    pub(crate) artifacts: Artifacts,
}

/// Which containerd the hosts have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
pub(crate) enum ContainerdVersion {
    /// The one that `hack/containerd` pins.
    #[default]
    #[value(name = "2.4")]
    Current,
    /// Debian's.
    #[value(name = "1.6")]
    Debian,
}

/// Who keeps the layers of images on the hosts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
pub(crate) enum Layers {
    /// The layer store, in the best way that works here.
    Store,
    /// The layer store over one FUSE file a layer.
    Fuse,
    /// The layer store, which converts layers whole before they are mounted.
    Convert,
    /// containerd's snapshotter.
    #[default]
    Containerd,
}

impl Layers {
    /// What runtime-shim's configuration says of it, in `[layers]`.
    pub(crate) fn keys(self) -> &'static str {
        match self {
            Self::Store => "mode = \"store\"",
            Self::Fuse => "mode = \"store\"\nmember = \"fuse\"",
            Self::Convert => "mode = \"store\"\nmember = \"convert\"",
            Self::Containerd => "mode = \"containerd\"",
        }
    }
}

/// Handler of pods without a RuntimeClass.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
pub(crate) enum DefaultRuntime {
    /// Our own shim.
    #[default]
    Sandman,
    /// containerd's.
    Runc,
}

impl DefaultRuntime {
    /// Its RuntimeClass handler.
    pub(crate) fn handler(self) -> &'static str {
        match self {
            Self::Sandman => "sandman",
            Self::Runc => "runc",
        }
    }
}

/// Ports on 127.0.0.1 of the machine's own namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Ports {
    /// The API server.
    pub(crate) apiserver: u16,
    /// The open registry.
    pub(crate) registry: u16,
    /// The registry with a password.
    pub(crate) private_registry: u16,
    /// The virtual node's kubelet API.
    pub(crate) kubelet_api: u16,
}

impl Ports {
    /// Takes ports that are free now. All are held until the last is found, so they differ.
    pub(crate) fn choose() -> anyhow::Result<Self> {
        let mut held = Vec::new();
        let mut next = || -> anyhow::Result<u16> {
            let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context("no free port")?;
            let port = listener.local_addr()?.port();
            held.push(listener);
            Ok(port)
        };
        Ok(Self {
            apiserver: next()?,
            registry: next()?,
            private_registry: next()?,
            kubelet_api: next()?,
        })
    }

    /// Whether all of them can be listened on.
    pub(crate) fn are_free(self) -> bool {
        [
            self.apiserver,
            self.registry,
            self.private_registry,
            self.kubelet_api,
        ]
        .into_iter()
        .all(|port| TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok())
    }
}

/// Programs and images that the components need.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Artifacts {
    /// The control plane and kubectl in one binary.
    pub(crate) kube_dev: PathBuf,
    /// Workspace binaries by name; without hosts there are none.
    pub(crate) binaries: BTreeMap<String, PathBuf>,
    /// Folder of the hosts' containerd, `ctr` and shim; Debian's if none.
    #[serde(default)]
    pub(crate) containerd_dir: Option<PathBuf>,
    /// The cluster's DNS; a cluster without hosts has none.
    #[serde(default)]
    pub(crate) coredns: Option<PathBuf>,
    /// EROFS image of the in-sandbox agent.
    pub(crate) daemon_image: Option<PathBuf>,
}

impl Artifacts {
    /// Where the containerd of hosts and its companions are.
    pub(crate) fn containerd_dir(&self) -> &Path {
        self.containerd_dir
            .as_deref()
            .unwrap_or(Path::new("/usr/bin"))
    }

    /// Path of a workspace binary.
    pub(crate) fn binary(&self, name: &str) -> anyhow::Result<&Path> {
        self.binaries
            .get(name)
            .map(PathBuf::as_path)
            .with_context(|| format!("{name} was not built; run `hack/dev up` without --no-build"))
    }
}

impl Settings {
    /// Choices of an earlier `up`, if there was one.
    pub(crate) fn load(layout: &Layout) -> anyhow::Result<Option<Self>> {
        let path = layout.settings_file();
        match fs::read(&path) {
            Ok(bytes) => serde_json::from_slice(&bytes)
                .with_context(|| format!("{} is damaged; run `hack/dev down`", path.display()))
                .map(Some),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error).with_context(|| format!("cannot read {}", path.display())),
        }
    }

    /// Choices of the running cluster.
    pub(crate) fn require(layout: &Layout) -> anyhow::Result<Self> {
        Self::load(layout)?.context("there is no cluster here; start one with `hack/dev up`")
    }

    /// Writes the choices in one step.
    pub(crate) fn save(&self, layout: &Layout) -> anyhow::Result<()> {
        let path = layout.settings_file();
        let temporary = path.with_extension("new");
        fs::write(&temporary, serde_json::to_vec_pretty(self)?)?;
        Ok(fs::rename(temporary, path)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chosen_ports_are_free_and_differ() {
        let ports = Ports::choose().unwrap();
        assert!(ports.are_free());
        let mut all = [
            ports.apiserver,
            ports.registry,
            ports.private_registry,
            ports.kubelet_api,
        ];
        all.sort_unstable();
        assert!(all.windows(2).all(|pair| pair[0] != pair[1]));
        let _held = TcpListener::bind((Ipv4Addr::LOCALHOST, ports.registry)).unwrap();
        assert!(!ports.are_free());
    }
}
