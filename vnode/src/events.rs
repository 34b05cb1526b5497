//! Cluster events about pods and the node. Posted beside the work, never in its way: what
//! comes too fast is dropped and counted, what repeats is counted up in place.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Event, EventSource, ObjectReference, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use k8s_openapi::jiff::Timestamp;
use kube::api::{Patch, PatchParams, PostParams};
use kube::{Api, Client};
use serde_json::json;
use tokio::sync::mpsc;
use tokio::time::{Instant, MissedTickBehavior};

use crate::errors::brief;
use crate::metrics::{Metrics, Reason, ReasonLabel};

/// The kubelet's defaults for events a second and at once.
const RATE: u32 = 50;
const BURST: u32 = 100;
/// Events that may wait to be posted.
const WAITING: usize = 1000;
/// Repeats that are remembered, and for how long.
const REMEMBERED: usize = 4096;
const REMEMBER_FOR: Duration = Duration::from_secs(600);
/// A post that takes longer is given up.
const POST_TIMEOUT: Duration = Duration::from_secs(10);
/// Longest message that the API server takes, in bytes.
const MAX_MESSAGE: usize = 1024;
const MAX_REASON: usize = 128;

/// Where events are handed in.
#[derive(Debug, Clone)]
pub struct Events {
    sender: mpsc::Sender<Note>,
    metrics: Metrics,
}

/// One event.
#[derive(Debug)]
struct Note {
    about: ObjectReference,
    warning: bool,
    reason: String,
    message: String,
    at: Timestamp,
}

/// Posts events; one task for all.
pub struct Poster {
    client: Client,
    node_name: String,
    notes: mpsc::Receiver<Note>,
    metrics: Metrics,
    sent: HashMap<Key, Sent>,
}

/// What makes two events the same.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Key {
    uid: String,
    field: String,
    reason: String,
    message: Arc<str>,
}

#[derive(Debug)]
struct Sent {
    name: String,
    count: i32,
    last: Instant,
}

/// Events for pods of this node, and the task that posts them.
pub fn channel(client: Client, node_name: &str, metrics: &Metrics) -> (Events, Poster) {
    let (sender, notes) = mpsc::channel(WAITING);
    let events = Events {
        sender,
        metrics: metrics.clone(),
    };
    let poster = Poster {
        client,
        node_name: node_name.to_owned(),
        notes,
        metrics: metrics.clone(),
        sent: HashMap::new(),
    };
    (events, poster)
}

// === impl Events ===

impl Events {
    /// Something that needs attention.
    pub fn warn(&self, pod: &Pod, reason: &str, message: &str) {
        self.pod(pod, true, reason, message);
    }

    /// Something about a pod as a whole.
    pub fn pod(&self, pod: &Pod, warning: bool, reason: &str, message: &str) {
        let about = reference(pod, None);
        self.note(about, warning, reason, message, Timestamp::now());
    }

    /// An event that a host saw.
    pub fn from_host(&self, pod: &Pod, event: sandman_protocol::v1::SandboxEvent) {
        let list = if event.init_container {
            "initContainers"
        } else if event.ephemeral_container {
            "ephemeralContainers"
        } else {
            "containers"
        };
        let field = (!event.container.is_empty())
            .then(|| format!("spec.{list}{{{}}}", clipped(&event.container, MAX_REASON)));
        let at = event
            .at
            .and_then(|at| Timestamp::from_second(at.seconds).ok());
        let about = reference(pod, field);
        let at = at.unwrap_or_else(Timestamp::now);
        self.note(about, event.warning, &event.reason, &event.message, at);
    }

    /// Something about the node itself.
    pub fn node(&self, name: &str, reason: &str, message: &str) {
        self.about_node(name, false, reason, message);
    }

    /// Something about the node that needs attention.
    pub fn node_warning(&self, name: &str, reason: &str, message: &str) {
        self.about_node(name, true, reason, message);
    }

    fn about_node(&self, name: &str, warning: bool, reason: &str, message: &str) {
        let about = ObjectReference {
            kind: Some("Node".to_owned()),
            name: Some(name.to_owned()),
            // As the kubelet does; `kubectl describe node` looks for it.
            uid: Some(name.to_owned()),
            ..ObjectReference::default()
        };
        self.note(about, warning, reason, message, Timestamp::now());
    }

    fn note(
        &self,
        about: ObjectReference,
        warning: bool,
        reason: &str,
        message: &str,
        at: Timestamp,
    ) {
        let note = Note {
            about,
            warning,
            reason: clipped(reason, MAX_REASON),
            message: clipped(message, MAX_MESSAGE),
            at,
        };
        if self.sender.try_send(note).is_err() {
            self.metrics
                .events_dropped
                .get_or_create(&ReasonLabel {
                    reason: Reason("rate"),
                })
                .inc();
        }
    }
}

