//! The query of `/containerLogs`, as `PodLogOptions` of the v1 API: pure parsing
//! and validation with the kubelet's codes and texts.

use http::StatusCode;
use jiff::Timestamp;
use sandman_protocol::v1;

use super::query::Query;

/// What a caller wants of a container's log.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(super) struct LogOptions {
    pub(super) follow: bool,
    pub(super) previous: bool,
    pub(super) timestamps: bool,
    /// Lines of the log file, taken before `since`.
    pub(super) tail_lines: Option<u64>,
    pub(super) since: Option<Timestamp>,
    /// Counts what is sent, timestamps included.
    pub(super) limit_bytes: Option<u64>,
    pub(super) stream: Stream,
}

/// Which of the container's outputs.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stream {
    #[default]
    All,
    Stdout,
    Stderr,
}

/// A refused query: the code and the body that the kubelet answers with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct BadQuery {
    pub(super) status: StatusCode,
    pub(super) body: &'static str,
}

const UNDECODABLE: BadQuery = BadQuery {
    status: StatusCode::BAD_REQUEST,
    body: r#"{"message": "Unable to decode query."}"#,
};

const INVALID: BadQuery = BadQuery {
    status: StatusCode::UNPROCESSABLE_ENTITY,
    body: r#"{"message": "Invalid request."}"#,
};

impl LogOptions {
    /// Reads the options; `now` turns `sinceSeconds` into a moment.
    ///
    /// `stream` is served whether or not the cluster has the feature gate
    /// PodLogsQuerySplitStreams: without it the API server never sends one.
    pub(super) fn parse(query: &Query, now: Timestamp) -> Result<Self, BadQuery> {
        // The older name `tail` wins, and its value "all" is the same as none.
        let tail = match query.first("tail") {
            Some("all") => None,
            Some(tail) if !tail.is_empty() => Some(tail),
            _ => query.first("tailLines"),
        };
        let tail_lines = tail.map(integer).transpose()?;
        let limit_bytes = query.first("limitBytes").map(integer).transpose()?;
        let since_seconds = query.first("sinceSeconds").map(integer).transpose()?;
        let since_time = match query.first("sinceTime") {
            // Go's metav1.Time decodes an empty value and "null" to no time.
            None | Some("" | "null") => None,
            Some(text) => Some(text.parse::<Timestamp>().map_err(|_| UNDECODABLE)?),
        };

        if tail_lines.is_some_and(|lines| lines < 0)
            || limit_bytes.is_some_and(|bytes| bytes < 1)
            || since_seconds.is_some_and(|seconds| seconds < 1)
            || (since_seconds.is_some() && since_time.is_some())
        {
            return Err(INVALID);
        }
        let stream = match query.first("stream") {
            None | Some("All") => Stream::All,
            Some("Stdout") => Stream::Stdout,
            Some("Stderr") => Stream::Stderr,
            Some(_) => return Err(INVALID),
        };
        if stream != Stream::All && tail_lines.is_some() {
            return Err(INVALID);
        }

        let since = match since_seconds {
            // Further back than time reaches is the same as no limit.
            Some(seconds) => now
                .checked_sub(jiff::SignedDuration::from_secs(seconds))
                .ok(),
            None => since_time,
        };
        Ok(Self {
            follow: boolean(query.first("follow")),
            previous: boolean(query.first("previous")),
            timestamps: boolean(query.first("timestamps")),
            tail_lines: tail_lines.map(i64::unsigned_abs),
            since,
            limit_bytes: limit_bytes.map(i64::unsigned_abs),
            stream,
        })
    }

    /// The same as a request to the pod's host.
    pub(super) fn request(&self, uid: &str, container: &str) -> v1::LogsRequest {
        v1::LogsRequest {
            uid: uid.to_owned(),
            container: container.to_owned(),
            follow: self.follow,
            previous: self.previous,
            timestamps: self.timestamps,
            tail_lines: self.tail_lines,
            since: self.since.map(|at| prost_types::Timestamp {
                seconds: at.as_second(),
                nanos: at.subsec_nanosecond(),
            }),
            limit_bytes: self.limit_bytes,
            stream: match self.stream {
                Stream::All => v1::LogStream::Unspecified,
                Stream::Stdout => v1::LogStream::Stdout,
                Stream::Stderr => v1::LogStream::Stderr,
            }
            .into(),
        }
    }
}

fn integer(text: &str) -> Result<i64, BadQuery> {
    text.parse().map_err(|_| UNDECODABLE)
}

/// As apimachinery converts a parameter: only absence, "0" and "false" are false.
fn boolean(text: Option<&str>) -> bool {
    text.is_some_and(|text| text != "0" && !text.eq_ignore_ascii_case("false"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(raw: &str) -> Result<LogOptions, BadQuery> {
        let now = "2026-11-29T12:00:00Z".parse().expect("a valid time");
        LogOptions::parse(&Query::parse(Some(raw)), now)
    }

    fn time(text: &str) -> Option<Timestamp> {
        Some(text.parse().expect("a valid time"))
    }

    #[test]
    fn accepted_queries() {
        let none = LogOptions::default;
        for (raw, want) in [
            ("", none()),
            (
                "follow=true&previous=1&timestamps",
                LogOptions {
                    follow: true,
                    previous: true,
                    timestamps: true,
                    ..none()
                },
            ),
            ("follow=false&previous=0&timestamps=FALSE", none()),
            (
                "tailLines=0",
                LogOptions {
                    tail_lines: Some(0),
                    ..none()
                },
            ),
            (
                "tail=7&tailLines=9",
                LogOptions {
                    tail_lines: Some(7),
                    ..none()
                },
            ),
            ("tail=all&tailLines=9", none()),
            (
                "limitBytes=1",
                LogOptions {
                    limit_bytes: Some(1),
                    ..none()
                },
            ),
            (
                "sinceSeconds=60",
                LogOptions {
                    since: time("2026-11-29T11:59:00Z"),
                    ..none()
                },
            ),
            ("sinceSeconds=9223372036854775807", none()),
            (
                "sinceTime=2026-11-29T10:00:00%2B01:00",
                LogOptions {
                    since: time("2026-11-29T09:00:00Z"),
                    ..none()
                },
            ),
            ("sinceTime=", none()),
            (
                "stream=Stderr",
                LogOptions {
                    stream: Stream::Stderr,
                    ..none()
                },
            ),
            (
                "stream=All&tailLines=3",
                LogOptions {
                    tail_lines: Some(3),
                    ..none()
                },
            ),
        ] {
            assert_eq!(parse(raw), Ok(want), "{raw}");
        }
    }

    #[test]
    fn refused_queries() {
        for (raw, want) in [
            ("tailLines=x", UNDECODABLE),
            ("limitBytes=", UNDECODABLE),
            ("sinceSeconds=1.5", UNDECODABLE),
            ("sinceTime=yesterday", UNDECODABLE),
            ("tail=x", UNDECODABLE),
            ("tailLines=-1", INVALID),
            ("limitBytes=0", INVALID),
            ("sinceSeconds=0", INVALID),
            ("sinceSeconds=5&sinceTime=2026-11-29T10:00:00Z", INVALID),
            ("stream=stdout", INVALID),
            ("stream=Stdout&tailLines=1", INVALID),
        ] {
            assert_eq!(parse(raw), Err(want), "{raw}");
        }
    }
}
