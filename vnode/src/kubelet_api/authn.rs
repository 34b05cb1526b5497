//! Authentication: a client certificate, else a bearer token. Nobody is let in
//! without a name; there is no anonymous access.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use http::HeaderMap;
use http::header::AUTHORIZATION;
use k8s_openapi::api::authentication::v1::TokenReviewStatus;
use rustls_pki_types::CertificateDer;
use sha2::{Digest, Sha256};
use x509_parser::prelude::{FromDer, X509Certificate};

use super::client_ca::ClientCa;
use super::review::{ReviewError, Reviews};
use super::review_cache::ReviewCache;

/// How long a good token stays good: the kubelet's `webhook.cacheTTL`.
const KEEP_GOOD: Duration = Duration::from_secs(2 * 60);
/// A refused one may be a moment younger than the API server's own caches.
const KEEP_REFUSED: Duration = Duration::from_secs(10);
const CACHE_ENTRIES: usize = 4096;
/// Longest token that is looked at. Service account tokens have about 1 KiB.
const MAX_TOKEN_BYTES: usize = 64 << 10;

const ALL_AUTHENTICATED: &str = "system:authenticated";
/// Ties a SubjectAccessReview to the very credential, as the API server does.
const CREDENTIAL_ID: &str = "authentication.kubernetes.io/credential-id";
/// `pkix` attribute that carries a user's UID (Kubernetes, 1.34 and later).
const UID_OID: &str = "1.3.6.1.4.1.57683.2";

/// Who a request is from.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(super) struct UserInfo {
    pub(super) name: String,
    pub(super) uid: String,
    pub(super) groups: Vec<String>,
    pub(super) extra: BTreeMap<String, Vec<String>>,
}

/// Why nobody could be recognised. Clients only learn `Unauthorized`.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum AuthnError {
    #[error("no client certificate and no bearer token")]
    NoCredentials,
    #[error("client certificate: {0}")]
    Certificate(String),
    #[error("bearer token refused: {0}")]
    Token(String),
    #[error("token review: {0}")]
    Review(#[from] ReviewError),
}

/// Recognises callers.
pub(super) struct Authenticator {
    client_ca: ClientCa,
    reviews: Arc<dyn Reviews>,
    tokens: ReviewCache<Result<Arc<UserInfo>, String>>,
}

impl Authenticator {
    pub(super) fn new(client_ca: ClientCa, reviews: Arc<dyn Reviews>) -> Self {
        Self {
            client_ca,
            reviews,
            tokens: ReviewCache::new(CACHE_ENTRIES),
        }
    }

