//! Brings the cluster up, or brings up what of it is missing. Every step first looks whether it is
//! done, so that `up` may be repeated after a crash of anything, `up` included.

use std::fs;
use std::time::Duration;

use anyhow::{Context, bail};
use k8s_openapi::api::core::v1::Node;
use kube::Api;
use nix::mount::{MsFlags, mount};
use nix::sys::statfs::{TMPFS_MAGIC, statfs};
use sandman_certs::DevPki;

use crate::artifacts;
use crate::components::{self, Component, NODE, Plan, ProbeContext};
use crate::kube_api;
use crate::layout::Layout;
use crate::net::{MAX_HOSTS, ensure_fabric};
use crate::pki;
use crate::progress::Progress;
use crate::settings::{ContainerdVersion, DefaultRuntime, Layers, Ports, Settings};
use crate::supervise::{Outcome, Supervisor};

/// A node registers, gets its certificate and connects to its hosts well within this.
const NODE_READY_WITHIN: Duration = Duration::from_secs(120);
/// The controller manager makes the first ServiceAccounts well within this.
const ACCOUNT_WITHIN: Duration = Duration::from_secs(60);
/// Manifests that are applied.
const MANIFESTS: [&str; 3] = [
    "manifests/base",
    "manifests/components/services",
    "hack/devcluster/manifests/dns",
];
/// Namespace of the ServiceAccounts that the manifests make.
const SYSTEM: &str = "sandman-system";

/// What `up` was asked for.
#[derive(Debug)]
pub(crate) struct Options {
    /// Number of hosts; as before, or 1, if not given.
    pub(crate) hosts: Option<u8>,
    /// Whether the virtual node takes WebSockets; as before, or true, if not given.
    pub(crate) websockets: Option<bool>,
    /// Which containerd the hosts have; as before, or the current one, if not given.
    pub(crate) containerd: Option<ContainerdVersion>,
    /// Who keeps the layers of images; as before, or containerd, if not given.
    pub(crate) layers: Option<Layers>,
    /// The runtime of pods that ask for none; as before, or sandman, if not given.
    pub(crate) runtime: Option<DefaultRuntime>,
    /// Whether to build what is out of date.
    pub(crate) build: bool,
    /// Cargo profile of the workspace binaries.
    pub(crate) profile: String,
}

/// Starts everything that does not run.
pub(crate) async fn up(layout: &Layout, options: Options) -> anyhow::Result<()> {
    let progress = Progress::start();
    let before = Settings::load(layout)?;
    let hosts = choose_hosts(options.hosts, before.as_ref())?;
    let supervisor = Supervisor::new(layout.clone());

    let containerd = options
        .containerd
        .or(before.as_ref().map(|settings| settings.containerd))
        .unwrap_or_default();
    let layers = options
        .layers
        .or(before.as_ref().map(|settings| settings.layers))
        .unwrap_or_default();
    let artifacts = if options.build {
        let containerd = (hosts > 0).then_some(containerd);
        artifacts::build(layout, &options.profile, containerd, progress)?
    } else {
        before
            .as_ref()
            .map(|settings| settings.artifacts.clone())
            .context("nothing was built yet; run `hack/dev up` without --no-build")?
    };
    let websockets = options
        .websockets
        .or(before.as_ref().map(|settings| settings.websockets))
        .unwrap_or(true);
    let runtime = options
        .runtime
        .or(before.as_ref().map(|settings| settings.runtime))
        .unwrap_or_default();
    let ports = choose_ports(before, &supervisor)?;
    let settings = Settings {
        hosts,
        ports,
        websockets,
        containerd,
        layers,
        runtime,
        artifacts,
    };
    settings.save(layout)?;

    let pki = pki::control_plane(layout)?;
    pki::fleet(layout, hosts)?;
    let kubeconfig = pki::write_admin_kubeconfig(layout, &pki, &settings)?;
    pki::write_node_kubeconfig(layout, &pki, &settings, NODE)?;
    mount_run_dir(layout)?;
    ensure_fabric(layout, hosts)?;

    let client = kube_api::client(&kubeconfig).await?;
    let up = Up {
        plan: Plan {
            layout,
            settings: &settings,
            pki: &pki,
        },
        supervisor,
        context: ProbeContext { client },
        progress,
    };
    let changed = up.start_all().await?;
    if changed == 0 {
        progress.say("everything runs");
    }
    progress.say(format_args!("ready; KUBECONFIG={}", kubeconfig.display()));
    Ok(())
}

