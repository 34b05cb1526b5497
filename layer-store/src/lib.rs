//! Image layers as a host keeps them.
//!
//! A layer that was seen once in the fleet is described by an *index*: where in the compressed blob
//! a decoder can start, and a digest of what it finds there. With an index, a host mounts the
//! layer's EROFS metadata at once and fetches only the spans that are read, each verified before
//! anybody sees it. The first host to see a layer makes the index in one streaming pass.

pub mod cache;
pub mod chain;
pub mod convert;
pub mod digest;
pub mod erofs;
pub mod filler;
mod fuse;
pub mod gzip;
pub mod index;
pub mod keeper;
pub mod layout;
pub mod mount;
pub mod origin;
pub mod peers;
pub mod store;
mod sys;
pub mod tar;
#[cfg(test)]
mod testing;

pub use self::{
    digest::{DiffId, LayerDigest, SpanDigest},
    index::{Encoding, LayerIndex, Span},
};
