//! Fields of a pod as text, for variables and downward API files
//! (`pkg/fieldpath`, `podFieldSelectorRuntimeValue`).

use std::collections::BTreeMap;
use std::fmt::Write;

use k8s_openapi::api::core::v1::{Container, Pod, ResourceFieldSelector};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use sandman_protocol::v1;

use crate::quantity;

/// A field's value.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Field {
    /// Known here.
    Text(String),
    /// Known on the host only.
    OnHost(v1::HostField),
}

/// The value of a field path of a pod.
pub(super) fn field(pod: &Pod, path: &str, host_ip: &str) -> Result<Field, String> {
    let metadata = &pod.metadata;
    let spec = pod.spec.as_ref();
    if let Some((map, key)) = subscript(path) {
        let map = match map {
            "metadata.annotations" => metadata.annotations.as_ref(),
            "metadata.labels" => metadata.labels.as_ref(),
            _ => return Err(format!("fieldPath {path:?} does not support subscript")),
        };
        return Ok(Field::Text(
            map.and_then(|map| map.get(key))
                .cloned()
                .unwrap_or_default(),
        ));
    }
    let text = match path {
        "metadata.annotations" => format_map(metadata.annotations.as_ref()),
        "metadata.labels" => format_map(metadata.labels.as_ref()),
        "metadata.name" => metadata.name.clone().unwrap_or_default(),
        "metadata.namespace" => metadata.namespace.clone().unwrap_or_default(),
        "metadata.uid" => metadata.uid.clone().unwrap_or_default(),
        "spec.nodeName" => spec.and_then(|s| s.node_name.clone()).unwrap_or_default(),
        "spec.serviceAccountName" => spec
            .and_then(|s| s.service_account_name.clone())
            .unwrap_or_default(),
        "status.hostIP" | "status.hostIPs" => host_ip.to_owned(),
        // One address a pod, so the list and its first are the same text.
        "status.podIP" | "status.podIPs" => return Ok(Field::OnHost(v1::HostField::PodIp)),
        _ => return Err(format!("unsupported fieldPath: {path}")),
    };
    Ok(Field::Text(text))
}

/// The value of a container's resource; unset limits are what the host offers.
pub(super) fn resource(
    container: &Container,
    selector: &ResourceFieldSelector,
    allocatable: v1::Resources,
) -> Result<String, String> {
    let unsupported = || format!("unsupported container resource : {}", selector.resource);
    let (list, name) = selector.resource.split_once('.').ok_or_else(unsupported)?;
    let resources = container.resources.as_ref();
    let (list, default) = match list {
        "limits" => {
            let default = match name {
                "cpu" => quantity::from_millis(allocatable.cpu_millis),
                "memory" => quantity::from_bytes(allocatable.memory_bytes),
                _ => quantity::from_bytes(allocatable.ephemeral_storage_bytes),
            };
            (resources.and_then(|r| r.limits.as_ref()), default)
        }
        "requests" => (
            resources.and_then(|r| r.requests.as_ref()),
            Quantity("0".to_owned()),
        ),
        _ => return Err(unsupported()),
    };
    if !matches!(name, "cpu" | "memory" | "ephemeral-storage") {
        return Err(unsupported());
    }
    let is_zero = |quantity: &&Quantity| quantity::millis(quantity) != Some(0);
    let value = list
        .and_then(|list| list.get(name))
        .filter(is_zero)
        .unwrap_or(&default);
    let one = Quantity("1".to_owned());
    let divisor = selector.divisor.as_ref().filter(is_zero).unwrap_or(&one);
    quantity::divided(value, divisor)
        .map(|value| value.to_string())
        .ok_or_else(|| format!("{} cannot be divided by {}", value.0, divisor.0))
}

fn subscript(path: &str) -> Option<(&str, &str)> {
    let (map, key) = path.strip_suffix("']")?.split_once("['")?;
    (!map.is_empty()).then_some((map, key))
}

