//! A host as its operator and its kernel see it.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use k8s_openapi::api::core::v1::{Container, Pod};
use sandman_integration::{Cluster, DEADLINE, PodBuilder, Scope, variable};
use serde::Deserialize;

/// A line of `cache ls`.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Layer {
    pub(crate) bytes: u64,
    pub(crate) state: String,
    pub(crate) pinned: bool,
    pub(crate) images: Vec<String>,
}

/// Runs `sandman-runtime-shim cache` on the first host.
pub(crate) async fn cache(cluster: &Cluster, arguments: &[&str]) -> Result<String> {
    let output = tokio::process::Command::new(cluster.state_dir.join("bin/sandman-runtime-shim"))
        .arg("--config")
        .arg(cluster.state_dir.join("config/runtime-shim-0.toml"))
        .arg("cache")
        .args(arguments)
        .stdin(Stdio::null())
        .output()
        .await?;
    if !output.status.success() {
        bail!(
            "cache {}: {}",
            arguments.join(" "),
            String::from_utf8_lossy(&output.stderr)
        );
    }
    Ok(String::from_utf8(output.stdout)?)
}

/// The layers of an image on the first host.
pub(crate) async fn layers(cluster: &Cluster, image: &str) -> Result<Vec<Layer>> {
    let text = cache(cluster, &["ls", "--json"]).await?;
    let all = text.lines().map(serde_json::from_str::<Layer>);
    let all = all.collect::<Result<Vec<_>, _>>()?;
    let is_of = |layer: &Layer| layer.images.iter().any(|name| name == image);
    Ok(all.into_iter().filter(is_of).collect())
}

/// A process of a pod, as the machine numbers it.
pub(crate) fn process_of(pod: &Pod) -> Result<u32> {
    let uid = pod.metadata.uid.as_deref().context("uid")?;
    let mut found = Vec::new();
    processes_below(
        Path::new("/sys/fs/cgroup"),
        &format!("pod{uid}"),
        12,
        false,
        &mut found,
    );
    found.first().copied().context("no process of the pod")
}

fn processes_below(folder: &Path, name: &str, depth: u32, inside: bool, found: &mut Vec<u32>) {
    if inside && let Ok(text) = std::fs::read_to_string(folder.join("cgroup.procs")) {
        found.extend(text.lines().filter_map(|line| line.parse::<u32>().ok()));
    }
    if depth == 0 || !found.is_empty() {
        return;
    }
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        if path.is_dir() {
            let inside = inside || path.ends_with(name);
            processes_below(&path, name, depth - 1, inside, found);
        }
    }
}

/// Root of a pod's file system, from outside.
pub(crate) fn root_of(pod: &Pod) -> Result<PathBuf> {
    Ok(PathBuf::from(format!("/proc/{}/root", process_of(pod)?)))
}

/// A pod of the Python image that sleeps.
pub(crate) fn python_pod(name: &str, image: &str) -> PodBuilder {
    PodBuilder::new(name).container(Container {
        name: "main".to_owned(),
        image: Some(image.to_owned()),
        image_pull_policy: Some("IfNotPresent".to_owned()),
        command: Some(vec!["sleep".to_owned(), "1000000".to_owned()]),
        ..Default::default()
    })
}

/// Runs Python in a pod.
pub(crate) async fn python(scope: &Scope, pod: &str, code: &str) -> Result<String> {
    let output = scope
        .kubectl()
        .run(&["exec", pod, "--", "python3", "-c", code])
        .await?;
    Ok(output.ok()?.text())
}

/// Waits until either of the two processes that watch layers may be killed again.
pub(crate) async fn settled(cluster: &Cluster) -> Result<()> {
    let settled = async {
        while cache(cluster, &["status"]).await.is_err() {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    };
    tokio::time::timeout(DEADLINE, settled)
        .await
        .context("the keeper and the service do not find each other")
}

/// Prunes until nothing is left of an image but what `done` allows. Its last pods, also those of the
/// test before, let go of it when the virtual node has the host forget them, which is no event that
/// anybody but the host sees.
pub(crate) async fn prune(
    cluster: &Cluster,
    image: &str,
    arguments: &[&str],
    done: impl Fn(&[Layer]) -> bool,
) -> Result<()> {
    let pruned = async {
        loop {
            cache(cluster, arguments).await?;
            let left = layers(cluster, image).await?;
            if done(&left) {
                return Ok(());
            }
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    };
    tokio::time::timeout(DEADLINE, pruned)
        .await
        .with_context(|| format!("{image} is not let go of"))?
}

/// Makes the host know an image by its indexes only, and nobody use it.
pub(crate) async fn empty(scope: &Scope, image: &str) -> Result<()> {
    cache(&scope.cluster, &["prefetch", image]).await?;
    prune(&scope.cluster, image, &["prune"], |left| {
        !left.is_empty() && left.iter().all(|layer| layer.state == "index")
    })
    .await
}

/// Address of a registry from here, by its name in images.
pub(crate) fn registry_url(variable_name: &str) -> Result<String> {
    Ok(format!("http://{}/v2", variable(variable_name)?))
}
