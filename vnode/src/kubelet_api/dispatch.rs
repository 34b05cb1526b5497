//! One request from its head to its response: who is it, may they, what do they
//! want. Nothing is looked at before the first two are answered.

use std::sync::{Arc, PoisonError};
use std::time::Duration;

use http::{Method, Request, Response, StatusCode};
use hyper::body::Incoming;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;

use super::api::Api;
use super::authn::AuthnError;
use super::authz::{AuthzError, attributes};
use super::bridge::Call;
use super::configz;
use super::listener::Peer;
use super::metrics::RequestLabels;
use super::query::{Query, decode_path};
use super::respond::{Body, json, json_list, later, method_not_allowed, text, typed};
use super::review::ReviewError;
use super::route::{self, NoRoute, Route};
use super::stats::text::CONTENT_TYPE as USAGE_TYPE;
use super::stats::{self, NodeUsage, cadvisor, resource_metrics, summary::Summary};
use super::{health, logs, port_forward, remote_command, run, target, zpages};
use crate::metrics::{CONTENT_TYPE, Reason, render};

/// A process that started lists its pods well within this.
const LISTED_WITHIN: Duration = Duration::from_secs(10);

/// Answers a request and counts it.
pub(super) async fn respond(
    api: &Arc<Api>,
    peer: &Arc<Peer>,
    mut request: Request<Incoming>,
) -> Response<Body> {
    let method = Reason(method_label(request.method()));
    let (path, response) = answer(api, peer, &mut request).await;
    let labels = RequestLabels {
        path: Reason(path),
        method,
        code: response.status().as_u16(),
    };
    api.node.metrics.requests.get_or_create(&labels).inc();
    response
}

/// The response, and the path's name in metrics.
async fn answer(
    api: &Arc<Api>,
    peer: &Arc<Peer>,
    request: &mut Request<Incoming>,
) -> (&'static str, Response<Body>) {
    let user = match api
        .authenticator
        .authenticate(&peer.chain, request.headers())
        .await
    {
        Ok(user) => user,
        Err(error) => {
            tracing::debug!(address = %peer.address, %error, "unauthenticated");
            return ("other", unrecognised(&error));
        }
    };
    // One decoded path for the policy and for the router.
    let uri = request.uri().clone();
    let Some(path) = decode_path(uri.path()) else {
        return ("other", text(StatusCode::BAD_REQUEST, "400: Bad Request"));
    };
    let label = route::label(&path);
    let wanted = attributes(request.method(), &path, api.config.streams_need_create);
    if let Err(error) = api.authorizer.authorize(&user, wanted).await {
        return (label, refused(peer, &error));
    }
    peer.place.trust();
    let debugging = api.config.debugging_handlers;
    let response = match route::find(request.method(), &path, debugging) {
        Ok(route) if route.is_about_pods() && !pods_are_known(api).await => later(
            StatusCode::SERVICE_UNAVAILABLE,
            "this node has just started and does not know its pods yet",
        ),
        Ok(route) => handle(api, peer, route, request).await,
        Err(NoRoute::NotFound) => text(StatusCode::NOT_FOUND, "404: Page Not Found"),
        Err(NoRoute::MethodNotAllowed(allow)) => method_not_allowed(allow),
        Err(NoRoute::DebuggingDisabled) => text(
            StatusCode::METHOD_NOT_ALLOWED,
            "Debug endpoints are disabled.\n",
        ),
    };
    (label, response)
}

/// Whether the pods were listed, or are soon: nobody should be told in the first second of a new
/// process that a pod does not exist.
async fn pods_are_known(api: &Api) -> bool {
    let mut listed = api.node.listed.clone();
    let known = listed.wait_for(|listed| *listed);
    matches!(tokio::time::timeout(LISTED_WITHIN, known).await, Ok(Ok(_)))
}

/// Callers do not learn why, so that guessing does not pay.
fn unrecognised(error: &AuthnError) -> Response<Body> {
    match error {
        AuthnError::Review(ReviewError::Busy) => busy(),
        _ => text(StatusCode::UNAUTHORIZED, "Unauthorized"),
    }
}

fn busy() -> Response<Body> {
    later(StatusCode::TOO_MANY_REQUESTS, "too many requests")
}

fn refused(peer: &Peer, error: &AuthzError) -> Response<Body> {
    let status = match error {
        AuthzError::Forbidden { .. } => {
            tracing::debug!(address = %peer.address, error = error.to_string().trim(), "forbidden");
            StatusCode::FORBIDDEN
        }
        AuthzError::Unknown {
            cause: ReviewError::Busy,
            ..
        } => return busy(),
        AuthzError::Unknown { cause, .. } => {
            tracing::warn!(address = %peer.address, %error, %cause, "cannot authorize");
            StatusCode::INTERNAL_SERVER_ERROR
        }
    };
    text(status, error.to_string())
}