    /// Finds out who asks. The certificate is checked for each request, not once
    /// a connection, because it may expire and the bundle may change meanwhile.
    /// A bad certificate does not spoil a good token.
    pub(super) async fn authenticate(
        &self,
        chain: &[CertificateDer<'_>],
        headers: &HeaderMap,
    ) -> Result<Arc<UserInfo>, AuthnError> {
        let refused = match self.certificate(chain).await {
            Ok(user) => return Ok(Arc::new(user)),
            Err(refused) => refused,
        };
        match bearer_token(headers) {
            Some(token) => self.token(token).await,
            None => Err(refused),
        }
    }

    async fn certificate(&self, chain: &[CertificateDer<'_>]) -> Result<UserInfo, AuthnError> {
        let leaf = chain.first().ok_or(AuthnError::NoCredentials)?;
        self.client_ca
            .verify(chain)
            .await
            .map_err(|error| AuthnError::Certificate(error.to_string()))?;
        user_of_certificate(leaf).map_err(|reason| AuthnError::Certificate(reason.into()))
    }

    async fn token(&self, token: &str) -> Result<Arc<UserInfo>, AuthnError> {
        if token.len() > MAX_TOKEN_BYTES {
            return Err(AuthnError::Token("too long".into()));
        }
        let key = Sha256::digest(token).into();
        let reviews = Arc::clone(&self.reviews);
        let token = token.to_owned();
        let ask = async move {
            let answer = user_of_review(reviews.token(&token).await?);
            let keep = if answer.is_ok() {
                KEEP_GOOD
            } else {
                KEEP_REFUSED
            };
            Ok((answer.map(Arc::new), keep))
        };
        self.tokens.get(key, ask).await?.map_err(AuthnError::Token)
    }
}

/// `Authorization: Bearer TOKEN`, read as the API server reads it.
fn bearer_token(headers: &HeaderMap) -> Option<&str> {
    let mut words = headers
        .get(AUTHORIZATION)?
        .to_str()
        .ok()?
        .trim()
        .splitn(3, ' ');
    let scheme = words.next()?;
    let token = words.next()?;
    (scheme.eq_ignore_ascii_case("bearer") && !token.is_empty()).then_some(token)
}

/// The common name is the user, the organizations are the groups. Text that
/// cannot be read as a string makes the whole certificate unusable: leaving out
/// one group could make another rule apply.
fn user_of_certificate(certificate: &CertificateDer<'_>) -> Result<UserInfo, &'static str> {
    const UNREADABLE: &str = "the subject has text that is not a string";
    let (_, parsed) =
        X509Certificate::from_der(certificate).map_err(|_| "not an X.509 certificate")?;
    let mut name = "";
    for attribute in parsed.subject().iter_common_name() {
        name = attribute.as_str().map_err(|_| UNREADABLE)?;
    }
    if name.is_empty() {
        return Err("the subject has no common name");
    }
    let mut groups = parsed
        .subject()
        .iter_organization()
        .map(|attribute| attribute.as_str().map(str::to_owned))
        .collect::<Result<Vec<_>, _>>()
        .map_err(|_| UNREADABLE)?;
    add_authenticated(&mut groups);

    let mut uid = "";
    for attribute in parsed.subject().iter_attributes() {
        if attribute.attr_type().to_id_string() == UID_OID {
            if !uid.is_empty() {
                return Err("the subject has more than one UID");
            }
            uid = attribute.as_str().map_err(|_| UNREADABLE)?;
            if uid.is_empty() {
                return Err("the subject has an empty UID");
            }
        }
    }
    let fingerprint = hex::encode(Sha256::digest(certificate));
    Ok(UserInfo {
        name: name.to_owned(),
        uid: uid.to_owned(),
        groups,
        extra: BTreeMap::from([(
            CREDENTIAL_ID.to_owned(),
            vec![format!("X509SHA256={fingerprint}")],
        )]),
    })
}

fn user_of_review(status: TokenReviewStatus) -> Result<UserInfo, String> {
    if status.authenticated != Some(true) {
        return Err(status
            .error
            .filter(|error| !error.is_empty())
            .unwrap_or_else(|| "not authenticated".into()));
    }
    let user = status.user.unwrap_or_default();
    let name = user.username.unwrap_or_default();
    if name.is_empty() {
        return Err("the review names no user".into());
    }
    let mut groups = user.groups.unwrap_or_default();
    add_authenticated(&mut groups);
    Ok(UserInfo {
        name,
        uid: user.uid.unwrap_or_default(),
        groups,
        extra: user.extra.unwrap_or_default(),
    })
}

fn add_authenticated(groups: &mut Vec<String>) {
    if !groups.iter().any(|group| group == ALL_AUTHENTICATED) {
        groups.push(ALL_AUTHENTICATED.to_owned());
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::authentication::v1::UserInfo as ReviewedUser;
    use rcgen::{CertificateParams, DnType, KeyPair};

    use super::*;

    fn certificate(build: impl FnOnce(&mut CertificateParams)) -> CertificateDer<'static> {
        let mut params = CertificateParams::default();
        params.distinguished_name = rcgen::DistinguishedName::new();
        build(&mut params);
        let key = KeyPair::generate().expect("a key");
        let signed = params.self_signed(&key).expect("a certificate");
        signed.der().clone()
    }

    #[test]
    fn subject_becomes_user_and_groups() {
        let leaf = certificate(|params| {
            let name = &mut params.distinguished_name;
            name.push(DnType::CommonName, "kube-apiserver-kubelet-client");
            name.push(DnType::OrganizationName, "system:masters");
        });
        let user = user_of_certificate(&leaf).expect("a user");
        assert_eq!(user.name, "kube-apiserver-kubelet-client");
        assert_eq!(user.groups, ["system:masters", "system:authenticated"]);
        let id = &user.extra[CREDENTIAL_ID][0];
        assert!(id.starts_with("X509SHA256=") && id.len() == 11 + 64, "{id}");
    }

    #[test]
    fn a_certificate_without_a_name_is_nobody() {
        let leaf = certificate(|params| {
            params
                .distinguished_name
                .push(DnType::OrganizationName, "system:masters");
        });
        assert_eq!(
            user_of_certificate(&leaf),
            Err("the subject has no common name")
        );
    }

    #[test]
    fn bearer_tokens() {
        for (value, want) in [
            ("Bearer abc", Some("abc")),
            ("bearer abc", Some("abc")),
            ("  BEARER abc  ", Some("abc")),
            ("Bearer abc def", Some("abc")),
            ("Bearer ", None),
            ("Bearer  abc", None),
            ("Basic abc", None),
            ("abc", None),
        ] {
            let mut headers = HeaderMap::new();
            headers.insert(AUTHORIZATION, value.parse().expect("a header"));
            assert_eq!(bearer_token(&headers), want, "{value:?}");
        }
        assert_eq!(bearer_token(&HeaderMap::new()), None);
    }

    #[test]
    fn reviews_without_a_clear_yes_are_a_no() {
        let named = |name: &str| {
            Some(ReviewedUser {
                username: Some(name.into()),
                ..ReviewedUser::default()
            })
        };
        let status = |authenticated, user, error: Option<&str>| TokenReviewStatus {
            authenticated,
            user,
            error: error.map(Into::into),
            ..TokenReviewStatus::default()
        };
        assert!(user_of_review(status(None, named("ann"), None)).is_err());
        assert!(user_of_review(status(Some(false), named("ann"), None)).is_err());
        assert!(user_of_review(status(Some(true), None, None)).is_err());
        assert!(user_of_review(status(Some(true), named(""), None)).is_err());
        assert_eq!(
            user_of_review(status(Some(false), None, Some("expired"))),
            Err("expired".into())
        );
        let user = user_of_review(status(Some(true), named("ann"), None)).expect("a user");
        assert_eq!(user.groups, ["system:authenticated"]);
    }
}
