//! What a reader of a log asked for, and how entries become the bytes it gets.
//! Pure.

use jiff::Timestamp;
use sandman_protocol::v1::{LogStream, LogsRequest};

use super::entry::{self, Entry};

/// A request for a log, decoded.
#[derive(Clone, Debug, Default)]
pub(super) struct Query {
    pub(super) follow: bool,
    pub(super) timestamps: bool,
    /// Lines of the file, partial entries counted, before `since` filters.
    pub(super) tail_lines: Option<u64>,
    pub(super) since: Option<Timestamp>,
    /// Counts timestamps too, and cuts wherever it falls.
    pub(super) limit_bytes: Option<u64>,
    pub(super) stream: LogStream,
}

impl Query {
    pub(super) fn new(request: &LogsRequest) -> Self {
        Self {
            follow: request.follow,
            timestamps: request.timestamps,
            tail_lines: request.tail_lines,
            since: request
                .since
                .and_then(|since| Timestamp::new(since.seconds, since.nanos).ok()),
            limit_bytes: request.limit_bytes,
            stream: request.stream(),
        }
    }
}

/// Turns entries into output, in order.
#[derive(Debug)]
pub(super) struct Output {
    query: Query,
    left: u64,
    /// The last entry that was written ended its line.
    at_line_start: bool,
}

impl Output {
    pub(super) fn new(query: Query) -> Self {
        let left = query.limit_bytes.unwrap_or(u64::MAX);
        Self {
            query,
            left,
            at_line_start: true,
        }
    }

    /// The limit is reached: nothing more will come.
    pub(super) fn is_full(&self) -> bool {
        self.left == 0
    }

    /// Appends one line of the file to `out`, if it is an entry that was asked for.
    pub(super) fn line(&mut self, line: &[u8], out: &mut Vec<u8>) {
        let Some(Entry {
            time,
            stream,
            partial,
            text,
        }) = entry::parse(line)
        else {
            return;
        };
        if !stream.matches(self.query.stream) || self.query.since.is_some_and(|since| time < since)
        {
            return;
        }
        if self.query.timestamps && self.at_line_start {
            self.put(entry::format_time(time).as_bytes(), out);
            self.put(b" ", out);
        }
        self.put(text, out);
        if !partial {
            self.put(b"\n", out);
        }
        self.at_line_start = !partial;
    }

    fn put(&mut self, bytes: &[u8], out: &mut Vec<u8>) {
        let fits = usize::try_from(self.left)
            .unwrap_or(usize::MAX)
            .min(bytes.len());
        out.extend_from_slice(&bytes[..fits]);
        self.left -= fits as u64;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINES: [&[u8]; 4] = [
        b"2026-11-29T12:00:00Z stdout F one",
        b"2026-11-29T12:00:01Z stderr P two ",
        b"rubbish",
        b"2026-11-29T12:00:02.5Z stderr F parts",
    ];

    fn output(query: Query) -> String {
        let mut output = Output::new(query);
        let mut out = Vec::new();
        for line in LINES {
            output.line(line, &mut out);
        }
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn joins_partial_entries_and_skips_rubbish() {
        assert_eq!(output(Query::default()), "one\ntwo parts\n");
    }

    #[test]
    fn timestamps_stand_at_the_start_of_logical_lines() {
        let query = Query {
            timestamps: true,
            ..Query::default()
        };
        let expected =
            "2026-11-29T12:00:00.000000000Z one\n2026-11-29T12:00:01.000000000Z two parts\n";
        assert_eq!(output(query), expected);
    }

    #[test]
    fn filters_by_time_and_stream() {
        let since = Some("2026-11-29T12:00:01Z".parse().unwrap());
        assert_eq!(
            output(Query {
                since,
                ..Query::default()
            }),
            "two parts\n"
        );
        let stream = LogStream::Stdout;
        assert_eq!(
            output(Query {
                stream,
                ..Query::default()
            }),
            "one\n"
        );
        let stream = LogStream::Stderr;
        assert_eq!(
            output(Query {
                stream,
                ..Query::default()
            }),
            "two parts\n"
        );
    }

    #[test]
    fn the_limit_counts_timestamps_and_cuts_anywhere() {
        let query = Query {
            timestamps: true,
            limit_bytes: Some(34),
            ..Query::default()
        };
        assert_eq!(output(query), "2026-11-29T12:00:00.000000000Z one");
        assert_eq!(
            output(Query {
                limit_bytes: Some(6),
                ..Query::default()
            }),
            "one\ntw"
        );
    }
}
