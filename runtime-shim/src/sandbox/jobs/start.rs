//! One attempt of a container: root file system, OCI spec, record, task, start.

use std::path::{Path, PathBuf};
use std::time::Instant;

use jiff::Timestamp;
use nix::sys::stat::Mode;
use nix::unistd::mkfifo;
use oci_spec::runtime::{LinuxNamespaceType, LinuxSeccomp, Spec};
use sandman_protocol::v1;

use super::devices::host_devices;
use super::pid_namespace::PidNamespace;
use super::propagation::check as check_propagation;
use super::setup::host_name;
use super::{About, Host, SHM_VOLUME, destroy, log_id};
use crate::images::Image;
use crate::logs::ContainerLog;
use crate::metrics::Phase;
use crate::network::PodNetwork;
use crate::rootfs::Root;
use crate::runtime::{NewContainer, RuntimeError, Stdio};
use crate::sandbox::facts::{START_ERROR_EXIT_CODE, Termination, User, VolumePaths};
use crate::sandbox::identity::Identity;
use crate::sandbox::live::Waiting;
use crate::sandbox::resize::Size;
use crate::spec::{self, Bind, HostValues, Prepared, SpecError};
use crate::users::OwnUsers;
use crate::volumes::{EtcPaths, VolumeError};

/// Largest seccomp profile of the host's own.
const MAX_PROFILE: u64 = 1024 * 1024;

/// All that an attempt is made from.
#[derive(Clone)]
pub struct StartRequest {
    /// The sandbox.
    pub spec: v1::SandboxSpec,
    /// The container.
    pub container: v1::Container,
    /// The attempt.
    pub identity: Identity,
    /// Its image.
    pub image: Image,
    /// The sandbox's namespaces.
    pub network: PodNetwork,
    /// The sandbox's files.
    pub paths: VolumePaths,
    /// The attempt before, to be removed first.
    pub previous: Option<String>,
    /// The container whose process namespace it joins, if it names one: its attempt.
    pub target: Option<Result<String, String>>,
}

/// What came of an attempt.
pub enum Started {
    /// The process runs.
    Running {
        /// The attempt.
        identity: Identity,
        /// Since when.
        since: Timestamp,
        /// The copying of its output.
        log: Option<ContainerLog>,
        /// Whom it runs as.
        user: Option<User>,
        /// What it has.
        size: Size,
    },
    /// The attempt was made but its process did not start: counts as a run that failed.
    Failed {
        /// The attempt.
        identity: Identity,
        /// Its end.
        end: Termination,
    },
    /// No attempt was made; the same one is tried again.
    Retry(Waiting),
}