/// `key="value"` lines in order of keys.
fn format_map(map: Option<&BTreeMap<String, String>>) -> String {
    let lines = map
        .into_iter()
        .flatten()
        .map(|(key, value)| format!("{key}={}", quote(value)));
    lines.collect::<Vec<_>>().join("\n")
}

/// Text in quotes as Go's `%q` writes it.
fn quote(text: &str) -> String {
    let mut quoted = String::with_capacity(text.len() + 2);
    quoted.push('"');
    for c in text.chars() {
        let escape = match c {
            '"' => "\\\"",
            '\\' => "\\\\",
            '\x07' => "\\a",
            '\x08' => "\\b",
            '\x0c' => "\\f",
            '\n' => "\\n",
            '\r' => "\\r",
            '\t' => "\\t",
            '\x0b' => "\\v",
            c if c.is_ascii_control() => {
                // Writing to a string cannot fail.
                let _ = write!(quoted, "\\x{:02x}", u32::from(c));
                continue;
            }
            c if c.is_control() => {
                let _ = write!(quoted, "\\u{:04x}", u32::from(c));
                continue;
            }
            c => {
                quoted.push(c);
                continue;
            }
        };
        quoted.push_str(escape);
    }
    quoted.push('"');
    quoted
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn pod() -> Pod {
        serde_json::from_value(json!({
            "metadata": {
                "name": "web", "namespace": "default", "uid": "u-1",
                "labels": {"b": "2", "a": "one\n\"x\""},
                "annotations": {"example.com/a": "yes"},
            },
            "spec": {"nodeName": "n", "serviceAccountName": "sa", "containers": []},
        }))
        .unwrap()
    }

    #[test]
    fn fields_of_the_pod() {
        for (path, text) in [
            ("metadata.name", "web"),
            ("metadata.namespace", "default"),
            ("metadata.uid", "u-1"),
            ("metadata.labels", "a=\"one\\n\\\"x\\\"\"\nb=\"2\""),
            ("metadata.labels['b']", "2"),
            ("metadata.labels['none']", ""),
            ("metadata.annotations['example.com/a']", "yes"),
            ("spec.nodeName", "n"),
            ("spec.serviceAccountName", "sa"),
            ("status.hostIP", "10.0.0.1"),
        ] {
            assert_eq!(
                field(&pod(), path, "10.0.0.1"),
                Ok(Field::Text(text.into())),
                "{path}"
            );
        }
        assert_eq!(
            field(&pod(), "status.podIP", ""),
            Ok(Field::OnHost(v1::HostField::PodIp))
        );
        assert!(field(&pod(), "spec.containers", "").is_err());
        assert!(field(&pod(), "spec.x['a']", "").is_err());
    }

    #[test]
    fn resources_with_defaults_and_divisors() {
        let container: Container = serde_json::from_value(json!({
            "name": "c",
            "resources": {"limits": {"memory": "64Mi"}, "requests": {"cpu": "250m"}},
        }))
        .unwrap();
        let host = v1::Resources {
            cpu_millis: 1500,
            memory_bytes: 1 << 30,
            ..Default::default()
        };
        let value = |resource: &str, divisor: Option<&str>| {
            let selector = ResourceFieldSelector {
                resource: resource.into(),
                divisor: divisor.map(|d| Quantity(d.into())),
                container_name: None,
            };
            super::resource(&container, &selector, host)
        };
        assert_eq!(value("limits.memory", Some("1Mi")).unwrap(), "64");
        assert_eq!(value("limits.memory", Some("0")).unwrap(), "67108864");
        assert_eq!(value("limits.cpu", None).unwrap(), "2");
        assert_eq!(value("requests.cpu", Some("1m")).unwrap(), "250");
        assert_eq!(value("requests.memory", None).unwrap(), "0");
        assert!(value("limits.nvidia.com/gpu", None).is_err());
        assert!(value("cpu", None).is_err());
    }
}
