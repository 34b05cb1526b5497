//! Probes and lifecycle hooks as a host runs them: ports by number, commands expanded. Pure.

use k8s_openapi::api::core::v1::{
    Container, ExecAction, GRPCAction, HTTPGetAction, LifecycleHandler, Probe, TCPSocketAction,
};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use sandman_protocol::v1;
use sandman_protocol::v1::env_var::Value;
use sandman_protocol::v1::handler::Action;

use super::spec::expand;

/// A probe. Its command sees only variables whose values the pod itself gives
/// (`ExpandContainerCommandOnlyStatic`).
pub(super) fn probe(container: &Container, probe: &Probe) -> v1::Probe {
    let action = if let Some(exec) = &probe.exec {
        let known = literals(container);
        let mut action = self::exec(exec);
        for word in &mut action.command {
            *word = expand(word, &known);
        }
        Some(Action::Exec(action))
    } else if let Some(get) = &probe.http_get {
        Some(Action::HttpGet(http_get(container, get)))
    } else if let Some(tcp) = &probe.tcp_socket {
        Some(Action::TcpSocket(tcp_socket(container, tcp)))
    } else {
        probe
            .grpc
            .as_ref()
            .map(|grpc| Action::Grpc(self::grpc(grpc)))
    };
    v1::Probe {
        handler: Some(v1::Handler { action }),
        initial_delay_seconds: count(probe.initial_delay_seconds),
        timeout_seconds: count(probe.timeout_seconds),
        period_seconds: count(probe.period_seconds),
        success_threshold: count(probe.success_threshold),
        failure_threshold: count(probe.failure_threshold),
        termination_grace_seconds: probe
            .termination_grace_period_seconds
            .map(|seconds| u32::try_from(seconds.max(0)).unwrap_or(u32::MAX)),
    }
}

/// A hook. One by tcpSocket is none, and fails on the host as with the kubelet.
pub(super) fn hook(container: &Container, hook: &LifecycleHandler) -> v1::Handler {
    let action = if let Some(exec) = &hook.exec {
        Some(Action::Exec(self::exec(exec)))
    } else if let Some(get) = &hook.http_get {
        Some(Action::HttpGet(http_get(container, get)))
    } else {
        hook.sleep.as_ref().map(|sleep| {
            Action::Sleep(v1::SleepAction {
                seconds: u32::try_from(sleep.seconds.max(0)).unwrap_or(u32::MAX),
            })
        })
    };
    v1::Handler { action }
}

fn literals(container: &Container) -> Vec<v1::EnvVar> {
    let variables = container.env.iter().flatten();
    variables
        .filter(|variable| variable.value_from.is_none())
        .map(|variable| v1::EnvVar {
            name: variable.name.clone(),
            value: Some(Value::Literal(variable.value.clone().unwrap_or_default())),
        })
        .collect()
}

fn exec(exec: &ExecAction) -> v1::ExecAction {
    v1::ExecAction {
        command: exec.command.clone().unwrap_or_default(),
    }
}

fn http_get(container: &Container, get: &HTTPGetAction) -> v1::HttpGetAction {
    let headers = get.http_headers.iter().flatten();
    v1::HttpGetAction {
        https: get
            .scheme
            .as_deref()
            .is_some_and(|scheme| scheme.eq_ignore_ascii_case("https")),
        host: get.host.clone().unwrap_or_default(),
        port: Some(port(container, &get.port)),
        path: get.path.clone().unwrap_or_default(),
        headers: headers
            .map(|header| v1::HttpHeader {
                name: header.name.clone(),
                value: header.value.clone(),
            })
            .collect(),
    }
}

fn tcp_socket(container: &Container, tcp: &TCPSocketAction) -> v1::TcpSocketAction {
    v1::TcpSocketAction {
        host: tcp.host.clone().unwrap_or_default(),
        port: Some(port(container, &tcp.port)),
    }
}

fn grpc(grpc: &GRPCAction) -> v1::GrpcAction {
    v1::GrpcAction {
        port: Some(number(grpc.port)),
        service: grpc.service.clone().unwrap_or_default(),
    }
}

