//! Messages on stderr and the exit code that they add up to.

use std::collections::BTreeSet;
use std::fmt::Display;

use crate::complain;
use crate::tar::EXIT_FAILURE;

/// GNU tar's exit code for files that changed while they were read.
const EXIT_DIFFERS: u8 = 1;

/// Collects what went wrong in one run.
#[derive(Debug, Default)]
pub(super) struct Diagnostics {
    exit_code: u8,
    said: BTreeSet<String>,
}

impl Diagnostics {
    /// Says something that does not make the run a failure.
    pub(super) fn note(&mut self, message: impl Display) {
        complain(format_args!("tar: {message}"));
    }

    /// Like [`Self::note`], but each text only once.
    pub(super) fn note_once(&mut self, message: String) {
        if !self.said.contains(&message) {
            self.note(&message);
            self.said.insert(message);
        }
    }

    /// Says that the archive is whole but not what was asked for.
    pub(super) fn differ(&mut self, message: impl Display) {
        self.note(message);
        self.exit_code = self.exit_code.max(EXIT_DIFFERS);
    }

    /// Says that something was left out.
    pub(super) fn fail(&mut self, message: impl Display) {
        self.note(message);
        self.exit_code = EXIT_FAILURE;
    }

    /// Whether anything failed so far.
    pub(super) fn failed(&self) -> bool {
        self.exit_code == EXIT_FAILURE
    }

    /// The exit code of the run.
    pub(super) fn exit_code(&self) -> u8 {
        self.exit_code
    }
}