// === impl Poster ===

impl Poster {
    /// Ends when every [`Events`] is dropped.
    pub async fn run(mut self) {
        // One token a tick; missed ticks come at once, up to the burst.
        let mut tokens = BURST;
        let mut refill = tokio::time::interval(Duration::from_secs(1) / RATE);
        refill.set_missed_tick_behavior(MissedTickBehavior::Burst);
        loop {
            if tokens == 0 {
                refill.tick().await;
                tokens = 1;
                continue;
            }
            let note = tokio::select! {
                biased;
                _ = refill.tick(), if tokens < BURST => {
                    tokens += 1;
                    continue;
                }
                note = self.notes.recv() => note,
            };
            let Some(note) = note else { return };
            tokens -= 1;
            match tokio::time::timeout(POST_TIMEOUT, self.post(note)).await {
                Ok(Ok(())) => {}
                // A namespace that is being deleted takes no new events.
                Ok(Err(error)) => self.dropped("refused", &brief(&error)),
                Err(_) => self.dropped("timeout", "no answer in time"),
            }
        }
    }

    fn dropped(&self, reason: &'static str, error: &str) {
        tracing::debug!(error, "cannot post an event");
        self.metrics
            .events_dropped
            .get_or_create(&ReasonLabel {
                reason: Reason(reason),
            })
            .inc();
    }

    async fn post(&mut self, note: Note) -> Result<(), kube::Error> {
        // Objects without a namespace have their events in this one.
        let namespace = note
            .about
            .namespace
            .as_deref()
            .unwrap_or("default")
            .to_owned();
        let api: Api<Event> = Api::namespaced(self.client.clone(), &namespace);
        let key = Key {
            uid: note.about.uid.clone().unwrap_or_default(),
            field: note.about.field_path.clone().unwrap_or_default(),
            reason: note.reason.clone(),
            message: note.message.as_str().into(),
        };
        if let Some(sent) = self.sent.get_mut(&key) {
            let patch = json!({ "count": sent.count + 1, "lastTimestamp": Time(note.at) });
            let params = PatchParams::default();
            match api
                .patch(&sent.name, &params, &Patch::Strategic(patch))
                .await
            {
                Ok(_) => {
                    sent.count += 1;
                    sent.last = Instant::now();
                    return Ok(());
                }
                // Events live for an hour; a new one takes its place.
                Err(kube::Error::Api(status)) if status.code == 404 => {
                    self.sent.remove(&key);
                }
                Err(error) => return Err(error),
            }
        }
        let event = self.event(&note, &namespace);
        let created = api.create(&PostParams::default(), &event).await?;
        self.remember(key, created.metadata.name.unwrap_or_default());
        Ok(())
    }

    fn event(&self, note: &Note, namespace: &str) -> Event {
        let pod = note.about.name.as_deref().unwrap_or_default();
        Event {
            metadata: ObjectMeta {
                name: Some(format!(
                    "{pod}.{:x}",
                    note.at.as_nanosecond() as u64 ^ unique()
                )),
                namespace: Some(namespace.to_owned()),
                ..ObjectMeta::default()
            },
            involved_object: note.about.clone(),
            type_: Some(if note.warning { "Warning" } else { "Normal" }.to_owned()),
            reason: Some(note.reason.clone()),
            message: Some(note.message.clone()),
            count: Some(1),
            first_timestamp: Some(Time(note.at)),
            last_timestamp: Some(Time(note.at)),
            source: Some(EventSource {
                component: Some("kubelet".to_owned()),
                host: Some(self.node_name.clone()),
            }),
            reporting_component: Some("kubelet".to_owned()),
            reporting_instance: Some(self.node_name.clone()),
            ..Event::default()
        }
    }

    fn remember(&mut self, key: Key, name: String) {
        if self.sent.len() >= REMEMBERED {
            self.sent
                .retain(|_, sent| sent.last.elapsed() < REMEMBER_FOR);
            if self.sent.len() >= REMEMBERED {
                self.sent.clear();
            }
        }
        self.sent.insert(
            key,
            Sent {
                name,
                count: 1,
                last: Instant::now(),
            },
        );
    }
}

fn unique() -> u64 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one(0_u8)
}

fn reference(pod: &Pod, field_path: Option<String>) -> ObjectReference {
    ObjectReference {
        api_version: Some("v1".to_owned()),
        kind: Some("Pod".to_owned()),
        namespace: pod.metadata.namespace.clone(),
        name: pod.metadata.name.clone(),
        uid: pod.metadata.uid.clone(),
        resource_version: None,
        field_path,
    }
}

fn clipped(text: &str, limit: usize) -> String {
    text[..text.floor_char_boundary(limit)].to_owned()
}
