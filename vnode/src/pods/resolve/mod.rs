//! What a pod refers to, turned into values: configMaps, secrets, fields,
//! service variables and tokens. The resolution itself is pure; the objects
//! come from [`objects`], [`services`] and [`tokens`].

pub mod credentials;
pub mod env;
pub mod fields;
pub mod objects;
pub mod services;
pub mod tokens;
pub mod volumes;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use k8s_openapi::api::core::v1::{ConfigMap, Container, Pod, Secret};
use sandman_protocol::v1;

use self::tokens::TokenKey;
use super::ephemeral;

/// Kind of an object that pods refer to by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// A ConfigMap.
    ConfigMap,
    /// A Secret.
    Secret,
}

/// An object that a pod refers to, in the pod's own namespace.
pub type Reference = (Kind, String);

/// What is known about a referenced object.
#[derive(Debug, Clone)]
pub enum Found<T> {
    /// Here it is.
    Present(Arc<T>),
    /// The API server says that there is none.
    Absent,
    /// Nothing is known yet, or reading it fails for the reason given.
    Unknown(Option<String>),
}

/// Everything that a resolution reads, at one moment.
#[derive(Debug, Default)]
pub struct Sources {
    /// ConfigMaps by name.
    pub config_maps: BTreeMap<String, Found<ConfigMap>>,
    /// Secrets by name.
    pub secrets: BTreeMap<String, Found<Secret>>,
    /// Variables of services, in the order of the list; `None` until services
    /// were read once.
    pub services: Option<Vec<(String, String)>>,
    /// Service account tokens.
    pub tokens: BTreeMap<TokenKey, Arc<str>>,
    /// Address of the pod's host.
    pub host_ip: String,
    /// What the host offers, for limits that the pod does not set.
    pub allocatable: v1::Resources,
}

/// The values.
#[derive(Debug, Default, PartialEq)]
pub struct Resolved {
    /// Variables of each container, by its name.
    pub env: BTreeMap<String, Vec<v1::EnvVar>>,
    /// Volumes with the files in them.
    pub volumes: Vec<v1::Volume>,
    /// Credentials for registries, most specific first.
    pub credentials: Vec<v1::RegistryCredential>,
    /// Pull secrets that are missing or malformed; the pull goes on without.
    pub bad_pull_secrets: Vec<String>,
}

/// Why a pod cannot be resolved now.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Unresolved {
    /// An object was not read yet; there will be news.
    #[error("waiting for {0}")]
    Pending(String),
    /// A container's configuration is wrong: `CreateContainerConfigError`.
    #[error("{message}")]
    Config {
        /// The container.
        container: String,
        /// The kubelet's text.
        message: String,
    },
    /// A volume cannot be filled: event `FailedMount`, containers wait.
    #[error("MountVolume.SetUp failed for volume {volume:?} : {message}")]
    Mount {
        /// The volume.
        volume: String,
        /// The kubelet's text.
        message: String,
    },
}

/// A problem inside one container or volume, before it is known whose it is.
#[derive(Debug)]
enum Problem {
    Pending(String),
    Wrong(String),
}

/// Resolves everything that `pod` refers to.
///
/// # Errors
/// The first thing that is missing, volumes first.
pub fn resolve(pod: &Pod, sources: &Sources) -> Result<Resolved, Unresolved> {
    let Some(spec) = &pod.spec else {
        return Ok(Resolved::default());
    };
    let mut resolved = Resolved::default();
    for volume in spec.volumes.iter().flatten() {
        let filled = volumes::fill(pod, volume, sources).map_err(|problem| match problem {
            Problem::Pending(what) => Unresolved::Pending(what),
            Problem::Wrong(message) => Unresolved::Mount {
                volume: volume.name.clone(),
                message,
            },
        })?;
        resolved.volumes.push(filled);
    }
    for container in ephemeral::all(pod) {
        let env = env::variables(pod, &container, sources).map_err(|problem| match problem {
            Problem::Pending(what) => Unresolved::Pending(what),
            Problem::Wrong(message) => Unresolved::Config {
                container: container.name.clone(),
                message,
            },
        })?;
        resolved.env.insert(container.name.clone(), env);
    }
    for reference in spec.image_pull_secrets.iter().flatten() {
        match sources.secrets.get(&reference.name) {
            Some(Found::Present(secret)) => match credentials::parse(secret) {
                Some(found) => resolved.credentials.extend(found),
                None => resolved.bad_pull_secrets.push(reference.name.clone()),
            },
            Some(Found::Absent) => resolved.bad_pull_secrets.push(reference.name.clone()),
            Some(Found::Unknown(_)) | None => {
                return Err(Unresolved::Pending(format!("secret {:?}", reference.name)));
            }
        }
    }
    credentials::sort(&mut resolved.credentials);
    Ok(resolved)
}

