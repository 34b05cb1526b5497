//! The layer store of hosts, on a cluster of `hack/dev up --layers store`. Run alone, one after the
//! other: these kill parts of the cluster and empty the hosts' caches.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod equality;
mod expected;
mod faults;
mod host;
mod lazy;
mod odd;
