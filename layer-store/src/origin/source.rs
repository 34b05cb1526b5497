//! One address of a blob, asked over HTTP.

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use http::header::{AUTHORIZATION, RANGE};
use reqwest::{Client, Response, Url};

use super::answer::{self, Answer};
use super::counters::{Counters, Fault};
use super::rest::Rest;
use super::{Authorize, Fetched, OriginError, chain};

/// Redirects, new tokens and new addresses within one read.
const MAX_STEPS: usize = 8;

/// How long a source may keep us waiting.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    /// Until the head of an answer.
    pub answer: Duration,
    /// Between two parts of its body.
    pub silence: Duration,
}

impl Default for Patience {
    fn default() -> Self {
        Self {
            answer: Duration::from_secs(10),
            silence: Duration::from_secs(5),
        }
    }
}

/// A blob at one registry or mirror.
pub struct Source {
    client: Client,
    blob: Url,
    size: u64,
    authorize: Arc<dyn Authorize>,
    patience: Patience,
    /// Where the registry sent us. Such addresses are signed and expire; a refusal there means that
    /// the registry must be asked again, not that we may not read.
    elsewhere: Mutex<Option<Url>>,
    rest: Mutex<Rest>,
    counters: Arc<Counters>,
}

impl std::fmt::Debug for Source {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Source")
            .field("name", &self.name())
            .finish_non_exhaustive()
    }
}

impl Source {
    /// A blob of `size` bytes at `blob`. The client must not follow redirects by itself: it would
    /// ask the registry anew for each range.
    #[must_use]
    pub fn new(
        client: Client,
        blob: Url,
        size: u64,
        authorize: Arc<dyn Authorize>,
        patience: Patience,
    ) -> Self {
        Self {
            client,
            blob,
            size,
            authorize,
            patience,
            elsewhere: Mutex::default(),
            rest: Mutex::default(),
            counters: Arc::default(),
        }
    }

    /// Counts together with others.
    #[must_use]
    pub fn counted_by(self, counters: Arc<Counters>) -> Self {
        Self { counters, ..self }
    }

    /// Host and port, for messages.
    #[must_use]
    pub fn name(&self) -> String {
        let host = self.blob.host_str().unwrap_or_default();
        self.blob
            .port()
            .map_or_else(|| host.to_owned(), |port| format!("{host}:{port}"))
    }

    /// Counts for metrics.
    #[must_use]
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Reads one range.
    ///
    /// # Errors
    /// Why it did not come. The source then rests for a while.
    pub async fn read(&self, range: Range<u64>) -> Result<Fetched, OriginError> {
        let read = self.try_read(&range).await;
        match &read {
            Ok(_) => lock(&self.rest).delivered(),
            Err(error) => self.failed(error),
        }
        read
    }

    fn failed(&self, error: &OriginError) {
        self.counters.failed(error.fault());
        let asked = match error {
            OriginError::Busy { pause, .. } => Some(*pause),
            _ => None,
        };
        lock(&self.rest).failed(Instant::now(), asked);
    }

    /// What it sent was not what the index promises. Others are asked first for a while.
    pub fn was_corrupt(&self) {
        self.counters.failed(Fault::Corrupt);
        lock(&self.rest).failed(Instant::now(), None);
    }

    pub(super) fn rests_until(&self, now: Instant) -> Option<Instant> {
        lock(&self.rest).until(now)
    }

    async fn try_read(&self, range: &Range<u64>) -> Result<Fetched, OriginError> {
        let mut renewed = false;
        for _ in 0..MAX_STEPS {
            let elsewhere = lock(&self.elsewhere).clone();
            let away = elsewhere.is_some();
            let url = elsewhere.unwrap_or_else(|| self.blob.clone());
            // A credential is for the registry, never for where it sends us.
            let shown = match away {
                true => None,
                false => self.authorize.header().await,
            };
            let mut request = self.client.get(url.clone()).header(
                RANGE,
                format!("bytes={}-{}", range.start, range.end.saturating_sub(1)),
            );
            if let Some(shown) = &shown {
                request = request.header(AUTHORIZATION, shown.clone());
            }
            self.counters.asked();
            let response = self.within(self.patience.answer, request.send()).await?;
            match answer::judge(response.status(), response.headers(), range, self.size) {
                Answer::Range => return self.body(response, range).await.map(Fetched::Range),
                Answer::Whole => return Ok(Fetched::Whole(self.whole(response))),
                Answer::Elsewhere(location) => self.follow(&url, &location)?,
                Answer::Refused | Answer::Missing if away => *lock(&self.elsewhere) = None,
                Answer::Refused if !renewed => {
                    renewed = true;
                    let status = response.status();
                    let headers = response.headers().clone();
                    drop(response);
                    match self.authorize.refused(shown.as_ref(), &headers).await {
                        Ok(true) => {}
                        Ok(false) => return Err(self.denied(status.to_string())),
                        Err(why) => return Err(self.denied(why)),
                    }
                }
                Answer::Refused => return Err(self.denied(response.status().to_string())),
                Answer::Missing => {
                    return Err(OriginError::Missing {
                        source_name: self.name(),
                    });
                }
                Answer::Busy(pause) => {
                    return Err(OriginError::Busy {
                        source_name: self.name(),
                        pause,
                    });
                }
                Answer::Wrong(what) => {
                    // A signed address may answer anything once it is too old.
                    if !away {
                        return Err(self.wrong(what));
                    }
                    *lock(&self.elsewhere) = None;
                }
            }
        }
        Err(self.wrong("it sends us from one address to the next".to_owned()))
    }

