//! Small builders for the pods that tests create.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{
    Container, EmptyDirVolumeSource, Pod, PodSpec, Toleration, Volume, VolumeMount,
};
use kube::api::ObjectMeta;

use crate::Cluster;

/// The test images, as hosts pull them.
pub mod images {
    use crate::Cluster;

    /// A shell and the usual small tools.
    #[must_use]
    pub fn busybox(cluster: &Cluster) -> String {
        format!("{}/busybox:1", cluster.images)
    }

    /// Python, git and pytest in several layers; stands for a SWE task.
    #[must_use]
    pub fn python(cluster: &Cluster) -> String {
        format!("{}/python-swe:1", cluster.images)
    }

    /// One static binary and nothing else.
    #[must_use]
    pub fn scratch(cluster: &Cluster) -> String {
        format!("{}/scratch-static:1", cluster.images)
    }

    /// A non-root user and an ENTRYPOINT.
    #[must_use]
    pub fn nonroot(cluster: &Cluster) -> String {
        format!("{}/nonroot-entrypoint:1", cluster.images)
    }
}

/// A container that runs a shell script in the busybox image.
#[must_use]
pub fn container(cluster: &Cluster, name: &str, script: &str) -> Container {
    Container {
        name: name.to_owned(),
        image: Some(images::busybox(cluster)),
        command: Some(vec![
            "/bin/sh".to_owned(),
            "-c".to_owned(),
            script.to_owned(),
        ]),
        ..Default::default()
    }
}

/// A pod bound for the virtual node.
#[derive(Clone, Debug)]
pub struct PodBuilder(Pod);

impl PodBuilder {
    /// A pod without containers that tolerates the virtual node's taint,
    /// selects it, and ends at once when deleted.
    #[must_use]
    pub fn new(name: &str) -> Self {
        Self(Pod {
            metadata: ObjectMeta {
                name: Some(name.to_owned()),
                ..Default::default()
            },
            spec: Some(PodSpec {
                node_selector: Some(BTreeMap::from([(
                    "type".to_owned(),
                    "virtual-kubelet".to_owned(),
                )])),
                tolerations: Some(vec![Toleration {
                    key: Some("virtual-kubelet.io/provider".to_owned()),
                    operator: Some("Exists".to_owned()),
                    ..Default::default()
                }]),
                termination_grace_period_seconds: Some(1),
                ..Default::default()
            }),
            ..Default::default()
        })
    }

    /// One busybox container `main` that sleeps for ever.
    #[must_use]
    pub fn sleeper(cluster: &Cluster, name: &str) -> Self {
        Self::new(name).container(container(cluster, "main", "exec sleep 1000000"))
    }

    /// Adds a container.
    #[must_use]
    pub fn container(self, container: Container) -> Self {
        self.spec(|spec| spec.containers.push(container))
    }

    /// Adds an init container.
    #[must_use]
    pub fn init_container(self, container: Container) -> Self {
        self.spec(|spec| spec.init_containers.get_or_insert_default().push(container))
    }

    /// Adds a volume.
    #[must_use]
    pub fn volume(self, volume: Volume) -> Self {
        self.spec(|spec| spec.volumes.get_or_insert_default().push(volume))
    }

    /// Mounts an emptyDir at `path` in every container there is so far.
    #[must_use]
    pub fn shared_folder(self, path: &str) -> Self {
        const NAME: &str = "shared";
        let volume = Volume {
            name: NAME.to_owned(),
            empty_dir: Some(EmptyDirVolumeSource::default()),
            ..Default::default()
        };
        self.volume(volume).spec(|spec| {
            for container in spec
                .init_containers
                .iter_mut()
                .flatten()
                .chain(&mut spec.containers)
            {
                let mount = VolumeMount {
                    name: NAME.to_owned(),
                    mount_path: path.to_owned(),
                    ..Default::default()
                };
                container.volume_mounts.get_or_insert_default().push(mount);
            }
        })
    }

    /// Sets the restart policy.
    #[must_use]
    pub fn restart_policy(self, policy: &str) -> Self {
        self.spec(|spec| spec.restart_policy = Some(policy.to_owned()))
    }

    /// Changes the spec in any way.
    #[must_use]
    pub fn spec(mut self, change: impl FnOnce(&mut PodSpec)) -> Self {
        change(self.0.spec.get_or_insert_default());
        self
    }

    /// Changes the metadata in any way.
    #[must_use]
    pub fn metadata(mut self, change: impl FnOnce(&mut ObjectMeta)) -> Self {
        change(&mut self.0.metadata);
        self
    }

    /// The pod.
    #[must_use]
    pub fn build(self) -> Pod {
        self.0
    }
}
