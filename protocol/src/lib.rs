//! Wire protocol between a virtual node and its hosts, and how both ends know
//! each other. vnode and runtime-shim meet only in this crate.
//!
//! * [`v1`]: the generated gRPC types of `sandman.host.v1`.
//! * [`access`]: which parts of a host pods may reach, as both ends' configurations say it.
//! * [`identity`]: the role names carried in fleet certificates.
//! * [`transport`]: mutual TLS that checks those names, for both ends.

pub mod access;
mod handshakes;
pub mod identity;
pub mod transport;
mod verify;

/// Generated types of `sandman.host.v1`; documented in `proto/sandman/host/v1/host.proto`.
#[allow(missing_docs, unreachable_pub, clippy::large_enum_variant)]
pub mod v1 {
    tonic::include_proto!("sandman.host.v1");
}

/// Newest [`v1::SandboxSpec::schema`] that this build knows.
pub const SCHEMA: u32 = 4;

/// Largest gRPC message either end accepts, in bytes. An Apply may carry
/// several configMaps and secrets, each of up to 1 MiB.
pub const MAX_MESSAGE_BYTES: usize = 32 << 20;
