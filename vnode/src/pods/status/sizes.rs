//! What containers and pods have and what is set aside for them, which differs
//! from what they ask for while they are resized.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{PodSpec, PodStatus, ResourceRequirements};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use sandman_protocol::v1;

use super::Observation;
use crate::quantity;

type List = BTreeMap<String, Quantity>;

/// Fills in what a pod has that names resources for all its containers together.
pub(super) fn fill_pod_level(
    new: &mut PodStatus,
    spec: &PodSpec,
    old: &PodStatus,
    seen: Observation<'_>,
) {
    if spec.resources.is_none() {
        return;
    }
    let figures = seen.report.and_then(|report| report.pod_allocated);
    let allocated = sized(figures, spec.resources.as_ref(), old.resources.as_ref());
    new.allocated_resources = allocated.as_ref().and_then(|own| own.requests.clone());
    let resize = seen.report.and_then(|report| report.resize.as_ref());
    if old.resources.is_none() || !resize.is_some_and(|resize| resize.in_progress) {
        new.resources = allocated;
    }
}

/// Figures of a host in the words of whoever asked for them: the pod now, or
/// before a resize that is not done. All but processor and memory is what was
/// asked for.
pub(super) fn sized(
    figures: Option<v1::ContainerResources>,
    wish: Option<&ResourceRequirements>,
    last: Option<&ResourceRequirements>,
) -> Option<ResourceRequirements> {
    let mut sized = wish.cloned();
    if let Some(sized) = &mut sized {
        sized.claims = None;
    }
    let Some(figures) = figures else {
        return sized;
    };
    let said = sized.is_some() || figures != v1::ContainerResources::default();
    let mut sized = sized.unwrap_or_default();
    let last = last.cloned().unwrap_or_default();
    let (cpu, memory) = (figures.cpu_request_millis, figures.memory_request_bytes);
    put(&mut sized.requests, last.requests.as_ref(), cpu, memory);
    let (cpu, memory) = (figures.cpu_limit_millis, figures.memory_limit_bytes);
    put(&mut sized.limits, last.limits.as_ref(), cpu, memory);
    said.then_some(sized)
}

fn put(list: &mut Option<List>, last: Option<&List>, cpu_millis: u64, memory_bytes: u64) {
    type Read = fn(&Quantity) -> Option<u64>;
    type Write = fn(u64) -> Quantity;
    let figures: [(&str, u64, Read, Write); 2] = [
        ("cpu", cpu_millis, quantity::millis, quantity::from_millis),
        (
            "memory",
            memory_bytes,
            quantity::units,
            quantity::from_bytes,
        ),
    ];
    for (name, figure, read, write) in figures {
        let says = |list: Option<&List>| list.and_then(|list| list.get(name)).and_then(read);
        if says(list.as_ref()).unwrap_or(0) == figure {
            continue;
        }
        if figure == 0 {
            list.get_or_insert_default().remove(name);
            continue;
        }
        let quantity = match last.and_then(|last| last.get(name)) {
            Some(quantity) if read(quantity) == Some(figure) => quantity.clone(),
            _ => write(figure),
        };
        list.get_or_insert_default()
            .insert(name.to_owned(), quantity);
    }
    if list.as_ref().is_some_and(BTreeMap::is_empty) {
        *list = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn list(value: Value) -> ResourceRequirements {
        serde_json::from_value(value).unwrap()
    }

    #[test]
    fn figures_are_told_as_they_were_asked_for() {
        let wish = list(json!({
            "requests": {"cpu": "0.2", "memory": "1Gi", "ephemeral-storage": "1Gi"},
            "limits": {"cpu": "1"},
        }));
        let last = list(json!({"requests": {"cpu": "100m", "memory": "0.5Gi"}}));
        let figures = |cpu: u64, memory: u64, limit: u64| {
            Some(v1::ContainerResources {
                cpu_request_millis: cpu,
                memory_request_bytes: memory,
                cpu_limit_millis: limit,
                ..Default::default()
            })
        };
        for (figures, expected) in [
            (None, wish.clone()),
            (figures(200, 1 << 30, 1000), wish.clone()),
            (
                figures(100, 1 << 29, 0),
                list(
                    json!({"requests": {"cpu": "100m", "memory": "0.5Gi", "ephemeral-storage": "1Gi"}}),
                ),
            ),
            (
                figures(150, 1 << 30, 1000),
                list(json!({
                    "requests": {"cpu": "150m", "memory": "1Gi", "ephemeral-storage": "1Gi"},
                    "limits": {"cpu": "1"},
                })),
            ),
        ] {
            assert_eq!(sized(figures, Some(&wish), Some(&last)), Some(expected));
        }
    }

    #[test]
    fn nothing_stays_nothing() {
        assert_eq!(sized(None, None, None), None);
        assert_eq!(
            sized(Some(v1::ContainerResources::default()), None, None),
            None
        );
        let empty = ResourceRequirements::default();
        let none = Some(v1::ContainerResources::default());
        assert_eq!(sized(none, Some(&empty), None), Some(empty));
    }
}
