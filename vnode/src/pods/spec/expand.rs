//! `$(VAR)`.

use sandman_protocol::v1;
use sandman_protocol::v1::env_var::Value;

/// Expands `$(VAR)` as `k8s.io/kubernetes/third_party/forked/golang/expansion`
/// does: `$$` is a dollar, unknown names stay as they are. So do names whose
/// value only the host knows.
pub(in crate::pods) fn expand(text: &str, env: &[v1::EnvVar]) -> String {
    let mut known: Vec<(&str, String)> = Vec::new();
    for variable in env {
        known.retain(|(name, _)| *name != variable.name);
        if let Some(Value::Literal(value)) = &variable.value {
            let value = expand_with(value, &known);
            known.push((&variable.name, value));
        }
    }
    expand_with(text, &known)
}

fn expand_with(text: &str, known: &[(&str, String)]) -> String {
    let mut expanded = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find('$') {
        expanded.push_str(&rest[..at]);
        rest = &rest[at + 1..];
        if let Some(after) = rest.strip_prefix('$') {
            expanded.push('$');
            rest = after;
        } else if let Some((name, after)) = rest.strip_prefix('(').and_then(|r| r.split_once(')')) {
            match known.iter().find(|(known, _)| *known == name) {
                Some((_, value)) => expanded.push_str(value),
                None => {
                    expanded.push_str("$(");
                    expanded.push_str(name);
                    expanded.push(')');
                }
            }
            rest = after;
        } else {
            expanded.push('$');
        }
    }
    expanded.push_str(rest);
    expanded
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expansion_follows_the_order_of_definition() {
        let literal = |name: &str, value: &str| v1::EnvVar {
            name: name.into(),
            value: Some(Value::Literal(value.into())),
        };
        let env = [
            literal("A", "a"),
            literal("B", "$(A)-$(C)"),
            literal("C", "c"),
            literal("RAW", "$$(A)"),
            v1::EnvVar {
                name: "IP".into(),
                value: Some(Value::HostField(v1::HostField::PodIp.into())),
            },
        ];
        for (text, expanded) in [
            ("$(A)/$(B)", "a/a-$(C)"),
            ("$(RAW)", "$(A)"),
            ("$$(A) $ $x $(", "$(A) $ $x $("),
            ("$(IP)/$(NONE)", "$(IP)/$(NONE)"),
            ("$$$(A)", "$a"),
        ] {
            assert_eq!(expand(text, &env), expanded, "{text}");
        }
    }
}
