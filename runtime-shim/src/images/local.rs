//! Images that are on this host already: the way from containerd's record of
//! one to what a container needs of it.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use containerd_client::services::v1::Image as Record;
use oci_spec::image::{ImageConfiguration, ImageManifest};

use super::containerd::{Containerd, Labels};
use super::documents;
use super::error::PullError;
use super::layers::{self, Layer, Shared};
use super::manifest::{self, Document};
use super::reference::Name;
use super::stored::{NotStored, Stored};
use crate::layers::LayerSet;

/// Label of an image record: whether its pull needed a credential.
pub(super) const ACCESS_LABEL: &str = "sandman.dev/image-access";
pub(super) const ACCESS_PRIVATE: &str = "private";
pub(super) const ACCESS_PUBLIC: &str = "public";

/// An image whose content is on this host.
#[derive(Clone, Debug)]
pub(super) struct Local {
    /// Digest of what the reference names: the index if there is one.
    pub(super) digest: String,
    pub(super) config: ImageConfiguration,
    pub(super) chain_id: String,
    /// Its layers, if the store has them; else containerd has them unpacked.
    pub(super) layers: Option<Arc<LayerSet>>,
    pub(super) size: u64,
    pub(super) private: bool,
}

/// Images that came by other ways than a pull of ours are for everybody.
pub(super) fn is_private(record: &Record) -> bool {
    record
        .labels
        .get(ACCESS_LABEL)
        .is_some_and(|access| access == ACCESS_PRIVATE)
}

/// What was read of images before, by digest: content under a digest never
/// changes, and a burst of pods asks for the same few images.
#[derive(Default)]
pub(super) struct Known {
    by_digest: Mutex<HashMap<String, Arc<Content>>>,
}

/// Images remembered; beyond it all are read anew.
const MAX_KNOWN: usize = 256;

struct Content {
    config: ImageConfiguration,
    config_digest: String,
    stack: Vec<Layer>,
    size: u64,
}

impl Known {
    async fn content(
        &self,
        store: &Containerd,
        record: &Record,
    ) -> Result<Option<Arc<Content>>, PullError> {
        let Some(target) = &record.target else {
            return Ok(None);
        };
        if let Some(content) = self.lock().get(&target.digest) {
            return Ok(Some(Arc::clone(content)));
        }
        let Some(content) = read(store, record).await? else {
            return Ok(None);
        };
        let content = Arc::new(content);
        let mut known = self.lock();
        if known.len() >= MAX_KNOWN {
            known.clear();
        }
        known.insert(target.digest.clone(), Arc::clone(&content));
        Ok(Some(content))
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, Arc<Content>>> {
        self.by_digest
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

async fn read(store: &Containerd, record: &Record) -> Result<Option<Content>, PullError> {
    let Some((image, documents_size)) = manifest_of(store, record).await? else {
        return Ok(None);
    };
    let config_digest = image.config().digest().to_string();
    let config = store
        .read_blob(&config_digest, manifest::MAX_CONFIG_BYTES)
        .await;
    let Some(config) = config.map_err(PullError::containerd("content read"))? else {
        return Ok(None);
    };
    let config = manifest::configuration(&config, &image)?;
    let stack = layers::stack(&image, &config);
    let size = manifest::size(&image).saturating_add(documents_size);
    Ok(Some(Content {
        config,
        config_digest,
        stack,
        size,
    }))
}

/// The image behind a record, if all of it is here; unpacks it anew when only
/// the snapshots are missing. `name` is one of the image's.
pub(super) async fn find(
    store: &Containerd,
    shared: &Shared,
    known: &Known,
    stored: Option<&Stored>,
    name: &Name,
    record: &Record,
) -> Result<Option<Local>, PullError> {
    let Some(content) = known.content(store, record).await? else {
        return Ok(None);
    };
    let chain_id = layers::top_of(&content.stack);
    let local = |layers| Local {
        digest: record.target.clone().unwrap_or_default().digest,
        config: content.config.clone(),
        chain_id: chain_id.clone(),
        layers,
        size: content.size,
        private: is_private(record),
    };
    if let Some(stored) = stored {
        match stored.find(name, &content.stack) {
            Ok(Some(layers)) => return Ok(Some(local(Some(Arc::new(layers))))),
            Ok(None) | Err(NotStored::Unsupported(_)) => {}
            Err(NotStored::Failed(error)) => return Err(error),
        }
    }
    let unpacked = chain_id.is_empty() || {
        let present = store.has_snapshot(&chain_id).await;
        present.map_err(PullError::containerd("snapshot stat"))?
    };
    if !unpacked {
        let leased = store
            .with_lease()
            .await
            .map_err(PullError::containerd("lease"))?;
        let result = unpack(&leased, shared, &content.stack, &content.config_digest).await;
        leased.release().await;
        if !result? {
            return Ok(None);
        }
    }
    Ok(Some(local(None)))
}

async fn unpack(
    store: &Containerd,
    shared: &Shared,
    stack: &[Layer],
    config_digest: &str,
) -> Result<bool, PullError> {
    if !layers::unpack_stored(store, shared, stack).await? {
        return Ok(false);
    }
    keep_snapshot(store, config_digest, layers::top_of(stack)).await?;
    Ok(true)
}

/// Lets an image's configuration hold its snapshot against containerd's
/// garbage collector, as containerd's own pulls do.
pub(super) async fn keep_snapshot(
    store: &Containerd,
    config_digest: &str,
    chain_id: String,
) -> Result<(), PullError> {
    if chain_id.is_empty() {
        return Ok(());
    }
    let label = format!("containerd.io/gc.ref.snapshot.{}", store.snapshotter());
    let labelled = store
        .label_blob(config_digest, Labels::from([(label, chain_id)]))
        .await;
    labelled.map_err(PullError::containerd("content labels"))
}

/// Bytes of an image's blobs; `None` if its documents are not here.
pub(super) async fn size(store: &Containerd, record: &Record) -> Result<Option<u64>, PullError> {
    let found = manifest_of(store, record).await?;
    Ok(found.map(|(image, documents)| manifest::size(&image).saturating_add(documents)))
}

/// The manifest for this machine behind a record, and the size of the documents
/// that lead to it.
async fn manifest_of(
    store: &Containerd,
    record: &Record,
) -> Result<Option<(ImageManifest, u64)>, PullError> {
    let Some(target) = &record.target else {
        return Ok(None);
    };
    let top = documents::stored(store, &target.digest, &target.media_type).await?;
    let Some((bytes, mut document)) = top else {
        return Ok(None);
    };
    let mut size = bytes.len() as u64;
    if let Document::Index(index) = &document {
        let chosen = manifest::choose(index, manifest::architecture())?;
        let (digest, media_type) = (chosen.digest().to_string(), chosen.media_type().to_string());
        let stored = documents::stored(store, &digest, &media_type).await?;
        let Some((bytes, chosen)) = stored else {
            return Ok(None);
        };
        size += bytes.len() as u64;
        document = chosen;
    }
    match document {
        Document::Manifest(image) => Ok(Some((*image, size))),
        Document::Index(_) => Ok(None),
    }
}
