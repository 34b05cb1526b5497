//! The server as a whole, in this process: real TLS, HTTP and gRPC on loopback,
//! with small stand-ins for the pod store, the API server's reviews and a host.

mod access;
mod cluster;
mod execs;
mod forwards;
mod host;
mod observing;
mod pki;
mod server;
mod streams;

use std::time::Duration;

/// Deadline of everything that is waited for.
const SOON: Duration = Duration::from_secs(20);
