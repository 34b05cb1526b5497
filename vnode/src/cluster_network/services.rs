//! Services and EndpointSlices as a kube-proxy reads them, made into ports with endpoints. Pure.
//!
//! IPv4 only: pods have no other addresses. What is for traffic from outside of the cluster (node
//! ports, load balancers, external IPs) is other nodes' business, and hints that keep traffic in a
//! zone are not followed.

use std::collections::{BTreeMap, BTreeSet};
use std::net::Ipv4Addr;

use k8s_openapi::api::core::v1::Service;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::ResourceExt as _;
use sandman_protocol::v1;

/// Label of a slice that names its Service.
pub(super) const SERVICE_NAME: &str = "kubernetes.io/service-name";
/// Label by which a Service says that another proxy serves it.
const OTHER_PROXY: &str = "service.kubernetes.io/service-proxy-name";
/// `DefaultClientIPServiceAffinitySeconds`
const DEFAULT_AFFINITY_SECONDS: u32 = 10_800;

/// What is kept of a Service.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Known {
    address: Ipv4Addr,
    ports: Vec<Port>,
    affinity_seconds: u32,
    /// Only endpoints of this node serve.
    local: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Port {
    name: String,
    port: u32,
    protocol: String,
}

/// What is kept of an EndpointSlice.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Slice {
    /// Port numbers by name and protocol.
    ports: Vec<(String, String, u32)>,
    endpoints: Vec<Endpoint>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Endpoint {
    addresses: Vec<Ipv4Addr>,
    ready: bool,
    /// Not ready any more, but it still serves.
    leaving: bool,
    node: Option<String>,
}

/// Key of a port, in the order of the wire.
pub(super) type Key = (Ipv4Addr, u32, String);

impl Known {
    /// `None` for Services that no ClusterIP leads to, or another proxy serves.
    pub(super) fn of(service: &Service) -> Option<Self> {
        let spec = service.spec.as_ref()?;
        if service.labels().contains_key(OTHER_PROXY) {
            return None;
        }
        // Of a dual-stack Service either may come first.
        let address = spec
            .cluster_ip
            .iter()
            .chain(spec.cluster_ips.iter().flatten())
            .find_map(|ip| ip.parse().ok())?;
        if spec.type_.as_deref() == Some("ExternalName") {
            return None;
        }
        let affine = spec.session_affinity.as_deref() == Some("ClientIP");
        let seconds = spec
            .session_affinity_config
            .as_ref()
            .and_then(|config| config.client_ip.as_ref()?.timeout_seconds)
            .and_then(|seconds| u32::try_from(seconds).ok())
            .unwrap_or(DEFAULT_AFFINITY_SECONDS);
        let ports = spec.ports.iter().flatten().filter_map(|port| {
            Some(Port {
                name: port.name.clone().unwrap_or_default(),
                port: number(port.port)?,
                protocol: protocol(port.protocol.as_deref()),
            })
        });
        Some(Self {
            address,
            ports: ports.collect(),
            affinity_seconds: if affine { seconds } else { 0 },
            local: spec.internal_traffic_policy.as_deref() == Some("Local"),
        })
    }
}

impl Slice {
    /// `None` for slices of other address families.
    pub(super) fn of(slice: &EndpointSlice) -> Option<Self> {
        if slice.address_type != "IPv4" {
            return None;
        }
        let ports = slice.ports.iter().flatten().filter_map(|port| {
            Some((
                port.name.clone().unwrap_or_default(),
                protocol(port.protocol.as_deref()),
                number(port.port?)?,
            ))
        });
        let endpoints = slice.endpoints.iter().flatten().map(|endpoint| {
            let conditions = endpoint.conditions.clone().unwrap_or_default();
            let ready = conditions.ready.unwrap_or(true);
            let addresses = endpoint.addresses.iter();
            Endpoint {
                // All addresses of an endpoint are the same one.
                addresses: addresses
                    .take(1)
                    .filter_map(|address| address.parse().ok())
                    .collect(),
                ready,
                leaving: conditions.serving.unwrap_or(ready)
                    && conditions.terminating.unwrap_or(false),
                node: endpoint.node_name.clone(),
            }
        });
        Some(Self {
            ports: ports.collect(),
            endpoints: endpoints.collect(),
        })
    }
}

