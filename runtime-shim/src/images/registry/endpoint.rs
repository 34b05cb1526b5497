//! One registry host: requests, the challenges it answers with, and its
//! refusals as errors.

use std::time::Duration;

use bytes::{Bytes, BytesMut};
use futures::StreamExt as _;
use http::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, RANGE, WWW_AUTHENTICATE};
use http::{HeaderMap, HeaderValue, Method, StatusCode};
use reqwest::{Client, Response, Url};
use tokio::sync::Mutex;

use super::challenge::Challenge;
use super::credential::Credential;
use crate::images::error::{PullError, chain};
use crate::images::manifest;

/// Whole of a manifest, token or HEAD request.
const SMALL_REQUEST_TIMEOUT: Duration = Duration::from_secs(60);
const MAX_TOKEN_BYTES: u64 = 1 << 20;
const MAX_ERROR_BYTES: u64 = 16 << 10;

/// A registry or a mirror, with at most one credential.
pub(super) struct Endpoint {
    client: Client,
    base: Url,
    credential: Option<Credential>,
    authorization: Mutex<Option<HeaderValue>>,
}

impl Endpoint {
    /// `base` is the address of the registry's API, up to and with `/v2/`.
    pub(super) fn new(client: Client, base: Url, credential: Option<Credential>) -> Self {
        Self {
            client,
            base,
            credential,
            authorization: Mutex::new(None),
        }
    }

    /// Whether this is the endpoint of that credential.
    pub(super) fn shows(&self, credential: Option<&Credential>) -> bool {
        self.credential.as_ref() == credential
    }

    /// Address of a blob.
    pub(super) fn blob_url(&self, repository: &str, digest: &str) -> Option<Url> {
        self.base.join(&format!("{repository}/blobs/{digest}")).ok()
    }

    /// Host and port, for messages.
    pub(super) fn host(&self) -> String {
        self.base.authority().to_owned()
    }

    /// Sends a request, meets a challenge once, and turns failures into errors.
    pub(super) async fn send(
        &self,
        repository: &str,
        method: Method,
        path: &str,
        range_from: Option<u64>,
    ) -> Result<Response, PullError> {
        let url = self
            .base
            .join(&format!("{repository}/{path}"))
            .map_err(|error| PullError::Malformed(format!("registry address: {error}")))?;
        let mut authorization = self.authorization.lock().await.clone();
        let mut challenged = false;
        loop {
            let mut request = self.client.request(method.clone(), url.clone());
            request = request.header(
                ACCEPT,
                if path.starts_with("blobs/") {
                    "*/*"
                } else {
                    manifest::ACCEPT
                },
            );
            if let Some(offset) = range_from {
                request = request.header(RANGE, format!("bytes={offset}-"));
            }
            if let Some(authorization) = &authorization {
                request = request.header(AUTHORIZATION, authorization.clone());
            }
            if !(method == Method::GET && path.starts_with("blobs/")) {
                request = request.timeout(SMALL_REQUEST_TIMEOUT);
            }
            let response = request
                .send()
                .await
                .map_err(|error| self.unreachable(error))?;
            // A second 401 is final. One after a token was used may be its expiry.
            if response.status() == StatusCode::UNAUTHORIZED
                && !challenged
                && let Some(fresh) = self.meet_challenge(response.headers(), repository).await?
            {
                challenged = true;
                *self.authorization.lock().await = Some(fresh.clone());
                authorization = Some(fresh);
                continue;
            }
            return self.judge(response, &method, repository, path).await;
        }
    }

    async fn judge(
        &self,
        response: Response,
        method: &Method,
        repository: &str,
        path: &str,
    ) -> Result<Response, PullError> {
        let status = response.status();
        if status.is_success() {
            return Ok(response);
        }
        let mut url = response.url().clone();
        url.set_query(None);
        let text = server_message(response).await;
        let or_status = |text: String| {
            if text.is_empty() {
                status.to_string()
            } else {
                text
            }
        };
        Err(match status {
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => PullError::Denied(or_status(text)),
            StatusCode::NOT_FOUND => {
                let what = path.split_once('/').map_or(path, |(_, what)| what);
                let separator = if manifest::is_sha256(what) { '@' } else { ':' };
                PullError::NotFound(format!("{}/{repository}{separator}{what}", self.host()))
            }
            StatusCode::TOO_MANY_REQUESTS => PullError::RateLimited(or_status(text)),
            _ => PullError::Status {
                method: if *method == Method::HEAD {
                    "HEAD"
                } else {
                    "GET"
                },
                url: url.to_string(),
                status,
                detail: if text.is_empty() {
                    text
                } else {
                    format!(": {text}")
                },
            },
        })
    }

    /// What is shown at the moment.
    pub(super) async fn authorization(&self) -> Option<HeaderValue> {
        self.authorization.lock().await.clone()
    }

    /// Gets something new to show after an answer with these headers; whether there is any.
    pub(super) async fn renew(
        &self,
        headers: &HeaderMap,
        repository: &str,
    ) -> Result<bool, PullError> {
        let fresh = self.meet_challenge(headers, repository).await?;
        let renewed = fresh.is_some();
        // Without a challenge, as in ECR's 403 for a token that is too old, the next request shows
        // nothing and gets one.
        *self.authorization.lock().await = fresh;
        Ok(renewed)
    }

