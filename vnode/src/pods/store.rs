//! The pods bound to this node, by UID. Each has the newest copy that the API
//! server sent, the status that this node computed, and its worker's notes.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use k8s_openapi::api::core::v1::{Pod, PodStatus};
use tokio::time::Instant;

use super::resolve::tokens::Tokens;
use super::status::{Waiting, is_terminal};
use crate::hosts::Uid;
use crate::view::HostName;

/// All pods.
#[derive(Debug, Default)]
pub(super) struct Store {
    inner: RwLock<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    by_uid: HashMap<Uid, Arc<Entry>>,
    by_name: BTreeMap<(String, String), Vec<Uid>>,
}

/// One pod.
#[derive(Debug)]
pub(super) struct Entry {
    pub(super) uid: Uid,
    /// Both copies under one lock, so that no order of two can be got wrong.
    copies: RwLock<Copies>,
    host: RwLock<Option<HostName>>,
    /// Something that the pod refers to has changed since it was last applied.
    pub(super) changed: AtomicBool,
    pub(super) work: tokio::sync::Mutex<Work>,
}

/// The pod's object as others see it and as this node does.
#[derive(Debug)]
struct Copies {
    /// As the API server last sent it.
    api: Arc<Pod>,
    /// The same with the newest status of our own.
    shown: Arc<Pod>,
}

/// Notes of a pod's worker. Nothing here must survive a restart.
#[derive(Debug, Default)]
pub(super) struct Work {
    /// What the host was last told to make true.
    pub(super) applied: Option<Applied>,
    /// The removal that the host was last told: its list's number and the grace.
    pub(super) removal: Option<(u64, Duration)>,
    /// The final DELETE was accepted.
    pub(super) deleted: bool,
    /// Since when a change of status waits to be written.
    pub(super) unwritten: Option<Instant>,
    /// Why the pod waits on this side.
    pub(super) waiting: Option<Waiting>,
    pub(super) tokens: Tokens,
    /// Warnings that were posted, so that each is posted once.
    pub(super) warned: BTreeSet<String>,
    /// Since when something that the pod refers to cannot be read.
    pub(super) unread_since: Option<Instant>,
    /// When the host of a pod that runs since before this process is told again.
    pub(super) adopt_at: Option<Instant>,
}

/// What makes two applications of a pod the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Applied {
    epoch: u64,
    generation: i64,
    /// Of labels and annotations: volumes show them, and changing them makes no
    /// new generation.
    metadata: u64,
}

// === impl Store ===

impl Store {
    /// Takes a copy of a pod. Returns its entry if that is news.
    pub(super) fn observe(&self, pod: Pod) -> Option<Arc<Entry>> {
        let uid: Uid = pod.metadata.uid.as_deref()?.into();
        if let Some(entry) = self.get(&uid) {
            return entry.observe(pod).then_some(entry);
        }
        let name = name_of(&pod);
        let entry = Arc::new(Entry::new(Uid::clone(&uid), pod));
        let mut inner = self.inner.write().unwrap_or_else(PoisonError::into_inner);
        inner
            .by_name
            .entry(name)
            .or_default()
            .push(Uid::clone(&uid));
        inner.by_uid.insert(uid, Arc::clone(&entry));
        Some(entry)
    }

    pub(super) fn remove(&self, uid: &str) -> Option<Arc<Entry>> {
        let mut inner = self.inner.write().unwrap_or_else(PoisonError::into_inner);
        let entry = inner.by_uid.remove(uid)?;
        let name = name_of(&entry.api());
        if let Some(uids) = inner.by_name.get_mut(&name) {
            uids.retain(|known| &**known != uid);
            if uids.is_empty() {
                inner.by_name.remove(&name);
            }
        }
        Some(entry)
    }

    pub(super) fn get(&self, uid: &str) -> Option<Arc<Entry>> {
        let inner = self.inner.read().unwrap_or_else(PoisonError::into_inner);
        inner.by_uid.get(uid).cloned()
    }

