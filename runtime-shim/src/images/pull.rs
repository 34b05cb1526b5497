//! One pull, from the registry's manifest to a committed snapshot and an image
//! record. Everything is held by a lease until the record refers to it.

use std::sync::Arc;

use containerd_client::services::v1::Image as Record;
use containerd_client::types::Descriptor;
use oci_spec::image::{ImageConfiguration, ImageManifest};

use super::blobs::{self, Blob};
use super::containerd::{Containerd, Labels};
use super::documents::{self, Fetched};
use super::error::PullError;
use super::layers::{self, Layer, Shared};
use super::local::{self, ACCESS_LABEL, ACCESS_PRIVATE, ACCESS_PUBLIC, Local};
use super::manifest::{self, Document};
use super::reference::{Name, Selector};
use super::registry::Session;
use super::stored::{NotStored, Stored};
use crate::layers::LayerSet;

/// Fetches, unpacks and records an image. `private` says whether the session
/// holds a credential.
pub(super) async fn pull(
    store: &Containerd,
    shared: &Shared,
    stored: Option<&Stored>,
    session: &Session,
    name: &Name,
    private: bool,
) -> Result<Local, PullError> {
    let leased = store
        .with_lease()
        .await
        .map_err(PullError::containerd("lease"))?;
    let result = pull_leased(&leased, shared, stored, session, name, private).await;
    leased.release().await;
    result
}

async fn pull_leased(
    store: &Containerd,
    shared: &Shared,
    stored: Option<&Stored>,
    session: &Session,
    name: &Name,
    private: bool,
) -> Result<Local, PullError> {
    let top = documents::top_document(store, session, name).await?;
    let chosen = match &top.document {
        Document::Manifest(_) => None,
        Document::Index(index) => {
            let chosen = manifest::choose(index, manifest::architecture())?;
            let selector = Selector::Digest(chosen.digest().to_string());
            let media_type = chosen.media_type().to_string();
            Some(documents::document(store, session, name, &selector, &media_type).await?)
        }
    };
    let bottom = chosen.as_ref().unwrap_or(&top);
    let Document::Manifest(image) = &bottom.document else {
        return Err(PullError::Malformed(
            "the index names another index".to_owned(),
        ));
    };
    manifest::check(image)?;

    let config = configuration(store, shared, session, name, image).await?;
    let stack = layers::stack(image, &config);
    let in_store = match stored {
        Some(stored) => store_layers(stored, shared, session, name, &stack).await?,
        None => None,
    };
    if in_store.is_none() {
        layers::fetch_and_unpack(store, shared, session, name, &stack).await?;
        local::keep_snapshot(
            store,
            image.config().digest().as_ref(),
            layers::top_of(&stack),
        )
        .await?;
    }

    documents::put(store, &shared.fetching, name, bottom, references(image)).await?;
    if chosen.is_some() {
        let label = (
            "containerd.io/gc.ref.content.m.0".to_owned(),
            bottom.digest.clone(),
        );
        documents::put(store, &shared.fetching, name, &top, Labels::from([label])).await?;
    }
    let private = record(store, name, &top, private).await?;
    let documents_size = top.bytes.len() + chosen.as_ref().map_or(0, |chosen| chosen.bytes.len());
    Ok(Local {
        size: manifest::size(image).saturating_add(documents_size as u64),
        chain_id: layers::top_of(&stack),
        layers: in_store,
        config,
        digest: top.digest,
        private,
    })
}

/// Brings an image's layers into the store; none if it is one that only containerd can unpack.
async fn store_layers(
    stored: &Stored,
    shared: &Shared,
    session: &Session,
    name: &Name,
    stack: &[Layer],
) -> Result<Option<Arc<LayerSet>>, PullError> {
    match stored.ensure(shared, session, name, stack).await {
        Ok(layers) => Ok(Some(Arc::new(layers))),
        Err(NotStored::Unsupported(why)) => {
            tracing::info!(image = name.canonical(), why, "image left to containerd");
            Ok(None)
        }
        Err(NotStored::Failed(error)) => Err(error),
    }
}

/// What containerd's garbage collector must know to keep a manifest's blobs.
fn references(image: &ImageManifest) -> Labels {
    let config = (
        "containerd.io/gc.ref.content.config".to_owned(),
        image.config(),
    );
    let layers = image.layers().iter().enumerate();
    let layers =
        layers.map(|(index, layer)| (format!("containerd.io/gc.ref.content.l.{index}"), layer));
    let all = std::iter::once(config).chain(layers);
    all.map(|(label, descriptor)| (label, descriptor.digest().to_string()))
        .collect()
}

async fn configuration(
    store: &Containerd,
    shared: &Shared,
    session: &Session,
    name: &Name,
    image: &ImageManifest,
) -> Result<ImageConfiguration, PullError> {
    let descriptor = image.config();
    let digest = descriptor.digest().to_string();
    let blob = Blob {
        digest: digest.clone(),
        size: descriptor.size(),
        labels: Labels::new(),
    };
    blobs::ensure(store, &shared.fetching, session, name, &blob).await?;
    let bytes = store.read_blob(&digest, manifest::MAX_CONFIG_BYTES).await;
    let bytes = bytes.map_err(PullError::containerd("content read"))?;
    manifest::configuration(&bytes.unwrap_or_default(), image)
}

/// Writes the image records. What once was public stays so.
async fn record(
    store: &Containerd,
    name: &Name,
    top: &Fetched,
    private: bool,
) -> Result<bool, PullError> {
    let target = Descriptor {
        media_type: manifest::media_type(&top.document),
        digest: top.digest.clone(),
        size: i64::try_from(top.bytes.len()).unwrap_or(i64::MAX),
        annotations: Labels::new(),
    };
    let by_digest = name.with_digest(&top.digest);
    let known = store
        .image(&by_digest)
        .await
        .map_err(PullError::containerd("image get"))?;
    let private = private && known.is_none_or(|known| local::is_private(&known));
    let access = if private {
        ACCESS_PRIVATE
    } else {
        ACCESS_PUBLIC
    };
    let mut names = vec![by_digest, name.canonical()];
    names.dedup();
    for name in names {
        let record = Record {
            name,
            labels: Labels::from([(ACCESS_LABEL.to_owned(), access.to_owned())]),
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
