//! What a sandbox needs before its containers: namespaces, volumes, images.

use std::time::Instant;

use sandman_protocol::v1;
use tokio_util::sync::CancellationToken;

use super::{About, Host, SHM_VOLUME};
use crate::images::{Image, ImageError, ImageRequest, PullObserver};
use crate::metrics::Phase;
use crate::network::PodNetwork;
use crate::sandbox::facts::VolumePaths;
use crate::sandbox::identity::Kind;
use crate::sandbox::live::Waiting;
use crate::spec::resources::{PodLimits, pod_limits};
use crate::spec::sandbox_cgroup;
use crate::users::UserRange;
use crate::volumes::{EtcFiles, HostFields, VolumeError};

/// Size of a pod's shared memory, as the CRI gives it.
const SHM_BYTES: u64 = 64 * 1024 * 1024;

/// Makes the namespaces of a sandbox. Returns what its cgroup is set to, too: a sandbox that has
/// been here before, with these bounds, keeps room for what runs in it.
///
/// # Errors
/// What to show until the next try.
pub async fn set_up_network(
    host: &Host,
    spec: &v1::SandboxSpec,
    bounds: Option<PodLimits>,
    users: Option<UserRange>,
) -> Result<(PodNetwork, Option<PodLimits>), Waiting> {
    let under_policies = spec.await_policies && spec.network() == v1::NetworkMode::Pod;
    let permit = host.turn(&spec.namespace).await;
    let bounds = bound(host, spec, bounds)?;
    let begin = Instant::now();
    let closed = match under_policies {
        true => host.network.close(&spec.uid).await,
        false => Ok(false),
    };
    let closed_now = matches!(closed, Ok(true));
    let made = match closed {
        Ok(_) => {
            let ports = &spec.host_ports;
            let network = &host.network;
            network
                .setup_with_users(&spec.uid, spec.network(), &spec.hostname, ports, users)
                .await
        }
        Err(error) => Err(error),
    };
    host.metrics.phase(Phase::Network, begin.elapsed());
    drop(permit);
    if closed_now && made.is_ok() {
        host.network.wait_for_policies(&spec.uid).await;
    }
    let made = made.map(|network| {
        let network = PodNetwork {
            ip: if spec.network() == v1::NetworkMode::Host {
                Some(host.host_ip)
            } else {
                network.ip
            },
            ..network
        };
        (network, bounds)
    });
    made.map_err(|error| {
        let message = format!("Failed to create pod sandbox: {error}");
        host.event(
            spec,
            About::sandbox_trouble(),
            "FailedCreatePodSandBox",
            &message,
        );
        Waiting {
            reason: "FailedCreatePodSandBox".to_owned(),
            message,
        }
    })
}

/// Bounds what all containers of a sandbox use together, before there are any.
fn bound(
    host: &Host,
    spec: &v1::SandboxSpec,
    before: Option<PodLimits>,
) -> Result<Option<PodLimits>, Waiting> {
    let Some(limits) = pod_limits(spec) else {
        return Ok(None);
    };
    let limits = before.map_or(limits, |before| before.join(limits));
    let cgroup = sandbox_cgroup(&host.limits.cgroup_parent, spec);
    let bounded = host.stats.bound(&cgroup.to_string_lossy(), &limits);
    bounded.map(|()| Some(limits)).map_err(|error| {
        let message = format!(
            "Failed to create pod sandbox: cgroup {}: {error}",
            cgroup.display()
        );
        let about = About::sandbox_trouble();
        host.event(spec, about, "FailedCreatePodSandBox", &message);
        Waiting {
            reason: "FailedCreatePodSandBox".to_owned(),
            message,
        }
    })
}

