//! What metrics say of a source.

use std::sync::atomic::{AtomicU64, Ordering};

/// Causes of failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// No connection, or one that broke off.
    Unreachable,
    /// Too long without a byte.
    Slow,
    /// 401 or 403 that a new credential did not help against.
    Denied,
    /// 404.
    Missing,
    /// 429 or 503.
    Busy,
    /// Another range, another length, another status.
    Wrong,
    /// Bytes that do not decode to what the index says.
    Corrupt,
}

impl Fault {
    /// All of them.
    pub const ALL: [Self; 7] = [
        Self::Unreachable,
        Self::Slow,
        Self::Denied,
        Self::Missing,
        Self::Busy,
        Self::Wrong,
        Self::Corrupt,
    ];

    /// The label of the metric.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Unreachable => "unreachable",
            Self::Slow => "slow",
            Self::Denied => "denied",
            Self::Missing => "missing",
            Self::Busy => "busy",
            Self::Wrong => "wrong",
            Self::Corrupt => "corrupt",
        }
    }
}

/// Counts since the source was made.
#[derive(Debug, Default)]
pub struct Counters {
    bytes: AtomicU64,
    requests: AtomicU64,
    faults: [AtomicU64; Fault::ALL.len()],
}

impl Counters {
    /// Bytes of blobs that arrived, good or not.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Requests that were sent, also those for another address or with another token.
    #[must_use]
    pub fn requests(&self) -> u64 {
        self.requests.load(Ordering::Relaxed)
    }

    /// Failures of one cause.
    #[must_use]
    pub fn faults(&self, fault: Fault) -> u64 {
        self.faults[fault as usize].load(Ordering::Relaxed)
    }

    pub(super) fn arrived(&self, bytes: usize) {
        self.bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    pub(super) fn asked(&self) {
        self.requests.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn failed(&self, fault: Fault) {
        self.faults[fault as usize].fetch_add(1, Ordering::Relaxed);
    }
}
