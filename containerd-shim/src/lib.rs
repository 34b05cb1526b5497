//! Grouped containerd shim: one process serves the task API of many sandboxes.
//!
//! Three kinds of process, so that no death loses more than it must:
//!
//! | process | does | its death |
//! |---|---|---|
//! | shim | containerd's task API, OCI specs, mounts, cgroups | the next one takes everything back from the holder |
//! | holder | is the parent of sandboxes, keeps their descriptors and exit statuses | ends its sandboxes |
//! | zygote | clones sandboxes from an almost empty process | the holder makes another |

pub mod cli;
mod events;
pub mod holder;
pub mod launch;
mod runc;
mod stats;
mod stdio;
pub mod sys;
mod task;
pub mod wire;
pub mod zygote;