/// Makes the volumes and managed files of a sandbox, or brings their contents up to date. A pull
/// for one of them is given up at `stopping`.
///
/// # Errors
/// What to show until the next try.
pub async fn apply_volumes(
    host: &Host,
    spec: &v1::SandboxSpec,
    network: &PodNetwork,
    stopping: &CancellationToken,
) -> Result<VolumePaths, Waiting> {
    // Not beside the other volumes: its waits are the registry's, and have their own words.
    mount_images(host, spec, stopping).await?;
    let begin = Instant::now();
    let made = try_apply_volumes(host, spec, network).await;
    host.metrics.phase(Phase::Volumes, begin.elapsed());
    made.map_err(|error| {
        let message = error.to_string();
        host.event(spec, About::sandbox_trouble(), "FailedMount", &message);
        Waiting {
            reason: "ContainerCreating".to_owned(),
            message,
        }
    })
}

/// Pulls and mounts the images that are volumes, each once.
async fn mount_images(
    host: &Host,
    spec: &v1::SandboxSpec,
    stopping: &CancellationToken,
) -> Result<(), Waiting> {
    let creating = |message: String| Waiting {
        reason: "ContainerCreating".to_owned(),
        message,
    };
    for volume in &spec.volumes {
        let Some(v1::volume::Source::Image(image)) = &volume.source else {
            continue;
        };
        let point = host
            .volumes
            .image_mount_point(&spec.uid, &volume.name)
            .await;
        let Some(point) = point.map_err(|error| creating(error.to_string()))? else {
            continue;
        };
        let pull = Pull {
            host,
            spec,
            reference: &image.reference,
            policy: image.pull_policy(),
            normal: About::sandbox(),
            trouble: About::sandbox_trouble(),
        };
        let pulled = stopping
            .run_until_cancelled(pull.run())
            .await
            .ok_or_else(|| creating("the sandbox ends".to_owned()))?
            .map_err(|error| Waiting {
                reason: error.reason().to_owned(),
                message: error.message().to_owned(),
            })?;
        let mounted = host
            .rootfs
            .mount_image(&spec.uid, &volume.name, &pulled, &point)
            .await;
        mounted.map_err(|error| {
            let message = format!(
                "MountVolume.SetUp failed for volume {:?} : {error}",
                volume.name
            );
            host.event(spec, About::sandbox_trouble(), "FailedMount", &message);
            creating(message)
        })?;
    }
    Ok(())
}

async fn try_apply_volumes(
    host: &Host,
    spec: &v1::SandboxSpec,
    network: &PodNetwork,
) -> Result<VolumePaths, VolumeError> {
    let fields = HostFields {
        pod_ip: network.ip,
        host_ip: Some(host.host_ip),
    };
    let mut wanted = spec.volumes.clone();
    if shares_memory(spec) {
        let source = v1::EmptyDir {
            memory: true,
            size_limit_bytes: SHM_BYTES,
        };
        wanted.push(v1::Volume {
            name: SHM_VOLUME.to_owned(),
            source: Some(v1::volume::Source::EmptyDir(source)),
        });
    }
    let volumes = host
        .volumes
        .apply(&spec.uid, &wanted, spec.fs_group, &fields)
        .await?;
    let etc = EtcFiles {
        hostname: host_name(spec)?,
        host_network: spec.network() == v1::NetworkMode::Host,
        fqdn: spec.fqdn.clone(),
        pod_ip: network.ip,
        aliases: spec.host_aliases.clone(),
        dns: spec.dns.clone().unwrap_or_default(),
    };
    let etc = host.volumes.etc_files(&spec.uid, &etc).await?;
    Ok(VolumePaths {
        volumes,
        hosts: etc.hosts,
        hostname: etc.hostname,
        resolv_conf: etc.resolv_conf,
    })
}

/// Containers of a pod share their IPC namespace, and so its shared memory. A lone container
/// needs no mount on the host for that.
fn shares_memory(spec: &v1::SandboxSpec) -> bool {
    spec.init_containers.len() + spec.containers.len() > 1 && !spec.host_ipc
}