/// `ResolveContainerPort`: a name is one of the container's own ports, else it
/// may still be a number.
fn port(container: &Container, port: &IntOrString) -> v1::Port {
    let name = match port {
        IntOrString::Int(port) => return number(*port),
        IntOrString::String(name) => name,
    };
    let mut ports = container.ports.iter().flatten();
    let found = ports
        .find(|port| port.name.as_ref() == Some(name))
        .map(|port| port.container_port)
        .or_else(|| name.parse().ok());
    match found {
        Some(port) => number(port),
        None => v1::Port {
            number: 0,
            unknown_name: name.clone(),
        },
    }
}

fn number(port: i32) -> v1::Port {
    v1::Port {
        number: u32::try_from(port).unwrap_or(0),
        unknown_name: String::new(),
    }
}

fn count(value: Option<i32>) -> u32 {
    value
        .and_then(|value| u32::try_from(value).ok())
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value as Json, json};

    fn container() -> Container {
        serde_json::from_value(json!({
            "name": "c",
            "ports": [{"name": "web", "containerPort": 8080}],
            "env": [
                {"name": "A", "value": "a"},
                {"name": "B", "value": "$(A)b"},
                {"name": "S", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}},
            ],
        }))
        .unwrap()
    }

    fn action(spec: Json) -> Action {
        let probe: Probe = serde_json::from_value(spec).unwrap();
        let built = super::probe(&container(), &probe);
        built.handler.unwrap().action.unwrap()
    }

    #[test]
    fn ports_by_name_and_number() {
        for (port, number, unknown) in [
            (json!(80), 80, ""),
            (json!("web"), 8080, ""),
            (json!("81"), 81, ""),
            (json!("admin"), 0, "admin"),
        ] {
            let Action::TcpSocket(tcp) = action(json!({"tcpSocket": {"port": port}})) else {
                panic!("not tcp")
            };
            let port = tcp.port.unwrap();
            assert_eq!((port.number, port.unknown_name.as_str()), (number, unknown));
        }
    }

    #[test]
    fn commands_see_only_what_the_pod_says() {
        let command = json!(["echo", "$(B)", "$(S)", "$$(A)"]);
        let Action::Exec(exec) = action(json!({"exec": {"command": command}})) else {
            panic!("not exec")
        };
        assert_eq!(exec.command, ["echo", "ab", "$(S)", "$(A)"]);
        // Hooks are not expanded at all.
        let handler = serde_json::from_value(json!({"exec": {"command": ["$(A)"]}})).unwrap();
        let Some(Action::Exec(exec)) = hook(&container(), &handler).action else {
            panic!("not exec")
        };
        assert_eq!(exec.command, ["$(A)"]);
    }

    #[test]
    fn http_and_grpc_as_they_are() {
        let Action::HttpGet(get) = action(json!({"httpGet": {
            "scheme": "HTTPS", "port": "web", "path": "/x", "host": "h",
            "httpHeaders": [{"name": "X", "value": "1"}],
        }})) else {
            panic!("not http")
        };
        assert!(get.https && get.port.unwrap().number == 8080);
        assert_eq!((get.host.as_str(), get.path.as_str()), ("h", "/x"));
        assert_eq!(get.headers[0].name, "X");
        let Action::Grpc(grpc) = action(json!({"grpc": {"port": 5000, "service": "s"}})) else {
            panic!("not grpc")
        };
        assert_eq!(
            (grpc.port.unwrap().number, grpc.service.as_str()),
            (5000, "s")
        );
    }

    #[test]
    fn numbers_of_a_probe() {
        let probe: Probe = serde_json::from_value(json!({
            "exec": {"command": ["true"]}, "initialDelaySeconds": 1, "timeoutSeconds": 2,
            "periodSeconds": 3, "successThreshold": 4, "failureThreshold": 5,
            "terminationGracePeriodSeconds": 0,
        }))
        .unwrap();
        let built = super::probe(&container(), &probe);
        assert_eq!(
            (
                built.initial_delay_seconds,
                built.timeout_seconds,
                built.period_seconds,
                built.success_threshold,
                built.failure_threshold,
                built.termination_grace_seconds
            ),
            (1, 2, 3, 4, 5, Some(0))
        );
    }

    #[test]
    fn hooks_by_tcp_are_none() {
        let tcp = serde_json::from_value(json!({"tcpSocket": {"port": 1}})).unwrap();
        assert_eq!(hook(&container(), &tcp).action, None);
        let sleep = serde_json::from_value(json!({"sleep": {"seconds": 0}})).unwrap();
        let action = Action::Sleep(v1::SleepAction { seconds: 0 });
        assert_eq!(hook(&container(), &sleep).action, Some(action));
    }
}
