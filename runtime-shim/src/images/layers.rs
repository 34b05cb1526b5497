//! Layers of an image: fetched in parallel, unpacked in order into snapshots
//! that all images with the same lower layers share.

use containerd_client::types::Descriptor;
use futures::stream::{FuturesUnordered, StreamExt as _};
use oci_spec::image::{ImageConfiguration, ImageManifest};
use tokio::sync::oneshot;

use super::blobs::{self, Blob};
use super::containerd::{Containerd, Labels};
use super::error::PullError;
use super::flight::{Flights, Locks};
use super::manifest;
use super::reference::Name;
use super::registry::Session;

/// Layers of one image that are fetched at a time.
const PARALLEL_FETCHES: usize = 4;

/// Work on single blobs and layers, shared by all pulls.
#[derive(Clone)]
pub(super) struct Shared {
    pub(super) fetching: Locks,
    unpacking: Flights<String, Result<(), String>>,
}

impl Shared {
    pub(super) fn new() -> Self {
        Self {
            fetching: Locks::default(),
            unpacking: Flights::new(),
        }
    }
}

/// One layer and its place in the stack.
#[derive(Clone, Debug)]
pub(super) struct Layer {
    descriptor: Descriptor,
    size: u64,
    /// Digest of the layer's uncompressed form.
    diff_id: String,
    /// Name of the snapshot below, empty for the lowest layer.
    parent: String,
    /// Name of the snapshot that unpacking makes.
    chain_id: String,
}

impl Layer {
    /// Digest of the blob.
    pub(super) fn digest(&self) -> &str {
        &self.descriptor.digest
    }

    /// Digest of the layer's uncompressed form.
    pub(super) fn diff_id(&self) -> &str {
        &self.diff_id
    }

    /// Bytes of the blob.
    pub(super) fn size(&self) -> u64 {
        self.size
    }
}

/// The layers of an image, lowest first. The configuration has been checked to
/// name as many as the manifest.
pub(super) fn stack(image: &ImageManifest, config: &ImageConfiguration) -> Vec<Layer> {
    let diff_ids = config.rootfs().diff_ids();
    let mut parent = String::new();
    let mut layers = Vec::with_capacity(diff_ids.len());
    for ((layer, diff_id), chain_id) in image
        .layers()
        .iter()
        .zip(diff_ids)
        .zip(manifest::chain_ids(diff_ids))
    {
        let descriptor = Descriptor {
            media_type: layer.media_type().to_string(),
            digest: layer.digest().to_string(),
            size: i64::try_from(layer.size()).unwrap_or(i64::MAX),
            annotations: Labels::new(),
        };
        layers.push(Layer {
            descriptor,
            size: layer.size(),
            diff_id: diff_id.clone(),
            parent: std::mem::replace(&mut parent, chain_id.clone()),
            chain_id,
        });
    }
    layers
}

/// Name of the snapshot with all layers; empty for an image without any.
pub(super) fn top_of(layers: &[Layer]) -> String {
    layers
        .last()
        .map(|layer| layer.chain_id.clone())
        .unwrap_or_default()
}

/// Fetches layers in parallel and unpacks them in order, each as soon as it
/// and the one below are there.
pub(super) async fn fetch_and_unpack(
    store: &Containerd,
    shared: &Shared,
    session: &Session,
    name: &Name,
    layers: &[Layer],
) -> Result<(), PullError> {
    let mut arrivals = Vec::with_capacity(layers.len());
    let mut fetches = Vec::with_capacity(layers.len());
    for layer in layers {
        let (arrived, arrival) = oneshot::channel();
        arrivals.push(arrival);
        fetches.push(async move {
            let digest = layer.descriptor.digest.clone();
            let blob = Blob {
                digest,
                size: layer.size,
                labels: Labels::new(),
            };
            blobs::ensure(store, &shared.fetching, session, name, &blob).await?;
            // Nobody waits when the unpacking failed.
            let _ = arrived.send(());
            Ok::<(), PullError>(())
        });
    }
    let fetch_all = async {
        let mut waiting = fetches.into_iter();
        let mut running: FuturesUnordered<_> = waiting.by_ref().take(PARALLEL_FETCHES).collect();
        while let Some(result) = running.next().await {
            result?;
            running.extend(waiting.next());
        }
        Ok::<(), PullError>(())
    };
    let unpack_all = async {
        for (arrival, layer) in arrivals.into_iter().zip(layers) {
            if arrival.await.is_err() {
                // The fetch failed; its own error is the one to report.
                std::future::pending::<()>().await;
            }
            unpack(store, shared, layer).await?;
        }
        Ok::<(), PullError>(())
    };
    tokio::try_join!(fetch_all, unpack_all).map(|_both| ())
}

/// Unpacks layers whose blobs are in the content store. False if one is not.
pub(super) async fn unpack_stored(
    store: &Containerd,
    shared: &Shared,
    layers: &[Layer],
) -> Result<bool, PullError> {
    for layer in layers {
        let info = store.blob_info(&layer.descriptor.digest).await;
        if info
            .map_err(PullError::containerd("content info"))?
            .is_none()
        {
            return Ok(false);
        }
    }
    for layer in layers {
        unpack(store, shared, layer).await?;
    }
    Ok(true)
}

/// Makes one committed snapshot, once at a time for all images that share it.
async fn unpack(store: &Containerd, shared: &Shared, layer: &Layer) -> Result<(), PullError> {
    // Held by each pull that needs it: the one that makes it may fail later on.
    let held = store.hold_snapshot(&layer.chain_id).await;
    held.map_err(PullError::containerd("lease"))?;
    let (store, layer) = (store.clone(), layer.clone());
    let chain_id = layer.chain_id.clone();
    let lost = Err("unpacking was interrupted".to_owned());
    let unpacked = shared
        .unpacking
        .join(chain_id, lost, || unpack_alone(store, layer))
        .await;
    unpacked.map_err(|why| PullError::Containerd {
        what: "unpack layer",
        why,
    })
}

async fn unpack_alone(store: Containerd, layer: Layer) -> Result<(), String> {
    let failed = |status: tonic::Status| format!("{:?}: {}", status.code(), status.message());
    if store.has_snapshot(&layer.chain_id).await.map_err(failed)? {
        return Ok(());
    }
    let key = format!("extract-{} {}", uuid::Uuid::new_v4(), layer.chain_id);
    let mounts = store.prepare(&key, &layer.parent).await.map_err(failed)?;
    let digest = layer.descriptor.digest.clone();
    let result = match store.apply(layer.descriptor, mounts).await {
        Ok(applied) if applied == layer.diff_id => {
            store.commit(&layer.chain_id, &key).await.map_err(failed)
        }
        Ok(applied) => Err(format!(
            "layer {digest} unpacks to {applied}, the image's configuration says {}",
            layer.diff_id
        )),
        Err(status) => Err(failed(status)),
    };
    if result.is_err() {
        store.remove_snapshot(&key).await;
    }
    result
}
