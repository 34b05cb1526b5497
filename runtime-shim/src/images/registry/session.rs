//! One repository, read with one credential: manifests and blobs, mirrors first.

use bytes::Bytes;
use http::header::{CONTENT_RANGE, CONTENT_TYPE};
use http::{Method, StatusCode};
use reqwest::Response;

use super::endpoint::{Endpoint, read_all};
use crate::images::error::{PullError, chain};
use crate::images::manifest;
use crate::images::reference::Selector;

/// One repository at its registry and its mirrors.
pub(in crate::images) struct Session {
    endpoints: Vec<Endpoint>,
    repository: String,
}

/// A manifest as the registry sent it, verified by digest.
#[derive(Debug)]
pub(in crate::images) struct RawManifest {
    pub(in crate::images) bytes: Bytes,
    pub(in crate::images) digest: String,
    pub(in crate::images) media_type: String,
}

impl Session {
    /// `endpoints` in the order to ask them; the last is the registry itself.
    pub(super) fn new(endpoints: Vec<Endpoint>, repository: &str) -> Self {
        Self {
            endpoints,
            repository: repository.to_owned(),
        }
    }

    /// The digest behind a tag, if the registry tells it without the manifest.
    pub(in crate::images) async fn head_manifest(
        &self,
        selector: &Selector,
    ) -> Result<Option<String>, PullError> {
        let path = format!("manifests/{}", selector.as_str());
        self.first(|endpoint| {
            let path = &path;
            async move {
                let response = endpoint
                    .send(&self.repository, Method::HEAD, path, None)
                    .await?;
                let digest = response.headers().get("docker-content-digest");
                let digest = digest
                    .and_then(|value| value.to_str().ok())
                    .map(str::to_owned);
                Ok(digest.filter(|digest| manifest::is_sha256(digest)))
            }
        })
        .await
    }

    /// A manifest or index.
    pub(in crate::images) async fn manifest(
        &self,
        selector: &Selector,
    ) -> Result<RawManifest, PullError> {
        let path = format!("manifests/{}", selector.as_str());
        self.first(|endpoint| {
            let path = &path;
            async move {
                let response = endpoint
                    .send(&self.repository, Method::GET, path, None)
                    .await?;
                let media_type = response.headers().get(CONTENT_TYPE);
                let media_type = media_type
                    .and_then(|value| value.to_str().ok())
                    .unwrap_or_default();
                let media_type = media_type
                    .split(';')
                    .next()
                    .unwrap_or_default()
                    .trim()
                    .to_owned();
                let bytes = read_all(response, manifest::MAX_MANIFEST_BYTES, "manifest").await?;
                let digest = manifest::digest(&bytes);
                if let Selector::Digest(expected) = selector
                    && *expected != digest
                {
                    return Err(PullError::Malformed(format!(
                        "the registry sent a manifest of digest {digest} for {expected}"
                    )));
                }
                Ok(RawManifest {
                    bytes,
                    digest,
                    media_type,
                })
            }
        })
        .await
    }

    /// Whether this repository holds a blob, by the session's credential.
    pub(in crate::images) async fn head_blob(&self, digest: &str) -> Result<(), PullError> {
        let path = format!("blobs/{digest}");
        self.first(|endpoint| {
            let path = &path;
            async move {
                endpoint
                    .send(&self.repository, Method::HEAD, path, None)
                    .await
                    .map(|_response| ())
            }
        })
        .await
    }

    /// Opens a blob from `offset` on. The bytes are not verified here.
    pub(in crate::images) async fn blob(
        &self,
        digest: &str,
        offset: u64,
    ) -> Result<BlobStream, PullError> {
        let path = format!("blobs/{digest}");
        self.first(|endpoint| {
            let path = &path;
            async move {
                let range = (offset > 0).then_some(offset);
                let response = endpoint
                    .send(&self.repository, Method::GET, path, range)
                    .await?;
                // Registries may ignore a range and send everything.
                let skip = if starts_at(&response, offset) {
                    0
                } else {
                    offset
                };
                let registry = endpoint.host();
                Ok(BlobStream {
                    response,
                    skip,
                    registry,
                })
            }
        })
        .await
    }

    /// Asks mirrors, then the registry, whose answer counts if all fail.
    async fn first<'a, T, F>(&'a self, ask: impl Fn(&'a Endpoint) -> F) -> Result<T, PullError>
    where
        F: Future<Output = Result<T, PullError>>,
    {
        let Some((origin, mirrors)) = self.endpoints.split_last() else {
            return Err(PullError::Malformed("no registry address".to_owned()));
        };
        for mirror in mirrors {
            match ask(mirror).await {
                Ok(answer) => return Ok(answer),
                Err(error) => tracing::debug!(mirror = mirror.host(), %error, "mirror failed"),
            }
        }
        ask(origin).await
    }
}

fn starts_at(response: &Response, offset: u64) -> bool {
    if response.status() != StatusCode::PARTIAL_CONTENT {
        return offset == 0;
    }
    let range = response
        .headers()
        .get(CONTENT_RANGE)
        .and_then(|value| value.to_str().ok());
    let start = range.and_then(|text| text.strip_prefix("bytes ")?.split('-').next()?.parse().ok());
    start == Some(offset)
}

/// A blob as it arrives.
pub(in crate::images) struct BlobStream {
    response: Response,
    skip: u64,
    registry: String,
}

impl BlobStream {
    /// The next bytes, `None` at the end.
    pub(in crate::images) async fn chunk(&mut self) -> Result<Option<Bytes>, PullError> {
        loop {
            let chunk = self
                .response
                .chunk()
                .await
                .map_err(|error| PullError::Unreachable {
                    registry: self.registry.clone(),
                    why: chain(&error.without_url()),
                })?;
            let Some(mut chunk) = chunk else {
                return Ok(None);
            };
            let skipped = usize::try_from(self.skip)
                .unwrap_or(usize::MAX)
                .min(chunk.len());
            self.skip -= skipped as u64;
            let chunk = chunk.split_off(skipped);
            if !chunk.is_empty() {
                return Ok(Some(chunk));
            }
        }
    }
}
