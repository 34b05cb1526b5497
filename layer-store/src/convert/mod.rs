//! First sight of a layer: from the registry's blob to what a host mounts.
//!
//! One pass over the stream decodes it, writes the archive, builds the EROFS metadata and the
//! index, and computes both digests; nothing of it is used before both are right. The bytes are
//! hostile until then, so a process of its own works on them ([`child`]): without privileges,
//! without network, and with no system call but those that move bytes. [`Conversion`] is the
//! caller's end of it.
//!
//! A child that was taken over could lie about the layer that took it over. That gains it nothing:
//! results are kept under that layer's digest, and whoever runs that layer runs its author's code.

mod child;
mod confine;
mod frame;
mod parent;
mod pass;
mod zstd;

use serde::{Deserialize, Serialize};

use crate::digest::{DiffId, LayerDigest};

pub use self::{
    child::run as run_child,
    parent::{Conversion, Converted},
    pass::convert,
};

/// What is to be converted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Order {
    /// Digest of the blob, from the image's manifest.
    pub layer: LayerDigest,
    /// Digest of the archive, from the image's configuration.
    pub diff_id: DiffId,
    /// Bytes of the blob, from the image's manifest.
    pub size: u64,
    /// What is refused as too large.
    pub limits: Limits,
}

/// Bounds on what a blob may turn into.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limits {
    /// Bytes of the archive.
    pub tar_size: u64,
    /// Bytes of the archive for each byte of the blob, once it is beyond `ratio_from`.
    pub ratio: u64,
    /// Bytes of the archive up to which any ratio is no bomb: layers of zeros exist.
    pub ratio_from: u64,
    /// Files of the layer.
    pub entries: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            tar_size: 64 << 30,
            ratio: 200,
            ratio_from: 1 << 30,
            entries: 2_000_000,
        }
    }
}

/// Why a layer was not converted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum ConvertError {
    /// The bytes are not the blob that the manifest names: try again, or elsewhere.
    #[error("the blob of {layer} is not what came: {found}")]
    WrongBlob {
        /// What was asked for.
        layer: LayerDigest,
        /// What is wrong with what came.
        found: String,
    },
    /// The image's configuration does not belong to its layers. No source can help.
    #[error("layer {layer} unpacks to {found}, its image's configuration says {diff_id}")]
    WrongDiffId {
        /// The layer.
        layer: LayerDigest,
        /// What the configuration says.
        diff_id: DiffId,
        /// What the layer has.
        found: DiffId,
    },
    /// The blob is the right one, and no layer.
    #[error("layer {layer} cannot be unpacked: {what}")]
    Malformed {
        /// The layer.
        layer: LayerDigest,
        /// What is wrong.
        what: String,
    },
    /// The layer may be fine, but not for this store: leave it to containerd's own unpacker.
    #[error("layer {layer} is left to containerd: {what}")]
    Unsupported {
        /// The layer.
        layer: LayerDigest,
        /// What is not supported.
        what: String,
    },
    /// The layer is beyond [`Limits`].
    #[error("layer {layer} is too large: {what}")]
    TooLarge {
        /// The layer.
        layer: LayerDigest,
        /// Which limit it exceeds.
        what: String,
    },
    /// The process that worked on it died: of a fault in this program, or because the blob made it
    /// do what it may not.
    #[error("the converter of layer {layer} died: {how}")]
    Died {
        /// The layer.
        layer: LayerDigest,
        /// How.
        how: String,
    },
    /// This host could not do it: no space, no memory, no helper.
    #[error("cannot convert layer {layer}: {what}")]
    Host {
        /// The layer.
        layer: LayerDigest,
        /// What went wrong.
        what: String,
    },
}

#[cfg(test)]
mod tests;