/// Why no attempt could be made.
#[derive(Debug, thiserror::Error)]
enum Trouble {
    #[error(transparent)]
    Spec(#[from] SpecError),
    #[error(transparent)]
    Volume(#[from] VolumeError),
    #[error(transparent)]
    Runtime(#[from] RuntimeError),
    #[error("{what}: {source}")]
    Io {
        what: &'static str,
        source: std::io::Error,
    },
}

impl Trouble {
    /// The kubelet's waiting reason.
    fn reason(&self) -> &'static str {
        match self {
            Self::Spec(_) | Self::Volume(_) => "CreateContainerConfigError",
            Self::Runtime(_) | Self::Io { .. } => "CreateContainerError",
        }
    }
}

/// Makes and starts an attempt.
pub async fn start(host: &Host, request: &StartRequest) -> Started {
    let id = request.identity.container_id();
    // Before the turn: a process that takes its time to die holds up nobody else's creation.
    if let Err(error) = make_room(host, request, &id).await {
        return refused(host, request, &id, &error.into()).await;
    }
    let permit = host.turn(&request.spec.namespace).await;
    match create(host, request, &id).await {
        Ok(made) => run(host, request, &id, made).await,
        Err(trouble) => {
            drop(permit);
            refused(host, request, &id, &trouble).await
        }
    }
}

/// Removes the attempt before this one, and what is left of this one if an earlier process of
/// ours did not live to finish it.
async fn make_room(host: &Host, request: &StartRequest, id: &str) -> Result<(), RuntimeError> {
    if let Some(previous) = &request.previous {
        destroy(host, previous).await?;
    }
    destroy(host, id).await
}

/// Takes back an attempt that could not be made.
async fn refused(host: &Host, request: &StartRequest, id: &str, trouble: &Trouble) -> Started {
    let message = trouble.to_string();
    if matches!(trouble, Trouble::Runtime(_)) {
        host.metrics.runtime_error();
    }
    host.event(
        &request.spec,
        request.trouble(),
        "Failed",
        &format!("Error: {message}"),
    );
    // What cannot be removed now is removed by the next try, which starts the same way.
    let _ = destroy(host, id).await;
    Started::Retry(Waiting {
        reason: trouble.reason().to_owned(),
        message,
    })
}

/// What an attempt has before its task.
struct Made {
    /// Held until the task is there.
    processes: Option<PidNamespace>,
    root: Root,
    log: Option<ContainerLog>,
    user: Option<User>,
}

/// Everything up to the record of the container.
async fn create(host: &Host, request: &StartRequest, id: &str) -> Result<Made, Trouble> {
    let begin = Instant::now();
    let root = host.rootfs.prepare(id, &request.image).await?;
    let accounts = host.rootfs.accounts(&request.image, &root).await?;
    let root = match &request.network.users {
        None => root,
        Some(users) => map_root(host, request, root, users.clone()).await?,
    };
    host.metrics.phase(Phase::Mount, begin.elapsed());

    let processes = match &request.target {
        None => None,
        Some(Ok(target)) => Some(PidNamespace::of(host, target).await?),
        Some(Err(why)) => return Err(SpecError::Config(why.clone()).into()),
    };
    let spec = oci_spec(host, request, id, &accounts, processes.as_ref()).await?;
    let user = spec.process().as_ref().map(|process| {
        let user = process.user();
        User {
            uid: user.uid(),
            gid: user.gid(),
            groups: user.additional_gids().clone().unwrap_or_default(),
        }
    });
    let runtime = host
        .runtime_types
        .get(&request.spec.runtime_handler)
        .ok_or_else(|| {
            RuntimeError::Failed(format!(
                "no runtime for handler {:?}",
                request.spec.runtime_handler
            ))
        })?;
    let container = NewContainer {
        id: id.to_owned(),
        labels: request.identity.labels(),
        runtime: runtime.clone(),
        image: request.image.name.clone(),
        snapshot: root.snapshot.clone(),
        spec,
    };
    host.runtime.create(&container).await?;

    let stdio = host.container_stdio(id, (&request.container).into());
    make_fifos(&host.fifo_dir.join(id), &stdio).map_err(|source| Trouble::Io {
        what: "making the container's FIFOs",
        source,
    })?;
    let log = stdio
        .stdout
        .as_deref()
        .map(|stdout| {
            host.logs
                .start(&log_id(&request.identity), stdout, stdio.stderr.as_deref())
        })
        .transpose()
        .map_err(|source| Trouble::Io {
            what: "opening the container's log",
            source,
        })?;
    host.event(
        &request.spec,
        request.about(),
        "Created",
        "Container created",
    );
    Ok(Made {
        processes,
        root,
        log,
        user,
    })
}

/// Task and start. From here on a failure counts as a run.
async fn run(host: &Host, request: &StartRequest, id: &str, made: Made) -> Started {
    let Made {
        processes,
        root,
        log,
        user,
    } = made;
    let begin = Instant::now();
    let stdio = host.container_stdio(id, (&request.container).into());
    let mut result = host.runtime.create_task(id, root.mounts, &stdio).await;
    host.rootfs.handed_over(id).await;
    if result.is_ok() {
        result = host.runtime.start(id).await;
    }
    drop(processes);
    host.metrics.phase(Phase::Start, begin.elapsed());
    let identity = request.identity.clone();
    let Err(error) = result else {
        host.event(
            &request.spec,
            request.about(),
            "Started",
            "Container started",
        );
        return Started::Running {
            identity,
            since: Timestamp::now(),
            log,
            user,
            size: Size::of(&request.spec, &request.container),
        };
    };
    host.metrics.runtime_error();
    let message = error.to_string();
    // What a call of this service's last process left half done is not this container's fault.
    let overtaken = matches!(error, RuntimeError::AlreadyExists(_));
    if !overtaken {
        host.event(
            &request.spec,
            request.trouble(),
            "Failed",
            &format!("Error: {message}"),
        );
    }
    let removed = destroy(host, id).await;
    if overtaken || error.is_unavailable() || removed.is_err() {
        return Started::Retry(Waiting {
            reason: "RunContainerError".to_owned(),
            message,
        });
    }
    let end = Termination {
        exit_code: START_ERROR_EXIT_CODE,
        reason: "StartError".to_owned(),
        message,
        started_at: None,
        finished_at: Timestamp::now(),
        container_id: id.to_owned(),
    };
    Started::Failed { identity, end }
}

impl StartRequest {
    fn about(&self) -> About<'_> {
        About::container(&self.container.name, self.identity.kind)
    }

    fn trouble(&self) -> About<'_> {
        About::trouble(&self.container.name, self.identity.kind)
    }
}

