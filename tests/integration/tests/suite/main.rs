//! Tests that leave the cluster as they found it, run side by side.

mod admission;
mod attach;
mod cgroups;
mod copy;
mod deletion;
mod ephemeral;
mod eviction;
mod exec;
mod exec_streams;
mod hooks;
mod host_access;
mod images;
mod init_containers;
mod kubelet_api;
mod lifecycle;
mod logs;
mod network;
mod network_policy;
mod node_identity;
mod port_forward;
mod probes;
mod resize;
mod restart;
mod sharing;
mod transport;
mod volumes;
