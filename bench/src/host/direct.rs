//! Sandboxes made through a host's containerd by the host service's own calls, as copies of the
//! container of a pod that runs there.

use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use anyhow::{Context, ensure};
use futures::{StreamExt, TryStreamExt, stream};
use nix::libc;
use nix::sys::stat::Mode;
use nix::unistd::mkfifo;
use oci_spec::runtime::Spec;
use sandman_runtime_shim::images::Image;
use sandman_runtime_shim::rootfs::{RootFs, Snapshots};
use sandman_runtime_shim::runtime::{Containerd, NewContainer, Runtime, Stdio, connect};
use tempfile::TempDir;

use super::pace::{Paced, paced};

/// The snapshotter of the dev cluster's hosts.
const SNAPSHOTTER: &str = "overlayfs";
/// What is not measured is made, and all is removed, so many at once.
const AT_ONCE: usize = 4;
const SIGKILL: u32 = libc::SIGKILL as u32;

/// What copies are made from.
#[derive(Clone)]
pub(super) struct Model {
    spec: Spec,
    image: Image,
    runtime: &'static str,
}

impl Model {
    /// Reads the record of a container whose root lies on this snapshot of an image.
    pub(super) async fn read(
        socket: &Path,
        id: &str,
        image: String,
        runtime: &'static str,
    ) -> anyhow::Result<Self> {
        let containerd = Containerd::new(connect(socket)?, SNAPSHOTTER);
        let spec = containerd.spec(id).await?;
        ensure!(
            spec.linux()
                .as_ref()
                .is_some_and(|linux| linux.cgroups_path().is_some()),
            "the spec of {id} has no cgroup"
        );
        Ok(Self {
            spec,
            image: Image {
                name: String::new(),
                image_id: String::new(),
                chain_id: image,
                layers: None,
                config: oci_spec::image::ImageConfiguration::default(),
                size: 0,
                pulled: None,
            },
            runtime,
        })
    }

    /// The same with namespaces of its own, and a cgroup beside the pod's.
    fn copy(&self, id: &str) -> Spec {
        let mut spec = self.spec.clone();
        if let Some(linux) = spec.linux_mut() {
            for namespace in linux.namespaces_mut().iter_mut().flatten() {
                namespace.set_path(None);
            }
            let of_pod = linux.cgroups_path().as_deref().and_then(Path::parent);
            let of_class = of_pod.and_then(Path::parent);
            let cgroup = of_class.map(|class| class.join(id));
            linux.set_cgroups_path(cgroup);
        }
        spec
    }
}

/// All of one model. Their output is read as long as this is there.
pub(super) struct Copies {
    containerd: Containerd,
    roots: Snapshots,
    model: Model,
    prefix: String,
    made: AtomicUsize,
    fifos: TempDir,
    outputs: Mutex<HashMap<String, [File; 2]>>,
}

impl Copies {
    /// None yet; their ids will begin with `prefix`.
    pub(super) fn new(socket: &Path, model: Model, prefix: String) -> anyhow::Result<Self> {
        let fifos = tempfile::Builder::new()
            .prefix("sandman-bench-")
            .tempdir_in("/run")
            .context("no folder for FIFOs in /run")?;
        Ok(Self {
            containerd: Containerd::new(connect(socket)?, SNAPSHOTTER),
            roots: Snapshots::new(connect(socket)?, SNAPSHOTTER, fifos.path()),
            model,
            prefix,
            made: AtomicUsize::new(0),
            fifos,
            outputs: Mutex::default(),
        })
    }

    /// How many were begun.
    pub(super) fn count(&self) -> usize {
        self.made.load(Ordering::Relaxed)
    }

    /// Makes more, until there are so many.
    pub(super) async fn fill(&self, count: usize) -> anyhow::Result<()> {
        let missing = count.saturating_sub(self.count());
        tracing::info!(missing, count, "making sandboxes");
        stream::iter(0..missing)
            .map(|_| self.create())
            .buffer_unordered(AT_ONCE)
            .try_collect::<Vec<()>>()
            .await?;
        Ok(())
    }

    /// Makes more at a fixed rate.
    pub(super) async fn paced(self: &std::sync::Arc<Self>, count: usize, rate: u32) -> Paced {
        paced(count, rate, || {
            let copies = self.clone();
            async move { copies.create().await }
        })
        .await
    }

