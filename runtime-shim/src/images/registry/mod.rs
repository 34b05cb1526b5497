//! Client of the OCI distribution protocol, reading side: manifests and blobs
//! of one repository with one credential, by mirrors first.

use std::collections::BTreeMap;
use std::time::Duration;

use reqwest::redirect::Policy;
use reqwest::{Client, Url};

mod challenge;
mod credential;
mod endpoint;
mod origins;
mod session;

pub(super) use self::credential::{Credential, CredentialHash, matching};
use self::endpoint::Endpoint;
pub(crate) use self::origins::Origins;
pub(super) use self::origins::repository;
pub(super) use self::session::Session;
use super::RegistryConfig;
use super::error::{PullError, chain};
use super::reference::Name;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Longest silence within an answer; an answer may take as long as it likes
/// while bytes come.
const READ_TIMEOUT: Duration = Duration::from_secs(30);
const DOCKER_HUB: &str = "docker.io";
const DOCKER_HUB_API: &str = "registry-1.docker.io";

/// HTTP clients and addresses of all registries.
#[derive(Debug)]
pub(super) struct Registries {
    configured: BTreeMap<String, Registry>,
    default_clients: Clients,
}

/// Clients of one registry.
#[derive(Clone, Debug)]
struct Clients {
    /// For pulls.
    pulls: Client,
    /// For ranges of blobs: it tells of redirects, which are followed once and remembered.
    ranges: Client,
}

#[derive(Debug)]
struct Registry {
    clients: Clients,
    config: RegistryConfig,
}

impl Registries {
    pub(super) fn new(configs: BTreeMap<String, RegistryConfig>) -> Result<Self, String> {
        let mut configured = BTreeMap::new();
        for (host, config) in configs {
            let clients = clients(&config).map_err(|why| format!("registries.{host:?}.{why}"))?;
            configured.insert(host, Registry { clients, config });
        }
        Ok(Self {
            configured,
            default_clients: clients(&RegistryConfig::default())?,
        })
    }

    /// The host's own credential for a registry.
    pub(super) fn own_credential(&self, registry: &str) -> Option<Credential> {
        let config = &self.configured.get(registry)?.config;
        let text = |value: &Option<String>| value.clone().unwrap_or_default();
        Credential::new(&text(&config.username), &text(&config.password), "")
    }

    /// Opens a repository with at most one credential. Tokens live as long as
    /// the session, so they never serve another pod.
    pub(super) fn session(
        &self,
        name: &Name,
        credential: Option<Credential>,
    ) -> Result<Session, PullError> {
        let registry = name.registry();
        let mut endpoints = Vec::new();
        for mirror in self.mirrors(registry) {
            endpoints.push(self.endpoint(mirror, self.own_credential(mirror_host(mirror)))?);
        }
        endpoints.push(self.endpoint(registry, credential)?);
        Ok(Session::new(endpoints, name.repository()))
    }

    fn mirrors(&self, registry: &str) -> &[String] {
        let configured = self.configured.get(registry);
        configured.map_or(&[], |registry| &registry.config.mirrors)
    }

    fn clients(&self, address: &str) -> &Clients {
        let configured = self.configured.get(mirror_host(address));
        configured.map_or(&self.default_clients, |registry| &registry.clients)
    }

    fn endpoint(
        &self,
        address: &str,
        credential: Option<Credential>,
    ) -> Result<Endpoint, PullError> {
        let host = mirror_host(address);
        let configured = self.configured.get(host);
        let plain_http = address.starts_with("http://")
            || (!address.contains("://")
                && configured.is_some_and(|registry| registry.config.plain_http));
        let api_host = if host == DOCKER_HUB {
            DOCKER_HUB_API
        } else {
            host
        };
        let scheme = if plain_http { "http" } else { "https" };
        let base = Url::parse(&format!("{scheme}://{api_host}/v2/")).map_err(|error| {
            PullError::Malformed(format!("registry address {address:?}: {error}"))
        })?;
        let client = self.clients(address).pulls.clone();
        Ok(Endpoint::new(client, base, credential))
    }
}

fn mirror_host(address: &str) -> &str {
    address
        .split_once("://")
        .map_or(address, |(_, rest)| rest)
        .trim_end_matches('/')
}

fn clients(config: &RegistryConfig) -> Result<Clients, String> {
    Ok(Clients {
        pulls: client(config, Policy::default())?,
        ranges: client(config, Policy::none())?,
    })
}

fn client(config: &RegistryConfig, redirects: Policy) -> Result<Client, String> {
    let mut builder = Client::builder()
        .redirect(redirects)
        .user_agent(concat!("sandman/", env!("CARGO_PKG_VERSION")))
        .connect_timeout(CONNECT_TIMEOUT)
        .read_timeout(READ_TIMEOUT);
    if let Some(path) = &config.ca_file {
        let pem = std::fs::read(path).map_err(|error| format!("ca_file {path:?}: {error}"))?;
        let authorities = reqwest::Certificate::from_pem_bundle(&pem)
            .map_err(|error| format!("ca_file {path:?}: {}", chain(&error)))?;
        builder = builder.tls_certs_merge(authorities);
    }
    builder
        .build()
        .map_err(|error| format!("TLS: {}", chain(&error)))
}
