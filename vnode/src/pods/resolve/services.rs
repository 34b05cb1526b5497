//! Variables that name the services of a pod's namespace
//! (`pkg/kubelet/envvars`). One watch of all services, of which only addresses
//! and ports are kept.

use std::collections::{BTreeMap, HashMap};
use std::sync::{PoisonError, RwLock};

use futures::StreamExt;
use k8s_openapi::api::core::v1::Service;
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{self, DefaultBackoff, Event};
use kube::{Api, Client};
use tokio::sync::watch;

use crate::errors::brief;

/// The namespace and name of the API server's own service, whose variables
/// every container gets.
const MASTER: (&str, &str) = ("default", "kubernetes");

type Namespace = String;
type Name = String;

/// What is kept of a service.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Known {
    ip: String,
    /// Name, port and protocol.
    ports: Vec<(Option<String>, i32, String)>,
}

/// The services of the cluster.
#[derive(Debug)]
pub struct Services {
    known: RwLock<HashMap<Namespace, BTreeMap<Name, Known>>>,
    synced: watch::Sender<bool>,
}

// === impl Services ===

impl Services {
    /// Nothing is known yet.
    pub fn new() -> Self {
        Self {
            known: RwLock::default(),
            synced: watch::Sender::new(false),
        }
    }

    /// Becomes true once every service was read.
    pub fn synced(&self) -> watch::Receiver<bool> {
        self.synced.subscribe()
    }

    /// Watches; ends only by being dropped.
    pub async fn run(&self, client: Client) {
        let api: Api<Service> = Api::all(client);
        let events =
            watcher::watcher(api, watcher::Config::default()).backoff(DefaultBackoff::default());
        tokio::pin!(events);
        let mut listing = HashMap::new();
        while let Some(event) = events.next().await {
            match event {
                Ok(Event::Init) => listing = HashMap::new(),
                Ok(Event::InitApply(service)) => apply(&mut listing, service),
                Ok(Event::InitDone) => {
                    *self.known.write().unwrap_or_else(PoisonError::into_inner) =
                        std::mem::take(&mut listing);
                    self.synced.send_replace(true);
                }
                Ok(Event::Apply(service)) => {
                    apply(
                        &mut self.known.write().unwrap_or_else(PoisonError::into_inner),
                        service,
                    );
                }
                Ok(Event::Delete(service)) => {
                    remove(
                        &mut self.known.write().unwrap_or_else(PoisonError::into_inner),
                        &service,
                    );
                }
                Err(error) => tracing::debug!(error = brief(&error), "watching services"),
            }
        }
    }

    /// The variables for a pod of `namespace`; without `links` only those of the
    /// API server. `None` until services were read once.
    pub fn variables(&self, namespace: &str, links: bool) -> Option<Vec<(String, String)>> {
        if !*self.synced.borrow() {
            return None;
        }
        let known = self.known.read().unwrap_or_else(PoisonError::into_inner);
        let master = known
            .get(MASTER.0)
            .and_then(|services| services.get_key_value(MASTER.1));
        let linked = links.then(|| known.get(namespace)).flatten();
        // A service of that name in the pod's own namespace comes last and wins.
        let own = linked.into_iter().flatten();
        Some(
            master
                .into_iter()
                .chain(own)
                .flat_map(|(name, known)| known.variables(name))
                .collect(),
        )
    }
}

impl Default for Services {
    fn default() -> Self {
        Self::new()
    }
}

fn apply(known: &mut HashMap<Namespace, BTreeMap<Name, Known>>, service: Service) {
    let Some(parsed) = Known::of(&service) else {
        return remove(known, &service);
    };
    if let (Some(namespace), Some(name)) = (service.metadata.namespace, service.metadata.name) {
        known.entry(namespace).or_default().insert(name, parsed);
    }
}

fn remove(known: &mut HashMap<Namespace, BTreeMap<Name, Known>>, service: &Service) {
    let (Some(namespace), Some(name)) = (&service.metadata.namespace, &service.metadata.name)
    else {
        return;
    };
    if let Some(services) = known.get_mut(namespace) {
        services.remove(name);
        if services.is_empty() {
            known.remove(namespace);
        }
    }
}

// === impl Known ===

