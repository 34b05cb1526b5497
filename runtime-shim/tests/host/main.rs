//! The service on a real host: containerd, runc, the agent and runtime-shim as they are, without a
//! cluster. One target, for each one more is linked again.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod exec;
mod faults;
mod health;
mod limits;
mod sandbox;
mod streams;
mod support;