fn choose_hosts(wanted: Option<u8>, before: Option<&Settings>) -> anyhow::Result<u8> {
    let had = before.map(|settings| settings.hosts);
    let hosts = wanted.or(had).unwrap_or(1);
    if hosts > MAX_HOSTS {
        bail!("--hosts {hosts}: at most {MAX_HOSTS} fit the address plan");
    }
    match had {
        Some(had) if hosts < had => {
            bail!(
                "--hosts {hosts}: the cluster has {had}; run `hack/dev down` to make a smaller one"
            )
        }
        _ => Ok(hosts),
    }
}

/// Keeps the ports of the cluster that runs; others may have taken those of one that does not.
fn choose_ports(before: Option<Settings>, supervisor: &Supervisor) -> anyhow::Result<Ports> {
    let forwarder_runs = supervisor.running(components::FORWARDER).is_some();
    match before {
        Some(before) if forwarder_runs || before.ports.are_free() => Ok(before.ports),
        _ => Ports::choose(),
    }
}

/// Sockets, and what a host must not write to disk, live on a tmpfs of the cluster's own.
fn mount_run_dir(layout: &Layout) -> anyhow::Result<()> {
    let dir = layout.run_dir();
    fs::create_dir_all(dir)?;
    if statfs(dir)?.filesystem_type() == TMPFS_MAGIC && is_mount_point(dir)? {
        return Ok(());
    }
    let flags = MsFlags::MS_NODEV | MsFlags::MS_NOSUID;
    mount(
        Some("sandman-dev"),
        dir,
        Some("tmpfs"),
        flags,
        Some("mode=0711"),
    )
    .with_context(|| format!("cannot mount a tmpfs on {}", dir.display()))
}

fn is_mount_point(dir: &std::path::Path) -> anyhow::Result<bool> {
    use std::os::unix::fs::MetadataExt;

    let parent = dir.parent().context("the run directory has no parent")?;
    Ok(fs::metadata(dir)?.dev() != fs::metadata(parent)?.dev())
}

/// The running part of `up`.
struct Up<'a> {
    plan: Plan<'a>,
    supervisor: Supervisor,
    context: ProbeContext,
    progress: Progress,
}

