//! Client of the OCI distribution protocol, reading side: manifests and blobs
//! of one repository with one credential, by mirrors first.

use std::collections::BTreeMap;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use futures::StreamExt as _;
use http::header::{ACCEPT, AUTHORIZATION, CONTENT_RANGE, CONTENT_TYPE, RANGE, WWW_AUTHENTICATE};
use http::{HeaderValue, Method, StatusCode};
use reqwest::{Client, Response, Url};
use tokio::sync::Mutex;

mod challenge;
mod credential;

use self::challenge::Challenge;
pub(super) use self::credential::{Credential, CredentialHash, matching};
use super::RegistryConfig;
use super::error::{PullError, chain};
use super::manifest;
use super::reference::{Name, Selector};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Longest silence within an answer; an answer may take as long as it likes
/// while bytes come.
const READ_TIMEOUT: Duration = Duration::from_secs(30);
/// Whole of a manifest, token or HEAD request.
const SMALL_REQUEST_TIMEOUT: Duration = Duration::from_secs(60);
const MAX_TOKEN_BYTES: u64 = 1 << 20;
const MAX_ERROR_BYTES: u64 = 16 << 10;
const DOCKER_HUB: &str = "docker.io";
const DOCKER_HUB_API: &str = "registry-1.docker.io";

/// HTTP clients and addresses of all registries.
#[derive(Debug)]
pub(super) struct Registries {
    configured: BTreeMap<String, Registry>,
    default_client: Client,
}

#[derive(Debug)]
struct Registry {
    client: Client,
    config: RegistryConfig,
}

impl Registries {
    pub(super) fn new(configs: BTreeMap<String, RegistryConfig>) -> Result<Self, String> {
        let mut configured = BTreeMap::new();
        for (host, config) in configs {
            let client = client(&config).map_err(|why| format!("registries.{host:?}.{why}"))?;
            configured.insert(host, Registry { client, config });
        }
        let default_client = client(&RegistryConfig::default())?;
        Ok(Self {
            configured,
            default_client,
        })
    }

    /// The host's own credential for a registry.
    pub(super) fn own_credential(&self, registry: &str) -> Option<Credential> {
        let config = &self.configured.get(registry)?.config;
        let text = |value: &Option<String>| value.clone().unwrap_or_default();
        Credential::new(&text(&config.username), &text(&config.password), "")
    }

    /// Opens a repository with at most one credential. Tokens live as long as
    /// the session, so they never serve another pod.
    pub(super) fn session(
        &self,
        name: &Name,
        credential: Option<Credential>,
    ) -> Result<Session, PullError> {
        let registry = name.registry();
        let mut endpoints = Vec::new();
        if let Some(configured) = self.configured.get(registry) {
            for mirror in &configured.config.mirrors {
                endpoints.push(self.endpoint(mirror, self.own_credential(mirror_host(mirror)))?);
            }
        }
        endpoints.push(self.endpoint(registry, credential)?);
        Ok(Session {
            endpoints,
            repository: name.repository().to_owned(),
        })
    }

    fn endpoint(
        &self,
        address: &str,
        credential: Option<Credential>,
    ) -> Result<Endpoint, PullError> {
        let host = mirror_host(address);
        let configured = self.configured.get(host);
        let plain_http = address.starts_with("http://")
            || (!address.contains("://")
                && configured.is_some_and(|registry| registry.config.plain_http));
        let api_host = if host == DOCKER_HUB {
            DOCKER_HUB_API
        } else {
            host
        };
        let scheme = if plain_http { "http" } else { "https" };
        let base = Url::parse(&format!("{scheme}://{api_host}/v2/")).map_err(|error| {
            PullError::Malformed(format!("registry address {address:?}: {error}"))
        })?;
        let client = configured
            .map_or(&self.default_client, |registry| &registry.client)
            .clone();
        Ok(Endpoint {
            client,
            base,
            plain_http,
            credential,
            authorization: Mutex::new(None),
        })
    }
}

fn mirror_host(address: &str) -> &str {
    address
        .split_once("://")
        .map_or(address, |(_, rest)| rest)
        .trim_end_matches('/')
}

fn client(config: &RegistryConfig) -> Result<Client, String> {
    let mut builder = Client::builder()
        .user_agent(concat!("sandman/", env!("CARGO_PKG_VERSION")))
        .connect_timeout(CONNECT_TIMEOUT)
        .read_timeout(READ_TIMEOUT);
    if let Some(path) = &config.ca_file {
        let pem = std::fs::read(path).map_err(|error| format!("ca_file {path:?}: {error}"))?;
        let authorities = reqwest::Certificate::from_pem_bundle(&pem)
            .map_err(|error| format!("ca_file {path:?}: {}", chain(&error)))?;
        builder = builder.tls_certs_merge(authorities);
    }
    builder
        .build()
        .map_err(|error| format!("TLS: {}", chain(&error)))
}

/// One repository at its registry and its mirrors.
pub(super) struct Session {
    endpoints: Vec<Endpoint>,
    repository: String,
}

/// A manifest as the registry sent it, verified by digest.
#[derive(Debug)]
pub(super) struct RawManifest {
    pub(super) bytes: Bytes,
    pub(super) digest: String,
    pub(super) media_type: String,
}

impl Session {
    /// The digest behind a tag, if the registry tells it without the manifest.
    pub(super) async fn head_manifest(
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
    pub(super) async fn manifest(&self, selector: &Selector) -> Result<RawManifest, PullError> {
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
    pub(super) async fn head_blob(&self, digest: &str) -> Result<(), PullError> {
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
    pub(super) async fn blob(&self, digest: &str, offset: u64) -> Result<BlobStream, PullError> {
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
pub(super) struct BlobStream {
    response: Response,
    skip: u64,
    registry: String,
}

impl BlobStream {
    /// The next bytes, `None` at the end.
    pub(super) async fn chunk(&mut self) -> Result<Option<Bytes>, PullError> {
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

struct Endpoint {
    client: Client,
    base: Url,
    plain_http: bool,
    credential: Option<Credential>,
    authorization: Mutex<Option<HeaderValue>>,
}

impl Endpoint {
    fn host(&self) -> String {
        self.base.authority().to_owned()
    }

    /// Sends a request, meets a challenge once, and turns failures into errors.
    async fn send(
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
                && let Some(fresh) = self.meet_challenge(&response, repository).await?
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

    async fn meet_challenge(
        &self,
        response: &Response,
        repository: &str,
    ) -> Result<Option<HeaderValue>, PullError> {
        let headers = response.headers().get_all(WWW_AUTHENTICATE);
        let challenge = headers
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
        if url.scheme() != "https" && !self.plain_http {
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

async fn read_all(response: Response, limit: u64, what: &str) -> Result<Bytes, PullError> {
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
