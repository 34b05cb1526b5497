//! Writes EROFS metadata for a tar archive.
//!
//! The image holds names, inodes, link targets and extended attributes. File data stays where it
//! is, in the archive, which is mounted as the image's external device: each file is one chunk that
//! starts at its place there. Both are in blocks of 512 bytes, the archive's own.
//!
//! The tree ([`tree`]) is what a runtime would unpack for overlayfs: whiteouts are character devices
//! 0/0, opaque directories have `trusted.overlay.opaque`. The same archive always gives the same
//! bytes.

mod format;
mod layout;
mod path;
mod tree;
mod write;
mod xattr;

pub use self::{tree::Tree, write::Image};

/// What cannot be said in EROFS, or not be said safely. Such a layer is left to containerd.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("entry {path:?}: {what}, which is not supported")]
pub struct TreeError {
    path: String,
    what: &'static str,
}

impl TreeError {
    fn new(path: &[u8], what: &'static str) -> Self {
        let shown = &path[..path.len().min(200)];
        Self {
            path: String::from_utf8_lossy(shown).into_owned(),
            what,
        }
    }
}

#[cfg(test)]
mod tests;
