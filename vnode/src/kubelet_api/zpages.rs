//! `/statusz`, `/flagz` and `/metrics/slis`: what a person or a dashboard asks
//! of a component, in the form of `k8s.io/component-base` (`zpages`, `metrics/prometheus/slis`).

use std::fmt::Write as _;

use http::StatusCode;
use jiff::Timestamp;
use serde_json::Value;

use super::configz;
use super::health::{CHECKS, SyncLoopCheck, check};
use super::respond::{Body, text};
use super::route;
use http::Response;

const WARNING: &str = "Warning: This endpoint is not meant to be machine parseable, has no \
                       formatting compatibility guarantees and is for debugging purposes only.";
const COMPONENT: &str = "sandman-vnode";

/// Since when, which version, and where else to look.
pub(super) fn status(started: Timestamp, now: Timestamp) -> Response<Body> {
    let up = now.duration_since(started).as_secs().max(0);
    let (hours, minutes, seconds) = (up / 3600, up / 60 % 60, up % 60);
    let mut page = format!("{COMPONENT} statusz\n{WARNING}\n\n");
    let _ = writeln!(page, "Started: {started}");
    let _ = writeln!(page, "Up: {hours} hr {minutes:02} min {seconds:02} sec");
    let _ = writeln!(page, "Binary version: {}", env!("CARGO_PKG_VERSION"));
    let _ = writeln!(page, "Paths: {}", route::pages().join(" "));
    text(StatusCode::OK, page)
}

/// The configuration in force, a line a value; secrets are blanked.
pub(super) fn flags(config: &Value) -> Response<Body> {
    let mut page = format!("{COMPONENT} flagz\n{WARNING}\n\n");
    lines(&mut page, "", &configz::redact(config));
    text(StatusCode::OK, page)
}

fn lines(page: &mut String, path: &str, value: &Value) {
    let at = |name: &str| {
        if path.is_empty() {
            name.to_owned()
        } else {
            format!("{path}.{name}")
        }
    };
    match value {
        Value::Object(members) => {
            for (name, value) in members {
                lines(page, &at(name), value);
            }
        }
        Value::Array(items) => {
            for (index, value) in items.iter().enumerate() {
                lines(page, &format!("{path}[{index}]"), value);
            }
        }
        Value::String(text) => {
            let _ = writeln!(page, "{path}={text}");
        }
        other => {
            let _ = writeln!(page, "{path}={other}");
        }
    }
}

/// The health checks as gauges, each looked at now.
pub(super) fn slis(syncloop: &SyncLoopCheck) -> String {
    let mut page = "# HELP kubernetes_healthcheck [STABLE] This metric records the result of a \
                    single healthcheck.\n# TYPE kubernetes_healthcheck gauge\n"
        .to_owned();
    for name in CHECKS {
        let well = i32::from(check(name, syncloop).is_ok());
        let _ = writeln!(
            page,
            "kubernetes_healthcheck{{name=\"{name}\",type=\"healthz\"}} {well}"
        );
    }
    page
}

#[cfg(test)]
mod tests {
    use http_body_util::BodyExt;
    use serde_json::json;

    use super::*;

    async fn page(response: Response<Body>) -> String {
        let body = response.into_body().collect().await.expect("a full body");
        String::from_utf8(body.to_bytes().to_vec()).expect("text")
    }

    #[tokio::test]
    async fn flags_are_lines_without_secrets() {
        let config = json!({"node": {"name": "n", "taint": true}, "hosts": [{"token": "t"}]});
        let page = page(flags(&config)).await;
        assert!(page.starts_with("sandman-vnode flagz\nWarning: "), "{page}");
        assert!(
            page.ends_with("\n\nhosts[0].token=<redacted>\nnode.name=n\nnode.taint=true\n"),
            "{page}"
        );
    }

    #[tokio::test]
    async fn status_says_since_when() {
        let started = Timestamp::UNIX_EPOCH;
        let now = Timestamp::from_second(3_725).unwrap();
        let page = page(status(started, now)).await;
        assert!(page.contains("\nStarted: 1970-01-01T00:00:00Z\n"), "{page}");
        assert!(page.contains("\nUp: 1 hr 02 min 05 sec\n"), "{page}");
        assert!(
            page.contains("/configz") && page.contains("/metrics/slis"),
            "{page}"
        );
    }

    #[test]
    fn checks_are_gauges() {
        let stuck = || Err("stuck".to_owned());
        let page = slis(&stuck);
        let line = |name: &str, value: i32| {
            format!("kubernetes_healthcheck{{name=\"{name}\",type=\"healthz\"}} {value}\n")
        };
        assert!(page.contains(&line("ping", 1)), "{page}");
        assert!(page.contains(&line("syncloop", 0)), "{page}");
    }
}
