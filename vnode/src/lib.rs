//! Virtual node: registers with a cluster as one node, places the pods bound to
//! it on Sandman hosts, and serves the kubelet API for them.
//!
//! * [`node`]: the Node object, its lease and its serving certificate.
//! * [`election`]: which of several replicas is the node.
//! * [`pods`]: what should be true of each pod, and what is.
//! * [`cluster_network`]: the Services that hosts' sandboxes reach.
//! * [`hosts`]: connections to the hosts, what they have and what they report.
//! * [`kubelet_api`]: exec, logs and the other calls the API server makes.

pub mod backoff;
pub mod cluster_network;
pub mod config;
pub mod election;
mod errors;
pub mod events;
pub mod hosts;
pub mod kubelet_api;
pub mod metrics;
pub mod node;
pub mod pods;
pub mod quantity;
pub mod queue;
mod run;
pub mod strategic;
pub mod view;

pub use self::run::run;