async fn oci_spec(
    host: &Host,
    request: &StartRequest,
    id: &str,
    accounts: &spec::Accounts,
    processes: Option<&PidNamespace>,
) -> Result<Spec, Trouble> {
    let StartRequest {
        container,
        identity,
        network,
        paths,
        ..
    } = request;
    let privileged = container.security.as_ref().is_some_and(|s| s.privileged);
    let mut binds = Vec::with_capacity(container.mounts.len());
    for (index, mount) in container.mounts.iter().enumerate() {
        let volume = paths
            .volumes
            .get(&mount.volume)
            .ok_or_else(|| SpecError::Config(format!("volume {:?} is not there", mount.volume)))?;
        let source = if mount.sub_path.is_empty() {
            volume.clone()
        } else {
            host.volumes
                .resolve_sub_path(
                    &identity.uid,
                    &container.name,
                    index,
                    volume,
                    &mount.sub_path,
                )
                .await?
        };
        let (source, propagation) = match mount.propagation() {
            // Only the host's own mount passes on to the host what the container mounts; a
            // container that may do that could not be kept inside by a pin anyway.
            v1::MountPropagation::Bidirectional if mount.sub_path.is_empty() && privileged => (
                host_path(&request.spec, &mount.volume).unwrap_or(source),
                v1::MountPropagation::Bidirectional,
            ),
            v1::MountPropagation::Bidirectional => (source, v1::MountPropagation::HostToContainer),
            propagation => (source, propagation),
        };
        if propagation != v1::MountPropagation::Unspecified {
            let mounts =
                std::fs::read_to_string("/proc/self/mountinfo").map_err(|source| Trouble::Io {
                    what: "reading the host's mounts",
                    source,
                })?;
            check_propagation(&mounts, &source, propagation).map_err(SpecError::Config)?;
        }
        binds.push(Bind {
            source,
            destination: PathBuf::from(&mount.path),
            read_only: mount.read_only || !is_writable(&request.spec, &mount.volume),
            recursive_read_only: mount.recursive_read_only,
            no_exec: is_image(&request.spec, &mount.volume),
            propagation,
        });
    }
    let mut termination = host
        .volumes
        .termination_file(&identity.uid, &container.name, identity.attempt)
        .await?;
    let mut namespaces = vec![
        (LinuxNamespaceType::Network, network.netns.clone()),
        (LinuxNamespaceType::Uts, network.utsns.clone()),
        (LinuxNamespaceType::Ipc, network.ipcns.clone()),
    ];
    // Held open until the runtime has opened it by its path.
    if let Some(processes) = processes {
        namespaces.push((LinuxNamespaceType::Pid, processes.path()));
    }
    if let Some(users) = &network.users {
        namespaces.push((LinuxNamespaceType::User, users.namespace.clone()));
    }
    let mut etc = EtcPaths {
        hosts: paths.hosts.clone(),
        hostname: paths.hostname.clone(),
        resolv_conf: paths.resolv_conf.clone(),
    };
    let mut shm = if request.spec.host_ipc {
        Some(PathBuf::from("/dev/shm"))
    } else {
        paths.volumes.get(SHM_VOLUME).cloned()
    };
    if let Some(users) = &network.users {
        let fixed = [
            ("termination", &mut termination),
            ("hosts", &mut etc.hosts),
            ("hostname", &mut etc.hostname),
            ("resolv.conf", &mut etc.resolv_conf),
        ];
        let fixed = fixed.into_iter().map(|(key, path)| (key.to_owned(), path));
        let fixed = fixed.chain(shm.as_mut().map(|path| ("shm".to_owned(), path)));
        let volumes = binds.iter_mut().enumerate();
        let volumes = volumes.map(|(index, bind)| (format!("volume-{index}"), &mut bind.source));
        for (key, path) in fixed.chain(volumes) {
            let volumes = &host.volumes;
            *path = volumes
                .map_users(&identity.uid, &container.name, &key, path, users)
                .await?;
        }
    }
    let hostname = host_name(&request.spec)?;
    let prepared = Prepared {
        container_id: id,
        accounts,
        hostname: &hostname,
        devices: if privileged {
            host_devices(Path::new("/dev")).map_err(|source| Trouble::Io {
                what: "listing the host's devices",
                source,
            })?
        } else {
            vec![]
        },
        namespaces: &namespaces,
        values: HostValues {
            pod_ip: network.ip,
            host_ip: Some(host.host_ip),
        },
        volumes: &binds,
        etc: &etc,
        shm: shm.as_deref(),
        termination_file: Some(&termination),
        // PID 1 among the host's processes is the host's own init, and in another container's
        // process namespace it is the agent there, which reaps.
        agent: (!container.without_agent && !request.spec.host_pid && processes.is_none())
            .then_some(host.agent.as_path()),
        localhost_profile: localhost_profile(host, container)?,
        users: network.users.as_ref().map(|users| users.range),
    };
    Ok(spec::build(
        &host.limits,
        &request.spec,
        container,
        &request.image.config,
        &prepared,
    )?)
}

