//! What the store tells, and what follows from it for sandboxes.

use std::sync::Arc;

use sandman_layer_store::filler::FillerEvent;
use sandman_layer_store::keeper::KeeperEvent;
use sandman_layer_store::store::StoreEvent;
use tokio::sync::mpsc;
use tracing::{debug, error, info, warn};

use super::Layers;
use crate::sandbox::Sandboxes;

/// What a pod is told whose layers nobody watched any more.
const LOST: &str =
    "The host lost track of reads of this pod's image, and ended it: it may have read zeros";

/// Follows the store for as long as the service runs.
pub(crate) async fn watch(
    layers: Arc<Layers>,
    sandboxes: Arc<Sandboxes>,
    mut events: mpsc::UnboundedReceiver<StoreEvent>,
) {
    while let Some(event) = events.recv().await {
        match event {
            StoreEvent::Keeper(KeeperEvent::Resumed) => info!("the layer keeper is back"),
            StoreEvent::Keeper(KeeperEvent::GroupLost(_)) => group_lost(&layers, &sandboxes).await,
            StoreEvent::Filler(FillerEvent::ReaderFailed { layer, why }) => {
                warn!(%layer, why, "a sandbox could not read its image");
            }
            StoreEvent::Filler(FillerEvent::Sealed(layer)) => debug!(%layer, "layer complete"),
            StoreEvent::Filler(FillerEvent::Corrupt(layer)) => {
                error!(%layer, "a layer's spans do not make up its archive; it is fetched anew");
            }
        }
    }
}

/// Readers of incomplete layers may have seen zeros: whoever runs on one ends, and is never
/// continued. A controller's next pod gets new mounts.
async fn group_lost(layers: &Arc<Layers>, sandboxes: &Sandboxes) {
    let host = sandboxes.host();
    let affected = host.rootfs.on_unsealed_layers();
    error!(
        roots = affected.len(),
        "the layer keeper and all copies of its group are gone; ending what may have read zeros"
    );
    let store = Arc::clone(layers);
    let renewed = tokio::task::spawn_blocking(move || {
        store.cool();
        store.record_group()
    });
    if let Ok(Err(error)) = renewed.await {
        error!(%error, "cannot record the keeper's new group");
    }
    for (uid, _) in sandboxes.views() {
        // Ids of containers and keys of volumes begin with the pod's UID.
        if affected.iter().any(|key| key.starts_with(&uid)) {
            sandboxes.evict(&uid, LOST);
        }
    }
    for key in affected {
        // At once: an eviction leaves time to end.
        if let Err(error) = host
            .runtime
            .kill(&key, None, libc::SIGKILL.unsigned_abs())
            .await
        {
            warn!(key, %error, "cannot end a container");
        }
    }
}
