//! Names of files in the folder of a layer store.
//!
//! ```text
//! <root>/keeper.lock                one keeper a root
//! <root>/<hex digest>/blob          the tar archive, sparse until the layer is complete
//! <root>/<hex digest>/meta.erofs    EROFS metadata that refers to the blob
//! <root>/<hex digest>/index         where spans are, and their digests
//! <root>/<hex digest>/filled        which spans the blob holds; valid within one boot
//! <root>/<hex digest>/sealed        the blob is complete, verified and on disk
//! <root>/<hex digest>/pinned        never evicted
//! ```

use crate::LayerDigest;

/// Held locked by the keeper.
pub const KEEPER_LOCK: &str = "keeper.lock";
/// The tar archive.
pub const BLOB: &str = "blob";
/// EROFS metadata.
pub const META: &str = "meta.erofs";
/// The layer's index.
pub const INDEX: &str = "index";
/// Which spans the blob holds.
pub const FILLED: &str = "filled";
/// Says that the blob is complete.
pub const SEALED: &str = "sealed";
/// Says that the layer stays.
pub const PINNED: &str = "pinned";

/// Name of a layer's folder.
#[must_use]
pub fn folder_name(layer: LayerDigest) -> String {
    hex::encode(layer.0)
}

/// The layer whose folder has this name.
#[must_use]
pub fn layer_of(name: &str) -> Option<LayerDigest> {
    let lower = name
        .bytes()
        .all(|b| b.is_ascii_digit() || b.is_ascii_lowercase());
    let mut digest = [0; 32];
    hex::decode_to_slice(name, &mut digest).ok()?;
    lower.then_some(LayerDigest(digest))
}
