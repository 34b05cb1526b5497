//! The cases, by theme.

pub(crate) mod errors;
pub(crate) mod execs;
pub(crate) mod filesystem;
pub(crate) mod identity;
pub(crate) mod kernel;
pub(crate) mod lifecycle;
pub(crate) mod resources;
pub(crate) mod streams;
pub(crate) mod survival;