/// The name that the sandbox's processes see: in the host's network it is the host's.
pub(super) fn host_name(spec: &v1::SandboxSpec) -> Result<String, VolumeError> {
    if spec.network() != v1::NetworkMode::Host {
        return Ok(spec.hostname.clone());
    }
    let name = nix::unistd::gethostname().map_err(|errno| VolumeError::Io {
        what: "host name".to_owned(),
        source: errno.into(),
    })?;
    Ok(name.to_string_lossy().into_owned())
}

/// Makes a container's image present.
///
/// # Errors
/// The registry's or the user's mistake, in the kubelet's words.
pub async fn ensure_image(
    host: &Host,
    spec: &v1::SandboxSpec,
    container: &v1::Container,
    kind: Kind,
) -> Result<Image, ImageError> {
    let pull = Pull {
        host,
        spec,
        reference: &container.image,
        policy: container.pull_policy(),
        normal: About::container(&container.name, kind),
        trouble: About::trouble(&container.name, kind),
    };
    pull.run().await
}

/// An image that is wanted, and whom the events about it concern.
struct Pull<'a> {
    host: &'a Host,
    spec: &'a v1::SandboxSpec,
    reference: &'a str,
    policy: v1::PullPolicy,
    normal: About<'a>,
    trouble: About<'a>,
}

impl PullObserver for Pull<'_> {
    fn pulling(&self) {
        let message = format!("Pulling image {:?}", self.reference);
        self.host.event(self.spec, self.normal, "Pulling", &message);
    }
}

impl Pull<'_> {
    async fn run(&self) -> Result<Image, ImageError> {
        let begin = Instant::now();
        let request = ImageRequest {
            reference: self.reference.to_owned(),
            policy: self.policy,
            credentials: self.spec.registry_credentials.clone(),
        };
        let made = self.host.images.ensure(&request, self).await;
        self.host.metrics.phase(Phase::Pull, begin.elapsed());
        match &made {
            Ok(image) => self.pulled(image),
            Err(error) => self.failed(error),
        }
        made
    }

    fn pulled(&self, image: &Image) {
        let message = match image.pulled {
            Some(pulled) => format!(
                "Successfully pulled image {:?} in {} ({} including waiting). \
                 Image size: {} bytes.",
                self.reference,
                go_millis(pulled.took),
                go_millis(pulled.including_waiting),
                image.size
            ),
            None => format!(
                "Container image {:?} already present on machine and can be accessed by the pod",
                self.reference
            ),
        };
        self.host.event(self.spec, self.normal, "Pulled", &message);
    }

    fn failed(&self, error: &ImageError) {
        let (reason, message) = match error.reason() {
            "ErrImageNeverPull" => ("ErrImageNeverPull", error.message().to_owned()),
            "InvalidImageName" => ("InspectFailed", error.message().to_owned()),
            _ => (
                "Failed",
                format!(
                    "Failed to pull image {:?}: {}",
                    self.reference,
                    error.message()
                ),
            ),
        };
        let text = format!("Error: {}", error.reason());
        self.host.event(self.spec, self.trouble, reason, &message);
        self.host.event(self.spec, self.trouble, "Failed", &text);
    }
}

/// A duration in Go's notation, cut to milliseconds.
fn go_millis(duration: std::time::Duration) -> String {
    let millis = duration.as_millis();
    if millis < 1000 {
        return format!("{millis}ms");
    }
    let (minutes, rest) = (millis / 60_000, millis % 60_000);
    let mut seconds = format!("{}.{:03}", rest / 1000, rest % 1000);
    seconds.truncate(seconds.trim_end_matches('0').trim_end_matches('.').len());
    if minutes > 0 {
        format!("{minutes}m{seconds}s")
    } else {
        format!("{seconds}s")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn durations_read_as_in_go() {
        for (millis, text) in [
            (0, "0ms"),
            (15, "15ms"),
            (1200, "1.2s"),
            (2000, "2s"),
            (61_050, "1m1.05s"),
        ] {
            assert_eq!(go_millis(Duration::from_millis(millis)), text);
        }
    }
}
