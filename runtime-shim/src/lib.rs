//! Host service of Sandman: makes the sandboxes of one host true through containerd.
//!
//! A virtual node states desire over gRPC; one task a sandbox compares it with what containerd
//! holds and acts. Nothing that runs in a sandbox depends on this process being alive.

pub mod agent;
pub mod cache_commands;
pub mod config;
pub mod eviction;
pub mod handler;
pub mod host_api;
pub mod images;
pub mod layers;
pub mod limits;
pub mod logs;
mod machine;
pub mod metrics;
pub mod network;
pub mod rootfs;
pub mod runtime;
pub mod sandbox;
pub mod server;
pub mod spec;
pub mod stats;
pub mod users;
pub mod volumes;
