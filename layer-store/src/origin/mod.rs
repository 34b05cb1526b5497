//! Where the bytes of a layer come from: ranges of its blob, from registries and their mirrors.
//!
//! Nothing that arrives here is trusted. The caller verifies what it decodes, and says so when it
//! was wrong ([`Source::was_corrupt`]); until then a source is believed about nothing but lengths.

mod answer;
mod counters;
mod rest;
mod source;

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use http::HeaderMap;
use http::header::HeaderValue;

pub use self::{
    counters::{Counters, Fault},
    source::{Patience, Source, WholeBlob},
};

/// Proves to a registry that we may read.
#[async_trait]
pub trait Authorize: Send + Sync + 'static {
    /// What goes into `Authorization` at the moment.
    async fn header(&self) -> Option<HeaderValue>;

    /// The registry refused `used` with these headers, by 401 or, as ECR does when a token is too
    /// old, by 403. Whether there is something new to show.
    ///
    /// # Errors
    /// Why there is not, for the person who reads the event of the pod.
    async fn refused(
        &self,
        used: Option<&HeaderValue>,
        headers: &HeaderMap,
    ) -> Result<bool, String>;
}

/// Shows nothing.
#[derive(Clone, Copy, Debug)]
pub struct Anonymous;

#[async_trait]
impl Authorize for Anonymous {
    async fn header(&self) -> Option<HeaderValue> {
        None
    }

    async fn refused(&self, _: Option<&HeaderValue>, _: &HeaderMap) -> Result<bool, String> {
        Ok(false)
    }
}

/// Bytes of a blob.
#[derive(Debug)]
pub enum Fetched {
    /// Exactly the range that was asked for.
    Range(Vec<u8>),
    /// The source does not serve ranges and sends everything from the beginning.
    Whole(WholeBlob),
}

/// Why a source did not deliver.
#[derive(Debug, thiserror::Error)]
pub enum OriginError {
    /// No answer, or one that broke off.
    #[error("{source_name}: {why}")]
    Unreachable {
        /// Host of the source.
        source_name: String,
        /// What happened.
        why: String,
    },
    /// It took longer than [`Patience`] allows.
    #[error("{source_name}: silent for {silence:?}")]
    Slow {
        /// Host of the source.
        source_name: String,
        /// How long.
        silence: Duration,
    },
    /// The credential is not, or not any more, good enough.
    #[error("{source_name}: access denied: {why}")]
    Denied {
        /// Host of the source.
        source_name: String,
        /// In its words or ours.
        why: String,
    },
    /// It does not have the blob.
    #[error("{source_name}: it does not have the layer")]
    Missing {
        /// Host of the source.
        source_name: String,
    },
    /// It wants to be left alone for a while.
    #[error("{source_name}: asks to be left alone for {pause:?}")]
    Busy {
        /// Host of the source.
        source_name: String,
        /// How long.
        pause: Duration,
    },
    /// The answer is not what was asked for.
    #[error("{source_name}: {what}")]
    Wrong {
        /// Host of the source.
        source_name: String,
        /// What is wrong with it.
        what: String,
    },
}

impl OriginError {
    /// Under which cause it is counted.
    #[must_use]
    pub fn fault(&self) -> Fault {
        match self {
            Self::Unreachable { .. } => Fault::Unreachable,
            Self::Slow { .. } => Fault::Slow,
            Self::Denied { .. } => Fault::Denied,
            Self::Missing { .. } => Fault::Missing,
            Self::Busy { .. } => Fault::Busy,
            Self::Wrong { .. } => Fault::Wrong,
        }
    }
}

/// All sources of one layer, in order of preference.
#[derive(Debug)]
pub struct Origin {
    sources: Vec<Arc<Source>>,
}

impl Origin {
    /// The sources that are tried in this order, such as mirrors first.
    #[must_use]
    pub fn new(sources: Vec<Arc<Source>>) -> Self {
        Self { sources }
    }

    /// Sources that may be asked now. One that failed comes back after a pause that grows.
    #[must_use]
    pub fn ready(&self, now: Instant) -> Vec<Arc<Source>> {
        let ready = self
            .sources
            .iter()
            .filter(|source| source.rests_until(now).is_none());
        ready.cloned().collect()
    }

    /// When the next source may be asked, if none may now.
    #[must_use]
    pub fn next_ready(&self, now: Instant) -> Option<Instant> {
        self.sources
            .iter()
            .filter_map(|source| source.rests_until(now))
            .min()
    }

    /// All sources, for metrics.
    #[must_use]
    pub fn sources(&self) -> &[Arc<Source>] {
        &self.sources
    }
}

/// An error and what caused it, in one line.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !text.ends_with(&cause_text) {
            text += ": ";
            text += &cause_text;
        }
        source = cause.source();
    }
    text
}

impl From<OriginError> for io::Error {
    fn from(error: OriginError) -> Self {
        Self::other(error)
    }
}
