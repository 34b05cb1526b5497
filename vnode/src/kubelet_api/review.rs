//! The two questions that the kubelet API asks the API server: whose token is
//! this (TokenReview) and may they do that (SubjectAccessReview).

use std::time::Duration;

use async_trait::async_trait;
use k8s_openapi::api::authentication::v1::{TokenReview, TokenReviewSpec, TokenReviewStatus};
use k8s_openapi::api::authorization::v1::{
    SubjectAccessReview, SubjectAccessReviewSpec, SubjectAccessReviewStatus,
};
use kube::api::PostParams;
use kube::{Api, Client};
use tokio::sync::Semaphore;

/// Time for one question with its retries. A caller waits no longer than this
/// for a 401 or a 500.
const DEADLINE: Duration = Duration::from_secs(10);
/// Questions asked at a time. Strangers can make us ask, by a new token each time;
/// the API server must not suffer from it.
const MAX_IN_FLIGHT: usize = 32;
/// Waits between the attempts of one question.
const RETRIES: [Duration; 3] = [
    Duration::from_millis(200),
    Duration::from_millis(500),
    Duration::from_secs(1),
];

/// Why a review has no answer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ReviewError {
    /// The API server could not be asked or refused the question.
    #[error("{0}")]
    Failed(String),
    /// Too many questions wait for their answer already.
    #[error("too many reviews wait for the API server")]
    Busy,
    /// The API server did not answer in time.
    #[error("the API server did not answer within {} s", DEADLINE.as_secs())]
    TimedOut,
}

/// Asks for reviews.
#[async_trait]
pub trait Reviews: Send + Sync {
    /// Whose token is it, if anybody's?
    async fn token(&self, token: &str) -> Result<TokenReviewStatus, ReviewError>;

    /// May they?
    async fn access(
        &self,
        spec: SubjectAccessReviewSpec,
    ) -> Result<SubjectAccessReviewStatus, ReviewError>;
}

/// Reviews by the cluster's API server. The identity of the client needs the
/// verb `create` on `tokenreviews` and `subjectaccessreviews`, which every node
/// identity has.
pub struct ClusterReviews {
    tokens: Api<TokenReview>,
    access: Api<SubjectAccessReview>,
    slots: Semaphore,
}

impl ClusterReviews {
    /// Reviews with the client's identity.
    pub fn new(client: Client) -> Self {
        Self {
            tokens: Api::all(client.clone()),
            access: Api::all(client),
            slots: Semaphore::new(MAX_IN_FLIGHT),
        }
    }

    /// Asks until there is an answer, a refusal or the deadline.
    async fn ask<T, F>(&self, attempt: impl Fn() -> F) -> Result<T, ReviewError>
    where
        F: Future<Output = kube::Result<T>>,
    {
        let attempts = async {
            // The semaphore is never closed.
            let _slot = self.slots.acquire().await.ok();
            for wait in RETRIES {
                match attempt().await {
                    Err(error) if passes(&error) => tokio::time::sleep(wait).await,
                    answer => return answer,
                }
            }
            attempt().await
        };
        match tokio::time::timeout(DEADLINE, attempts).await {
            Ok(answer) => answer.map_err(|error| ReviewError::Failed(error.to_string())),
            Err(_) => Err(ReviewError::TimedOut),
        }
    }
}

#[async_trait]
impl Reviews for ClusterReviews {
    async fn token(&self, token: &str) -> Result<TokenReviewStatus, ReviewError> {
        let review = TokenReview {
            spec: TokenReviewSpec {
                token: token.to_owned(),
                audiences: None,
            },
            ..TokenReview::default()
        };
        let answer =
            self.ask(|| async { self.tokens.create(&PostParams::default(), &review).await });
        answer.await?.status.ok_or_else(no_status)
    }

    async fn access(
        &self,
        spec: SubjectAccessReviewSpec,
    ) -> Result<SubjectAccessReviewStatus, ReviewError> {
        let review = SubjectAccessReview {
            spec,
            ..SubjectAccessReview::default()
        };
        let answer =
            self.ask(|| async { self.access.create(&PostParams::default(), &review).await });
        answer.await?.status.ok_or_else(no_status)
    }
}

fn no_status() -> ReviewError {
    ReviewError::Failed("the API server answered a review without a status".into())
}

/// Whether the same question may have an answer a moment later.
fn passes(error: &kube::Error) -> bool {
    match error {
        kube::Error::Api(status) => status.code == 429 || status.code >= 500,
        kube::Error::HyperError(_) | kube::Error::Service(_) => true,
        _ => false,
    }
}
