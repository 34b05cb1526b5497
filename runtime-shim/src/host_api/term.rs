//! The highest leader term obeyed, which keeps a deposed leader from changing anything.

use std::sync::{Mutex, PoisonError};

use tokio::sync::watch;
use tonic::Status;

use crate::sandbox::store::Store;

/// Remembers the highest term, durably.
#[derive(Debug)]
pub struct Term {
    store: Store,
    write: Mutex<()>,
    highest: watch::Sender<u64>,
}

impl Term {
    /// Starts from the record.
    ///
    /// # Errors
    /// The record cannot be read.
    pub fn load(store: Store) -> std::io::Result<Self> {
        let highest = watch::Sender::new(store.term()?);
        Ok(Self {
            store,
            write: Mutex::new(()),
            highest,
        })
    }

    /// The highest term so far.
    #[must_use]
    pub fn highest(&self) -> u64 {
        *self.highest.borrow()
    }

    /// Follows the highest term.
    #[must_use]
    pub fn follow(&self) -> watch::Receiver<u64> {
        self.highest.subscribe()
    }

    /// Accepts a request of `term`, or refuses it as outdated.
    ///
    /// # Errors
    /// `ABORTED` for a lower term; `UNAVAILABLE` when a new one cannot be written down.
    pub fn check(&self, term: u64) -> Result<(), Status> {
        let _order = self.write.lock().unwrap_or_else(PoisonError::into_inner);
        let highest = self.highest();
        if term < highest {
            return Err(Status::aborted(format!(
                "term {term} is over: this host obeys term {highest}"
            )));
        }
        if term > highest {
            self.store
                .write_term(term)
                .map_err(|error| Status::unavailable(format!("cannot write the term: {error}")))?;
            self.highest.send_replace(term);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn terms_only_grow() {
        let dir = tempfile::tempdir().unwrap();
        let term = Term::load(Store::open(dir.path()).unwrap()).unwrap();
        assert!(term.check(3).is_ok() && term.check(3).is_ok());
        assert_eq!(term.check(2).unwrap_err().code(), tonic::Code::Aborted);
        assert!(term.check(4).is_ok());
        let again = Term::load(Store::open(dir.path()).unwrap()).unwrap();
        assert_eq!(again.highest(), 4);
    }
}