    pub(super) fn all(&self) -> Vec<Arc<Entry>> {
        let inner = self.inner.read().unwrap_or_else(PoisonError::into_inner);
        inner.by_uid.values().cloned().collect()
    }

    pub(super) fn len(&self) -> usize {
        self.inner
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .by_uid
            .len()
    }

    /// The newest pod of that name, one that is not over before one that is.
    pub(super) fn find(&self, namespace: &str, name: &str) -> Option<Arc<Entry>> {
        let inner = self.inner.read().unwrap_or_else(PoisonError::into_inner);
        let uids = inner
            .by_name
            .get(&(namespace.to_owned(), name.to_owned()))?;
        let entries = uids.iter().filter_map(|uid| inner.by_uid.get(uid));
        entries
            .max_by_key(|entry| {
                let pod = entry.shown();
                let over = is_terminal(pod.status.as_ref().and_then(|s| s.phase.as_deref()));
                (!over, pod.metadata.creation_timestamp.clone())
            })
            .cloned()
    }
}

// === impl Applied ===

impl Applied {
    /// `epoch` is that of the host's list.
    pub(super) fn of(pod: &Pod, epoch: u64) -> Self {
        let mut metadata = DefaultHasher::new();
        pod.metadata.labels.hash(&mut metadata);
        pod.metadata.annotations.hash(&mut metadata);
        Self {
            epoch,
            generation: pod.metadata.generation.unwrap_or(0),
            metadata: metadata.finish(),
        }
    }
}

// === impl Entry ===

impl Entry {
    fn new(uid: Uid, mut pod: Pod) -> Self {
        strip(&mut pod);
        let pod = Arc::new(pod);
        Self {
            uid,
            copies: RwLock::new(Copies {
                api: Arc::clone(&pod),
                shown: pod,
            }),
            host: RwLock::new(None),
            changed: AtomicBool::new(true),
            work: tokio::sync::Mutex::default(),
        }
    }

    /// Takes a newer copy. Older ones come from a watch that lags behind the
    /// answers to our own writes.
    pub(super) fn observe(&self, mut pod: Pod) -> bool {
        strip(&mut pod);
        let mut copies = self.copies.write().unwrap_or_else(PoisonError::into_inner);
        if !is_newer(&pod, &copies.api) {
            return false;
        }
        copies.api = Arc::new(pod);
        copies.shown = Arc::clone(&copies.api);
        true
    }

    /// As the API server last sent it.
    pub(super) fn api(&self) -> Arc<Pod> {
        let copies = self.copies.read().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(&copies.api)
    }

    /// With the newest status.
    pub(super) fn shown(&self) -> Arc<Pod> {
        let copies = self.copies.read().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(&copies.shown)
    }

    /// Shows a status that is not written yet.
    pub(super) fn show(&self, status: &PodStatus) {
        let mut copies = self.copies.write().unwrap_or_else(PoisonError::into_inner);
        if copies.shown.status.as_ref() != Some(status) {
            copies.shown = Arc::new(Pod {
                status: Some(status.clone()),
                ..(*copies.api).clone()
            });
        }
    }

