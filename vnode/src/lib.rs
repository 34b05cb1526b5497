//! Virtual node: registers with a cluster as one node, places the pods bound to
//! it on Sandman hosts, and serves the kubelet API for them.

pub mod kubelet_api;
pub mod view;
