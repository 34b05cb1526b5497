//! The pods of one batch as the API server tells of them, with the moment at which it did.

use std::collections::{BTreeSet, VecDeque};
use std::pin::Pin;
use std::time::Instant;

use futures::{Stream, StreamExt};
use k8s_openapi::api::core::v1::Pod;
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, ResourceExt};

use crate::pod::{BATCH_LABEL, Progress, progress};

/// One change, as it reached the client.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Change {
    /// A pod is, or became, this.
    Pod(String, Progress, Instant),
    /// A pod is gone.
    Gone(String),
}

type Events = Pin<Box<dyn Stream<Item = watcher::Result<Event<Pod>>> + Send>>;

/// A watch that knows which pods there are.
pub(crate) struct PodWatch {
    events: Events,
    pods: Pods,
}

/// Bookkeeping over the events, apart from where they come from.
#[derive(Debug, Default)]
struct Pods {
    alive: BTreeSet<String>,
    /// Pods of a list that is under way: what it lacks was removed while nobody watched.
    listed: BTreeSet<String>,
    changes: VecDeque<Change>,
}

impl PodWatch {
    /// Begins to watch; whatever happens after this returned is seen.
    pub(crate) async fn open(pods: Api<Pod>, batch: &str) -> Self {
        let config = watcher::Config::default().labels(&format!("{BATCH_LABEL}={batch}"));
        let mut watch = Self {
            events: watcher(pods, config).default_backoff().boxed(),
            pods: Pods::default(),
        };
        while let Some(event) = watch.events.next().await {
            let listed = matches!(event, Ok(Event::InitDone));
            watch.take(event);
            if listed {
                break;
            }
        }
        watch
    }

    /// The next change. Safe to give up and call again.
    pub(crate) async fn next(&mut self) -> Option<Change> {
        loop {
            if let Some(change) = self.pods.changes.pop_front() {
                return Some(change);
            }
            let event = self.events.next().await?;
            self.take(event);
        }
    }

    /// Whether no pod of the batch is left.
    pub(crate) fn is_empty(&self) -> bool {
        self.pods.alive.is_empty()
    }

    /// Number of pods of the batch.
    pub(crate) fn len(&self) -> usize {
        self.pods.alive.len()
    }

    fn take(&mut self, event: watcher::Result<Event<Pod>>) {
        match event {
            Ok(event) => self.pods.take(event, Instant::now()),
            // The watcher tries again.
            Err(error) => tracing::warn!(%error, "watching pods"),
        }
    }
}

impl Pods {
    fn take(&mut self, event: Event<Pod>, at: Instant) {
        match event {
            Event::Apply(pod) => {
                self.alive.insert(pod.name_any());
                self.changed(&pod, at);
            }
            Event::Delete(pod) => self.gone(pod.name_any()),
            Event::Init => self.listed.clear(),
            Event::InitApply(pod) => {
                self.listed.insert(pod.name_any());
                self.changed(&pod, at);
            }
            Event::InitDone => {
                let listed = std::mem::take(&mut self.listed);
                let gone: Vec<_> = self.alive.difference(&listed).cloned().collect();
                for name in gone {
                    self.gone(name);
                }
                self.alive = listed;
            }
        }
    }

    fn changed(&mut self, pod: &Pod, at: Instant) {
        let change = Change::Pod(pod.name_any(), progress(pod), at);
        self.changes.push_back(change);
    }

    fn gone(&mut self, name: String) {
        self.alive.remove(&name);
        self.changes.push_back(Change::Gone(name));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(name: &str) -> Pod {
        let mut pod = Pod::default();
        pod.metadata.name = Some(name.to_owned());
        pod
    }

    #[test]
    fn removals_during_an_interrupted_watch_are_seen() {
        let now = Instant::now();
        let mut pods = Pods::default();
        pods.take(Event::Apply(pod("a")), now);
        pods.take(Event::Apply(pod("b")), now);
        pods.changes.clear();
        pods.take(Event::Init, now);
        pods.take(Event::InitApply(pod("b")), now);
        pods.take(Event::InitDone, now);
        assert_eq!(pods.alive, BTreeSet::from(["b".to_owned()]));
        assert!(pods.changes.contains(&Change::Gone("a".to_owned())));
        pods.take(Event::Delete(pod("b")), now);
        assert!(pods.alive.is_empty());
    }
}
