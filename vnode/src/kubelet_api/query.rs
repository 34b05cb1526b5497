//! Query strings and paths of the kubelet API, decoded once and in one way, so
//! that authorization and routing can never read the same request differently.

use std::borrow::Cow;

use percent_encoding::percent_decode_str;

/// A decoded query string. Repeated keys keep their order.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(super) struct Query(Vec<(String, String)>);

impl Query {
    /// Decodes a raw query string; bytes that are not UTF-8 become U+FFFD.
    pub(super) fn parse(raw: Option<&str>) -> Self {
        Self(
            form_urlencoded::parse(raw.unwrap_or_default().as_bytes())
                .into_owned()
                .collect(),
        )
    }

    /// The first value of a key.
    pub(super) fn first(&self, key: &str) -> Option<&str> {
        self.0
            .iter()
            .find(|(name, _)| name == key)
            .map(|(_, value)| value.as_str())
    }

    /// All values of a key in order.
    pub(super) fn all<'a>(&'a self, key: &'a str) -> impl Iterator<Item = &'a str> {
        self.0
            .iter()
            .filter(move |(name, _)| name == key)
            .map(|(_, value)| value.as_str())
    }

    /// Whether the key is there at all, as in `?verbose`.
    pub(super) fn has(&self, key: &str) -> bool {
        self.first(key).is_some()
    }
}

/// The percent-decoded path, or `None` for one that no client of ours sends: not
/// UTF-8, or with control characters in it.
pub(super) fn decode_path(raw: &str) -> Option<Cow<'_, str>> {
    let path = percent_decode_str(raw).decode_utf8().ok()?;
    (path.starts_with('/') && !path.chars().any(char::is_control)).then_some(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repeated_keys_keep_their_order() {
        let query = Query::parse(Some("command=sh&command=-c&command=echo+a%26b&tty"));
        assert_eq!(
            query.all("command").collect::<Vec<_>>(),
            ["sh", "-c", "echo a&b"]
        );
        assert!(query.has("tty"));
        assert_eq!(query.first("tty"), Some(""));
        assert_eq!(query.first("stdin"), None);
        assert_eq!(Query::parse(None), Query::default());
    }

    #[test]
    fn paths_decode_or_are_refused() {
        assert_eq!(
            decode_path("/exec/ns/a%2Db/c").as_deref(),
            Some("/exec/ns/a-b/c")
        );
        for bad in ["*", "", "/a%00b", "/a%0ab", "/%ff"] {
            assert_eq!(decode_path(bad), None, "{bad}");
        }
    }
}