impl Up<'_> {
    /// Gives the number of components that had to be started.
    async fn start_all(&self) -> anyhow::Result<usize> {
        let components = self.plan.components()?;
        let (before_api, after_api): (Vec<_>, Vec<_>) = components
            .into_iter()
            .partition(Component::needs_no_api_objects);
        let mut changed = self.start(&before_api).await?;

        let client = &self.context.client;
        let mut applied = 0;
        for manifests in MANIFESTS {
            let manifests = self.plan.layout.repo().join(manifests);
            applied += kube_api::apply_manifests(client, &manifests).await?;
        }
        if changed > 0 {
            self.progress
                .say(format_args!("applied {applied} objects of manifests/"));
        }
        kube_api::wait_default_account(client, ACCOUNT_WITHIN)
            .await
            .map_err(|error| {
                self.supervisor
                    .failed(components::CONTROLLER_MANAGER, &error.to_string())
            })?;
        if self.plan.settings.hosts == 0 {
            return Ok(changed);
        }
        self.issue_tokens().await?;
        changed += self.start(&after_api).await?;
        self.wait_node().await?;
        self.check_pressures().await?;
        // Last: a cluster whose node does not come up says so before minutes of packing.
        artifacts::images::ensure(self.plan.layout, self.plan.settings, self.progress)?;
        Ok(changed)
    }

    async fn start(&self, components: &[Component]) -> anyhow::Result<usize> {
        let mut changed = 0;
        for component in components {
            let outcome = self.supervisor.ensure(component, &self.context).await?;
            let what = match outcome {
                Outcome::Unchanged => continue,
                Outcome::Started => "started",
                Outcome::Replaced => "restarted, for it has changed",
            };
            changed += 1;
            self.progress
                .say(format_args!("{}: {what}", component.name));
        }
        Ok(changed)
    }

    /// The approver and the virtual node's election work with the rights of their ServiceAccounts
    /// and no others. A token in use is kept: a new one would restart its user.
    async fn issue_tokens(&self) -> anyhow::Result<()> {
        let users = [
            (
                components::APPROVER,
                "sandman-csr-approver",
                self.plan.approver_kubeconfig(),
            ),
            (
                components::VNODE,
                "sandman-vnode",
                self.plan.election_kubeconfig(),
            ),
            (components::DNS, "coredns", self.plan.dns_kubeconfig()),
        ];
        for (component, account, path) in users {
            if path.exists() && self.supervisor.running(component).is_some() {
                continue;
            }
            let client = &self.context.client;
            let token = kube_api::service_account_token(client, SYSTEM, account).await?;
            let kubeconfig = self.plan.token_kubeconfig(account, &token);
            crate::supervise::write_private(&path, &kubeconfig)?;
        }
        Ok(())
    }

    /// Ready, or the log of whoever died on the way.
    async fn wait_node(&self) -> anyhow::Result<()> {
        let nodes: Api<Node> = Api::all(self.context.client.clone());
        if nodes
            .get_opt(NODE)
            .await?
            .is_some_and(|node| kube_api::is_ready(&node))
        {
            return Ok(());
        }
        self.progress.say(format_args!("waiting for node {NODE}"));
        let ready = kube_api::wait_node_ready(&self.context.client, NODE, NODE_READY_WITHIN);
        tokio::select! {
            done = ready => done.map_err(|error| self.supervisor.failed(components::VNODE, &error.to_string())),
            name = self.first_death() => Err(self.supervisor.failed(&name, "ended")),
        }
    }

    /// A node under pressure takes no pods: better said now than found out pod by pod.
    async fn check_pressures(&self) -> anyhow::Result<()> {
        let nodes: Api<Node> = Api::all(self.context.client.clone());
        let pressures = kube_api::pressures(&nodes.get(NODE).await?);
        if !pressures.is_empty() {
            bail!(
                "node {NODE} takes no pods: {}; free some, `hack/dev logs runtime-shim-0` says \
                 what there is too little of",
                pressures.join(", ")
            );
        }
        Ok(())
    }

    async fn first_death(&self) -> String {
        let watched = self.supervisor.records();
        loop {
            for record in &watched {
                if !record.identity.is_alive() && self.plan.is_part(&record.name) {
                    return record.name.clone();
                }
            }
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    }
}

/// Starts what a name stands for; also what `up` does not start.
pub(crate) async fn start(layout: &Layout, name: &str) -> anyhow::Result<()> {
    let (settings, pki) = load(layout)?;
    let plan = Plan {
        layout,
        settings: &settings,
        pki: &pki,
    };
    let components = plan.named(name)?;
    let client = kube_api::client(&pki::admin_kubeconfig_path(layout)).await?;
    let supervisor = Supervisor::new(layout.clone());
    let context = ProbeContext { client };
    for component in &components {
        supervisor.ensure(component, &context).await?;
    }
    Ok(())
}

/// Stops what a name stands for and leaves it stopped.
pub(crate) async fn stop(layout: &Layout, name: &str) -> anyhow::Result<()> {
    let (settings, pki) = load(layout)?;
    let plan = Plan {
        layout,
        settings: &settings,
        pki: &pki,
    };
    let supervisor = Supervisor::new(layout.clone());
    for component in plan.named(name)?.iter().rev() {
        supervisor
            .stop(&component.name, component.stop_grace)
            .await?;
    }
    Ok(())
}

fn load(layout: &Layout) -> anyhow::Result<(Settings, DevPki)> {
    Ok((Settings::require(layout)?, pki::control_plane(layout)?))
}
