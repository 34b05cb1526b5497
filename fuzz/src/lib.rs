//! Feeds what strangers send to the code that reads it.
//!
//! Each target takes any bytes and must neither panic nor break its own promises; it answers with a
//! number for the way that it took, so that [`engine`] keeps inputs that lead somewhere new. The
//! corpus is in `corpus/`, replayed by an ordinary test; `sandman-fuzz TARGET` looks for more.

pub mod engine;
mod logs;
mod pod;
mod spdy;
mod websocket;

use std::hash::{DefaultHasher, Hash, Hasher as _};

/// Code under test: takes any bytes, answers with the way that it took.
pub type Run = fn(&[u8]) -> u64;

/// One target.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    /// Its name, and that of its corpus.
    pub name: &'static str,
    /// Runs it once. Panics if it finds something.
    pub run: Run,
    /// Pieces that mean something in its inputs.
    pub words: &'static [&'static [u8]],
}

/// All targets.
pub const TARGETS: [Target; 4] = [
    Target {
        name: "spdy",
        run: spdy::run,
        words: spdy::WORDS,
    },
    Target {
        name: "websocket",
        run: websocket::run,
        words: websocket::WORDS,
    },
    Target {
        name: "logs",
        run: logs::run,
        words: logs::WORDS,
    },
    Target {
        name: "pod",
        run: pod::run,
        words: pod::WORDS,
    },
];

/// A number for a way through the code.
fn way(steps: &impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    steps.hash(&mut hasher);
    hasher.finish()
}

/// Cuts an input as a network would: the first byte says how.
fn pieces(input: &[u8]) -> (&[u8], usize) {
    match input.split_first() {
        Some((size, rest)) => (rest, usize::from(*size).max(1)),
        None => (input, 1),
    }
}
