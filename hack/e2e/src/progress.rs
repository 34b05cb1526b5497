//! What a person sees meanwhile: one line a step, with the seconds since the command began.

use std::time::Instant;

/// Prints steps to standard error.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Progress {
    begun: Instant,
}

impl Progress {
    /// Starts the clock.
    pub(crate) fn start() -> Self {
        Self {
            begun: Instant::now(),
        }
    }

    /// Prints one line.
    pub(crate) fn say(&self, text: impl std::fmt::Display) {
        eprintln!("[{:6.1}s] {text}", self.begun.elapsed().as_secs_f64());
    }
}