    fn follow(&self, from: &Url, location: &str) -> Result<(), OriginError> {
        let to = from.join(location);
        let to = to.map_err(|error| self.wrong(format!("it redirects to no address: {error}")))?;
        if from.scheme() == "https" && to.scheme() != "https" {
            return Err(self.wrong("it redirects from https to less".to_owned()));
        }
        *lock(&self.elsewhere) = Some(to);
        Ok(())
    }

    /// The body of a part, exactly as long as the range.
    async fn body(
        &self,
        mut response: Response,
        range: &Range<u64>,
    ) -> Result<Vec<u8>, OriginError> {
        let wanted = usize::try_from(range.end - range.start)
            .map_err(|_| self.wrong("the range does not fit into memory".to_owned()))?;
        let mut body = Vec::with_capacity(wanted);
        while let Some(part) = self.within(self.patience.silence, response.chunk()).await? {
            self.counters.arrived(part.len());
            if body.len() + part.len() > wanted {
                return Err(self.wrong("it sends more than it announced".to_owned()));
            }
            body.extend_from_slice(&part);
        }
        if body.len() < wanted {
            return Err(self.wrong(format!("it sends {} of {wanted} bytes", body.len())));
        }
        Ok(body)
    }

    fn whole(&self, response: Response) -> WholeBlob {
        WholeBlob {
            response,
            left: self.size,
        }
    }

    async fn within<T>(
        &self,
        silence: Duration,
        what: impl Future<Output = reqwest::Result<T>>,
    ) -> Result<T, OriginError> {
        match tokio::time::timeout(silence, what).await {
            Ok(Ok(done)) => Ok(done),
            // Signed addresses are secrets for as long as they last.
            Ok(Err(error)) => Err(OriginError::Unreachable {
                source_name: self.name(),
                why: chain(&error.without_url()),
            }),
            Err(_) => Err(OriginError::Slow {
                source_name: self.name(),
                silence,
            }),
        }
    }

    /// The next part of a whole blob; none at its end.
    ///
    /// # Errors
    /// It broke off, or is longer than the blob. The source then rests for a while.
    pub async fn next(&self, whole: &mut WholeBlob) -> Result<Option<bytes::Bytes>, OriginError> {
        let next = self.try_next(whole).await;
        if let Err(error) = &next {
            self.failed(error);
        }
        next
    }

    async fn try_next(&self, whole: &mut WholeBlob) -> Result<Option<bytes::Bytes>, OriginError> {
        let part = self
            .within(self.patience.silence, whole.response.chunk())
            .await?;
        let Some(part) = part else {
            return match whole.left {
                0 => Ok(None),
                left => Err(self.wrong(format!("it ends {left} bytes before the blob does"))),
            };
        };
        self.counters.arrived(part.len());
        whole.left = whole
            .left
            .checked_sub(part.len() as u64)
            .ok_or_else(|| self.wrong("it sends more than the blob".to_owned()))?;
        Ok(Some(part))
    }

    fn denied(&self, why: String) -> OriginError {
        OriginError::Denied {
            source_name: self.name(),
            why,
        }
    }

    fn wrong(&self, what: String) -> OriginError {
        OriginError::Wrong {
            source_name: self.name(),
            what,
        }
    }
}

/// A blob that comes from its beginning, part by part: see [`Source::next`].
#[derive(Debug)]
pub struct WholeBlob {
    response: Response,
    left: u64,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
