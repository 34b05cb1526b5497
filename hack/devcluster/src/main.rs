//! The dev cluster: a real control plane, registry, virtual node and hosts in network namespaces.
fn main() {}
