//! Checks of the names that go into certificates. A name that Kubernetes or DNS would refuse later is refused here, with the field it came from.

use crate::error::{Error, Result};

/// Checks a DNS-1123 subdomain, the form of fleet and member names,
/// Kubernetes node names and DNS SANs.
pub fn check_subdomain(field: &'static str, value: &str) -> Result<()> {
    if value.len() > 253 {
        return Err(invalid(field, value, "is longer than 253 characters"));
    }
    value
        .split('.')
        .find_map(label_fault)
        .map_or(Ok(()), |reason| Err(invalid(field, value, reason)))
}

fn invalid(field: &'static str, value: &str, reason: &str) -> Error {
    Error::Invalid {
        field,
        value: value.to_owned(),
        reason: reason.to_owned(),
    }
}

fn label_fault(label: &str) -> Option<&'static str> {
    let alphanumeric = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit();
    if label.is_empty() {
        Some("is empty or has an empty part")
    } else if label.len() > 63 {
        Some("has a part longer than 63 characters")
    } else if !label.chars().all(|c| alphanumeric(c) || c == '-') {
        Some(
            "may contain only lower-case letters, digits and '-' (parts joined by '.' in a DNS name)",
        )
    } else if !label.starts_with(alphanumeric) || !label.ends_with(alphanumeric) {
        Some("must start and end with a letter or digit")
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn subdomains() {
        for good in [
            "a",
            "0",
            "node-1.example.org",
            "10-0-0-1.x",
            &"x".repeat(63),
        ] {
            check_subdomain("--dns", good).unwrap();
        }
        for bad in [
            "",
            ".",
            "a..b",
            "a.",
            ".a",
            "-a",
            "a-",
            "A",
            "a_b",
            "a/b",
            "é",
            "*.example.org",
            "a b",
            &"x".repeat(64),
            &"x.".repeat(130),
        ] {
            assert!(
                check_subdomain("--dns", bad).is_err(),
                "{bad:?} was accepted"
            );
        }
    }

    #[test]
    fn the_error_names_field_and_value() {
        let text = check_subdomain("--name", "Bad").unwrap_err().to_string();
        assert!(text.starts_with("--name \"Bad\": "), "{text}");
    }
}
