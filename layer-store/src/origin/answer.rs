//! What an answer's head says about a request for a range. Pure.

use std::ops::Range;
use std::time::Duration;

use http::header::{CONTENT_RANGE, LOCATION, RETRY_AFTER};
use http::{HeaderMap, StatusCode};

/// Taken when a source says that it is busy and not for how long.
const DEFAULT_PAUSE: Duration = Duration::from_secs(1);

/// What to do with an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Answer {
    /// Its body is the range.
    Range,
    /// Its body is the whole blob.
    Whole,
    /// The blob is elsewhere.
    Elsewhere(String),
    /// Not with this credential, or not at this address any more.
    Refused,
    /// Not here.
    Missing,
    /// Later.
    Busy(Duration),
    /// Useless.
    Wrong(String),
}

/// Judges the head of an answer to a request for `range` of a blob of `size` bytes.
pub(super) fn judge(
    status: StatusCode,
    headers: &HeaderMap,
    range: &Range<u64>,
    size: u64,
) -> Answer {
    let text = |name| headers.get(name).and_then(|value| value.to_str().ok());
    match status {
        StatusCode::PARTIAL_CONTENT => match text(CONTENT_RANGE) {
            Some(given) if names(given, range, size) => Answer::Range,
            Some(given) => Answer::Wrong(format!(
                "asked for bytes {}-{} of {size}, it sends {:?}",
                range.start,
                range.end.saturating_sub(1),
                shortened(given)
            )),
            None => Answer::Wrong("it sends a part without saying which".to_owned()),
        },
        StatusCode::OK => Answer::Whole,
        StatusCode::MOVED_PERMANENTLY
        | StatusCode::FOUND
        | StatusCode::SEE_OTHER
        | StatusCode::TEMPORARY_REDIRECT
        | StatusCode::PERMANENT_REDIRECT => match text(LOCATION) {
            Some(location) => Answer::Elsewhere(location.to_owned()),
            None => Answer::Wrong("it redirects to nowhere".to_owned()),
        },
        StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => Answer::Refused,
        StatusCode::NOT_FOUND | StatusCode::GONE => Answer::Missing,
        StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE => {
            // The form with a date is rare, and no reason to look at the clock.
            let seconds = text(RETRY_AFTER).and_then(|value| value.trim().parse().ok());
            Answer::Busy(seconds.map_or(DEFAULT_PAUSE, Duration::from_secs))
        }
        other => Answer::Wrong(format!("it answers {other}")),
    }
}

/// Whether `bytes first-last/size` is the range. The size may be left open.
fn names(given: &str, range: &Range<u64>, size: u64) -> bool {
    let parse = || {
        let (span, total) = given
            .trim()
            .strip_prefix("bytes")?
            .trim_start()
            .split_once('/')?;
        let (first, last) = span.split_once('-')?;
        let number = |text: &str| text.trim().parse::<u64>().ok();
        let total_fits = total.trim() == "*" || number(total)? == size;
        Some(
            total_fits
                && number(first)? == range.start
                && number(last)?.checked_add(1)? == range.end,
        )
    };
    parse().unwrap_or(false)
}

fn shortened(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(100).collect()
}

#[cfg(test)]
mod tests {
    use http::header::HeaderName;

    use super::*;

    fn answer(status: u16, headers: &[(HeaderName, &str)]) -> Answer {
        let headers = headers
            .iter()
            .map(|(name, value)| (name.clone(), value.parse().unwrap()))
            .collect();
        judge(
            StatusCode::from_u16(status).unwrap(),
            &headers,
            &(10..20),
            100,
        )
    }

    #[test]
    fn only_the_asked_range_is_taken() {
        let part = |given: &str| answer(206, &[(CONTENT_RANGE, given)]);
        for good in ["bytes 10-19/100", "bytes 10-19/*", "bytes  10-19/100 "] {
            assert_eq!(part(good), Answer::Range, "{good}");
        }
        for bad in [
            "bytes 10-20/100",
            "bytes 0-9/100",
            "bytes 10-19/99",
            "bytes */100",
            "bytes 10-/100",
            "bytes 10-18446744073709551615/100",
            "items 10-19/100",
            "",
        ] {
            assert!(matches!(part(bad), Answer::Wrong(_)), "{bad}");
        }
        assert!(matches!(answer(206, &[]), Answer::Wrong(_)));
    }

    #[test]
    fn other_answers_are_told_apart() {
        assert_eq!(answer(200, &[]), Answer::Whole);
        assert_eq!(
            answer(307, &[(LOCATION, "/x")]),
            Answer::Elsewhere("/x".to_owned())
        );
        assert!(matches!(answer(302, &[]), Answer::Wrong(_)));
        assert_eq!(answer(401, &[]), Answer::Refused);
        assert_eq!(answer(403, &[]), Answer::Refused);
        assert_eq!(answer(404, &[]), Answer::Missing);
        let pause = |seconds| Answer::Busy(Duration::from_secs(seconds));
        assert_eq!(answer(429, &[(RETRY_AFTER, "7")]), pause(7));
        assert_eq!(
            answer(503, &[(RETRY_AFTER, "Wed, 21 Oct 2026 07:28:00 GMT")]),
            pause(1)
        );
        assert_eq!(answer(503, &[]), pause(1));
        for status in [204, 304, 416, 500, 502] {
            assert!(matches!(answer(status, &[]), Answer::Wrong(_)), "{status}");
        }
    }
}
