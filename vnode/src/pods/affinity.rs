//! Whether the node is one that a pod may run on, by its node selector and node
//! affinity (`k8s.io/component-helpers/scheduling/corev1/nodeaffinity`). Pure.
//!
//! The scheduler has asked already; pods that name the node themselves were
//! never asked.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{NodeSelectorRequirement, NodeSelectorTerm, PodSpec};

use super::admit::Rejection;

type Labels = BTreeMap<String, String>;

/// Whether a pod says anything about nodes.
pub(super) fn is_asked(spec: &PodSpec) -> bool {
    let selector = spec.node_selector.as_ref();
    selector.is_some_and(|selector| !selector.is_empty()) || terms(spec).is_some()
}

/// Refuses a pod that must not run on this node.
pub(super) fn check(spec: &PodSpec, node: &str, labels: &Labels) -> Result<(), Rejection> {
    let selected = spec
        .node_selector
        .iter()
        .flatten()
        .all(|(label, value)| labels.get(label) == Some(value));
    let allowed =
        terms(spec).is_none_or(|terms| terms.iter().any(|term| term_matches(term, node, labels)));
    if selected && allowed {
        return Ok(());
    }
    Err(Rejection {
        reason: "NodeAffinity",
        message: "Predicate NodeAffinity failed: node(s) didn't match Pod's node affinity/selector"
            .to_owned(),
    })
}

fn terms(spec: &PodSpec) -> Option<&Vec<NodeSelectorTerm>> {
    let affinity = spec.affinity.as_ref()?.node_affinity.as_ref()?;
    let required = affinity
        .required_during_scheduling_ignored_during_execution
        .as_ref()?;
    Some(&required.node_selector_terms)
}

/// A term that says nothing matches nothing.
fn term_matches(term: &NodeSelectorTerm, node: &str, labels: &Labels) -> bool {
    let expressions = term.match_expressions.as_deref().unwrap_or_default();
    let fields = term.match_fields.as_deref().unwrap_or_default();
    let name = BTreeMap::from([("metadata.name".to_owned(), node.to_owned())]);
    (!expressions.is_empty() || !fields.is_empty())
        && expressions.iter().all(|wish| matches(wish, labels))
        && fields.iter().all(|wish| matches(wish, &name))
}

fn matches(wish: &NodeSelectorRequirement, labels: &Labels) -> bool {
    let value = labels.get(&wish.key);
    let values = wish.values.as_deref().unwrap_or_default();
    let listed = value.is_some_and(|value| values.contains(value));
    let number = |text: Option<&String>| text.and_then(|text| text.parse::<i64>().ok());
    let numbers = number(value).zip(number(values.first()));
    match wish.operator.as_str() {
        "In" => listed,
        "NotIn" => !listed,
        "Exists" => value.is_some(),
        "DoesNotExist" => value.is_none(),
        "Gt" => numbers.is_some_and(|(has, wants)| has > wants),
        "Lt" => numbers.is_some_and(|(has, wants)| has < wants),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn admitted(spec: Value) -> bool {
        let mut spec = spec;
        spec["containers"] = json!([]);
        let spec: PodSpec = serde_json::from_value(spec).unwrap();
        assert!(is_asked(&spec));
        let labels = [("zone", "a"), ("cores", "8")].map(|(k, v)| (k.into(), v.into()));
        check(&spec, "node-1", &labels.into()).is_ok()
    }

    fn affinity(terms: Value) -> Value {
        json!({"affinity": {"nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms},
        }}})
    }

    #[test]
    fn selectors_want_every_label() {
        assert!(admitted(json!({"nodeSelector": {"zone": "a"}})));
        assert!(!admitted(
            json!({"nodeSelector": {"zone": "a", "disk": "ssd"}})
        ));
    }

    #[test]
    fn each_operator() {
        for (operator, key, values, expected) in [
            ("In", "zone", json!(["b", "a"]), true),
            ("In", "zone", json!(["b"]), false),
            ("NotIn", "zone", json!(["b"]), true),
            ("NotIn", "disk", json!(["ssd"]), true),
            ("Exists", "zone", json!([]), true),
            ("Exists", "disk", json!([]), false),
            ("DoesNotExist", "disk", json!([]), true),
            ("Gt", "cores", json!(["4"]), true),
            ("Gt", "zone", json!(["4"]), false),
            ("Lt", "cores", json!(["8"]), false),
        ] {
            let wish = json!([{"key": key, "operator": operator, "values": values}]);
            let found = admitted(affinity(json!([{"matchExpressions": wish}])));
            assert_eq!(found, expected, "{operator} {key}");
        }
    }

    #[test]
    fn one_term_is_enough_and_an_empty_one_is_none() {
        let name = |name: &str| json!({"matchFields": [{"key": "metadata.name", "operator": "In", "values": [name]}]});
        assert!(admitted(affinity(json!([name("other"), name("node-1")]))));
        assert!(!admitted(affinity(json!([name("other")]))));
        assert!(!admitted(affinity(json!([{}]))));
        let plain: PodSpec = serde_json::from_value(json!({"containers": []})).unwrap();
        assert!(!is_asked(&plain) && check(&plain, "n", &Labels::new()).is_ok());
    }
}
