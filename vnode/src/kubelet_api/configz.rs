//! `/configz`: the node's configuration as it is in force, without secrets.

use serde_json::{Map, Value};

/// Name of the component in the document; the kubelet's is `kubeletconfig`.
const COMPONENT: &str = "sandman-vnode";
const BLANK: &str = "<redacted>";

/// The document, one member a component.
pub(super) fn document(config: &Value) -> Value {
    let mut document = Map::new();
    document.insert(COMPONENT.to_owned(), redact(config));
    Value::Object(document)
}

/// Blanks strings whose key sounds like a secret. The configuration names files
/// and not their contents; this is for the day when somebody adds a key.
pub(super) fn redact(value: &Value) -> Value {
    match value {
        Value::Object(members) => Value::Object(
            members
                .iter()
                .map(|(key, value)| {
                    let value = if value.is_string() && is_secret(key) {
                        BLANK.into()
                    } else {
                        redact(value)
                    };
                    (key.clone(), value)
                })
                .collect(),
        ),
        Value::Array(items) => Value::Array(items.iter().map(redact).collect()),
        other => other.clone(),
    }
}

fn is_secret(key: &str) -> bool {
    let key = key.to_ascii_lowercase();
    ["password", "secret", "token", "credential"]
        .iter()
        .any(|word| key.contains(word))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn secrets_are_blanked_wherever_they_are() {
        let config = json!({
            "node_name": "n",
            "hosts": [{"name": "a", "bearer_token": "t"}],
            "registry": {"password": "p", "username": "u"},
        });
        assert_eq!(
            document(&config),
            json!({"sandman-vnode": {
                "node_name": "n",
                "hosts": [{"name": "a", "bearer_token": BLANK}],
                "registry": {"password": BLANK, "username": "u"},
            }})
        );
    }
}