    async fn meet_challenge(
        &self,
        headers: &HeaderMap,
        repository: &str,
    ) -> Result<Option<HeaderValue>, PullError> {
        let challenge = headers
            .get_all(WWW_AUTHENTICATE)
            .iter()
            .filter_map(|value| Challenge::parse(value.to_str().ok()?))
            .max_by_key(|challenge| matches!(challenge, Challenge::Bearer { .. }));
        let value = match (challenge, &self.credential) {
            (Some(Challenge::Bearer { realm, service }), _) => {
                format!(
                    "Bearer {}",
                    self.token(&realm, service.as_deref(), repository).await?
                )
            }
            (Some(Challenge::Basic), Some(Credential::Password { username, password })) => {
                basic(username, password)
            }
            _ => return Ok(None),
        };
        let mut value = HeaderValue::from_str(&value).map_err(|_| {
            PullError::Malformed("the token service sent an unusable token".to_owned())
        })?;
        value.set_sensitive(true);
        Ok(Some(value))
    }

    /// Gets a token as the distribution specification's token authentication says.
    async fn token(
        &self,
        realm: &str,
        service: Option<&str>,
        repository: &str,
    ) -> Result<String, PullError> {
        #[derive(serde::Deserialize)]
        struct Answer {
            token: Option<String>,
            access_token: Option<String>,
        }
        let mut url = Url::parse(realm).map_err(|error| {
            PullError::Malformed(format!(
                "the registry names token service {realm:?}: {error}"
            ))
        })?;
        // Credentials go where the registry says, but never in the clear by its word.
        if url.scheme() != "https" && self.base.scheme() == "https" {
            return Err(PullError::Malformed(format!(
                "the registry names token service {realm:?}, which is not https"
            )));
        }
        let mut pairs = vec![("scope", format!("repository:{repository}:pull"))];
        pairs.extend(service.map(|service| ("service", service.to_owned())));
        let request = match &self.credential {
            Some(Credential::IdentityToken(token)) => {
                pairs.push(("grant_type", "refresh_token".to_owned()));
                pairs.push(("client_id", "sandman".to_owned()));
                pairs.push(("refresh_token", token.clone()));
                let mut form =
                    Url::parse("form:").map_err(|error| PullError::Malformed(error.to_string()))?;
                form.query_pairs_mut().extend_pairs(&pairs);
                self.client
                    .post(url)
                    .header(CONTENT_TYPE, "application/x-www-form-urlencoded")
                    .body(form.query().unwrap_or_default().to_owned())
            }
            Some(Credential::Password { username, password }) => {
                url.query_pairs_mut().extend_pairs(&pairs);
                self.client
                    .get(url)
                    .header(AUTHORIZATION, basic(username, password))
            }
            None => {
                url.query_pairs_mut().extend_pairs(&pairs);
                self.client.get(url)
            }
        };
        let response = request.timeout(SMALL_REQUEST_TIMEOUT).send().await;
        let response = response.map_err(|error| self.unreachable(error))?;
        let response = self
            .judge(response, &Method::GET, repository, "token")
            .await?;
        let body = read_all(response, MAX_TOKEN_BYTES, "token").await?;
        let answer: Answer = serde_json::from_slice(&body).map_err(|error| {
            PullError::Malformed(format!("the token service's answer is unreadable: {error}"))
        })?;
        answer
            .token
            .or(answer.access_token)
            .filter(|token| !token.is_empty())
            .ok_or_else(|| {
                PullError::Malformed("the token service's answer holds no token".to_owned())
            })
    }

    fn unreachable(&self, error: reqwest::Error) -> PullError {
        PullError::Unreachable {
            registry: self.host(),
            why: chain(&error.without_url()),
        }
    }
}

fn basic(username: &str, password: &str) -> String {
    use base64::Engine as _;
    let text = format!("{username}:{password}");
    format!(
        "Basic {}",
        base64::engine::general_purpose::STANDARD.encode(text)
    )
}

/// A whole answer of at most `limit` bytes.
pub(super) async fn read_all(
    response: Response,
    limit: u64,
    what: &str,
) -> Result<Bytes, PullError> {
    let registry = response.url().authority().to_owned();
    let mut body = BytesMut::new();
    let mut stream = response.bytes_stream();
    while let Some(chunk) = stream.next().await {
        let chunk = chunk.map_err(|error| PullError::Unreachable {
            registry: registry.clone(),
            why: chain(&error.without_url()),
        })?;
        if (body.len() + chunk.len()) as u64 > limit {
            return Err(PullError::Malformed(format!(
                "{what} is larger than {limit} bytes"
            )));
        }
        body.extend_from_slice(&chunk);
    }
    Ok(body.freeze())
}

/// The registry's own words, made harmless for a status message.
async fn server_message(response: Response) -> String {
    #[derive(serde::Deserialize)]
    struct Body {
        errors: Vec<Entry>,
    }
    #[derive(serde::Deserialize)]
    struct Entry {
        #[serde(default)]
        code: String,
        #[serde(default)]
        message: String,
    }
    let Ok(body) = read_all(response, MAX_ERROR_BYTES, "error").await else {
        return String::new();
    };
    let text = match serde_json::from_slice::<Body>(&body) {
        Ok(body) => {
            let entries = body.errors.iter().take(3);
            let entries =
                entries.map(|entry| format!("{}: {}", entry.code.to_lowercase(), entry.message));
            entries.collect::<Vec<_>>().join("; ")
        }
        Err(_) => String::new(),
    };
    text.chars().filter(|c| !c.is_control()).take(512).collect()
}
