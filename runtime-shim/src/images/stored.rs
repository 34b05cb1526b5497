//! Layers of an image in the layer store: each is seen once, in parallel with the others, and
//! filled as it is read ever after.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use futures::stream::{FuturesUnordered, StreamExt as _};
use sandman_layer_store::{DiffId, LayerDigest};

use super::error::PullError;
use super::layers::{Layer, Shared};
use super::reference::Name;
use super::registry::{self, Session};
use crate::layers::{Conversion, LayerSet, Layers, NotConverted, SetLayer};

/// Layers of one image that are fetched at a time.
const PARALLEL_FETCHES: usize = 4;
/// Broken transfers in a row without one new byte before the pull is given up.
const FRUITLESS_ATTEMPTS: u32 = 3;
/// Repositories that are known to have a layer; beyond it they are asked anew.
const MAX_PROVEN: usize = 65_536;

/// The store, and what is known of who may have which layer of it.
#[derive(Clone)]
pub(super) struct Stored {
    layers: Arc<Layers>,
    /// Repositories that proved to have a layer: a digest alone opens nothing.
    proven: Arc<Mutex<HashSet<(String, LayerDigest)>>>,
}

/// Why an image is not in the store.
#[derive(Debug)]
pub(super) enum NotStored {
    /// It may be fine for containerd.
    Unsupported(String),
    /// It is not to be had.
    Failed(PullError),
}

impl From<PullError> for NotStored {
    fn from(error: PullError) -> Self {
        Self::Failed(error)
    }
}

impl From<NotConverted> for NotStored {
    fn from(error: NotConverted) -> Self {
        match error {
            NotConverted::Image(why) => Self::Failed(PullError::Malformed(why)),
            NotConverted::Unsupported(why) => Self::Unsupported(why),
            NotConverted::Host(why) => Self::Failed(PullError::Store(why)),
        }
    }
}

impl Stored {
    pub(super) fn new(layers: Arc<Layers>) -> Self {
        Self {
            layers,
            proven: Arc::default(),
        }
    }

    /// All layers of an image, if they are in the store. `repository` is where what is missing of
    /// them comes from.
    pub(super) fn find(
        &self,
        repository: &Name,
        stack: &[Layer],
    ) -> Result<Option<LayerSet>, NotStored> {
        let mut layers = Vec::with_capacity(stack.len());
        for layer in stack {
            let Some((digest, diff_id)) = ids(layer) else {
                return Ok(None);
            };
            match self.layers.take(digest, diff_id, layer.size())? {
                Some(layer) => layers.push(layer),
                None => return Ok(None),
            }
        }
        // Without layers there is nothing to mount; with unfaithful ones containerd has unpacked it.
        if layers.is_empty() || !LayerSet::is_faithful(&layers) {
            return Ok(None);
        }
        Ok(Some(LayerSet {
            repository: registry::repository(repository),
            layers,
        }))
    }

    /// Makes all layers of an image present. Others may do the same for images with the same
    /// layers.
    pub(super) async fn ensure(
        &self,
        shared: &Shared,
        session: &Session,
        name: &Name,
        stack: &[Layer],
    ) -> Result<LayerSet, NotStored> {
        if stack.is_empty() {
            return Err(NotStored::Unsupported("the image has no layers".to_owned()));
        }
        let mut waiting = stack.iter().enumerate().map(|(n, layer)| async move {
            let made = self.ensure_layer(shared, session, name, layer).await?;
            Ok::<_, NotStored>((n, made))
        });
        let mut running: FuturesUnordered<_> = waiting.by_ref().take(PARALLEL_FETCHES).collect();
        let mut made = Vec::with_capacity(stack.len());
        while let Some(result) = running.next().await {
            made.push(result?);
            running.extend(waiting.next());
        }
        made.sort_by_key(|(n, _)| *n);
        let layers: Vec<_> = made.into_iter().map(|(_, layer)| layer).collect();
        if !LayerSet::is_faithful(&layers) {
            return Err(NotStored::Unsupported(
                "a layer does not describe the directories that it adds to".to_owned(),
            ));
        }
        Ok(LayerSet {
            repository: registry::repository(name),
            layers,
        })
    }