/// The ports of one Service with their endpoints, in a fixed order. `node` is this node.
pub(super) fn compile<'a>(
    service: &Known,
    slices: impl Iterator<Item = &'a Slice> + Clone,
    node: &str,
) -> BTreeMap<Key, v1::ServicePort> {
    let ports = service.ports.iter().map(|port| {
        let key = v1::ServiceKey {
            address: service.address.to_bits(),
            port: port.port,
            protocol: port.protocol.clone(),
        };
        let endpoints = endpoints(service, port, slices.clone(), node);
        let compiled = v1::ServicePort {
            key: Some(key),
            endpoints: endpoints
                .into_iter()
                .map(|(address, port)| v1::Endpoint {
                    address: address.to_bits(),
                    port,
                })
                .collect(),
            affinity_seconds: service.affinity_seconds,
        };
        let key = (service.address, port.port, port.protocol.clone());
        (key, compiled)
    });
    ports.collect()
}

/// Those that are ready, or while there are none, those that leave and still serve.
fn endpoints<'a>(
    service: &Known,
    port: &Port,
    slices: impl Iterator<Item = &'a Slice>,
    node: &str,
) -> BTreeSet<(Ipv4Addr, u32)> {
    let mut ready = BTreeSet::new();
    let mut leaving = BTreeSet::new();
    for slice in slices {
        let numbers = slice
            .ports
            .iter()
            .filter(|(name, protocol, _)| *name == port.name && *protocol == port.protocol);
        for (_, _, number) in numbers {
            for endpoint in &slice.endpoints {
                if service.local && endpoint.node.as_deref() != Some(node) {
                    continue;
                }
                let addresses = endpoint.addresses.iter().map(|&address| (address, *number));
                if endpoint.ready {
                    ready.extend(addresses);
                } else if endpoint.leaving {
                    leaving.extend(addresses);
                }
            }
        }
    }
    if ready.is_empty() { leaving } else { ready }
}

fn protocol(name: Option<&str>) -> String {
    name.unwrap_or("TCP").to_owned()
}

