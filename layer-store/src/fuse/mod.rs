//! Layers' bytes as files of a FUSE file system, for hosts whose kernel has no pre-content events.
//!
//! One connection a host, one file a watched layer, named by the hex digits of its digest. EROFS
//! takes that file for the layer's device, so each read of bytes that EROFS does not have becomes a
//! `FUSE_READ`: the same question that fanotify asks, answered by the same filler. The answer
//! carries the bytes, read from the blob that the filler wrote.
//!
//! Unlike fanotify this fails **closed**: with the last descriptor of the connection gone, every
//! read ends with an error. What a keeper that was killed had taken is asked again
//! (`FUSE_NOTIFY_RESEND`, Linux 6.9), so no journal is needed.
//!
//! The file system is mounted nowhere: only who has its descriptor can open a file of it. Its
//! answers are never shorter than asked, but for the end of the file: EROFS shows zeros for what is
//! missing in a short one.
//!
//! [`wire`] reads and writes the kernel's messages, [`Connection`] moves them, [`Files`] knows the
//! layers, [`Service`] ties them together.

mod connection;
mod files;
mod service;
mod wire;

pub(crate) use self::connection::Connection;
use self::files::Files;
pub(crate) use self::service::{Service, Step};
