//! Where the bytes of lazily filled layers come from, for as long as a sandbox may read them: long
//! after the pull whose credential opened the repository.
//!
//! A repository is shown the credential that it accepted last. Credentials are kept over a restart
//! of this process, in one file on the volatile file system that nobody else may read: without them
//! a running sandbox could not read what it has not read yet.

use std::collections::{BTreeMap, HashMap};
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;
use http::{HeaderMap, HeaderValue};
use sandman_layer_store::LayerDigest;
use sandman_layer_store::origin::{Authorize, Counters, Origin, Patience, Source};

use super::endpoint::Endpoint;
use super::{Credential, Registries, mirror_host};
use crate::images::reference::Name;

/// Credentials that are tried for one repository.
const MAX_CREDENTIALS: usize = 8;
/// Repositories whose credentials are kept.
const MAX_REPOSITORIES: usize = 4096;
/// Name of the file of credentials.
const FILE: &str = "credentials.json";

/// The repositories that layers come from.
pub(crate) struct Origins {
    registries: Arc<Registries>,
    file: PathBuf,
    access: Mutex<HashMap<String, Arc<Access>>>,
    kept: Mutex<BTreeMap<String, Vec<Credential>>>,
    counters: Arc<Counters>,
}

impl Origins {
    /// `state_dir` is on a volatile file system.
    pub(in crate::images) fn new(registries: Arc<Registries>, state_dir: &Path) -> Self {
        let file = state_dir.join(FILE);
        let kept = std::fs::read(&file)
            .map_err(|error| error.to_string())
            .and_then(|bytes| serde_json::from_slice(&bytes).map_err(|error| error.to_string()));
        let kept = kept.unwrap_or_else(|error| {
            if file.exists() {
                tracing::warn!(file = %file.display(), error, "cannot read kept credentials");
            }
            BTreeMap::default()
        });
        Self {
            registries,
            file,
            access: Mutex::default(),
            kept: Mutex::new(kept),
            counters: Arc::default(),
        }
    }

    /// What all registries did for readers.
    pub(crate) fn counters(&self) -> &Arc<Counters> {
        &self.counters
    }

    /// The sources of a layer of `size` bytes of this repository, as [`repository`] names it.
    pub(crate) fn of(&self, repository: &str, layer: LayerDigest, size: u64) -> Origin {
        let Ok(name) = Name::parse(repository) else {
            return Origin::new(Vec::new());
        };
        let registry = name.registry();
        let mut sources = Vec::new();
        for mirror in self.registries.mirrors(registry) {
            // One for all repositories of a mirror would be enough, but it has little to hold.
            let own = self.registries.own_credential(mirror_host(mirror));
            if let Ok(endpoint) = self.registries.endpoint(mirror, own) {
                let access = Access::new(vec![Arc::new(endpoint)], name.repository());
                sources.extend(self.source(mirror, &name, Arc::new(access), layer, size));
            }
        }
        let access = self.access(&name);
        sources.extend(self.source(registry, &name, access, layer, size));
        Origin::new(sources.into_iter().map(Arc::new).collect())
    }

    fn source(
        &self,
        address: &str,
        name: &Name,
        access: Arc<Access>,
        layer: LayerDigest,
        size: u64,
    ) -> Option<Source> {
        let endpoint = access.endpoints().first().cloned()?;
        let url = endpoint.blob_url(name.repository(), &layer.to_string())?;
        let client = self.registries.clients(address).ranges.clone();
        let source = Source::new(client, url, size, access, Patience::default());
        Some(source.counted_by(Arc::clone(&self.counters)))
    }

    fn access(&self, name: &Name) -> Arc<Access> {
        let key = repository(name);
        let mut all = lock(&self.access);
        if let Some(access) = all.get(&key) {
            return Arc::clone(access);
        }
        let kept = lock(&self.kept).get(&key).cloned().unwrap_or_default();
        let own = self.registries.own_credential(name.registry());
        let credentials = kept.into_iter().map(Some).chain([own]);
        let endpoints = credentials
            .filter_map(|credential| self.registries.endpoint(name.registry(), credential).ok())
            .map(Arc::new)
            .collect();
        let access = Arc::new(Access::new(endpoints, name.repository()));
        all.insert(key, Arc::clone(&access));
        access
    }

    /// The repository has accepted this credential for a pull. Blocks for the time of a small file.
    pub(in crate::images) fn accepted(&self, name: &Name, credential: Option<&Credential>) {
        let access = self.access(name);
        let endpoint = self
            .registries
            .endpoint(name.registry(), credential.cloned());
        if let Ok(endpoint) = endpoint {
            access.prefer(endpoint, credential);
        }
        let Some(credential) = credential else { return };
        let mut kept = lock(&self.kept);
        let of_repository = kept.entry(repository(name)).or_default();
        if of_repository.first() == Some(credential) {
            return;
        }
        of_repository.retain(|other| other != credential);
        of_repository.insert(0, credential.clone());
        of_repository.truncate(MAX_CREDENTIALS);
        while kept.len() > MAX_REPOSITORIES {
            kept.pop_first();
        }
        if let Err(error) = self.save(&kept) {
            tracing::warn!(%error, "cannot keep a registry credential over a restart");
        }
    }

