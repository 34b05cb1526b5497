//! The running dev cluster, as its environment describes it.

use std::path::PathBuf;
use std::process::Stdio;

use anyhow::{Context as _, Result, bail};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};

/// Paths and names of the dev cluster under test.
#[derive(Clone, Debug)]
pub struct Cluster {
    /// Kubeconfig of the cluster's administrator.
    pub kubeconfig: PathBuf,
    /// The control plane's binary, which holds kubectl of the same version.
    pub kube_dev: PathBuf,
    /// The dev cluster program, to stop and start components.
    pub dev: PathBuf,
    /// State folder given to it.
    pub state_dir: PathBuf,
    /// Prefix of the test images as the hosts pull them.
    pub images: String,
    /// Name of the virtual node.
    pub node: String,
    /// Number of its hosts.
    pub hosts: u32,
}

/// A part of the dev cluster that a test may disturb.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Component {
    /// The virtual node.
    Vnode,
    /// A second replica of it; only there once started.
    StandbyVnode,
    /// The host service of one host.
    RuntimeShim(u32),
    /// containerd of one host.
    Containerd(u32),
    /// Keeper of one host's layers; only with the layer store.
    LayerKeeper(u32),
    /// The image registry.
    Registry,
}

impl Component {
    /// The name that `hack/dev status` shows.
    #[must_use]
    pub fn name(self) -> String {
        match self {
            Self::Vnode => "vnode".to_owned(),
            Self::StandbyVnode => "vnode-standby".to_owned(),
            Self::RuntimeShim(host) => format!("runtime-shim-{host}"),
            Self::Containerd(host) => format!("containerd-{host}"),
            Self::LayerKeeper(host) => format!("keeper-{host}"),
            Self::Registry => "registry".to_owned(),
        }
    }
}

/// A variable of `hack/dev env`.
///
/// # Errors
/// Names it and says where it comes from.
pub fn variable(name: &str) -> Result<String> {
    std::env::var(name).with_context(|| {
        format!(
            "{name} is not set: run the tests by hack/test, or first `eval \"$(hack/dev env)\"`"
        )
    })
}

impl Cluster {
    /// Reads the environment.
    ///
    /// # Errors
    /// Names the variable that is missing.
    pub fn from_env() -> Result<Self> {
        // A second call in this process reports the first: nothing to do.
        let _ = rustls::crypto::ring::default_provider().install_default();
        Ok(Self {
            kubeconfig: variable("KUBECONFIG")?.into(),
            kube_dev: variable("SANDMAN_KUBE_DEV")?.into(),
            dev: variable("SANDMAN_DEV")?.into(),
            state_dir: variable("SANDMAN_STATE_DIR")?.into(),
            images: format!("{}/sandman", variable("SANDMAN_REGISTRY")?),
            node: variable("SANDMAN_NODE")?,
            hosts: variable("SANDMAN_HOSTS")?.parse()?,
        })
    }

    /// A client with the administrator's rights.
    ///
    /// # Errors
    /// When the kubeconfig cannot be used.
    pub async fn client(&self) -> Result<Client> {
        self.client_from(&self.kubeconfig).await
    }

    /// A client with the rights of another kubeconfig of the cluster's PKI.
    ///
    /// # Errors
    /// When the kubeconfig cannot be used.
    pub async fn client_from(&self, kubeconfig: &std::path::Path) -> Result<Client> {
        let kubeconfig = Kubeconfig::read_from(kubeconfig)?;
        let config =
            Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await?;
        Ok(Client::try_from(config)?)
    }

    /// Runs a subcommand of the dev cluster program.
    ///
    /// # Errors
    /// With what it printed, when it fails.
    pub async fn dev(&self, arguments: &[&str]) -> Result<String> {
        let output = tokio::process::Command::new(&self.dev)
            .args(arguments)
            .arg("--state-dir")
            .arg(&self.state_dir)
            .stdin(Stdio::null())
            .output()
            .await
            .with_context(|| format!("run {}", self.dev.display()))?;
        if !output.status.success() {
            bail!(
                "{} {}: {}\n{}{}",
                self.dev.display(),
                arguments.join(" "),
                output.status,
                String::from_utf8_lossy(&output.stdout),
                String::from_utf8_lossy(&output.stderr),
            );
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// Kills a component with SIGKILL; it stays down until [`Self::start`].
    ///
    /// # Errors
    /// As [`Self::dev`].
    pub async fn kill(&self, component: Component) -> Result<()> {
        self.dev(&["kill", &component.name()]).await.map(drop)
    }

    /// Sends a component another signal, such as `STOP` or `CONT`.
    ///
    /// # Errors
    /// As [`Self::dev`].
    pub async fn signal(&self, component: Component, signal: &str) -> Result<()> {
        let arguments = ["kill", "--signal", signal, &component.name()];
        self.dev(&arguments).await.map(drop)
    }

    /// Starts a component that was killed; returns when its process runs.
    ///
    /// # Errors
    /// As [`Self::dev`].
    pub async fn start(&self, component: Component) -> Result<()> {
        self.dev(&["start", &component.name()]).await.map(drop)
    }

    /// The last part of a component's log, for failure messages.
    pub async fn log_tail(&self, component: &str) -> String {
        match self.dev(&["logs", component]).await {
            Ok(log) => {
                let lines: Vec<&str> = log.lines().collect();
                lines[lines.len().saturating_sub(40)..].join("\n")
            }
            Err(error) => format!("(no log: {error})"),
        }
    }
}
