//! Service account tokens bound to a pod, replaced at 80 % of their life or
//! after a day (`pkg/kubelet/token/token_manager.go`).

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::authentication::v1::{BoundObjectReference, TokenRequest, TokenRequestSpec};
use k8s_openapi::api::core::v1::{Pod, ServiceAccount, ServiceAccountTokenProjection};
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use kube::api::PostParams;
use kube::{Api, Client};

use crate::backoff::unit_random;
use crate::errors::brief;

/// What the API server fills in where the author says nothing.
const DEFAULT_SECONDS: i64 = 3600;
/// A token is replaced after this time even if it lives longer.
const MAX_AGE: SignedDuration = SignedDuration::from_hours(24);
/// Spread of the replacements of tokens that were made together.
const JITTER: Duration = Duration::from_secs(10);
/// No token is asked for again sooner than this, or half of it: not one whose
/// replacement fails, and not one that looks expired because clocks differ.
const MIN_WAIT: Duration = Duration::from_secs(60);

/// What makes two projections want the same token.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TokenKey {
    audience: Option<String>,
    seconds: i64,
}

/// The tokens of one pod.
#[derive(Debug, Default)]
pub struct Tokens {
    held: BTreeMap<TokenKey, Token>,
}

struct Token {
    text: Arc<str>,
    replace_at: Timestamp,
    expires_at: Timestamp,
}

impl std::fmt::Debug for Token {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Token")
            .field("expires_at", &self.expires_at)
            .finish_non_exhaustive()
    }
}

// === impl TokenKey ===

impl TokenKey {
    /// The key of a projection.
    pub fn of(source: &ServiceAccountTokenProjection) -> Self {
        Self {
            audience: source
                .audience
                .clone()
                .filter(|audience| !audience.is_empty()),
            seconds: source.expiration_seconds.unwrap_or(DEFAULT_SECONDS),
        }
    }

    /// The keys of all projections of a pod.
    pub fn all(pod: &Pod) -> Vec<Self> {
        let volumes = pod
            .spec
            .iter()
            .flat_map(|spec| spec.volumes.iter().flatten());
        let sources = volumes
            .filter_map(|v| v.projected.as_ref()?.sources.as_ref())
            .flatten();
        let tokens = sources.filter_map(|source| source.service_account_token.as_ref());
        let mut keys: Vec<Self> = tokens.map(Self::of).collect();
        keys.sort();
        keys.dedup();
        keys
    }
}

// === impl Tokens ===

impl Tokens {
    /// Fetches what is missing or due. A token that cannot be replaced stays in
    /// use while it is valid. Returns whether any token changed.
    ///
    /// # Errors
    /// The API server's, when a needed token cannot be had.
    pub async fn refresh(&mut self, client: &Client, pod: &Pod) -> Result<bool, kube::Error> {
        let now = Timestamp::now();
        let mut changed = false;
        for key in TokenKey::all(pod) {
            let held = self.held.get_mut(&key);
            if held.as_ref().is_some_and(|token| now < token.replace_at) {
                continue;
            }
            match (request(client, pod, &key, now).await, held) {
                (Ok(token), _) => {
                    self.held.insert(key, token);
                    changed = true;
                }
                (Err(error), Some(token)) if now < token.expires_at => {
                    token.replace_at = retry_at(Timestamp::now(), unit_random());
                    tracing::warn!(
                        error = brief(&error),
                        "keeping a service account token that is due"
                    );
                }
                (Err(error), _) => return Err(error),
            }
        }
        Ok(changed)
    }

    /// The tokens by key.
    pub fn texts(&self) -> BTreeMap<TokenKey, Arc<str>> {
        self.held
            .iter()
            .map(|(key, token)| (key.clone(), Arc::clone(&token.text)))
            .collect()
    }

    /// Time until the next token is due; `None` without tokens.
    pub fn next_due(&self) -> Option<Duration> {
        let at = self.held.values().map(|token| token.replace_at).min()?;
        Some(Duration::try_from(at.duration_since(Timestamp::now())).unwrap_or_default())
    }
}

