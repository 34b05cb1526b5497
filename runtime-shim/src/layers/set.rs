//! The layers that one image consists of.

use sandman_layer_store::LayerDigest;
use sandman_layer_store::cache::InUse;

/// The layers of an image, all of them in the store. None is removed while this lives.
#[derive(Debug)]
pub struct LayerSet {
    /// Where they came from, and what is missing of them still does.
    pub(crate) repository: String,
    /// Lowest first; at least one.
    pub(crate) layers: Vec<SetLayer>,
}

/// One of them.
#[derive(Debug)]
pub(crate) struct SetLayer {
    pub(crate) in_use: InUse,
    /// Bytes of the registry's blob.
    pub(crate) size: u64,
    pub(crate) implicit_directories: u32,
}

impl SetLayer {
    pub(crate) fn digest(&self) -> LayerDigest {
        self.in_use.layer()
    }
}

impl LayerSet {
    /// Whether a stack of these layers shows what unpacking them one over the other does. A layer
    /// that does not describe a directory of its own gives it a mode and an owner nevertheless,
    /// which would hide those of the layer below.
    pub(crate) fn is_faithful(layers: &[SetLayer]) -> bool {
        let above = layers.iter().skip(1);
        above
            .into_iter()
            .all(|layer| layer.implicit_directories == 0)
    }
}
