//! What must be the same after a crash as before it.

use anyhow::{Context as _, Result, ensure};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;
use kube::api::{Api, ListParams};

/// Pod UID, container id and restart count: a crash of ours may change none.
pub(crate) type Identity = (String, String, i32);

pub(crate) fn identity(pod: &Pod) -> Result<Identity> {
    let main = pod
        .status
        .as_ref()
        .and_then(|status| status.container_statuses.as_ref()?.first())
        .context("container status")?;
    Ok((
        pod.uid().context("uid")?,
        main.container_id.clone().context("containerID")?,
        main.restart_count,
    ))
}

pub(crate) async fn identities(pods: &Api<Pod>) -> Result<Vec<Identity>> {
    let mut all = pods
        .list(&ListParams::default())
        .await?
        .iter()
        .map(identity)
        .collect::<Result<Vec<_>>>()?;
    all.sort();
    Ok(all)
}

pub(crate) fn same(before: &[Identity], after: &[Identity]) -> Result<()> {
    ensure!(
        before == after,
        "containers changed\nbefore: {before:#?}\nafter: {after:#?}"
    );
    Ok(())
}