async fn request(
    client: &Client,
    pod: &Pod,
    key: &TokenKey,
    now: Timestamp,
) -> Result<Token, kube::Error> {
    let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
    let account = pod
        .spec
        .as_ref()
        .and_then(|spec| spec.service_account_name.as_deref());
    let api: Api<ServiceAccount> = Api::namespaced(client.clone(), namespace);
    let wanted = TokenRequest {
        spec: Some(TokenRequestSpec {
            audiences: key.audience.clone().map(|audience| vec![audience]),
            bound_object_ref: Some(BoundObjectReference {
                api_version: Some("v1".to_owned()),
                kind: Some("Pod".to_owned()),
                name: pod.metadata.name.clone(),
                uid: pod.metadata.uid.clone(),
            }),
            expiration_seconds: Some(key.seconds),
        }),
        ..TokenRequest::default()
    };
    let issued: TokenRequest = api
        .create_subresource(
            "token",
            account.unwrap_or("default"),
            &PostParams::default(),
            &wanted,
        )
        .await?;
    let status = issued.status.unwrap_or_default();
    let expires_at = status.expiration_timestamp.map_or(now, |time| time.0);
    Ok(Token {
        text: status.token.unwrap_or_default().into(),
        replace_at: replace_at(now, expires_at, unit_random()),
        expires_at,
    })
}

/// When a token issued at `now` is replaced. `random` is between 0 and 1.
fn replace_at(now: Timestamp, expires_at: Timestamp, random: f64) -> Timestamp {
    let life = expires_at.duration_since(now);
    let age = (life * 4 / 5).min(MAX_AGE);
    let jitter = SignedDuration::try_from(JITTER.mul_f64(random)).unwrap_or_default();
    (now + (age - jitter)).max(retry_at(now, random))
}

/// When to try again after an attempt at `now` that brought nothing of use.
fn retry_at(now: Timestamp, random: f64) -> Timestamp {
    let wait = MIN_WAIT.mul_f64(0.5 + 0.5 * random);
    now + SignedDuration::try_from(wait).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replaced_late_in_life_or_after_a_day() {
        let now = Timestamp::UNIX_EPOCH;
        let after = |hours: i64| {
            let expires = now + SignedDuration::from_hours(hours);
            replace_at(now, expires, 0.0).duration_since(now).as_secs()
        };
        assert_eq!(after(1), 2880);
        assert_eq!(after(24 * 365), 24 * 3600);
    }

    #[test]
    fn never_asked_for_in_a_loop() {
        let now = Timestamp::UNIX_EPOCH;
        let half = now + SignedDuration::from_secs(30);
        let full = now + SignedDuration::from_secs(60);
        assert_eq!((retry_at(now, 0.0), retry_at(now, 1.0)), (half, full));
        // A clock that is behind or ahead of the API server's.
        for seconds in [-3600, 0, 5] {
            let expires = now + SignedDuration::from_secs(seconds);
            assert_eq!(replace_at(now, expires, 0.0), half);
        }
    }

    /// An API server that is away while a token is due but still valid.
    #[tokio::test]
    async fn a_failed_replacement_waits_and_keeps_the_token() {
        let client = crate::pods::tests::unreachable_api();
        let pod: Pod = serde_json::from_value(serde_json::json!({
            "metadata": {"namespace": "ns", "name": "web"},
            "spec": {"containers": [], "volumes": [
                {"name": "a", "projected": {"sources": [{"serviceAccountToken": {"path": "a"}}]}},
            ]},
        }))
        .unwrap();
        let now = Timestamp::now();
        let mut tokens = Tokens::default();
        assert!(tokens.refresh(&client, &pod).await.is_err(), "none to keep");
        tokens.held.insert(
            TokenKey::all(&pod).remove(0),
            Token {
                text: "held".into(),
                replace_at: now,
                expires_at: now + SignedDuration::from_hours(1),
            },
        );
        assert!(!tokens.refresh(&client, &pod).await.unwrap());
        let due = tokens.next_due().unwrap();
        assert!(due > MIN_WAIT / 3 && due <= MIN_WAIT, "{due:?}");
        assert_eq!(tokens.texts().len(), 1);
    }

    #[test]
    fn one_token_for_equal_projections() {
        let pod: Pod = serde_json::from_value(serde_json::json!({"spec": {"containers": [], "volumes": [
            {"name": "a", "projected": {"sources": [{"serviceAccountToken": {"path": "a", "expirationSeconds": 3607}}]}},
            {"name": "b", "projected": {"sources": [
                {"serviceAccountToken": {"path": "b", "expirationSeconds": 3607}},
                {"serviceAccountToken": {"path": "c", "audience": "vault"}},
            ]}},
        ]}}))
        .unwrap();
        assert_eq!(TokenKey::all(&pod).len(), 2);
    }
}
