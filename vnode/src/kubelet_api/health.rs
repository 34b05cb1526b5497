//! `/healthz` with the kubelet's checks: `ping`, `log` and `syncloop`.

use http::{Response, StatusCode};

use super::query::Query;
use super::respond::{Body, text};

/// Says whether the node's own loop makes progress; the error is for the log of
/// an operator, callers only learn which check failed.
pub type SyncLoopCheck = dyn Fn() -> Result<(), String> + Send + Sync;

/// In the order that `?verbose` prints them.
pub(super) const CHECKS: [&str; 3] = ["ping", "log", "syncloop"];

/// One of [`CHECKS`]. `ping` and `log` cannot fail: whoever answers is alive, and
/// writing a log line never blocks.
pub(super) fn check(name: &str, syncloop: &SyncLoopCheck) -> Result<(), String> {
    match name {
        "syncloop" => syncloop(),
        _ => Ok(()),
    }
}

/// Answers `/healthz` and, with `only`, `/healthz/NAME`.
pub(super) fn respond(
    only: Option<&str>,
    query: &Query,
    syncloop: &SyncLoopCheck,
) -> Response<Body> {
    let check = |name: &str| check(name, syncloop);
    match only {
        Some(name) if CHECKS.contains(&name) => match check(name) {
            Ok(()) => text(StatusCode::OK, "ok"),
            Err(reason) => text(
                StatusCode::INTERNAL_SERVER_ERROR,
                format!("internal server error: {reason}\n"),
            ),
        },
        Some(_) => text(StatusCode::NOT_FOUND, "404 page not found\n"),
        None => all(query, check),
    }
}

fn all(query: &Query, check: impl Fn(&str) -> Result<(), String>) -> Response<Body> {
    let mut report = String::new();
    let mut failed = false;
    for name in CHECKS {
        let line = if query.all("exclude").any(|excluded| excluded == name) {
            format!("[+]{name} excluded: ok\n")
        } else if let Err(reason) = check(name) {
            tracing::warn!(check = name, %reason, "health check failed");
            failed = true;
            format!("[-]{name} failed: reason withheld\n")
        } else {
            format!("[+]{name} ok\n")
        };
        report.push_str(&line);
    }
    if failed {
        report.push_str("healthz check failed\n");
        return text(StatusCode::INTERNAL_SERVER_ERROR, report);
    }
    if !query.has("verbose") {
        return text(StatusCode::OK, "ok");
    }
    let unknown: Vec<String> = query
        .all("exclude")
        .filter(|name| !CHECKS.contains(name))
        .map(|name| format!("{name:?}"))
        .collect();
    if !unknown.is_empty() {
        report.push_str(&format!(
            "warn: some health checks cannot be excluded: no matches for {}\n",
            unknown.join(", ")
        ));
    }
    report.push_str("healthz check passed\n");
    text(StatusCode::OK, report)
}

#[cfg(test)]
mod tests {
    use http_body_util::BodyExt;

    use super::*;

    async fn answer(only: Option<&str>, query: &str, healthy: bool) -> (u16, String) {
        let check = move || if healthy { Ok(()) } else { Err("stuck".into()) };
        let response = respond(only, &Query::parse(Some(query)), &check);
        let code = response.status().as_u16();
        let body = response.into_body().collect().await.expect("a full body");
        let text = String::from_utf8(body.to_bytes().to_vec()).expect("text");
        (code, text)
    }

    #[tokio::test]
    async fn every_form_of_healthz() {
        for (only, query, healthy, code, want) in [
            (None, "", true, 200, "ok"),
            (Some("ping"), "", false, 200, "ok"),
            (Some("syncloop"), "", true, 200, "ok"),
            (
                Some("syncloop"),
                "",
                false,
                500,
                "internal server error: stuck\n",
            ),
            (Some("other"), "", true, 404, "404 page not found\n"),
            (
                None,
                "verbose",
                true,
                200,
                "[+]ping ok\n[+]log ok\n[+]syncloop ok\nhealthz check passed\n",
            ),
            (
                None,
                "",
                false,
                500,
                "[+]ping ok\n[+]log ok\n[-]syncloop failed: reason withheld\nhealthz check failed\n",
            ),
            (None, "exclude=syncloop", false, 200, "ok"),
            (
                None,
                "verbose&exclude=syncloop&exclude=x",
                false,
                200,
                "[+]ping ok\n[+]log ok\n[+]syncloop excluded: ok\n\
                 warn: some health checks cannot be excluded: no matches for \"x\"\n\
                 healthz check passed\n",
            ),
        ] {
            let found = answer(only, query, healthy).await;
            assert_eq!(found, (code, want.to_owned()), "{only:?} {query}");
        }
    }
}
