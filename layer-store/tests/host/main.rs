//! What only the kernel can tell: that it reads our images, and that the converter is confined.
//!
//! These need root, and a kernel that mounts EROFS from a file (6.12 or newer).

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod convert;
mod erofs;
mod support;
