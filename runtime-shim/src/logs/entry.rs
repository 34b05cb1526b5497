//! Lines of a log file: `<RFC 3339 time, nine digits> stdout|stderr P|F text`,
//! the format of the Container Runtime Interface. Pure.

use jiff::Timestamp;
use sandman_protocol::v1::LogStream;

/// Longest text of one entry; a longer line is cut into partial entries.
pub(super) const MAX_TEXT: usize = 16 << 10;
/// Longest line a reader accepts: text, time, stream and tags with room.
pub(super) const MAX_LINE: usize = MAX_TEXT + 256;

/// Where output came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stream {
    Stdout,
    Stderr,
}

impl Stream {
    fn name(self) -> &'static str {
        match self {
            Self::Stdout => "stdout",
            Self::Stderr => "stderr",
        }
    }

    /// Whether a query for `wanted` includes this stream.
    pub(super) fn matches(self, wanted: LogStream) -> bool {
        match wanted {
            LogStream::Unspecified => true,
            LogStream::Stdout => self == Self::Stdout,
            LogStream::Stderr => self == Self::Stderr,
        }
    }
}

/// One parsed line.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Entry<'a> {
    pub(super) time: Timestamp,
    pub(super) stream: Stream,
    /// The text is the beginning or middle of a longer line.
    pub(super) partial: bool,
    pub(super) text: &'a [u8],
}

/// A time as every entry writes it.
pub(super) fn format_time(time: Timestamp) -> String {
    format!("{time:.9}")
}

/// Appends one entry. `time` is text from [`format_time`].
pub(super) fn append(buffer: &mut Vec<u8>, time: &str, stream: Stream, partial: bool, text: &[u8]) {
    buffer.extend_from_slice(time.as_bytes());
    buffer.push(b' ');
    buffer.extend_from_slice(stream.name().as_bytes());
    buffer.extend_from_slice(if partial { b" P " } else { b" F " });
    buffer.extend_from_slice(text);
    buffer.push(b'\n');
}

/// Reads a line without its newline; `None` if it is no entry.
pub(super) fn parse(line: &[u8]) -> Option<Entry<'_>> {
    let mut parts = line.splitn(4, |byte| *byte == b' ');
    let time = std::str::from_utf8(parts.next()?).ok()?.parse().ok()?;
    let stream = match parts.next()? {
        b"stdout" => Stream::Stdout,
        b"stderr" => Stream::Stderr,
        _ => return None,
    };
    // Tags are separated by colons; the first says whether the line is whole.
    let partial = match parts.next()?.split(|byte| *byte == b':').next()? {
        b"P" => true,
        b"F" => false,
        _ => return None,
    };
    Some(Entry {
        time,
        stream,
        partial,
        text: parts.next().unwrap_or_default(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_survive_writing_and_reading() {
        let time: Timestamp = "2026-11-29T12:00:00.5Z".parse().unwrap();
        let mut line = Vec::new();
        append(
            &mut line,
            &format_time(time),
            Stream::Stderr,
            true,
            b"a \xff b",
        );
        assert_eq!(line, b"2026-11-29T12:00:00.500000000Z stderr P a \xff b\n");
        let entry = parse(&line[..line.len() - 1]).unwrap();
        let expected = Entry {
            time,
            stream: Stream::Stderr,
            partial: true,
            text: b"a \xff b",
        };
        assert_eq!(entry, expected);
    }

    #[test]
    fn accepts_tags_and_refuses_the_rest() {
        assert!(
            !parse(b"2026-11-29T12:00:00Z stdout F:x:y text")
                .unwrap()
                .partial
        );
        assert_eq!(parse(b"2026-11-29T12:00:00Z stdout F ").unwrap().text, b"");
        for line in [
            &b""[..],
            b"hello",
            b"2026-11-29T12:00:00Z stdin F x",
            b"2026-11-29T12:00:00Z stdout Q x",
            b"yesterday stdout F x",
            b"2026-11-29T12:00:00Z stdout",
        ] {
            assert_eq!(parse(line), None, "{line:?}");
        }
    }
}
