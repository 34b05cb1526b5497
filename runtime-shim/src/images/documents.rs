//! Manifests and indexes on their way from a registry or the content store:
//! verified by digest, and used only if the registry grants them.

use bytes::Bytes;

use super::blobs::{self, Blob};
use super::containerd::{Containerd, Labels};
use super::error::PullError;
use super::flight::Locks;
use super::manifest::{self, Document};
use super::reference::{Name, Selector};
use super::registry::Session;

/// A verified document and what it says.
pub(super) struct Fetched {
    pub(super) bytes: Bytes,
    pub(super) digest: String,
    pub(super) document: Document,
}

/// What the reference names. A tag is asked by HEAD first: an unchanged one
/// costs no download and no pull of the registry's rate limit.
pub(super) async fn top_document(
    store: &Containerd,
    session: &Session,
    name: &Name,
) -> Result<Fetched, PullError> {
    if let Selector::Tag(_) = name.selector()
        && let Some(digest) = session.head_manifest(name.selector()).await?
    {
        return document(store, session, name, &Selector::Digest(digest), "").await;
    }
    document(store, session, name, name.selector(), "").await
}

/// A document from the content store or from the registry. One from the store
/// is used only after the registry confirmed the digest to this session.
pub(super) async fn document(
    store: &Containerd,
    session: &Session,
    name: &Name,
    selector: &Selector,
    media_type: &str,
) -> Result<Fetched, PullError> {
    if let Selector::Digest(digest) = selector {
        let stored = store.read_blob(digest, manifest::MAX_MANIFEST_BYTES).await;
        let stored = stored.map_err(PullError::containerd("content read"))?;
        // Documents written by this module carry the media type themselves or
        // are recognisable by the fallback; else they are fetched again.
        if let Some(bytes) = stored
            && let Ok(document) = manifest::parse(&bytes, media_type)
        {
            if name.selector() == selector {
                session.head_manifest(selector).await?;
            }
            return Ok(Fetched {
                bytes,
                digest: digest.clone(),
                document,
            });
        }
    }
    let raw = session.manifest(selector).await?;
    let document = manifest::parse(&raw.bytes, &raw.media_type)?;
    Ok(Fetched {
        bytes: raw.bytes,
        digest: raw.digest,
        document,
    })
}

/// Makes a document present in the content store, with these labels among its own.
pub(super) async fn put(
    store: &Containerd,
    locks: &Locks,
    name: &Name,
    document: &Fetched,
    labels: Labels,
) -> Result<(), PullError> {
    let blob = Blob {
        digest: document.digest.clone(),
        size: document.bytes.len() as u64,
        labels: labels.clone(),
    };
    // Another image may consist of the same document.
    let lock = locks.of(&document.digest);
    let _held = lock.lock().await;
    let leased = store.hold_blob(&document.digest).await;
    leased.map_err(PullError::containerd("lease"))?;
    let known = store
        .blob_info(&document.digest)
        .await
        .map_err(PullError::containerd("content info"))?;
    match known {
        Some(known)
            if labels
                .iter()
                .all(|(key, value)| known.labels.get(key) == Some(value)) =>
        {
            Ok(())
        }
        Some(_) => {
            let labelled = store.label_blob(&document.digest, labels).await;
            labelled.map_err(PullError::containerd("content labels"))
        }
        None => blobs::put(store, name, &blob, &document.bytes).await,
    }
}

/// A document of the content store; `None` if it is not there.
pub(super) async fn stored(
    store: &Containerd,
    digest: &str,
    media_type: &str,
) -> Result<Option<(Bytes, Document)>, PullError> {
    let bytes = store.read_blob(digest, manifest::MAX_MANIFEST_BYTES).await;
    let Some(bytes) = bytes.map_err(PullError::containerd("content read"))? else {
        return Ok(None);
    };
    let document = manifest::parse(&bytes, media_type)?;
    Ok(Some((bytes, document)))
}
