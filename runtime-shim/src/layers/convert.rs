//! First sight of a layer: from a stream of the registry's blob to a layer in the store, by a
//! process without rights.

use std::io::Write as _;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use bytes::Bytes;
use sandman_layer_store::convert::{self, ConvertError, Order};
use sandman_layer_store::{DiffId, LayerDigest};
use tokio::sync::{OwnedSemaphorePermit, mpsc};
use tokio::task::JoinHandle;

use super::{DRAFT, Layers};

/// Pieces of a blob between the registry and the converter.
const PIECES: usize = 16;

/// Why a layer did not get into the store.
#[derive(Debug, Clone, thiserror::Error)]
pub(crate) enum NotConverted {
    /// The image or its registry.
    #[error("{0}")]
    Image(String),
    /// A layer that containerd can unpack and the store cannot.
    #[error("{0}")]
    Unsupported(String),
    /// This host.
    #[error("{0}")]
    Host(String),
}

impl From<ConvertError> for NotConverted {
    fn from(error: ConvertError) -> Self {
        let text = error.to_string();
        match error {
            ConvertError::WrongBlob { .. }
            | ConvertError::WrongDiffId { .. }
            | ConvertError::Malformed { .. }
            | ConvertError::TooLarge { .. } => Self::Image(text),
            ConvertError::Unsupported { .. } => Self::Unsupported(text),
            ConvertError::Died { .. } | ConvertError::Host { .. } => Self::Host(text),
        }
    }
}

/// A conversion that is going on. Dropped, it ends and leaves nothing.
pub(crate) struct Conversion {
    layers: Arc<Layers>,
    pieces: mpsc::Sender<Bytes>,
    work: JoinHandle<Result<(), NotConverted>>,
    _turn: OwnedSemaphorePermit,
}

impl Conversion {
    /// Waits for a processor and begins.
    pub(crate) async fn start(
        layers: &Arc<Layers>,
        layer: LayerDigest,
        diff_id: DiffId,
        size: u64,
    ) -> Result<Self, NotConverted> {
        let turn = Arc::clone(&layers.conversions).acquire_owned().await;
        let turn = turn.map_err(|error| NotConverted::Host(error.to_string()))?;
        let order = Order {
            layer,
            diff_id,
            size,
            limits: convert::Limits::default(),
        };
        let (pieces, received) = mpsc::channel(PIECES);
        let worker = Arc::clone(layers);
        let work = tokio::task::spawn_blocking(move || run(&worker, order, received));
        Ok(Self {
            layers: Arc::clone(layers),
            pieces,
            work,
            _turn: turn,
        })
    }

    /// The next part of the blob. False when the converter takes no more: [`Self::finish`] knows
    /// why.
    pub(crate) async fn write(&self, piece: Bytes) -> bool {
        let bytes = &self.layers.first_sight_bytes;
        bytes.fetch_add(piece.len() as u64, Ordering::Relaxed);
        self.pieces.send(piece).await.is_ok()
    }

    /// Waits until the layer is verified and in its place.
    pub(crate) async fn finish(self) -> Result<(), NotConverted> {
        drop(self.pieces);
        let done = self.work.await;
        done.map_err(|error| NotConverted::Host(error.to_string()))?
    }
}

fn run(
    layers: &Layers,
    order: Order,
    mut pieces: mpsc::Receiver<Bytes>,
) -> Result<(), NotConverted> {
    let folder = layers.store.cache().folder(order.layer);
    let draft = layers.root.join(format!("{DRAFT}{}", uuid::Uuid::new_v4()));
    let (conversion, mut input) = convert::Conversion::start(&layers.filler, order, draft)?;
    while let Some(piece) = pieces.blocking_recv() {
        // The converter knows why it takes no more.
        if input.write_all(&piece).is_err() {
            break;
        }
    }
    drop((input, pieces));
    let converted = conversion.finish()?;
    let published = converted.publish(&folder);
    published.map_err(|error| NotConverted::Host(format!("cannot keep the layer: {error}")))
}
