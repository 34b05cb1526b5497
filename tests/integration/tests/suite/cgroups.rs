//! What pods may use, as the kernel was told.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, ensure};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use sandman_integration::{PodBuilder, Scope};

/// cgroups of this name below a folder, not deeper than hosts of the dev cluster have them.
fn find(folder: &Path, name: &str, depth: u32, found: &mut Vec<PathBuf>) {
    let Ok(entries) = std::fs::read_dir(folder) else {
        return;
    };
    let folders = entries.flatten().map(|entry| entry.path());
    for path in folders.filter(|path| path.is_dir()) {
        if path.file_name().is_some_and(|file| file == name) {
            found.push(path);
        } else if depth > 0 {
            find(&path, name, depth - 1, found);
        }
    }
}

/// A value of the pod's cgroup, under the name that either version has for it.
fn value(groups: &[PathBuf], files: [&str; 2]) -> Result<String> {
    let mut paths = groups
        .iter()
        .flat_map(|group| files.map(|file| group.join(file)));
    let path = paths.find(|path| path.is_file()).context("no such value")?;
    Ok(std::fs::read_to_string(path)?.trim().to_owned())
}

#[test]
fn pods_are_bounded_below_their_class() {
    Scope::run(|scope| async move {
        let quantity = |text: &str| Quantity(text.to_owned());
        let limits = |cpu: &str, memory: &str| {
            Some(
                [
                    ("cpu".to_owned(), quantity(cpu)),
                    ("memory".to_owned(), quantity(memory)),
                ]
                .into(),
            )
        };
        let pods = [
            ("plain", "besteffort", None),
            ("some", "burstable", Some(("10m", "32Mi"))),
        ];
        for (name, class, request) in pods {
            let mut builder = PodBuilder::sleeper(&scope.cluster, name);
            if let Some((cpu, memory)) = request {
                builder = builder.spec(|spec| {
                    let own = spec.resources.get_or_insert_default();
                    own.requests = limits(cpu, memory);
                    own.limits = limits("100m", "64Mi");
                });
            }
            let pod = scope.ready_pod(&builder.build()).await?;
            let uid = pod.metadata.uid.context("uid")?;
            let mut groups = Vec::new();
            let root = Path::new("/sys/fs/cgroup");
            find(root, &format!("pod{uid}"), 8, &mut groups);
            ensure!(!groups.is_empty(), "no cgroup of pod {uid}");
            let right = groups
                .iter()
                .all(|group| group.parent().is_some_and(|parent| parent.ends_with(class)));
            ensure!(right, "{groups:?} are not in {class}");
            if request.is_some() {
                let memory = value(&groups, ["memory.max", "memory.limit_in_bytes"])?;
                ensure!(memory == (64 << 20).to_string(), "{memory}");
                let quota = value(&groups, ["cpu.max", "cpu.cfs_quota_us"])?;
                ensure!(quota.split(' ').next() == Some("10000"), "{quota}");
            }
        }
        Ok(())
    });
}
