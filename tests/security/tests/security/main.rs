//! A hostile sandbox: root inside, with the default rights of a container, attacks what is around it.
//!
//! Run on a dev cluster of either runtime (`hack/dev up`, then `eval "$(hack/dev env)"`):
//! `cargo test -p sandman-security-tests -- --ignored`
//!
//! An attack is a script that ends with 0 if it succeeded. Each one is harmless when it does, so
//! that it can be seen to succeed: run it as root of a machine, outside of any container.

#![allow(clippy::unwrap_used)] // helpers of tests may panic like tests

mod attack;
mod bombs;
mod files;
mod neighbours;
mod syscalls;