/// The root as a pod with ids of its own sees it.
async fn map_root(
    host: &Host,
    request: &StartRequest,
    root: Root,
    users: OwnUsers,
) -> Result<Root, Trouble> {
    let folder = host
        .volumes
        .mapped_folder(&request.spec.uid, &request.container.name)?;
    let Root { mounts, snapshot } = root;
    let mapped =
        tokio::task::spawn_blocking(move || crate::users::map_root(mounts, &users, &folder)).await;
    mapped
        .map_err(std::io::Error::other)
        .flatten()
        .map(|mounts| Root { mounts, snapshot })
        .map_err(|source| Trouble::Io {
            what: "mapping the ids of the image's layers",
            source,
        })
}

/// Whether containers may write to a volume. What came from the API server they may not, whatever
/// the pod says (the kubelet's `mustMountRO`): its files are replaced behind their backs, and on
/// this host by a service that runs as root.
fn is_writable(spec: &v1::SandboxSpec, volume: &str) -> bool {
    use v1::volume::Source;
    spec.volumes.iter().any(|known| {
        known.name == volume
            && matches!(
                known.source,
                Some(Source::EmptyDir(_) | Source::HostPath(_))
            )
    })
}

/// Whether a volume is an image, of which nothing may be run (the API's promise).
fn is_image(spec: &v1::SandboxSpec, volume: &str) -> bool {
    let mut volumes = spec.volumes.iter();
    volumes.any(|known| {
        known.name == volume && matches!(known.source, Some(v1::volume::Source::Image(_)))
    })
}

/// The host's own path that a volume stands for.
fn host_path(spec: &v1::SandboxSpec, volume: &str) -> Option<PathBuf> {
    let volume = spec.volumes.iter().find(|known| known.name == volume)?;
    match &volume.source {
        Some(v1::volume::Source::HostPath(wish)) => Some(PathBuf::from(&wish.path)),
        _ => None,
    }
}

/// The host's own seccomp profile that the container names.
fn localhost_profile(
    host: &Host,
    container: &v1::Container,
) -> Result<Option<LinuxSeccomp>, Trouble> {
    let Some(wish) = container.security.as_ref().and_then(|s| s.seccomp.as_ref()) else {
        return Ok(None);
    };
    let (v1::seccomp::Kind::Localhost, Some(dir)) = (wish.kind(), &host.seccomp_dir) else {
        return Ok(None);
    };
    let name = Path::new(&wish.profile);
    let inside = name
        .components()
        .all(|part| matches!(part, std::path::Component::Normal(_)));
    if !inside {
        return Err(SpecError::Config(format!(
            "securityContext.seccompProfile.localhostProfile: {:?} leaves the profile folder",
            wish.profile
        ))
        .into());
    }
    let path = dir.join(name);
    let read = || -> std::io::Result<LinuxSeccomp> {
        if std::fs::metadata(&path)?.len() > MAX_PROFILE {
            return Err(std::io::Error::other("too large"));
        }
        Ok(serde_json::from_slice(&std::fs::read(&path)?)?)
    };
    match read() {
        Ok(profile) => Ok(Some(profile)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(SpecError::Config(format!(
            "securityContext.seccompProfile.localhostProfile: {:?}: {error}",
            wish.profile
        ))
        .into()),
    }
}

fn make_fifos(dir: &Path, stdio: &Stdio) -> std::io::Result<()> {
    std::fs::create_dir_all(dir)?;
    for path in [&stdio.stdin, &stdio.stdout, &stdio.stderr]
        .into_iter()
        .flatten()
    {
        match mkfifo(path, Mode::S_IRUSR | Mode::S_IWUSR) {
            Ok(()) | Err(nix::errno::Errno::EEXIST) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_an_empty_dir_is_writable() {
        let volume = |name: &str, source| v1::Volume {
            name: name.to_owned(),
            source,
        };
        let spec = v1::SandboxSpec {
            volumes: vec![
                volume(
                    "scratch",
                    Some(v1::volume::Source::EmptyDir(v1::EmptyDir::default())),
                ),
                volume(
                    "token",
                    Some(v1::volume::Source::Files(v1::Files::default())),
                ),
                volume("nothing", None),
            ],
            ..Default::default()
        };
        for (name, expected) in [
            ("scratch", true),
            ("token", false),
            ("nothing", false),
            ("unknown", false),
        ] {
            assert_eq!(is_writable(&spec, name), expected, "{name}");
        }
    }
}