    fn save(&self, kept: &BTreeMap<String, Vec<Credential>>) -> io::Result<()> {
        let draft = self.file.with_extension("new");
        let mut file = std::fs::OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(&draft)?;
        file.write_all(&serde_json::to_vec(kept)?)?;
        std::fs::rename(draft, &self.file)
    }
}

/// How a repository is named in records: as in a reference, without tag.
pub(in crate::images) fn repository(name: &Name) -> String {
    format!("{}/{}", name.registry(), name.repository())
}

/// What one registry is shown for one repository.
struct Access {
    repository: String,
    /// One a credential; the first is the one in use.
    endpoints: Mutex<Vec<Arc<Endpoint>>>,
}

impl Access {
    fn new(endpoints: Vec<Arc<Endpoint>>, repository: &str) -> Self {
        Self {
            repository: repository.to_owned(),
            endpoints: Mutex::new(endpoints),
        }
    }

    fn endpoints(&self) -> Vec<Arc<Endpoint>> {
        lock(&self.endpoints).clone()
    }

    fn prefer(&self, endpoint: Endpoint, credential: Option<&Credential>) {
        let mut endpoints = lock(&self.endpoints);
        let known = endpoints.iter().position(|other| other.shows(credential));
        let endpoint = match known {
            Some(0) => return,
            Some(at) => endpoints.remove(at),
            None => Arc::new(endpoint),
        };
        endpoints.insert(0, endpoint);
        endpoints.truncate(MAX_CREDENTIALS);
    }

    fn use_first(&self, endpoint: &Arc<Endpoint>) {
        let mut endpoints = lock(&self.endpoints);
        if let Some(at) = endpoints
            .iter()
            .position(|other| Arc::ptr_eq(other, endpoint))
        {
            let endpoint = endpoints.remove(at);
            endpoints.insert(0, endpoint);
        }
    }
}

#[async_trait]
impl Authorize for Access {
    async fn header(&self) -> Option<HeaderValue> {
        let endpoints = self.endpoints();
        endpoints.first()?.authorization().await
    }

    async fn refused(
        &self,
        used: Option<&HeaderValue>,
        headers: &HeaderMap,
    ) -> Result<bool, String> {
        let mut why = None;
        for (n, endpoint) in self.endpoints().iter().enumerate() {
            let shown = endpoint.authorization().await;
            if n == 0 && shown.is_some() && shown.as_ref() != used {
                // Another reader was refused just before and has renewed it.
                return Ok(true);
            }
            match endpoint.renew(headers, &self.repository).await {
                // The same once more would be refused once more.
                Ok(true) if endpoint.authorization().await.as_ref() != used => {
                    self.use_first(endpoint);
                    return Ok(true);
                }
                Ok(_) => {}
                Err(error) => why = Some(error.to_string()),
            }
        }
        // A token that is too old, refused without a challenge: the next request gets one.
        match why {
            Some(why) => Err(why),
            None => Ok(used.is_some()),
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn origins(folder: &Path) -> Origins {
        let registries = Registries::new(BTreeMap::new()).unwrap();
        Origins::new(Arc::new(registries), folder)
    }

    fn credential(password: &str) -> Credential {
        Credential::new("user", password, "").unwrap()
    }

    /// Passwords that are shown to a repository, in order.
    fn shown(origins: &Origins, name: &Name, passwords: &[&str]) -> Vec<String> {
        let endpoints = origins.access(name).endpoints();
        let which = |endpoint: &Arc<Endpoint>| {
            let found = passwords
                .iter()
                .find(|password| endpoint.shows(Some(&credential(password))));
            found.map_or("none".to_owned(), ToString::to_string)
        };
        endpoints.iter().map(which).collect()
    }

    #[test]
    fn the_last_accepted_credential_comes_first_and_survives_a_restart() {
        // reqwest wants one; another test may have installed it.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let folder = tempfile::tempdir().unwrap();
        let name = Name::parse("registry.example/team/app:1").unwrap();
        let other = Name::parse("registry.example/team/other:1").unwrap();
        let known = ["one", "two"];
        let first = origins(folder.path());
        first.accepted(&name, Some(&credential("one")));
        first.accepted(&name, Some(&credential("two")));
        assert_eq!(shown(&first, &name, &known), ["two", "one", "none"]);
        first.accepted(&name, Some(&credential("one")));
        assert_eq!(shown(&first, &name, &known), ["one", "two", "none"]);
        let second = origins(folder.path());
        assert_eq!(shown(&second, &name, &known), ["one", "two", "none"]);
        // What one repository was shown is not for another.
        assert_eq!(shown(&second, &other, &known), ["none"]);
        let mode = std::fs::metadata(folder.path().join(FILE)).unwrap();
        use std::os::unix::fs::PermissionsExt as _;
        assert_eq!(mode.permissions().mode() & 0o077, 0);
    }

    #[test]
    fn a_layer_has_the_address_of_its_repository() {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let folder = tempfile::tempdir().unwrap();
        let origin =
            origins(folder.path()).of("registry.example:5000/team/app", LayerDigest([7; 32]), 10);
        let names: Vec<_> = origin
            .sources()
            .iter()
            .map(|source| source.name())
            .collect();
        assert_eq!(names, ["registry.example:5000"]);
    }
}