/// The objects that a pod refers to.
pub fn references(pod: &Pod) -> BTreeSet<Reference> {
    let mut references = BTreeSet::new();
    let mut add = |kind, name: &str| {
        if !name.is_empty() {
            references.insert((kind, name.to_owned()));
        }
    };
    let Some(spec) = &pod.spec else {
        return references;
    };
    for secret in spec.image_pull_secrets.iter().flatten() {
        add(Kind::Secret, &secret.name);
    }
    for volume in spec.volumes.iter().flatten() {
        if let Some(source) = &volume.config_map {
            add(Kind::ConfigMap, &source.name);
        }
        if let Some(name) = volume.secret.as_ref().and_then(|s| s.secret_name.as_ref()) {
            add(Kind::Secret, name);
        }
        let projections = volume.projected.as_ref().and_then(|p| p.sources.as_ref());
        for source in projections.into_iter().flatten() {
            if let Some(config_map) = &source.config_map {
                add(Kind::ConfigMap, &config_map.name);
            }
            if let Some(secret) = &source.secret {
                add(Kind::Secret, &secret.name);
            }
        }
    }
    for container in ephemeral::all(pod) {
        for from in container.env_from.iter().flatten() {
            if let Some(config_map) = &from.config_map_ref {
                add(Kind::ConfigMap, &config_map.name);
            }
            if let Some(secret) = &from.secret_ref {
                add(Kind::Secret, &secret.name);
            }
        }
        for from in container
            .env
            .iter()
            .flatten()
            .filter_map(|env| env.value_from.as_ref())
        {
            if let Some(config_map) = &from.config_map_key_ref {
                add(Kind::ConfigMap, &config_map.name);
            }
            if let Some(secret) = &from.secret_key_ref {
                add(Kind::Secret, &secret.name);
            }
        }
    }
    references
}

/// Init containers, then regular ones.
pub fn containers(pod: &Pod) -> impl Iterator<Item = &Container> {
    let spec = pod.spec.iter();
    spec.flat_map(|spec| {
        spec.init_containers
            .iter()
            .flatten()
            .chain(&spec.containers)
    })
}

// === impl Sources ===

impl Sources {
    /// The ConfigMap, `None` if it is absent and may be.
    fn config_map(&self, name: &str, optional: bool) -> Result<Option<&ConfigMap>, Problem> {
        lookup("configmap", name, self.config_maps.get(name), optional)
    }

    /// The Secret, `None` if it is absent and may be.
    fn secret(&self, name: &str, optional: bool) -> Result<Option<&Secret>, Problem> {
        lookup("secret", name, self.secrets.get(name), optional)
    }
}

fn lookup<'a, T>(
    kind: &str,
    name: &str,
    found: Option<&'a Found<T>>,
    optional: bool,
) -> Result<Option<&'a T>, Problem> {
    match found {
        Some(Found::Present(object)) => Ok(Some(object)),
        Some(Found::Absent) if optional => Ok(None),
        Some(Found::Absent) => Err(Problem::Wrong(format!("{kind} {name:?} not found"))),
        Some(Found::Unknown(Some(error))) => {
            Err(Problem::Pending(format!("{kind} {name:?}: {error}")))
        }
        Some(Found::Unknown(None)) | None => Err(Problem::Pending(format!("{kind} {name:?}"))),
    }
}
