//! The `WWW-Authenticate` header of registries: which scheme and which token
//! service a 401 asks for. Pure.

/// What a registry asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Challenge {
    /// User name and password with each request.
    Basic,
    /// A token from `realm`.
    Bearer {
        /// URL of the token service.
        realm: String,
        /// The registry's name at the token service.
        service: Option<String>,
    },
}

impl Challenge {
    /// The strongest challenge that the header holds and we can meet.
    pub(super) fn parse(header: &str) -> Option<Self> {
        let (scheme, rest) = header.trim().split_once(' ').unwrap_or((header.trim(), ""));
        if scheme.eq_ignore_ascii_case("basic") {
            return Some(Self::Basic);
        }
        if !scheme.eq_ignore_ascii_case("bearer") {
            return None;
        }
        let mut realm = None;
        let mut service = None;
        for (key, value) in parameters(rest) {
            match key.to_ascii_lowercase().as_str() {
                "realm" => realm = Some(value),
                "service" => service = Some(value),
                _ => {}
            }
        }
        Some(Self::Bearer {
            realm: realm?,
            service,
        })
    }
}

/// `key="value", key=value` with backslash escapes inside quotes.
fn parameters(text: &str) -> Vec<(String, String)> {
    let mut found = Vec::new();
    let mut chars = text.chars().peekable();
    loop {
        while chars.next_if(|c| c.is_whitespace() || *c == ',').is_some() {}
        let mut key = String::new();
        while let Some(c) = chars.next_if(|c| *c != '=' && *c != ',') {
            key.push(c);
        }
        if chars.next_if_eq(&'=').is_none() {
            return found;
        }
        let mut value = String::new();
        if chars.next_if_eq(&'"').is_some() {
            while let Some(c) = chars.next() {
                match c {
                    '"' => break,
                    '\\' => value.extend(chars.next()),
                    _ => value.push(c),
                }
            }
        } else {
            while let Some(c) = chars.next_if(|c| *c != ',') {
                value.push(c);
            }
        }
        found.push((key.trim().to_owned(), value.trim().to_owned()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_bearer_challenges() {
        let header = r#"Bearer realm="https://auth.example/token?a=b,c",service="reg \"x\"",scope="repository:a/b:pull""#;
        let expected = Challenge::Bearer {
            realm: "https://auth.example/token?a=b,c".to_owned(),
            service: Some("reg \"x\"".to_owned()),
        };
        assert_eq!(Challenge::parse(header), Some(expected));
    }

    #[test]
    fn reads_basic_challenges() {
        assert_eq!(
            Challenge::parse("Basic realm=\"x\""),
            Some(Challenge::Basic)
        );
        assert_eq!(Challenge::parse("basic"), Some(Challenge::Basic));
    }

    #[test]
    fn survives_nonsense() {
        for header in [
            "",
            "Bearer",
            "Bearer realm",
            "Negotiate",
            "Bearer ,,,=",
            "Bearer realm=\"a",
        ] {
            let _ = Challenge::parse(header);
        }
        assert_eq!(Challenge::parse("Bearer service=\"x\""), None);
    }
}