    /// The host that the pod is placed on.
    pub(super) fn host(&self) -> Option<HostName> {
        self.host
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    pub(super) fn set_host(&self, host: HostName) {
        *self.host.write().unwrap_or_else(PoisonError::into_inner) = Some(host);
    }
}

/// Drops what no part of the node reads and what is large.
fn strip(pod: &mut Pod) {
    pod.metadata.managed_fields = None;
}

fn is_newer(new: &Pod, old: &Pod) -> bool {
    let version = |pod: &Pod| pod.metadata.resource_version.as_ref()?.parse::<u64>().ok();
    match (version(new), version(old)) {
        (Some(new), Some(old)) => new > old,
        _ => new.metadata.resource_version != old.metadata.resource_version,
    }
}

fn name_of(pod: &Pod) -> (String, String) {
    let text = |text: &Option<String>| text.clone().unwrap_or_default();
    (text(&pod.metadata.namespace), text(&pod.metadata.name))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn pod(uid: &str, version: u64, phase: &str, created: u64) -> Pod {
        serde_json::from_value(json!({
            "metadata": {
                "namespace": "ns", "name": "web", "uid": uid,
                "resourceVersion": version.to_string(),
                "creationTimestamp": format!("1970-01-01T00:00:{created:02}Z"),
            },
            "status": {"phase": phase},
        }))
        .unwrap()
    }

    #[test]
    fn copies_that_lag_behind_are_ignored() {
        let store = Store::default();
        let entry = store.observe(pod("a", 10, "Pending", 1)).unwrap();
        assert!(entry.observe(pod("a", 12, "Running", 1)));
        assert!(store.observe(pod("a", 11, "Pending", 1)).is_none());
        assert!(store.observe(pod("a", 12, "Pending", 1)).is_none());
        assert_eq!(
            entry.api().status.as_ref().unwrap().phase.as_deref(),
            Some("Running")
        );
    }

    #[test]
    fn labels_and_annotations_are_applied_when_they_change() {
        let mut pod = pod("a", 1, "Running", 1);
        let first = Applied::of(&pod, 1);
        pod.metadata.resource_version = Some("2".to_owned());
        assert_eq!(Applied::of(&pod, 1), first);
        assert_ne!(Applied::of(&pod, 2), first);
        let color = BTreeMap::from([("color".to_owned(), "red".to_owned())]);
        pod.metadata.labels = Some(color.clone());
        let labelled = Applied::of(&pod, 1);
        assert_ne!(labelled, first);
        pod.metadata.labels = None;
        pod.metadata.annotations = Some(color);
        let annotated = Applied::of(&pod, 1);
        assert!(annotated != first && annotated != labelled);
    }

    #[test]
    fn a_status_is_shown_until_a_newer_copy_comes() {
        let store = Store::default();
        let entry = store.observe(pod("a", 10, "Pending", 1)).unwrap();
        let phase = |pod: Arc<Pod>| pod.status.as_ref().unwrap().phase.clone().unwrap();
        let ours = pod("a", 10, "Running", 1).status.unwrap();
        entry.show(&ours);
        assert_eq!(phase(entry.shown()), "Running");
        assert_eq!(phase(entry.api()), "Pending");
        assert!(entry.observe(pod("a", 11, "Failed", 1)));
        assert_eq!(phase(entry.shown()), "Failed");
    }

    /// Two locks that were taken in both orders stopped the whole node here.
    #[test]
    fn showing_and_observing_at_once_ends() {
        const ROUNDS: u64 = 2_000;
        let entry = Arc::new(Entry::new("a".into(), pod("a", 1, "Pending", 1)));
        let ours = pod("a", 1, "Running", 1).status.unwrap();
        let (done, ended) = std::sync::mpsc::channel();
        let start = |work: Box<dyn FnOnce(&Entry) + Send>| {
            let (entry, done) = (Arc::clone(&entry), done.clone());
            std::thread::spawn(move || {
                work(&entry);
                let _ = done.send(());
            });
        };
        start(Box::new(|entry| {
            for version in 2..ROUNDS {
                entry.observe(pod("a", version, "Pending", 1));
            }
        }));
        start(Box::new(move |entry| {
            for _ in 2..ROUNDS {
                entry.show(&ours);
            }
        }));
        for _ in 0..2 {
            assert_eq!(ended.recv_timeout(Duration::from_secs(60)), Ok(()));
        }
    }

    #[test]
    fn a_name_means_the_newest_pod_that_is_not_over() {
        let store = Store::default();
        store.observe(pod("old", 1, "Running", 1));
        store.observe(pod("new", 2, "Pending", 2));
        assert_eq!(&*store.find("ns", "web").unwrap().uid, "new");
        store.observe(pod("new", 3, "Failed", 2));
        assert_eq!(&*store.find("ns", "web").unwrap().uid, "old");
        store.remove("old");
        assert_eq!(&*store.find("ns", "web").unwrap().uid, "new");
        store.remove("new");
        assert!(store.find("ns", "web").is_none());
        assert_eq!(store.len(), 0);
    }
}