fn number(port: i32) -> Option<u32> {
    u16::try_from(port)
        .ok()
        .filter(|&port| port > 0)
        .map(u32::from)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    const NODE: &str = "here";

    fn known(spec: Value) -> Option<Known> {
        let service = json!({"metadata": {"name": "s"}, "spec": spec});
        Known::of(&serde_json::from_value(service).unwrap())
    }

    fn slice(ports: Value, endpoints: Value) -> Slice {
        let slice = json!({
            "metadata": {"name": "s-1"}, "addressType": "IPv4",
            "ports": ports, "endpoints": endpoints,
        });
        Slice::of(&serde_json::from_value(slice).unwrap()).unwrap()
    }

    /// `address:port` of each endpoint of each port.
    fn compiled(service: &Known, slices: &[Slice]) -> BTreeMap<u32, Vec<String>> {
        compile(service, slices.iter(), NODE)
            .into_iter()
            .map(|((_, port, _), compiled)| {
                let endpoints = compiled.endpoints.iter().map(|endpoint| {
                    format!(
                        "{}:{}",
                        Ipv4Addr::from_bits(endpoint.address),
                        endpoint.port
                    )
                });
                (port, endpoints.collect())
            })
            .collect()
    }

    #[test]
    fn ports_meet_by_name_and_protocol() {
        let service = known(json!({"clusterIP": "10.96.0.10", "ports": [
            {"name": "dns", "port": 53, "protocol": "UDP"},
            {"name": "dns-tcp", "port": 54},
            {"name": "web", "port": 80, "targetPort": "http"},
        ]}))
        .unwrap();
        let slices = [
            slice(
                json!([{"name": "dns", "port": 5353, "protocol": "UDP"},
                    {"name": "dns-tcp", "port": 5353},
                    {"name": "web", "port": 8080}]),
                json!([{"addresses": ["10.64.0.3"]}, {"addresses": ["10.64.0.2"]}]),
            ),
            // Another version of the pod has its named port elsewhere.
            slice(
                json!([{"name": "web", "port": 9090}, {"name": "dns", "port": 1}]),
                json!([{"addresses": ["10.64.0.9"]}]),
            ),
        ];
        let all = compiled(&service, &slices);
        assert_eq!(all[&53], ["10.64.0.2:5353", "10.64.0.3:5353"]);
        assert_eq!(all[&54], ["10.64.0.2:5353", "10.64.0.3:5353"]);
        assert_eq!(
            all[&80],
            ["10.64.0.2:8080", "10.64.0.3:8080", "10.64.0.9:9090"]
        );
    }

    #[test]
    fn those_that_leave_serve_only_while_nobody_is_ready() {
        let service = known(json!({"clusterIP": "10.96.0.1", "ports": [{"port": 1}]})).unwrap();
        let leaving = json!({"addresses": ["10.0.0.1"],
            "conditions": {"ready": false, "serving": true, "terminating": true}});
        let gone = json!({"addresses": ["10.0.0.2"],
            "conditions": {"ready": false, "serving": false, "terminating": true}});
        let unready = json!({"addresses": ["10.0.0.3"], "conditions": {"ready": false}});
        let ready = json!({"addresses": ["10.0.0.4"], "conditions": {}});
        let ports = json!([{"port": 1}]);
        let mut endpoints = vec![leaving, gone, unready];
        let without = slice(ports.clone(), endpoints.clone().into());
        assert_eq!(compiled(&service, &[without])[&1], ["10.0.0.1:1"]);
        endpoints.push(ready);
        let with = slice(ports, endpoints.into());
        assert_eq!(compiled(&service, &[with])[&1], ["10.0.0.4:1"]);
        assert_eq!(compiled(&service, &[])[&1], [""; 0], "refused, not unknown");
    }

    #[test]
    fn local_services_are_served_by_this_node() {
        let service = known(json!({
            "clusterIP": "10.96.0.1", "ports": [{"port": 1}], "internalTrafficPolicy": "Local",
        }))
        .unwrap();
        let slice = slice(
            json!([{"port": 1}]),
            json!([{"addresses": ["10.0.0.1"], "nodeName": "there"},
                {"addresses": ["10.0.0.2"], "nodeName": NODE},
                {"addresses": ["10.0.0.3"]}]),
        );
        assert_eq!(compiled(&service, &[slice])[&1], ["10.0.0.2:1"]);
    }

    #[test]
    fn affinity_has_kubernetes_default() {
        let seconds = |extra: Value| {
            let mut spec = json!({"clusterIP": "10.96.0.1", "ports": [{"port": 1}]});
            spec.as_object_mut()
                .unwrap()
                .extend(extra.as_object().unwrap().clone());
            known(spec).unwrap().affinity_seconds
        };
        assert_eq!(seconds(json!({})), 0);
        assert_eq!(seconds(json!({"sessionAffinity": "None"})), 0);
        assert_eq!(seconds(json!({"sessionAffinity": "ClientIP"})), 10_800);
        let config = json!({"sessionAffinity": "ClientIP",
            "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": 7}}});
        assert_eq!(seconds(config), 7);
    }

    #[test]
    fn services_without_an_address_of_ours_are_left_alone() {
        for spec in [
            json!({"clusterIP": "None", "ports": [{"port": 1}]}),
            json!({"ports": [{"port": 1}]}),
            json!({"clusterIP": "fd00::1", "ports": [{"port": 1}]}),
            json!({"type": "ExternalName", "externalName": "example.com"}),
        ] {
            assert_eq!(known(spec.clone()), None, "{spec}");
        }
        let dual = json!({"clusterIP": "fd00::1", "clusterIPs": ["fd00::1", "10.96.0.1"]});
        assert!(known(dual).is_some());
        let other = json!({"metadata": {"name": "s", "labels": {OTHER_PROXY: "x"}},
            "spec": {"clusterIP": "10.96.0.1", "ports": [{"port": 1}]}});
        assert_eq!(Known::of(&serde_json::from_value(other).unwrap()), None);
        let ipv6 = json!({"metadata": {"name": "s-1"}, "addressType": "IPv6", "endpoints": []});
        assert_eq!(Slice::of(&serde_json::from_value(ipv6).unwrap()), None);
    }
}
