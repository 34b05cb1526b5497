//! The work of a sandbox that takes time: each job runs beside its worker and hands back what
//! came of it. Jobs touch the host, never the worker's state.

mod collect;
mod destroy;
mod devices;
mod health;
mod pid_namespace;
mod propagation;
mod resize;
mod setup;
mod start;

use std::collections::HashMap;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use jiff::Timestamp;
use sandman_protocol::access::HostAccess;
use sandman_protocol::v1;
use tokio::sync::Notify;

pub use self::collect::{Last, collect};
pub use self::destroy::{destroy, release, tear_down};
pub use self::health::{HookKind, Probing, run_hook, run_probe};
pub use self::resize::{Resized, resize};
pub use self::setup::{apply_volumes, ensure_image, set_up_network};
pub use self::start::{StartRequest, Started, start};
use super::board::Board;
use super::facts::{Termination, VolumePaths};
use super::identity::{Identity, Kind};
use super::live::Waiting;
use super::oom::SharedKills;
use super::queue::{CreationQueue, Permit};
use super::store::Store;
use super::view::Streams;
use crate::handler::Verdict;
use crate::images::{Image, ImageError, Images};
use crate::logs::LogStore;
use crate::metrics::{Metrics, Phase};
use crate::network::{Network, PodNetwork};
use crate::rootfs::RootFs;
use crate::runtime::{Runtime, Stdio};
use crate::spec::HostLimits;
use crate::spec::resources::PodLimits;
use crate::stats::Stats;
use crate::users::Users;
use crate::volumes::Volumes;

/// Name of the volume that a sandbox's containers share as `/dev/shm`. No volume of a pod can
/// have it: theirs are DNS labels.
pub const SHM_VOLUME: &str = "sandman.shm";

/// Everything that sandboxes are made of.
pub struct Host {
    /// Containers and their processes.
    pub runtime: Arc<dyn Runtime>,
    /// Root file systems.
    pub rootfs: Arc<dyn RootFs>,
    /// Images.
    pub images: Images,
    /// Namespaces and addresses.
    pub network: Network,
    /// Volumes and managed files.
    pub volumes: Volumes,
    /// Container logs.
    pub logs: LogStore,
    /// cgroups and usage.
    pub stats: Stats,
    /// Kills for want of memory among containers without a limit.
    pub shared_kills: SharedKills,
    /// Durable records.
    pub store: Store,
    /// Reports and events.
    pub board: Arc<Board>,
    /// Pace of creation.
    pub queue: CreationQueue,
    /// Counters.
    pub metrics: Metrics,
    /// What is true of every container.
    pub limits: HostLimits,
    /// containerd runtime by RuntimeClass handler; "" is the default.
    pub runtime_types: HashMap<String, String>,
    /// The agent's binary.
    pub agent: PathBuf,
    /// Folder of FIFOs.
    pub fifo_dir: PathBuf,
    /// Folder of the host's own seccomp profiles.
    pub seccomp_dir: Option<PathBuf>,
    /// Address of this host.
    pub host_ip: IpAddr,
    /// TCP ports at which this service itself listens.
    pub own_ports: Vec<u16>,
    /// What pods may reach of this host.
    pub access: HostAccess,
    /// Ids for pods with users of their own; or why there can be none.
    pub users: Result<Users, String>,
    /// Told when a sandbox gives back what it had.
    pub room: Notify,
}

/// What came of a job.
pub enum Outcome {
    /// Namespaces and address.
    Network(Result<(PodNetwork, Option<PodLimits>), Waiting>),
    /// Volumes and managed files.
    Volumes(Result<VolumePaths, Waiting>),
    /// A container's image.
    Image {
        /// The container.
        container: String,
        /// The image as the pod named it then.
        reference: String,
        /// What came of it.
        result: Box<Result<Image, ImageError>>,
    },
    /// A container's start.
    Start(String, Box<Started>),
    /// One run of a probe.
    Probed(Probing, Verdict),
    /// Other sizes for what runs.
    Resized(Resized),
    /// A hook of an attempt; whether it succeeded.
    Hooked {
        /// The container.
        container: String,
        /// The attempt.
        attempt: u32,
        /// Which hook.
        kind: HookKind,
        /// Whether it succeeded.
        done: bool,
    },
    /// A container's last words.
    Collected(String, Termination),
    /// The removal of all but the logs.
    Released(Result<(), Waiting>),
    /// The removal of everything.
    TornDown(Result<(), Waiting>),
}

impl Host {
    /// FIFOs of a container.
    #[must_use]
    pub fn container_stdio(&self, container_id: &str, streams: Streams) -> Stdio {
        let dir = self.fifo_dir.join(container_id);
        Stdio {
            stdin: streams.stdin.then(|| dir.join("stdin")),
            stdout: Some(dir.join("stdout")),
            stderr: (!streams.tty).then(|| dir.join("stderr")),
            terminal: streams.tty,
        }
    }

    /// Waits for a turn to make something, and says how long that took.
    async fn turn(&self, namespace: &str) -> Permit {
        let asked = Instant::now();
        let permit = self.queue.acquire(namespace).await;
        self.metrics.phase(Phase::Queue, asked.elapsed());
        permit
    }

    /// Queues an event of a sandbox.
    pub fn event(&self, spec: &v1::SandboxSpec, about: About<'_>, reason: &str, message: &str) {
        let (container, kind) = about.container.unwrap_or(("", Kind::Regular));
        self.board.event(v1::SandboxEvent {
            uid: spec.uid.clone(),
            namespace: spec.namespace.clone(),
            name: spec.name.clone(),
            warning: about.warning,
            reason: reason.to_owned(),
            message: message.to_owned(),
            container: container.to_owned(),
            init_container: kind == Kind::Init,
            ephemeral_container: kind == Kind::Ephemeral,
            at: Some(super::report::wire_time(Timestamp::now())),
        });
    }
}

/// What an event is about.
#[derive(Clone, Copy, Debug)]
pub struct About<'a> {
    warning: bool,
    container: Option<(&'a str, Kind)>,
}

impl<'a> About<'a> {
    /// Trouble of a whole sandbox.
    #[must_use]
    pub fn sandbox_trouble() -> Self {
        Self {
            warning: true,
            container: None,
        }
    }

    /// A whole sandbox's normal life.
    #[must_use]
    pub fn sandbox() -> Self {
        Self {
            warning: false,
            container: None,
        }
    }

    /// A container's normal life.
    #[must_use]
    pub fn container(name: &'a str, kind: Kind) -> Self {
        Self {
            warning: false,
            container: Some((name, kind)),
        }
    }

    /// A container's trouble.
    #[must_use]
    pub fn trouble(name: &'a str, kind: Kind) -> Self {
        Self {
            warning: true,
            container: Some((name, kind)),
        }
    }
}

/// The log of an attempt.
#[must_use]
pub fn log_id(identity: &Identity) -> crate::logs::LogId {
    crate::logs::LogId {
        uid: identity.uid.clone(),
        container: identity.container.clone(),
        attempt: identity.attempt,
    }
}

/// Removes a folder of FIFOs. What is not there needs no removal; what cannot be removed costs
/// an inode.
fn remove_fifos(dir: &Path) {
    if let Err(error) = std::fs::remove_dir_all(dir)
        && error.kind() != std::io::ErrorKind::NotFound
    {
        tracing::warn!(dir = %dir.display(), %error, "cannot remove FIFOs");
    }
}
