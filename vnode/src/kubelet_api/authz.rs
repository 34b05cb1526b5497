//! Authorization: a pure map from path and method to what the caller must be
//! allowed, and a SubjectAccessReview for every request that is not in the cache.

use std::sync::Arc;
use std::time::Duration;

use http::Method;
use k8s_openapi::api::authorization::v1::{ResourceAttributes, SubjectAccessReviewSpec};
use sha2::{Digest, Sha256};

use super::authn::UserInfo;
use super::review::{ReviewError, Reviews};
use super::review_cache::{Key, ReviewCache};

/// How long a yes and a no may be kept: the kubelet's `webhook.cacheAuthorizedTTL`
/// and `webhook.cacheUnauthorizedTTL`.
const KEEP_ALLOWED: Duration = Duration::from_secs(5 * 60);
const KEEP_DENIED: Duration = Duration::from_secs(30);
const CACHE_ENTRIES: usize = 8192;

/// What a request needs: `verb` on any one of these subresources of the node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Attributes {
    /// Empty for a method that has no verb; only a rule for all verbs allows it.
    pub(super) verb: &'static str,
    /// In the order they are asked; never empty.
    pub(super) subresources: &'static [&'static str],
}

/// The attributes of a request, as `pkg/kubelet/server/auth.go` computes them.
///
/// `streams_need_create`: exec, attach, run and portForward ask for `create`
/// whatever the method. A WebSocket handshake is a GET, so by the method alone
/// `get` on `nodes/proxy`, which monitoring commonly has, would run commands in
/// every pod of the node.
pub(super) fn attributes(method: &Method, path: &str, streams_need_create: bool) -> Attributes {
    let verb = match method.as_str() {
        "POST" => "create",
        "GET" => "get",
        "PUT" => "update",
        "PATCH" => "patch",
        "DELETE" => "delete",
        _ => "",
    };
    let root = path
        .strip_prefix('/')
        .unwrap_or(path)
        .split('/')
        .next()
        .unwrap_or_default();
    let subresources: &[&str] = match root {
        "pods" | "runningpods" => &["pods", "proxy"],
        "healthz" => &["healthz", "proxy"],
        "configz" => &["configz", "proxy"],
        "stats" => &["stats"],
        "metrics" => &["metrics"],
        "logs" => &["log"],
        "checkpoint" => &["checkpoint"],
        "statusz" => &["statusz"],
        "flagz" => &["configz"],
        _ => &["proxy"],
    };
    let streams = matches!(root, "exec" | "attach" | "run" | "portForward");
    Attributes {
        verb: if streams && streams_need_create {
            "create"
        } else {
            verb
        },
        subresources,
    }
}

/// Why a request does not go on. The texts are the kubelet's response bodies.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum AuthzError {
    #[error(
        "Forbidden (user={user}, verb={verb}, resource=nodes, subresource(s)=[{}])\n",
        .subresources.join(" ")
    )]
    Forbidden {
        user: String,
        verb: &'static str,
        subresources: &'static [&'static str],
    },
    #[error(
        "Authorization error (user={user}, verb={verb}, resource=nodes, subresource={subresource})"
    )]
    Unknown {
        user: String,
        verb: &'static str,
        subresource: &'static str,
        cause: ReviewError,
    },
}

/// Decides by the cluster's policy.
pub(super) struct Authorizer {
    node_name: String,
    reviews: Arc<dyn Reviews>,
    decisions: ReviewCache<bool>,
}

impl Authorizer {
    pub(super) fn new(node_name: String, reviews: Arc<dyn Reviews>) -> Self {
        Self {
            node_name,
            reviews,
            decisions: ReviewCache::new(CACHE_ENTRIES),
        }
    }

    /// Asks for each subresource in turn; the first yes is enough.
    pub(super) async fn authorize(
        &self,
        user: &UserInfo,
        wanted: Attributes,
    ) -> Result<(), AuthzError> {
        for subresource in wanted.subresources {
            let spec = self.question(user, wanted.verb, subresource);
            let allowed = self
                .decide(spec)
                .await
                .map_err(|cause| AuthzError::Unknown {
                    user: user.name.clone(),
                    verb: wanted.verb,
                    subresource,
                    cause,
                })?;
            if allowed {
                return Ok(());
            }
        }
        Err(AuthzError::Forbidden {
            user: user.name.clone(),
            verb: wanted.verb,
            subresources: wanted.subresources,
        })
    }

    async fn decide(&self, spec: SubjectAccessReviewSpec) -> Result<bool, ReviewError> {
        let key = digest(&spec)?;
        let reviews = Arc::clone(&self.reviews);
        let ask = async move {
            let status = reviews.access(spec).await?;
            let allowed = status.allowed && status.denied != Some(true);
            Ok((allowed, if allowed { KEEP_ALLOWED } else { KEEP_DENIED }))
        };
        self.decisions.get(key, ask).await
    }

    fn question(&self, user: &UserInfo, verb: &str, subresource: &str) -> SubjectAccessReviewSpec {
        SubjectAccessReviewSpec {
            user: Some(user.name.clone()),
            uid: (!user.uid.is_empty()).then(|| user.uid.clone()),
            groups: Some(user.groups.clone()),
            extra: (!user.extra.is_empty()).then(|| user.extra.clone()),
            resource_attributes: Some(ResourceAttributes {
                verb: Some(verb.to_owned()),
                group: Some(String::new()),
                version: Some("v1".to_owned()),
                resource: Some("nodes".to_owned()),
                subresource: Some(subresource.to_owned()),
                name: Some(self.node_name.clone()),
                ..ResourceAttributes::default()
            }),
            non_resource_attributes: None,
        }
    }
}

