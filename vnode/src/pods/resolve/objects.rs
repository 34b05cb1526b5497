//! The configMaps and secrets that pods of this node refer to, each followed by
//! a watch of its own: a node may read objects by name only, and only those
//! that its pods name. The watch of an object ends with its last user.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::fmt::Debug;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures::StreamExt;
use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::core::v1::{ConfigMap, Secret};
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Client, Resource};
use serde::de::DeserializeOwned;
use tokio_util::task::AbortOnDropHandle;

use super::{Found, Kind, Reference};
use crate::backoff::Backoff;
use crate::errors::brief;
use crate::hosts::Uid;

/// Right after a pod is bound, the authorizer may not know yet that the node
/// may read its secrets; so the first retries come quickly.
const FIRST_RETRY: Duration = Duration::from_millis(100);
const MAX_RETRY: Duration = Duration::from_secs(30);

/// Called with the users of an object that changed.
type OnChange = Arc<dyn Fn(&HashSet<Uid>) + Send + Sync>;

/// Followed objects of one kind, by namespace and name.
type Entries<K> = Arc<Mutex<HashMap<(String, String), Entry<K>>>>;

/// What is known about objects of one namespace.
type ByName<K> = BTreeMap<String, Found<K>>;

/// All followed objects.
pub struct Objects {
    config_maps: Cache<ConfigMap>,
    secrets: Cache<Secret>,
    /// What each pod uses, to know what it no longer does.
    used: Mutex<HashMap<Uid, (String, BTreeSet<Reference>)>>,
}

/// An object that may say that it never changes.
trait Immutable {
    fn is_immutable(&self) -> bool;
}

impl Immutable for ConfigMap {
    fn is_immutable(&self) -> bool {
        self.immutable == Some(true)
    }
}

impl Immutable for Secret {
    fn is_immutable(&self) -> bool {
        self.immutable == Some(true)
    }
}

struct Cache<K> {
    client: Client,
    on_change: OnChange,
    entries: Entries<K>,
}

struct Entry<K> {
    found: Found<K>,
    users: HashSet<Uid>,
    _watch: AbortOnDropHandle<()>,
}

// === impl Objects ===

impl Objects {
    /// Nothing is followed yet. `on_change` is called from the watches' tasks and
    /// must not block.
    pub fn new(client: &Client, on_change: OnChange) -> Self {
        Self {
            config_maps: Cache::new(client, &on_change),
            secrets: Cache::new(client, &on_change),
            used: Mutex::default(),
        }
    }

    /// States what a pod refers to from now on.
    pub fn set(&self, uid: &Uid, namespace: &str, references: BTreeSet<Reference>) {
        let mut used = lock(&self.used);
        let old = if references.is_empty() {
            used.remove(uid)
        } else {
            used.insert(Uid::clone(uid), (namespace.to_owned(), references.clone()))
        };
        let old = old.map(|(_, references)| references).unwrap_or_default();
        for (kind, name) in references.difference(&old) {
            match kind {
                Kind::ConfigMap => self.config_maps.follow(uid, namespace, name),
                Kind::Secret => self.secrets.follow(uid, namespace, name),
            }
        }
        for (kind, name) in old.difference(&references) {
            match kind {
                Kind::ConfigMap => self.config_maps.unfollow(uid, namespace, name),
                Kind::Secret => self.secrets.unfollow(uid, namespace, name),
            }
        }
    }

    /// A pod refers to nothing any more.
    pub fn release(&self, uid: &Uid) {
        let namespace = lock(&self.used)
            .get(uid)
            .map(|(namespace, _)| namespace.clone());
        if let Some(namespace) = namespace {
            self.set(uid, &namespace, BTreeSet::new());
        }
    }

