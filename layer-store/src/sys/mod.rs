//! System calls that no safe crate offers. The only `unsafe` code of the keeper's side.

pub(crate) mod fanotify;
