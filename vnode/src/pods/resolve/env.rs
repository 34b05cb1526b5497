//! Environment of a container (`makeEnvironmentVariables` of
//! `pkg/kubelet/kubelet_pods.go`). `$(VAR)` in values is left to the host,
//! which knows every value; text that is not a value of the pod's author is
//! escaped so that it is not expanded.

use k8s_openapi::api::core::v1::{Container, EnvVar, EnvVarSource, Pod};
use sandman_protocol::v1;
use sandman_protocol::v1::env_var::Value;

use super::fields::{self, Field};
use super::{Problem, Sources, containers};

/// The variables in the order in which they are defined; later ones win.
pub(super) fn variables(
    pod: &Pod,
    container: &Container,
    sources: &Sources,
) -> Result<Vec<v1::EnvVar>, Problem> {
    let services = sources.services.as_ref();
    let services = services.ok_or_else(|| Problem::Pending("the list of services".to_owned()))?;
    let mut variables: Vec<v1::EnvVar> = services
        .iter()
        .map(|(name, value)| verbatim(name, value))
        .collect();
    for from in container.env_from.iter().flatten() {
        let prefix = from.prefix.as_deref().unwrap_or_default();
        if let Some(reference) = &from.config_map_ref {
            let optional = reference.optional == Some(true);
            let found = sources.config_map(&reference.name, optional)?;
            for (key, value) in found.iter().filter_map(|c| c.data.as_ref()).flatten() {
                variables.push(verbatim(&format!("{prefix}{key}"), value));
            }
        }
        if let Some(reference) = &from.secret_ref {
            let optional = reference.optional == Some(true);
            let found = sources.secret(&reference.name, optional)?;
            for (key, value) in found.iter().filter_map(|s| s.data.as_ref()).flatten() {
                variables.push(verbatim(&format!("{prefix}{key}"), &text(&value.0)));
            }
        }
    }
    for env in container.env.iter().flatten() {
        if let Some(variable) = variable(pod, container, env, sources)? {
            variables.push(variable);
        }
    }
    Ok(variables)
}

fn variable(
    pod: &Pod,
    container: &Container,
    env: &EnvVar,
    sources: &Sources,
) -> Result<Option<v1::EnvVar>, Problem> {
    let value = env.value.as_deref().unwrap_or_default();
    let from = match &env.value_from {
        Some(from) if value.is_empty() => from,
        _ => return Ok(Some(literal(&env.name, value.to_owned()))),
    };
    Ok(match from_source(pod, container, from, sources)? {
        Some(Field::Text(text)) => Some(verbatim(&env.name, &text)),
        Some(Field::OnHost(field)) => Some(v1::EnvVar {
            name: env.name.clone(),
            value: Some(Value::HostField(field.into())),
        }),
        None => None,
    })
}

/// The value of a source; `None` if it is absent and may be.
fn from_source(
    pod: &Pod,
    container: &Container,
    from: &EnvVarSource,
    sources: &Sources,
) -> Result<Option<Field>, Problem> {
    if let Some(reference) = &from.field_ref {
        let field = fields::field(pod, &reference.field_path, &sources.host_ip);
        return field.map(Some).map_err(Problem::Wrong);
    }
    if let Some(selector) = &from.resource_field_ref {
        let other = selector
            .container_name
            .as_deref()
            .filter(|name| !name.is_empty());
        let container = match other {
            Some(name) => containers(pod)
                .find(|c| c.name == name)
                .ok_or_else(|| Problem::Wrong(format!("container {name} not found")))?,
            None => container,
        };
        let value = fields::resource(container, selector, sources.allocatable);
        return value
            .map(|value| Some(Field::Text(value)))
            .map_err(Problem::Wrong);
    }
    let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
    if let Some(reference) = &from.config_map_key_ref {
        let optional = reference.optional == Some(true);
        let found = sources.config_map(&reference.name, optional)?;
        let Some(config_map) = found else {
            return Ok(None);
        };
        let value = config_map
            .data
            .as_ref()
            .and_then(|data| data.get(&reference.key));
        return match value {
            Some(value) => Ok(Some(Field::Text(value.clone()))),
            None if optional => Ok(None),
            None => Err(missing_key(
                &reference.key,
                "ConfigMap",
                namespace,
                &reference.name,
            )),
        };
    }
    if let Some(reference) = &from.secret_key_ref {
        let optional = reference.optional == Some(true);
        let found = sources.secret(&reference.name, optional)?;
        let Some(secret) = found else { return Ok(None) };
        let value = secret
            .data
            .as_ref()
            .and_then(|data| data.get(&reference.key));
        return match value {
            Some(value) => Ok(Some(Field::Text(text(&value.0)))),
            None if optional => Ok(None),
            None => Err(missing_key(
                &reference.key,
                "Secret",
                namespace,
                &reference.name,
            )),
        };
    }
    Ok(Some(Field::Text(String::new())))
}

