//! Real sandboxes, made by a real holder and zygote. Needs root and busybox-static:
//! `cargo test -p sandman-containerd-shim --test launch -- --ignored`.

mod faults;
mod inside;
mod many;
mod support;