fn digest(spec: &SubjectAccessReviewSpec) -> Result<Key, ReviewError> {
    let text = serde_json::to_vec(spec).map_err(|error| ReviewError::Failed(error.to_string()))?;
    Ok(Sha256::digest(text).into())
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use async_trait::async_trait;
    use k8s_openapi::api::authentication::v1::TokenReviewStatus;
    use k8s_openapi::api::authorization::v1::SubjectAccessReviewStatus;

    use super::*;

    #[test]
    fn attributes_are_the_kubelets() {
        for (path, want) in [
            ("/pods", &["pods", "proxy"][..]),
            ("/pods/", &["pods", "proxy"]),
            ("/podsmore", &["proxy"]),
            ("/runningpods/", &["pods", "proxy"]),
            ("/healthz", &["healthz", "proxy"]),
            ("/healthz/syncloop", &["healthz", "proxy"]),
            ("/configz", &["configz", "proxy"]),
            ("/stats/summary", &["stats"]),
            ("/metrics", &["metrics"]),
            ("/metrics/resource", &["metrics"]),
            ("/logs/syslog", &["log"]),
            ("/checkpoint/a/b/c", &["checkpoint"]),
            ("/statusz", &["statusz"]),
            ("/flagz", &["configz"]),
            ("/containerLogs/a/b/c", &["proxy"]),
            ("/debug/pprof/heap", &["proxy"]),
            ("/exec/a/b/c", &["proxy"]),
            ("//metrics", &["proxy"]),
            ("/", &["proxy"]),
        ] {
            let found = attributes(&Method::GET, path, true);
            assert_eq!(found.subresources, want, "{path}");
        }
        for (method, verb) in [
            (Method::GET, "get"),
            (Method::POST, "create"),
            (Method::PUT, "update"),
            (Method::PATCH, "patch"),
            (Method::DELETE, "delete"),
            (Method::HEAD, ""),
            (Method::OPTIONS, ""),
        ] {
            assert_eq!(attributes(&method, "/pods", true).verb, verb, "{method}");
        }
    }

    #[test]
    fn streams_need_create_whatever_the_method() {
        for path in [
            "/exec/a/b/c",
            "/attach/a/b/c",
            "/run/a/b/c",
            "/portForward/a/b",
        ] {
            assert_eq!(
                attributes(&Method::GET, path, true).verb,
                "create",
                "{path}"
            );
            assert_eq!(attributes(&Method::GET, path, false).verb, "get", "{path}");
        }
        assert_eq!(
            attributes(&Method::GET, "/containerLogs/a/b/c", true).verb,
            "get"
        );
    }

    /// Allows one subresource and records what was asked.
    struct Policy {
        allowed: &'static str,
        asked: Mutex<Vec<String>>,
    }

    #[async_trait]
    impl Reviews for Policy {
        async fn token(&self, _: &str) -> Result<TokenReviewStatus, ReviewError> {
            Ok(TokenReviewStatus::default())
        }

        async fn access(
            &self,
            spec: SubjectAccessReviewSpec,
        ) -> Result<SubjectAccessReviewStatus, ReviewError> {
            let wanted = spec.resource_attributes.expect("always set");
            let subresource = wanted.subresource.expect("always set");
            self.asked
                .lock()
                .expect("not poisoned")
                .push(subresource.clone());
            if subresource == "stats" {
                return Err(ReviewError::TimedOut);
            }
            Ok(SubjectAccessReviewStatus {
                allowed: subresource == self.allowed,
                ..SubjectAccessReviewStatus::default()
            })
        }
    }

    fn user() -> UserInfo {
        UserInfo {
            name: "ann".into(),
            ..UserInfo::default()
        }
    }

    #[tokio::test]
    async fn first_yes_wins_and_answers_are_kept() {
        let policy = Arc::new(Policy {
            allowed: "proxy",
            asked: Mutex::default(),
        });
        let authorizer = Authorizer::new("node-1".into(), policy.clone());
        for _ in 0..3 {
            let wanted = attributes(&Method::GET, "/pods", true);
            assert_eq!(authorizer.authorize(&user(), wanted).await, Ok(()));
        }
        assert_eq!(
            *policy.asked.lock().expect("not poisoned"),
            ["pods", "proxy"]
        );
    }

    #[tokio::test]
    async fn refusals_have_the_kubelets_texts() {
        let policy = Arc::new(Policy {
            allowed: "none",
            asked: Mutex::default(),
        });
        let authorizer = Authorizer::new("node-1".into(), policy);
        let refused = authorizer
            .authorize(&user(), attributes(&Method::GET, "/pods", true))
            .await
            .expect_err("nothing is allowed");
        assert_eq!(
            refused.to_string(),
            "Forbidden (user=ann, verb=get, resource=nodes, subresource(s)=[pods proxy])\n"
        );
        let failed = authorizer
            .authorize(&user(), attributes(&Method::GET, "/stats/summary", true))
            .await
            .expect_err("the review fails");
        assert_eq!(
            failed.to_string(),
            "Authorization error (user=ann, verb=get, resource=nodes, subresource=stats)"
        );
    }
}