    /// From nothing to a running process, in the host service's order.
    async fn create(&self) -> anyhow::Result<()> {
        let number = self.made.fetch_add(1, Ordering::Relaxed);
        let id = format!("{}{number}", self.prefix);
        let root = self.roots.prepare(&id, &self.model.image).await?;
        let container = NewContainer {
            id: id.clone(),
            labels: HashMap::new(),
            runtime: self.model.runtime.to_owned(),
            image: self.model.image.name.clone(),
            snapshot: root.snapshot,
            spec: self.model.copy(&id),
        };
        self.containerd.create(&container).await?;
        let stdio = self.open_output(&id)?;
        self.containerd
            .create_task(&id, root.mounts, &stdio)
            .await?;
        self.containerd.start(&id).await?;
        Ok(())
    }

    fn open_output(&self, id: &str) -> anyhow::Result<Stdio> {
        let dir = self.fifos.path().join(id);
        std::fs::create_dir(&dir)?;
        let make = |name: &str| -> anyhow::Result<(PathBuf, File)> {
            let path = dir.join(name);
            mkfifo(&path, Mode::S_IRUSR | Mode::S_IWUSR)?;
            let reader = File::options()
                .read(true)
                .custom_flags(libc::O_NONBLOCK)
                .open(&path)?;
            Ok((path, reader))
        };
        let ((stdout, out), (stderr, err)) = (make("stdout")?, make("stderr")?);
        let mut outputs = self.outputs.lock().unwrap_or_else(PoisonError::into_inner);
        outputs.insert(id.to_owned(), [out, err]);
        Ok(Stdio {
            stdin: None,
            stdout: Some(stdout),
            stderr: Some(stderr),
            terminal: false,
        })
    }
}

/// Removes all whose ids begin with `prefix`, whatever state they are in.
pub(super) async fn remove_all(socket: PathBuf, prefix: String) -> anyhow::Result<()> {
    let scratch = tempfile::tempdir()?;
    let containerd = Containerd::new(connect(&socket)?, SNAPSHOTTER);
    let roots = Snapshots::new(connect(&socket)?, SNAPSHOTTER, scratch.path());
    let records = containerd.list().await?;
    let ids = records.into_iter().map(|record| record.id);
    let ids: Vec<String> = ids.filter(|id| id.starts_with(&prefix)).collect();
    if !ids.is_empty() {
        tracing::info!(sandboxes = ids.len(), "removing");
    }
    stream::iter(ids)
        .map(|id| remove(&containerd, &roots, id))
        .buffer_unordered(AT_ONCE)
        .try_collect::<Vec<()>>()
        .await?;
    Ok(())
}

async fn remove(containerd: &Containerd, roots: &Snapshots, id: String) -> anyhow::Result<()> {
    if containerd.state(&id).await?.is_some() {
        containerd.kill(&id, None, SIGKILL).await?;
        // No exec's: the main process.
        let _ = containerd.wait_exec(&id, "").await;
        containerd.delete_task(&id).await?;
    }
    containerd.delete(&id).await?;
    roots.remove(&id).await?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_share_nothing_with_the_model() {
        let spec = serde_json::json!({
            "ociVersion": "1.0.2",
            "root": {"path": "rootfs"},
            "linux": {
                "cgroupsPath": "/sandman/host-0/besteffort/podx/x-main-0",
                "namespaces": [{"type": "pid"}, {"type": "network", "path": "/run/netns/x"}],
            },
        });
        let model = Model {
            spec: serde_json::from_value(spec).unwrap(),
            image: Image {
                name: String::new(),
                image_id: String::new(),
                chain_id: "sha256:a".to_owned(),
                layers: None,
                config: oci_spec::image::ImageConfiguration::default(),
                size: 0,
                pulled: None,
            },
            runtime: "r",
        };
        let copy = serde_json::to_value(model.copy("b-1")).unwrap();
        assert_eq!(
            copy["linux"]["cgroupsPath"],
            "/sandman/host-0/besteffort/b-1"
        );
        let namespaces = copy["linux"]["namespaces"].as_array().unwrap();
        assert_eq!(namespaces.len(), 2);
        assert!(namespaces.iter().all(|one| one.get("path").is_none()));
    }
}
