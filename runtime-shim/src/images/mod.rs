//! Images of this host: pulled from registries into containerd's stores and
//! unpacked there. For the sandbox core, which asks for one per container.

use std::collections::{BTreeMap, HashSet};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use oci_spec::image::ImageConfiguration;
use sandman_protocol::v1;
use serde::Deserialize;
use tonic::transport::Channel;

mod blobs;
mod containerd;
mod documents;
mod error;
mod flight;
mod layers;
mod local;
mod manifest;
mod pull;
mod reference;
mod registry;
mod stored;

use self::containerd::Containerd;
pub use self::error::ImageError;
use self::error::PullError;
pub(crate) use self::error::chain;
use self::flight::Flights;
use self::layers::Shared;
use self::local::{Known, Local};
use self::reference::Name;
pub(crate) use self::registry::Origins;
use self::registry::{Credential, CredentialHash, Registries};
use self::stored::Stored;
use crate::layers::{LayerSet, Layers};

/// Accepted credentials that are remembered; beyond it the registry is asked anew.
const MAX_REMEMBERED_GRANTS: usize = 65_536;

/// How to reach one registry host.
#[derive(Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RegistryConfig {
    /// Speak http instead of https.
    pub plain_http: bool,
    /// Hosts (optionally with `http://` or `https://`) asked before the registry itself.
    pub mirrors: Vec<String>,
    /// PEM file of certificate authorities besides the system's.
    pub ca_file: Option<PathBuf>,
    /// Credentials of the host itself, used when the pod brings none.
    pub username: Option<String>,
    /// Goes with `username`.
    pub password: Option<String>,
}

impl std::fmt::Debug for RegistryConfig {
    // Configurations are logged at start; passwords are not.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RegistryConfig")
            .field("plain_http", &self.plain_http)
            .field("mirrors", &self.mirrors)
            .field("ca_file", &self.ca_file)
            .field("username", &self.username)
            .finish_non_exhaustive()
    }
}

/// What [`Images`] needs to know.
#[derive(Clone, Debug)]
pub struct ImagesConfig {
    /// containerd namespace.
    pub namespace: String,
    /// containerd snapshotter that images are unpacked into.
    pub snapshotter: String,
    /// By registry host as it appears in references, `docker.io` for the default.
    pub registries: BTreeMap<String, RegistryConfig>,
    /// Folder on a volatile file system, for what must outlive this process but not the host.
    pub state_dir: PathBuf,
}

/// One container's wish for an image.
#[derive(Clone, Debug)]
pub struct ImageRequest {
    /// As the user wrote it.
    pub reference: String,
    /// When to ask the registry.
    pub policy: v1::PullPolicy,
    /// Most specific first.
    pub credentials: Vec<v1::RegistryCredential>,
}

/// Told about the pull that a request causes.
pub trait PullObserver: Send + Sync {
    /// A registry is about to be asked; called at most once per request.
    fn pulling(&self);
}

/// An image that is complete and unpacked on this host.
#[derive(Clone, Debug)]
pub struct Image {
    /// Normalised reference, `docker.io/library/busybox:latest`.
    pub name: String,
    /// `repository@sha256:...`, what container statuses report.
    pub image_id: String,
    /// Name of the committed snapshot that holds the root file system; empty
    /// for an image without layers.
    pub chain_id: String,
    /// The image's layers in the store; without them that snapshot is there.
    pub layers: Option<Arc<LayerSet>>,
    /// The image's own configuration.
    pub config: ImageConfiguration,
    /// Bytes of its blobs, as the registry sends them.
    pub size: u64,
    /// How the pull went; `None` when the image was there already.
    pub pulled: Option<Pulled>,
}

/// Durations of one request's pull, for the `Pulled` event.
#[derive(Clone, Copy, Debug)]
pub struct Pulled {
    /// Time the pull itself took.
    pub took: Duration,
    /// The same plus the time before this request's turn.
    pub including_waiting: Duration,
}

/// Why [`Images::new`] refused its configuration; names the key.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{0}")]
pub struct ImagesConfigError(String);

/// The images of this host.
#[derive(Clone)]
pub struct Images {
    inner: Arc<Inner>,
}

struct Inner {
    store: Containerd,
    registries: Arc<Registries>,
    origins: Arc<Origins>,
    stored: Option<Stored>,
    shared: Shared,
    known: Known,
    pulls: Flights<PullKey, Result<(Arc<Local>, Duration), ImageError>>,
    grants: Mutex<HashSet<(String, CredentialHash)>>,
    salt: [u8; 16],
}

