//! Writing a sandbox's facts down, until they are.
//!
//! Some of what is done destroys what a fact was learnt from: the runtime forgets an exit when its
//! task is deleted. Such things wait while the record lags behind.

use jiff::{SignedDuration, Timestamp};
use tracing::warn;

use crate::sandbox::facts::Facts;
use crate::sandbox::store::Store;

/// Between two tries to write.
const RETRY: SignedDuration = SignedDuration::from_secs(1);

/// How far the record of one sandbox is.
#[derive(Debug, Default)]
pub(super) struct Journal {
    retry_at: Option<Timestamp>,
}

impl Journal {
    /// Writes the facts, or notes that they are still to be written.
    pub(super) fn write(&mut self, store: &Store, uid: &str, facts: &Facts, now: Timestamp) {
        self.retry_at = match store.write_facts(uid, facts) {
            Ok(()) => None,
            Err(error) => {
                if self.is_current() {
                    warn!(pod_uid = uid, %error, "cannot write the record of the sandbox");
                }
                Some(now.saturating_add(RETRY).unwrap_or(now))
            }
        };
    }

    /// Whether the record holds all facts.
    pub(super) fn is_current(&self) -> bool {
        self.retry_at.is_none()
    }

    /// When to write again.
    pub(super) fn retry_at(&self) -> Option<Timestamp> {
        self.retry_at
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_could_not_be_written_is_still_to_be_written() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path()).unwrap();
        let (facts, now) = (Facts::default(), Timestamp::UNIX_EPOCH);
        let mut journal = Journal::default();
        // A file where the sandbox's folder should be.
        let folder = dir.path().join("sandboxes").join("u");
        std::fs::write(&folder, "").unwrap();
        journal.write(&store, "u", &facts, now);
        assert!(!journal.is_current());
        assert_eq!(journal.retry_at(), Some(now + RETRY));
        std::fs::remove_file(&folder).unwrap();
        journal.write(&store, "u", &facts, now + RETRY);
        assert!(journal.is_current() && journal.retry_at().is_none());
        assert!(folder.join("facts").exists());
    }
}