async fn handle(
    api: &Arc<Api>,
    peer: &Arc<Peer>,
    route: Route,
    request: &mut Request<Incoming>,
) -> Response<Body> {
    let query = || Query::parse(request.uri().query());
    match route {
        Route::Healthz { check } => {
            health::respond(check.as_deref(), &query(), &*api.node.syncloop)
        }
        Route::Pods => pod_list(api.node.pods.pods()),
        Route::RunningPods => pod_list(api.node.pods.running_pods()),
        Route::StatsSummary => {
            let only = query().first("only_cpu_and_memory") == Some("true");
            usage(api, move |api, usage| summary(api, usage, only)).await
        }
        Route::Metrics => typed(StatusCode::OK, CONTENT_TYPE, render(&api.node.registry)),
        Route::ResourceMetrics => usage(api, resource_metrics).await,
        Route::CadvisorMetrics => usage(api, cadvisor_metrics).await,
        Route::SliMetrics => {
            let metrics = zpages::slis(&*api.node.syncloop);
            typed(StatusCode::OK, USAGE_TYPE, metrics)
        }
        Route::Configz => json(&configz::document(&api.config.configz)),
        Route::Statusz => zpages::status(api.started, Timestamp::now()),
        Route::Flagz => zpages::flags(&api.config.configz),
        Route::ContainerLogs(wanted) => logs::respond(api, &wanted, &query()).await,
        Route::Exec(wanted) => {
            remote_command::respond(api, peer, Call::Exec, &wanted, request).await
        }
        Route::Attach(wanted) => {
            remote_command::respond(api, peer, Call::Attach, &wanted, request).await
        }
        Route::Run(wanted) => run::respond(api, peer, &wanted, &query()).await,
        Route::PortForward(wanted) => port_forward::respond(api, peer, &wanted, request).await,
        Route::Checkpoint(wanted) => match target::known_container(&*api.node.pods, &wanted) {
            Ok(_) => text(
                StatusCode::METHOD_NOT_ALLOWED,
                "checkpoint is not supported by this node: no runtime of it can save a container\n",
            ),
            Err(refused) => text(refused.status, refused.body),
        },
        Route::Disabled(reason) => text(StatusCode::METHOD_NOT_ALLOWED, format!("{reason}\n")),
    }
}

/// The node's usage, and what `render` makes of it. Ten thousand pods are too
/// much work for a thread that others wait for.
async fn usage(
    api: &Arc<Api>,
    render: impl FnOnce(&Api, Option<NodeUsage>) -> Response<Body> + Send + 'static,
) -> Response<Body> {
    let reports = api.node.hosts.stats().await;
    let api = Arc::clone(api);
    blocking(move || {
        let usage = {
            let counter = api.node_counter.lock();
            let mut counter = counter.unwrap_or_else(PoisonError::into_inner);
            stats::join(&reports, &*api.node.pods, &mut counter, Timestamp::now())
        };
        render(&api, usage)
    })
    .await
}

fn resource_metrics(_: &Api, usage: Option<NodeUsage>) -> Response<Body> {
    let metrics = resource_metrics::render(usage.as_ref());
    typed(StatusCode::OK, USAGE_TYPE, metrics)
}

fn cadvisor_metrics(_: &Api, usage: Option<NodeUsage>) -> Response<Body> {
    let metrics = cadvisor::render(usage.as_ref());
    typed(StatusCode::OK, USAGE_TYPE, metrics)
}

fn summary(api: &Api, usage: Option<NodeUsage>, only_cpu_and_memory: bool) -> Response<Body> {
    let node = &api.config.node_name;
    match usage {
        Some(usage) => json(&Summary::new(usage, node, api.started, only_cpu_and_memory)),
        None => text(
            StatusCode::INTERNAL_SERVER_ERROR,
            "Internal Error: no host of this node answered",
        ),
    }
}

async fn blocking(work: impl FnOnce() -> Response<Body> + Send + 'static) -> Response<Body> {
    tokio::task::spawn_blocking(work)
        .await
        .unwrap_or_else(|error| text(StatusCode::INTERNAL_SERVER_ERROR, error.to_string()))
}

/// Ten thousand pods are tens of megabytes of JSON, made as they are sent.
fn pod_list(pods: Vec<Arc<Pod>>) -> Response<Body> {
    json_list(
        r#"{"kind":"PodList","apiVersion":"v1","metadata":{},"items":["#,
        pods,
    )
}

fn method_label(method: &Method) -> &'static str {
    [
        "GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS", "CONNECT", "TRACE",
    ]
    .into_iter()
    .find(|name| *name == method.as_str())
    .unwrap_or("other")
}
