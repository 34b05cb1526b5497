//! Real sandboxes, made by a real holder and zygote. Needs root and busybox-static:
//! `cargo test -p sandman-containerd-shim --test launch -- --ignored`.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod faults;
mod inside;
mod many;
mod support;
