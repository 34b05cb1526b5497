//! The holder: parent of everything a shim starts, and memory for what a killed shim would lose.

pub mod protocol;