/// Requests with equal keys share a pull. The credential belongs to it: a
/// result must not reach a pod whose own credential was not asked.
#[derive(Clone, PartialEq, Eq, Hash)]
struct PullKey {
    name: Name,
    credentials: Vec<CredentialHash>,
}

impl Images {
    /// Uses an open connection to containerd, and the layer store if there is one.
    ///
    /// # Errors
    /// A registry's configuration is unusable.
    pub fn new(
        channel: Channel,
        config: ImagesConfig,
        layers: Option<Arc<Layers>>,
    ) -> Result<Self, ImagesConfigError> {
        let store = Containerd::new(channel, &config.namespace, config.snapshotter)
            .map_err(ImagesConfigError)?;
        let registries = Registries::new(config.registries).map_err(ImagesConfigError)?;
        let registries = Arc::new(registries);
        let origins = Origins::new(Arc::clone(&registries), &config.state_dir);
        let inner = Inner {
            store,
            registries,
            origins: Arc::new(origins),
            stored: layers.map(Stored::new),
            shared: Shared::new(),
            known: Known::default(),
            pulls: Flights::new(),
            grants: Mutex::default(),
            salt: uuid::Uuid::new_v4().into_bytes(),
        };
        Ok(Self {
            inner: Arc::new(inner),
        })
    }

    /// Makes the image present, unpacked and permitted to the holder of the
    /// credentials. Requests for the same image share one pull, which goes on
    /// when the caller gives up.
    ///
    /// # Errors
    /// See [`ImageError::reason`]. What was fetched stays and is resumed by the next call.
    pub async fn ensure(
        &self,
        request: &ImageRequest,
        progress: &dyn PullObserver,
    ) -> Result<Image, ImageError> {
        let inner = &self.inner;
        let name = Name::parse(&request.reference)?;
        let credentials = inner.credentials(&name, request);
        if request.policy != v1::PullPolicy::Always {
            let local = inner.local(&name).await;
            let local = local.map_err(|why| ImageError::inspect(&request.reference, &why))?;
            if let Some(local) = local
                && inner.permits(&name, &local, &credentials)
            {
                return Ok(image(&name, &local, None));
            }
            if request.policy == v1::PullPolicy::Never {
                return Err(ImageError::never_pull(&request.reference));
            }
        }

        progress.pulling();
        let asked = Instant::now();
        let key = PullKey {
            name: name.clone(),
            credentials: credentials
                .iter()
                .map(|credential| credential.hash(&inner.salt))
                .collect(),
        };
        let reference = request.reference.clone();
        let lost = Err(ImageError::pull(&reference, &"the pull was interrupted"));
        let (worker, pulled_name) = (Arc::clone(inner), name.clone());
        let work = move || async move {
            let started = Instant::now();
            let pulled = worker.pull(&pulled_name, credentials).await;
            match pulled {
                Ok(local) => Ok((Arc::new(local), started.elapsed())),
                Err(why) => Err(ImageError::pull(&reference, &why)),
            }
        };
        let (local, took) = inner.pulls.join(key, lost, work).await?;
        let including_waiting = asked.elapsed().max(took);
        Ok(image(
            &name,
            &local,
            Some(Pulled {
                took,
                including_waiting,
            }),
        ))
    }

    /// Where the bytes of lazily filled layers come from.
    pub(crate) fn origins(&self) -> Arc<Origins> {
        Arc::clone(&self.inner.origins)
    }

    /// An image that is complete on this host, whoever may use it: for the host's operator.
    ///
    /// # Errors
    /// It cannot be looked at.
    pub(crate) async fn local(&self, reference: &str) -> Result<Option<Image>, ImageError> {
        let name = Name::parse(reference)?;
        let local = self.inner.local(&name).await;
        let local = local.map_err(|why| ImageError::inspect(reference, &why))?;
        Ok(local.map(|local| image(&name, &local, None)))
    }

    /// Names of all image records.
    ///
    /// # Errors
    /// containerd does not answer.
    pub(crate) async fn names(&self) -> Result<Vec<String>, ImageError> {
        let records = self.inner.store.images().await;
        let records = records.map_err(|status| ImageError::inspect("*", &status.message()))?;
        Ok(records.into_iter().map(|record| record.name).collect())
    }

