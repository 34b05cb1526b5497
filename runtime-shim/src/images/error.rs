//! Why an image is not to be had, in the kubelet's words, so that `kubectl
//! describe` and dashboards read the same for every node.

/// Reason and text for container statuses and events.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
#[error("{message}")]
pub struct ImageError {
    reason: &'static str,
    message: String,
}

impl ImageError {
    pub(super) fn invalid_name(reference: &str, why: &dyn std::fmt::Display) -> Self {
        Self {
            reason: "InvalidImageName",
            message: format!(
                "Failed to apply default image tag {reference:?}: couldn't parse image name {reference:?}: {why}"
            ),
        }
    }

    pub(super) fn never_pull(reference: &str) -> Self {
        Self {
            reason: "ErrImageNeverPull",
            message: format!(
                "Container image {reference:?} is not present with pull policy of Never"
            ),
        }
    }

    pub(super) fn inspect(reference: &str, why: &dyn std::fmt::Display) -> Self {
        Self {
            reason: "ImageInspectError",
            message: format!("Failed to inspect image {reference:?}: {why}"),
        }
    }

    pub(super) fn pull(reference: &str, why: &dyn std::fmt::Display) -> Self {
        Self {
            reason: "ErrImagePull",
            message: format!("failed to pull image {reference:?}: {why}"),
        }
    }

    /// The kubelet's waiting reason: `ErrImagePull`, `ErrImageNeverPull`,
    /// `InvalidImageName` or `ImageInspectError`.
    pub fn reason(&self) -> &'static str {
        self.reason
    }

    /// Text for statuses and events.
    pub fn message(&self) -> &str {
        &self.message
    }
}

/// Why one step of a pull failed; becomes the text of an [`ImageError`].
#[derive(Debug, thiserror::Error)]
pub(super) enum PullError {
    /// The registry knows no such manifest or blob.
    #[error("{0}: not found")]
    NotFound(String),
    /// 401 or 403. Another credential may fare better.
    #[error(
        "pull access denied, repository does not exist or may require authorization: server message: {0}"
    )]
    Denied(String),
    /// 429.
    #[error("toomanyrequests: the registry limits the rate of pulls: {0}")]
    RateLimited(String),
    /// Any other answer that is no success.
    #[error("unexpected status from {method} request to {url}: {status}{detail}")]
    Status {
        /// HTTP method.
        method: &'static str,
        /// Without query, which may hold signatures.
        url: String,
        /// Status line.
        status: http::StatusCode,
        /// `: text` or empty.
        detail: String,
    },
    /// No answer.
    #[error("failed to do request to registry {registry}: {why}")]
    Unreachable {
        /// Host asked.
        registry: String,
        /// Cause, with its causes.
        why: String,
    },
    /// The registry's answer is not what it should be.
    #[error("{0}")]
    Malformed(String),
    /// Another repository's transfer of the same blob was committed first. No failure: the caller
    /// goes on with what is there.
    #[error("{0} was committed by another pull")]
    Overtaken(String),
    /// The layer store of this host.
    #[error("layer store: {0}")]
    Store(String),
    /// containerd refused.
    #[error("containerd: {what}: {why}")]
    Containerd {
        /// The call.
        what: &'static str,
        /// Its status.
        why: String,
    },
}

impl PullError {
    pub(super) fn containerd(what: &'static str) -> impl FnOnce(tonic::Status) -> Self {
        move |status| Self::Containerd {
            what,
            why: format!("{:?}: {}", status.code(), status.message()),
        }
    }
}

/// An error with its causes on one line.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !text.ends_with(&cause_text) {
            text.push_str(": ");
            text.push_str(&cause_text);
        }
        source = cause.source();
    }
    text
}
