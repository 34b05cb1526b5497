//! Tests that kill parts of the cluster. They run alone, one after the other
//! (`--test-threads=1`), and put back what they killed.

mod burst;
mod fleet;
mod host;
mod identity;
mod registry;
mod runtime_shim;
mod services;
mod takeover;
mod vnode;
