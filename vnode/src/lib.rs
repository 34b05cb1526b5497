//! Virtual node: registers with a cluster and runs its pods on Sandman hosts.
