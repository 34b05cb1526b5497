//! The Prometheus text format, as far as usage needs it.

use std::fmt::{self, Write};

use jiff::Timestamp;

/// Media type of a [`Text`].
pub(in crate::kubelet_api) const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// The text so far. Writing to a string cannot fail, so nothing is checked.
#[derive(Debug, Default)]
pub(super) struct Text(pub(super) String);

impl Text {
    pub(super) fn family(&mut self, name: &str, kind: &str, help: &str) {
        let _ = writeln!(self.0, "# HELP {name} {help}\n# TYPE {name} {kind}");
    }

    /// Labels in the order of their names, as Go's client writes them; the
    /// timestamp is in milliseconds.
    pub(super) fn sample(
        &mut self,
        name: &str,
        labels: &[(&str, &str)],
        value: impl fmt::Display,
        at: Option<Timestamp>,
    ) {
        self.0.push_str(name);
        let mut open = '{';
        for (label, text) in labels {
            let _ = write!(self.0, "{open}{label}=\"");
            self.escaped(text);
            self.0.push('"');
            open = ',';
        }
        if !labels.is_empty() {
            self.0.push('}');
        }
        let _ = write!(self.0, " {value}");
        if let Some(at) = at {
            let _ = write!(self.0, " {}", at.as_millisecond());
        }
        self.0.push('\n');
    }

    fn escaped(&mut self, text: &str) {
        for character in text.chars() {
            match character {
                '\\' => self.0.push_str("\\\\"),
                '"' => self.0.push_str("\\\""),
                '\n' => self.0.push_str("\\n"),
                other => self.0.push(other),
            }
        }
    }
}

/// Nanoseconds, written as seconds without rounding.
pub(super) struct Seconds(pub(super) u64);

impl fmt::Display for Seconds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}.{:09}",
            self.0 / 1_000_000_000,
            self.0 % 1_000_000_000
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_cannot_leave_their_quotes() {
        let mut text = Text::default();
        text.sample("m", &[("image", "a\"} 1\nb\\")], 2, None);
        assert_eq!(text.0, "m{image=\"a\\\"} 1\\nb\\\\\"} 2\n");
    }
}