    /// What is known about the objects of `references`.
    pub fn found(
        &self,
        namespace: &str,
        references: &BTreeSet<Reference>,
    ) -> (ByName<ConfigMap>, ByName<Secret>) {
        let of = |wanted: Kind| {
            references
                .iter()
                .filter(move |(kind, _)| *kind == wanted)
                .map(|(_, name)| name)
        };
        (
            of(Kind::ConfigMap)
                .map(|name| (name.clone(), self.config_maps.found(namespace, name)))
                .collect(),
            of(Kind::Secret)
                .map(|name| (name.clone(), self.secrets.found(namespace, name)))
                .collect(),
        )
    }
}

// === impl Cache ===

impl<K> Cache<K>
where
    K: Resource<Scope = NamespaceResourceScope, DynamicType = ()>
        + Clone
        + Debug
        + DeserializeOwned
        + Immutable
        + Send
        + Sync
        + 'static,
{
    fn new(client: &Client, on_change: &OnChange) -> Self {
        Self {
            client: client.clone(),
            on_change: Arc::clone(on_change),
            entries: Arc::default(),
        }
    }

    fn follow(&self, uid: &Uid, namespace: &str, name: &str) {
        let key = (namespace.to_owned(), name.to_owned());
        let mut entries = lock(&self.entries);
        if let Some(entry) = entries.get_mut(&key) {
            entry.users.insert(Uid::clone(uid));
            return;
        }
        let watch = watch(
            Api::namespaced(self.client.clone(), namespace),
            key.clone(),
            Arc::clone(&self.entries),
            Arc::clone(&self.on_change),
        );
        let entry = Entry {
            found: Found::Unknown(None),
            users: HashSet::from([Uid::clone(uid)]),
            _watch: AbortOnDropHandle::new(tokio::spawn(watch)),
        };
        entries.insert(key, entry);
    }

    fn unfollow(&self, uid: &Uid, namespace: &str, name: &str) {
        let key = (namespace.to_owned(), name.to_owned());
        let mut entries = lock(&self.entries);
        if let Some(entry) = entries.get_mut(&key) {
            entry.users.remove(uid);
            if entry.users.is_empty() {
                entries.remove(&key);
            }
        }
    }

    fn found(&self, namespace: &str, name: &str) -> Found<K> {
        let entries = lock(&self.entries);
        let key = (namespace.to_owned(), name.to_owned());
        entries
            .get(&key)
            .map_or(Found::Unknown(None), |entry| entry.found.clone())
    }
}

async fn watch<K>(api: Api<K>, key: (String, String), entries: Entries<K>, on_change: OnChange)
where
    K: Resource + Clone + Debug + DeserializeOwned + Immutable + Send + Sync + 'static,
{
    let events = watcher::watch_object(api, &key.1).backoff(Retries(new_retries()));
    tokio::pin!(events);
    while let Some(event) = events.next().await {
        let (found, done) = match event {
            Ok(Some(object)) => {
                let done = object.is_immutable();
                (Found::Present(Arc::new(object)), done)
            }
            Ok(None) => (Found::Absent, false),
            Err(error) => (Found::Unknown(Some(brief(&error))), false),
        };
        let users = {
            let mut entries = lock(&entries);
            let Some(entry) = entries.get_mut(&key) else {
                return;
            };
            // A failing read does not undo what was read before.
            if matches!(
                (&found, &entry.found),
                (Found::Unknown(_), Found::Present(_) | Found::Absent)
            ) {
                continue;
            }
            entry.found = found;
            entry.users.clone()
        };
        on_change(&users);
        if done {
            return;
        }
    }
}

fn new_retries() -> Backoff {
    Backoff::new(FIRST_RETRY, MAX_RETRY)
}

/// Our delays as the watcher wants them.
struct Retries(Backoff);

impl Iterator for Retries {
    type Item = Duration;

    fn next(&mut self) -> Option<Duration> {
        Some(self.0.step())
    }
}

impl kube::runtime::utils::Backoff for Retries {
    fn reset(&mut self) {
        self.0.reset();
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