    /// Every image of this host with all its names, for the inventory.
    ///
    /// # Errors
    /// containerd does not answer.
    pub async fn list(&self) -> Result<Vec<v1::Image>, ImageError> {
        let store = &self.inner.store;
        let records = store
            .images()
            .await
            .map_err(|status| ImageError::inspect("*", &status.message()))?;
        let mut by_digest: BTreeMap<String, (Vec<String>, containerd_client::services::v1::Image)> =
            BTreeMap::new();
        for record in records {
            let Some(target) = &record.target else {
                continue;
            };
            let entry = by_digest.entry(target.digest.clone());
            entry
                .or_insert_with(|| (Vec::new(), record.clone()))
                .0
                .push(record.name);
        }
        let mut images = Vec::with_capacity(by_digest.len());
        for (mut names, record) in by_digest.into_values() {
            names.sort();
            match local::size(store, &record).await {
                Ok(Some(size_bytes)) => images.push(v1::Image { names, size_bytes }),
                Ok(None) => {}
                Err(error) => tracing::debug!(image = names[0], %error, "image left out of list"),
            }
        }
        Ok(images)
    }
}

impl Inner {
    /// Credentials to try in turn; none at all means anonymous.
    fn credentials(&self, name: &Name, request: &ImageRequest) -> Vec<Credential> {
        let mut credentials = registry::matching(name, &request.credentials);
        if credentials.is_empty() {
            credentials.extend(self.registries.own_credential(name.registry()));
        }
        credentials
    }

    async fn local(&self, name: &Name) -> Result<Option<Local>, PullError> {
        let record = self.store.image(&name.canonical()).await;
        match record.map_err(PullError::containerd("image get"))? {
            Some(record) => {
                let stored = self.stored.as_ref();
                local::find(
                    &self.store,
                    &self.shared,
                    &self.known,
                    stored,
                    name,
                    &record,
                )
                .await
            }
            None => Ok(None),
        }
    }

    /// Whether an image that is here may be given to the holder of these credentials.
    fn permits(&self, name: &Name, local: &Local, credentials: &[Credential]) -> bool {
        if !local.private {
            return true;
        }
        let image_id = name.with_digest(&local.digest);
        let grants = self.grants.lock().unwrap_or_else(PoisonError::into_inner);
        credentials
            .iter()
            .any(|credential| grants.contains(&(image_id.clone(), credential.hash(&self.salt))))
    }

    fn grant(&self, image_id: String, credential: &Credential) {
        let mut grants = self.grants.lock().unwrap_or_else(PoisonError::into_inner);
        if grants.len() >= MAX_REMEMBERED_GRANTS {
            grants.clear();
        }
        grants.insert((image_id, credential.hash(&self.salt)));
    }

    async fn pull(&self, name: &Name, credentials: Vec<Credential>) -> Result<Local, PullError> {
        let mut denied = None;
        let attempts = credentials.into_iter().map(Some);
        let attempts: Vec<_> = attempts.collect();
        let attempts = if attempts.is_empty() {
            vec![None]
        } else {
            attempts
        };
        for credential in attempts {
            let session = self.registries.session(name, credential.clone())?;
            let private = credential.is_some();
            let stored = self.stored.as_ref();
            match pull::pull(&self.store, &self.shared, stored, &session, name, private).await {
                Ok(local) => {
                    if local.layers.is_some() {
                        self.origins.accepted(name, credential.as_ref());
                    }
                    if let Some(credential) = &credential {
                        self.grant(name.with_digest(&local.digest), credential);
                    }
                    tracing::info!(
                        image = name.canonical(),
                        digest = local.digest,
                        "image pulled"
                    );
                    return Ok(local);
                }
                // The next credential may be accepted.
                Err(error @ PullError::Denied(_)) => denied = Some(error),
                Err(error) => return Err(error),
            }
        }
        Err(denied.unwrap_or_else(|| PullError::Denied("no credential".to_owned())))
    }
}

fn image(name: &Name, local: &Local, pulled: Option<Pulled>) -> Image {
    Image {
        name: name.canonical(),
        image_id: name.with_digest(&local.digest),
        chain_id: local.chain_id.clone(),
        layers: local.layers.clone(),
        config: local.config.clone(),
        size: local.size,
        pulled,
    }
}

#[cfg(test)]
mod tests;