impl Known {
    /// `None` for services without an address or ports.
    fn of(service: &Service) -> Option<Self> {
        let spec = service.spec.as_ref()?;
        let ip = spec
            .cluster_ip
            .clone()
            .filter(|ip| !ip.is_empty() && ip != "None")?;
        let ports: Vec<_> = spec
            .ports
            .iter()
            .flatten()
            .map(|port| {
                let name = port.name.clone().filter(|name| !name.is_empty());
                (
                    name,
                    port.port,
                    port.protocol.clone().unwrap_or_else(|| "TCP".to_owned()),
                )
            })
            .collect();
        (!ports.is_empty()).then_some(Self { ip, ports })
    }

    fn variables(&self, name: &str) -> Vec<(String, String)> {
        let prefix = variable_name(name);
        let host = if self.ip.contains(':') {
            format!("[{}]", self.ip)
        } else {
            self.ip.clone()
        };
        let mut variables = vec![(format!("{prefix}_SERVICE_HOST"), self.ip.clone())];
        for (index, (name, port, _)) in self.ports.iter().enumerate() {
            if index == 0 {
                variables.push((format!("{prefix}_SERVICE_PORT"), port.to_string()));
            }
            if let Some(name) = name {
                let name = format!("{prefix}_SERVICE_PORT_{}", variable_name(name));
                variables.push((name, port.to_string()));
            }
        }
        for (index, (_, port, protocol)) in self.ports.iter().enumerate() {
            let lower = protocol.to_lowercase();
            let url = format!("{lower}://{host}:{port}");
            if index == 0 {
                variables.push((format!("{prefix}_PORT"), url.clone()));
            }
            let prefix = format!("{prefix}_PORT_{port}_{}", protocol.to_uppercase());
            variables.push((format!("{prefix}_PROTO"), lower));
            variables.push((format!("{prefix}_PORT"), port.to_string()));
            variables.push((format!("{prefix}_ADDR"), self.ip.clone()));
            variables.push((prefix, url));
        }
        variables
    }
}

fn variable_name(name: &str) -> String {
    name.replace('-', "_").to_uppercase()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn service(namespace: &str, name: &str, spec: serde_json::Value) -> Service {
        serde_json::from_value(json!({
            "metadata": {"namespace": namespace, "name": name}, "spec": spec,
        }))
        .unwrap()
    }

    #[test]
    fn variables_of_the_namespace_and_of_the_api_server() {
        let services = Services::new();
        assert_eq!(services.variables("ns", true), None);
        {
            let mut known = services.known.write().unwrap();
            for service in [
                service(
                    "default",
                    "kubernetes",
                    json!({"clusterIP": "10.96.0.1", "ports": [{"name": "https", "port": 443}]}),
                ),
                service(
                    "ns",
                    "my-db",
                    json!({"clusterIP": "fd00::1", "ports": [{"port": 53, "protocol": "UDP"}]}),
                ),
                service(
                    "ns",
                    "headless",
                    json!({"clusterIP": "None", "ports": [{"port": 1}]}),
                ),
            ] {
                apply(&mut known, service);
            }
        }
        services.synced.send_replace(true);
        let all: BTreeMap<_, _> = services
            .variables("ns", true)
            .unwrap()
            .into_iter()
            .collect();
        for (name, value) in [
            ("KUBERNETES_SERVICE_HOST", "10.96.0.1"),
            ("KUBERNETES_SERVICE_PORT", "443"),
            ("KUBERNETES_SERVICE_PORT_HTTPS", "443"),
            ("KUBERNETES_PORT", "tcp://10.96.0.1:443"),
            ("KUBERNETES_PORT_443_TCP_PROTO", "tcp"),
            ("MY_DB_PORT_53_UDP", "udp://[fd00::1]:53"),
            ("MY_DB_PORT_53_UDP_ADDR", "fd00::1"),
        ] {
            assert_eq!(all.get(name).map(String::as_str), Some(value), "{name}");
        }
        assert!(!all.keys().any(|name| name.starts_with("HEADLESS")));
        let unlinked = services.variables("ns", false).unwrap();
        assert!(
            unlinked
                .iter()
                .all(|(name, _)| name.starts_with("KUBERNETES"))
        );
    }
}
