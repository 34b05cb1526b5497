//! One pull, from the registry's manifest to a committed snapshot and an image
//! record; and the way back from a record to an image that is ready to use.

use bytes::Bytes;
pub(super) use containerd_client::services::v1::Image as Record;
use containerd_client::types::Descriptor;
use futures::stream::{FuturesUnordered, StreamExt as _};
use oci_spec::image::{ImageConfiguration, ImageManifest};
use tokio::sync::oneshot;

use super::blobs::{self, Blob};
use super::containerd::{Containerd, Labels};
use super::error::PullError;
use super::flight::{Flights, Locks};
use super::manifest::{self, Document};
use super::reference::{Name, Selector};
use super::registry::Session;

/// Label of an image record: whether its pull needed a credential.
pub(super) const ACCESS_LABEL: &str = "sandman.dev/image-access";
pub(super) const ACCESS_PRIVATE: &str = "private";
const ACCESS_PUBLIC: &str = "public";

/// Layers of one image that are fetched at a time.
const PARALLEL_BLOBS: usize = 4;

/// Work on single blobs and layers, shared by all pulls.
#[derive(Clone)]
pub(super) struct Shared {
    fetching: Locks,
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

/// An image whose content is on this host.
#[derive(Clone, Debug)]
pub(super) struct Local {
    /// Digest of what the reference names: the index if there is one.
    pub(super) digest: String,
    pub(super) config: ImageConfiguration,
    pub(super) chain_id: String,
    pub(super) size: u64,
    pub(super) private: bool,
}

/// Fetches, unpacks and records an image. `private` says whether the session
/// holds a credential.
pub(super) async fn pull(
    store: &Containerd,
    shared: &Shared,
    session: &Session,
    name: &Name,
    private: bool,
) -> Result<Local, PullError> {
    let leased = store
        .with_lease()
        .await
        .map_err(PullError::containerd("lease"))?;
    let result = pull_leased(&leased, shared, session, name, private).await;
    leased.release().await;
    result
}

async fn pull_leased(
    store: &Containerd,
    shared: &Shared,
    session: &Session,
    name: &Name,
    private: bool,
) -> Result<Local, PullError> {
    let top = top_document(store, session, name).await?;
    let (manifest_blob, image_manifest, size_of_documents) = match &top.document {
        Document::Manifest(image_manifest) => (
            top.clone_raw(),
            image_manifest.clone(),
            top.bytes.len() as u64,
        ),
        Document::Index(index) => {
            let chosen = manifest::choose(index, manifest::architecture())?;
            let selector = Selector::Digest(chosen.digest().to_string());
            let raw = document(
                store,
                session,
                name,
                &selector,
                chosen.media_type().as_ref(),
            )
            .await?;
            let Document::Manifest(image_manifest) = &raw.document else {
                return Err(PullError::Malformed(
                    "the index names another index".to_owned(),
                ));
            };
            let size = (top.bytes.len() + raw.bytes.len()) as u64;
            (raw.clone_raw(), image_manifest.clone(), size)
        }
    };
    manifest::check(&image_manifest)?;

    let config = configuration(store, shared, session, name, &image_manifest).await?;
    let diff_ids = config.rootfs().diff_ids().clone();
    let chain = manifest::chain_ids(&diff_ids);
    fetch_and_unpack(
        store,
        shared,
        session,
        name,
        &image_manifest,
        &diff_ids,
        &chain,
    )
    .await?;

    // References for containerd's garbage collector, top down.
    let mut labels = Labels::new();
    labels.insert(
        "containerd.io/gc.ref.content.config".into(),
        image_manifest.config().digest().to_string(),
    );
    for (index, layer) in image_manifest.layers().iter().enumerate() {
        labels.insert(
            format!("containerd.io/gc.ref.content.l.{index}"),
            layer.digest().to_string(),
        );
    }
    put_document(store, name, &manifest_blob, labels).await?;
    if let Document::Index(_) = &top.document {
        let label = (
            "containerd.io/gc.ref.content.m.0".to_owned(),
            manifest_blob.digest.clone(),
        );
        put_document(store, name, &top.clone_raw(), [label].into()).await?;
    }

    let target = Descriptor {
        media_type: manifest::media_type(&top.document),
        digest: top.digest.clone(),
        size: i64::try_from(top.bytes.len()).unwrap_or(i64::MAX),
        annotations: Labels::new(),
    };
    let private = record(store, name, &target, private).await?;
    Ok(Local {
        digest: top.digest,
        size: manifest::size(&image_manifest).saturating_add(size_of_documents),
        config,
        chain_id: chain.last().cloned().unwrap_or_default(),
        private,
    })
}

/// Writes the image records. What once was public stays so.
async fn record(
    store: &Containerd,
    name: &Name,
    target: &Descriptor,
    private: bool,
) -> Result<bool, PullError> {
    let by_digest = name.with_digest(&target.digest);
    let known = store
        .image(&by_digest)
        .await
        .map_err(PullError::containerd("image get"))?;
    let private = private && known.is_none_or(|known| is_private(&known));
    let access = if private {
        ACCESS_PRIVATE
    } else {
        ACCESS_PUBLIC
    };
    let mut names = vec![by_digest, name.canonical()];
    names.dedup();
    for name in names {
        let labels = [(ACCESS_LABEL.to_owned(), access.to_owned())];
        let record = Record {
            name,
            labels: labels.into(),
            target: Some(target.clone()),
            ..Default::default()
        };
        store
            .put_image(record)
            .await
            .map_err(PullError::containerd("image put"))?;
    }
    Ok(private)
}

pub(super) fn is_private(record: &Record) -> bool {
    record
        .labels
        .get(ACCESS_LABEL)
        .is_some_and(|access| access == ACCESS_PRIVATE)
}

/// A verified document and what it says.
struct Fetched {
    bytes: Bytes,
    digest: String,
    document: Document,
}

/// Bytes and digest alone.
struct Raw {
    bytes: Bytes,
    digest: String,
}

impl Fetched {
    fn clone_raw(&self) -> Raw {
        Raw {
            bytes: self.bytes.clone(),
            digest: self.digest.clone(),
        }
    }
}

/// What the reference names. A tag is asked by HEAD first: an unchanged one
/// costs no download and no pull of the registry's rate limit.
async fn top_document(
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
async fn document(
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

async fn put_document(
    store: &Containerd,
    name: &Name,
    raw: &Raw,
    labels: Labels,
) -> Result<(), PullError> {
    let blob = Blob {
        digest: raw.digest.clone(),
        size: raw.bytes.len() as u64,
        labels: labels.clone(),
    };
    let known = store
        .blob_info(&raw.digest)
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
            let labelled = store.label_blob(&raw.digest, labels).await;
            labelled.map_err(PullError::containerd("content labels"))
        }
        None => blobs::put(store, name, &blob, &raw.bytes).await,
    }
}

async fn configuration(
    store: &Containerd,
    shared: &Shared,
    session: &Session,
    name: &Name,
    image_manifest: &ImageManifest,
) -> Result<ImageConfiguration, PullError> {
    let descriptor = image_manifest.config();
    let digest = descriptor.digest().to_string();
    let blob = Blob {
        digest: digest.clone(),
        size: descriptor.size(),
        labels: Labels::new(),
    };
    blobs::ensure(store, &shared.fetching, session, name, &blob).await?;
    let bytes = store.read_blob(&digest, manifest::MAX_CONFIG_BYTES).await;
    let bytes = bytes.map_err(PullError::containerd("content read"))?;
    let config = manifest::configuration(&bytes.unwrap_or_default(), image_manifest)?;
    let diff_ids = config.rootfs().diff_ids();
    if !diff_ids.iter().all(|diff_id| manifest::is_sha256(diff_id)) {
        return Err(PullError::Malformed(
            "the image's configuration has an invalid diff id".into(),
        ));
    }
    // The configuration holds the snapshot, as containerd's own pulls do.
    if let Some(chain_id) = manifest::chain_ids(diff_ids).pop() {
        let label = format!("containerd.io/gc.ref.snapshot.{}", store.snapshotter());
        let labelled = store.label_blob(&digest, [(label, chain_id)].into()).await;
        labelled.map_err(PullError::containerd("content labels"))?;
    }
    Ok(config)
}

/// Fetches layers in parallel and unpacks them in order, each as soon as it
/// and the one below are there.
async fn fetch_and_unpack(
    store: &Containerd,
    shared: &Shared,
    session: &Session,
    name: &Name,
    image_manifest: &ImageManifest,
    diff_ids: &[String],
    chain: &[String],
) -> Result<(), PullError> {
    let mut arrived = Vec::new();
    let mut fetches = Vec::new();
    for layer in image_manifest.layers() {
        let (done, wait) = oneshot::channel();
        arrived.push(wait);
        let (digest, size) = (layer.digest().to_string(), layer.size());
        let blob = Blob {
            digest,
            size,
            labels: Labels::new(),
        };
        fetches.push(async move {
            blobs::ensure(store, &shared.fetching, session, name, &blob).await?;
            // Nobody waits when the unpacking failed.
            let _ = done.send(());
            Ok::<(), PullError>(())
        });
    }
    let fetch_all = async {
        let mut pending = fetches.into_iter();
        let mut running: FuturesUnordered<_> = pending.by_ref().take(PARALLEL_BLOBS).collect();
        while let Some(result) = running.next().await {
            result?;
            running.extend(pending.next());
        }
        Ok::<(), PullError>(())
    };
    let unpack_all = async {
        for (index, (wait, layer)) in arrived.into_iter().zip(image_manifest.layers()).enumerate() {
            if wait.await.is_err() {
                // The fetch failed; its own error is the one to report.
                std::future::pending::<()>().await;
            }
            let parent = index
                .checked_sub(1)
                .map_or(String::new(), |below| chain[below].clone());
            let layer = Descriptor {
                media_type: layer.media_type().to_string(),
                digest: layer.digest().to_string(),
                size: i64::try_from(layer.size()).unwrap_or(i64::MAX),
                annotations: Labels::new(),
            };
            unpack(
                store,
                shared,
                layer,
                &diff_ids[index],
                parent,
                &chain[index],
            )
            .await?;
        }
        Ok::<(), PullError>(())
    };
    tokio::try_join!(fetch_all, unpack_all).map(|_both| ())
}

/// Makes one committed snapshot, once at a time for all images that share it.
async fn unpack(
    store: &Containerd,
    shared: &Shared,
    layer: Descriptor,
    diff_id: &str,
    parent: String,
    chain_id: &str,
) -> Result<(), PullError> {
    // Held by each pull that needs it: the one that makes it may fail later on.
    store
        .hold_snapshot(chain_id)
        .await
        .map_err(PullError::containerd("lease"))?;
    let store = store.clone();
    let (diff_id, name) = (diff_id.to_owned(), chain_id.to_owned());
    let work = move || async move {
        let failed = |status: tonic::Status| format!("{:?}: {}", status.code(), status.message());
        if store.has_snapshot(&name).await.map_err(failed)? {
            return Ok(());
        }
        let key = format!("extract-{} {name}", uuid::Uuid::new_v4());
        let mounts = store.prepare(&key, &parent).await.map_err(failed)?;
        let digest = layer.digest.clone();
        let result = match store.apply(layer, mounts).await {
            Ok(applied) if applied == diff_id => store.commit(&name, &key).await.map_err(failed),
            Ok(applied) => Err(format!(
                "layer {digest} unpacks to {applied}, the image's configuration says {diff_id}"
            )),
            Err(status) => Err(failed(status)),
        };
        if result.is_err() {
            store.remove_snapshot(&key).await;
        }
        result
    };
    let lost = Err("unpacking was interrupted".to_owned());
    shared
        .unpacking
        .join(chain_id.to_owned(), lost, work)
        .await
        .map_err(|why| PullError::Containerd {
            what: "unpack layer",
            why,
        })
}

/// Bytes of an image's blobs; `None` if its documents are not here.
pub(super) async fn size(store: &Containerd, record: &Record) -> Result<Option<u64>, PullError> {
    let documents = stored_manifest(store, record).await?;
    Ok(documents.map(|(manifest, size)| manifest::size(&manifest).saturating_add(size)))
}

/// The manifest for this machine behind a record, and the size of the documents
/// that lead to it.
async fn stored_manifest(
    store: &Containerd,
    record: &Record,
) -> Result<Option<(ImageManifest, u64)>, PullError> {
    let Some(target) = &record.target else {
        return Ok(None);
    };
    let top = stored_document(store, &target.digest, &target.media_type).await?;
    let Some((bytes, mut document)) = top else {
        return Ok(None);
    };
    let mut size = bytes.len() as u64;
    if let Document::Index(index) = &document {
        let chosen = manifest::choose(index, manifest::architecture())?;
        let media_type = chosen.media_type().to_string();
        let stored = stored_document(store, &chosen.digest().to_string(), &media_type).await?;
        let Some((bytes, chosen)) = stored else {
            return Ok(None);
        };
        size += bytes.len() as u64;
        document = chosen;
    }
    match document {
        Document::Manifest(image_manifest) => Ok(Some((image_manifest, size))),
        Document::Index(_) => Ok(None),
    }
}

/// The image behind a record, if all of it is here; unpacks it anew when only
/// the snapshots are missing.
pub(super) async fn local(
    store: &Containerd,
    shared: &Shared,
    record: &Record,
) -> Result<Option<Local>, PullError> {
    let Some(target) = &record.target else {
        return Ok(None);
    };
    let Some((image_manifest, size)) = stored_manifest(store, record).await? else {
        return Ok(None);
    };
    let config = image_manifest.config().digest().to_string();
    let config = store.read_blob(&config, manifest::MAX_CONFIG_BYTES).await;
    let Some(config) = config.map_err(PullError::containerd("content read"))? else {
        return Ok(None);
    };
    let config = manifest::configuration(&config, &image_manifest)?;
    let diff_ids = config.rootfs().diff_ids().clone();
    let chain = manifest::chain_ids(&diff_ids);
    let chain_id = chain.last().cloned().unwrap_or_default();
    if !chain_id.is_empty() && !has_snapshot(store, &chain_id).await? {
        for layer in image_manifest.layers() {
            let info = store.blob_info(&layer.digest().to_string()).await;
            if info
                .map_err(PullError::containerd("content info"))?
                .is_none()
            {
                return Ok(None);
            }
        }
        let leased = store
            .with_lease()
            .await
            .map_err(PullError::containerd("lease"))?;
        let unpacked = unpack_stored(&leased, shared, &image_manifest, &diff_ids, &chain).await;
        leased.release().await;
        unpacked?;
    }
    Ok(Some(Local {
        digest: target.digest.clone(),
        size: manifest::size(&image_manifest).saturating_add(size),
        config,
        chain_id,
        private: is_private(record),
    }))
}

async fn unpack_stored(
    store: &Containerd,
    shared: &Shared,
    image_manifest: &ImageManifest,
    diff_ids: &[String],
    chain: &[String],
) -> Result<(), PullError> {
    for (index, layer) in image_manifest.layers().iter().enumerate() {
        let parent = index
            .checked_sub(1)
            .map_or(String::new(), |below| chain[below].clone());
        let layer = Descriptor {
            media_type: layer.media_type().to_string(),
            digest: layer.digest().to_string(),
            size: i64::try_from(layer.size()).unwrap_or(i64::MAX),
            annotations: Labels::new(),
        };
        unpack(
            store,
            shared,
            layer,
            &diff_ids[index],
            parent,
            &chain[index],
        )
        .await?;
    }
    // Imported images may lack the reference that keeps the snapshot.
    let (Some(chain_id), config) = (chain.last(), image_manifest.config().digest().to_string())
    else {
        return Ok(());
    };
    let label = format!("containerd.io/gc.ref.snapshot.{}", store.snapshotter());
    let labelled = store
        .label_blob(&config, [(label, chain_id.clone())].into())
        .await;
    labelled.map_err(PullError::containerd("content labels"))
}

async fn has_snapshot(store: &Containerd, chain_id: &str) -> Result<bool, PullError> {
    store
        .has_snapshot(chain_id)
        .await
        .map_err(PullError::containerd("snapshot stat"))
}

async fn stored_document(
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
