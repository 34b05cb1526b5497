//! Two-way strategic merge patches: the smallest patch that turns one status
//! into another without touching list entries that neither of them names.
//! The counterpart of `strategicpatch.CreateTwoWayMergePatch` for the few lists
//! that this node writes.

use serde_json::{Map, Value};

/// Lists that the API server merges by key; all others are replaced whole.
/// From the `patchMergeKey` tags of `k8s.io/api/core/v1`.
const MERGE_KEYS: [(&str, &str); 5] = [
    ("conditions", "type"),
    ("podIPs", "ip"),
    ("hostIPs", "ip"),
    ("addresses", "type"),
    ("resourceClaimStatuses", "name"),
];

/// The patch from `old` to `new`, or `None` when they are equal.
pub fn diff(old: &Value, new: &Value) -> Option<Value> {
    match (old, new) {
        (Value::Object(old), Value::Object(new)) => {
            let patch = diff_objects(old, new);
            (!patch.is_empty()).then_some(Value::Object(patch))
        }
        _ => (old != new).then(|| new.clone()),
    }
}

fn diff_objects(old: &Map<String, Value>, new: &Map<String, Value>) -> Map<String, Value> {
    let mut patch = Map::new();
    for (field, value) in new {
        let change = match (old.get(field), value) {
            (None, _) => Some(value.clone()),
            (Some(Value::Array(before)), Value::Array(after)) => match merge_key(field) {
                Some(key) => diff_lists(before, after, key),
                None => (before != after).then(|| value.clone()),
            },
            (Some(before), _) => diff(before, value),
        };
        if let Some(change) = change {
            patch.insert(field.clone(), change);
        }
    }
    for field in old.keys().filter(|field| !new.contains_key(*field)) {
        patch.insert(field.clone(), Value::Null);
    }
    patch
}

fn diff_lists(old: &[Value], new: &[Value], key: &str) -> Option<Value> {
    let find = |list: &[Value], id: &Value| {
        list.iter()
            .find(|element| element.get(key) == Some(id))
            .cloned()
    };
    let mut patch = Vec::new();
    for element in new {
        let Some(id) = element.get(key) else { continue };
        match find(old, id) {
            None => patch.push(element.clone()),
            Some(before) => {
                if let Some(Value::Object(mut change)) = diff(&before, element) {
                    change.insert(key.to_owned(), id.clone());
                    patch.push(Value::Object(change));
                }
            }
        }
    }
    for id in old.iter().filter_map(|element| element.get(key)) {
        if find(new, id).is_none() {
            patch.push(serde_json::json!({ "$patch": "delete", key: id }));
        }
    }
    (!patch.is_empty()).then_some(Value::Array(patch))
}

fn merge_key(field: &str) -> Option<&'static str> {
    MERGE_KEYS
        .iter()
        .find(|(list, _)| *list == field)
        .map(|(_, key)| *key)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn names_only_what_changed() {
        for (name, old, new, patch) in [
            (
                "equal",
                json!({"a": 1, "b": [1]}),
                json!({"a": 1, "b": [1]}),
                None,
            ),
            ("added", json!({}), json!({"a": 1}), Some(json!({"a": 1}))),
            (
                "removed",
                json!({"a": 1}),
                json!({}),
                Some(json!({"a": null})),
            ),
            (
                "nested",
                json!({"info": {"a": 1, "b": 2}}),
                json!({"info": {"a": 1, "b": 3}}),
                Some(json!({"info": {"b": 3}})),
            ),
            (
                "other lists are replaced",
                json!({"images": [1, 2]}),
                json!({"images": [2]}),
                Some(json!({"images": [2]})),
            ),
            (
                "conditions are merged by type",
                json!({"conditions": [{"type": "Ready", "status": "False", "reason": "x"}, {"type": "Mine", "status": "True"}]}),
                json!({"conditions": [{"type": "Ready", "status": "True"}, {"type": "Mine", "status": "True"}]}),
                Some(json!({"conditions": [{"type": "Ready", "status": "True", "reason": null}]})),
            ),
            (
                "a condition appears, one goes",
                json!({"conditions": [{"type": "Old"}]}),
                json!({"conditions": [{"type": "New"}]}),
                Some(json!({"conditions": [{"type": "New"}, {"$patch": "delete", "type": "Old"}]})),
            ),
            (
                "addresses of a pod",
                json!({"podIPs": [{"ip": "10.0.0.1"}]}),
                json!({"podIPs": [{"ip": "10.0.0.2"}]}),
                Some(
                    json!({"podIPs": [{"ip": "10.0.0.2"}, {"$patch": "delete", "ip": "10.0.0.1"}]}),
                ),
            ),
        ] {
            assert_eq!(diff(&old, &new), patch, "{name}");
        }
    }
}