fn missing_key(key: &str, kind: &str, namespace: &str, name: &str) -> Problem {
    Problem::Wrong(format!(
        "couldn't find key {key} in {kind} {namespace}/{name}"
    ))
}

/// A value that the pod's author wrote, expanded on the host.
fn literal(name: &str, value: String) -> v1::EnvVar {
    v1::EnvVar {
        name: name.to_owned(),
        value: Some(Value::Literal(value)),
    }
}

/// A value that stays as it is: `$$` is an escaped dollar.
fn verbatim(name: &str, value: &str) -> v1::EnvVar {
    literal(name, value.replace('$', "$$"))
}

/// Variables are text; what is no UTF-8 cannot be carried in one.
fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pods::resolve::Found;
    use serde_json::{Value as Json, json};
    use std::sync::Arc;

    fn sources() -> Sources {
        let mut sources = Sources {
            services: Some(vec![("KUBERNETES_SERVICE_HOST".into(), "10.96.0.1".into())]),
            host_ip: "10.90.0.11".into(),
            ..Sources::default()
        };
        let config = serde_json::from_value(json!({"data": {"key": "$(x)", "mode": "fast"}}));
        sources
            .config_maps
            .insert("config".into(), Found::Present(Arc::new(config.unwrap())));
        let secret = serde_json::from_value(json!({"data": {"password": "aHVudGVyMg=="}}));
        sources
            .secrets
            .insert("secret".into(), Found::Present(Arc::new(secret.unwrap())));
        sources.config_maps.insert("gone".into(), Found::Absent);
        sources
    }

    fn run(container: Json) -> Result<Vec<(String, String)>, Problem> {
        let mut container = container;
        container["name"] = json!("c");
        let pod: Pod = serde_json::from_value(json!({
            "metadata": {"name": "p", "namespace": "ns"},
            "spec": {"containers": [container]},
        }))
        .unwrap();
        let container = &pod.spec.as_ref().unwrap().containers[0];
        let variables = variables(&pod, container, &sources())?;
        Ok(variables
            .into_iter()
            .map(|variable| match variable.value.unwrap() {
                Value::Literal(text) => (variable.name, text),
                Value::HostField(field) => (variable.name, format!("<{field}>")),
            })
            .collect())
    }

    #[test]
    fn variables_in_the_order_of_definition() {
        let variables = run(json!({
            "envFrom": [
                {"prefix": "P_", "configMapRef": {"name": "config"}},
                {"secretRef": {"name": "secret"}},
                {"configMapRef": {"name": "gone", "optional": true}},
            ],
            "env": [
                {"name": "PLAIN", "value": "$(P_mode)/$$x"},
                {"name": "KEY", "valueFrom": {"configMapKeyRef": {"name": "config", "key": "key"}}},
                {"name": "PW", "valueFrom": {"secretKeyRef": {"name": "secret", "key": "password"}}},
                {"name": "NONE", "valueFrom": {"secretKeyRef": {"name": "secret", "key": "x", "optional": true}}},
                {"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
                {"name": "HOST", "valueFrom": {"fieldRef": {"fieldPath": "status.hostIP"}}},
                {"name": "EMPTY"},
            ],
        }))
        .unwrap();
        let expected = [
            ("KUBERNETES_SERVICE_HOST", "10.96.0.1"),
            ("P_key", "$$(x)"),
            ("P_mode", "fast"),
            ("password", "hunter2"),
            ("PLAIN", "$(P_mode)/$$x"),
            ("KEY", "$$(x)"),
            ("PW", "hunter2"),
            ("IP", "<1>"),
            ("HOST", "10.90.0.11"),
            ("EMPTY", ""),
        ];
        assert_eq!(
            variables,
            expected.map(|(n, v)| (n.to_owned(), v.to_owned()))
        );
    }

    #[test]
    fn what_is_missing_is_said_in_the_kubelets_words() {
        let wrong = |value: Json| match run(value).unwrap_err() {
            Problem::Wrong(message) => message,
            Problem::Pending(what) => panic!("pending {what}"),
        };
        assert_eq!(
            wrong(json!({"envFrom": [{"configMapRef": {"name": "gone"}}]})),
            "configmap \"gone\" not found"
        );
        assert_eq!(
            wrong(
                json!({"env": [{"name": "A", "valueFrom": {"configMapKeyRef": {"name": "config", "key": "no"}}}]})
            ),
            "couldn't find key no in ConfigMap ns/config"
        );
    }

    #[test]
    fn objects_that_were_not_read_yet_are_waited_for() {
        let problem = run(json!({"envFrom": [{"secretRef": {"name": "later"}}]})).unwrap_err();
        assert!(matches!(problem, Problem::Pending(what) if what == "secret \"later\""));
    }
}