    async fn ensure_layer(
        &self,
        shared: &Shared,
        session: &Session,
        name: &Name,
        layer: &Layer,
    ) -> Result<SetLayer, NotStored> {
        let refused =
            || PullError::Malformed(format!("digest {} is not supported", layer.digest()));
        let (digest, diff_id) = ids(layer).ok_or_else(refused)?;
        let repository = registry::repository(name);
        // Two images of a repository that share a layer: the second finds it there. Not of other
        // repositories: a slow one must not be theirs to wait for.
        let lock = shared.fetching.of(&format!("layer {repository}@{digest}"));
        let _held = lock.lock().await;
        let proof = (repository, digest);
        if let Some(there) = self.layers.take(digest, diff_id, layer.size())? {
            if !self.proven().contains(&proof) {
                session.head_blob(layer.digest()).await?;
                self.prove(proof);
            }
            return Ok(there);
        }
        let conversion = Conversion::start(&self.layers, digest, diff_id, layer.size()).await?;
        let fed = feed(session, layer, &conversion).await;
        let converted = conversion.finish().await;
        // What stopped the bytes is why there is no layer.
        fed?;
        converted?;
        self.prove(proof);
        self.keep_limits();
        let made = self.layers.take(digest, diff_id, layer.size())?;
        let gone = || PullError::Store(format!("layer {digest} was removed at once"));
        Ok(made.ok_or_else(gone)?)
    }

    /// In the background: a full store must not hold up a pull that has its bytes.
    fn keep_limits(&self) {
        let layers = Arc::clone(&self.layers);
        tokio::task::spawn_blocking(move || {
            if let Err(error) = layers.keep_limits() {
                tracing::warn!(%error, "cannot remove layers from the store");
            }
        });
    }

    fn prove(&self, proof: (String, LayerDigest)) {
        let mut proven = self.proven();
        if proven.len() >= MAX_PROVEN {
            proven.clear();
        }
        proven.insert(proof);
    }

    fn proven(&self) -> MutexGuard<'_, HashSet<(String, LayerDigest)>> {
        self.proven.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Both digests; none if they are not what the store can name.
fn ids(layer: &Layer) -> Option<(LayerDigest, DiffId)> {
    Some((layer.digest().parse().ok()?, layer.diff_id().parse().ok()?))
}

/// Streams a blob into a conversion; goes on where a transfer broke off.
async fn feed(session: &Session, layer: &Layer, conversion: &Conversion) -> Result<(), PullError> {
    let (mut sent, mut reached, mut fruitless) = (0, 0, 0);
    loop {
        let error = match transfer(session, layer, conversion, &mut sent).await {
            Err(error @ PullError::Unreachable { .. }) => error,
            other => return other,
        };
        fruitless = if sent > reached { 0 } else { fruitless + 1 };
        reached = sent;
        if fruitless >= FRUITLESS_ATTEMPTS {
            return Err(error);
        }
        tracing::debug!(digest = layer.digest(), %error, "blob transfer broke; resuming");
    }
}

async fn transfer(
    session: &Session,
    layer: &Layer,
    conversion: &Conversion,
    sent: &mut u64,
) -> Result<(), PullError> {
    let mut stream = session.blob(layer.digest(), *sent).await?;
    while *sent < layer.size() {
        let Some(piece) = stream.chunk().await? else {
            return Err(PullError::Unreachable {
                registry: "answer".to_owned(),
                why: format!(
                    "{} ended after {sent} of {} bytes",
                    layer.digest(),
                    layer.size()
                ),
            });
        };
        *sent += piece.len() as u64;
        // The converter counts as well, and refuses what is longer than the manifest says.
        if !conversion.write(piece).await {
            return Ok(());
        }
    }
    Ok(())
}
