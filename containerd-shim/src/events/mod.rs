//! Events to containerd, in order, until it has taken them.
//!
//! One queue a shim: the order in which a task's methods enqueue is the order in which containerd
//! hears. The queue is in memory only. What must not be lost (an exit) is in the task's record too,
//! and is told again after a restart of the shim; containerd takes an event twice without harm.

mod message;

use std::time::{Duration, SystemTime};

use containerd_shim_protos::api::ForwardRequest;
use containerd_shim_protos::protobuf::MessageField;
use containerd_shim_protos::protobuf::well_known_types::any::Any;
use containerd_shim_protos::shim::event::Envelope;
use containerd_shim_protos::shim_async::{Client, EventsClient};
use containerd_shim_protos::ttrpc;
use containerd_shim_protos::ttrpc::context;
use tokio::sync::{mpsc, oneshot};

pub(crate) use message::{Event, What};

use crate::task::convert::timestamp;

/// How long containerd may take for one event.
const TIMEOUT: Duration = Duration::from_secs(5);
/// First and longest pause between attempts.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(2));

enum Item {
    Event(Box<Envelope>),
    /// Tells that all before it are out.
    Flush(oneshot::Sender<()>),
}

/// Takes events; clones share the queue.
#[derive(Clone)]
pub(crate) struct Publisher {
    queue: mpsc::UnboundedSender<Item>,
    namespace: String,
}

impl Publisher {
    /// Sends to containerd's ttrpc socket at `address`, a path or `unix://` with one.
    pub(crate) fn start(address: &str, namespace: &str) -> Self {
        let (queue, events) = mpsc::unbounded_channel();
        let address = if address.contains("://") {
            address.to_owned()
        } else {
            format!("unix://{address}")
        };
        tokio::spawn(forward(address, events));
        Self {
            queue,
            namespace: namespace.to_owned(),
        }
    }

    /// Puts `event` at the end of the queue.
    pub(crate) fn publish(&self, event: &Event<'_>) {
        let (topic, type_url, value) = event.encode();
        let mut payload = Any::new();
        payload.type_url = type_url;
        payload.value = value;
        let mut envelope = Envelope::new();
        envelope.timestamp = MessageField::some(timestamp(SystemTime::now()));
        envelope.namespace.clone_from(&self.namespace);
        envelope.topic = topic.to_owned();
        envelope.event = MessageField::some(payload);
        // Fails only when the runtime is ending.
        drop(self.queue.send(Item::Event(Box::new(envelope))));
    }

    /// Waits until containerd has taken all events so far; not for long, for it may be gone.
    pub(crate) async fn flush(&self) {
        let (done, flushed) = oneshot::channel();
        drop(self.queue.send(Item::Flush(done)));
        drop(tokio::time::timeout(TIMEOUT, flushed).await);
    }
}

async fn forward(address: String, mut events: mpsc::UnboundedReceiver<Item>) {
    let mut connection = None;
    while let Some(item) = events.recv().await {
        let envelope = match item {
            Item::Event(envelope) => envelope,
            Item::Flush(done) => {
                let _gone = done.send(());
                continue;
            }
        };
        let mut request = ForwardRequest::new();
        request.envelope = MessageField::from(Some(*envelope));
        let mut pause = BACKOFF.0;
        loop {
            match send(&address, &mut connection, &request).await {
                Ok(()) => break,
                // It has understood and will not have it: asking again changes nothing.
                Err(ttrpc::Error::RpcStatus(status)) if refused(status.code()) => {
                    tracing::error!(status = status.message, "containerd refuses an event");
                    break;
                }
                Err(error) => {
                    connection = None;
                    tracing::warn!(%error, "an event waits for containerd");
                    tokio::time::sleep(pause).await;
                    pause = BACKOFF.1.min(pause * 2);
                }
            }
        }
    }
}

fn refused(code: ttrpc::Code) -> bool {
    matches!(
        code,
        ttrpc::Code::INVALID_ARGUMENT | ttrpc::Code::UNIMPLEMENTED | ttrpc::Code::PERMISSION_DENIED
    )
}

async fn send(
    address: &str,
    connection: &mut Option<EventsClient>,
    request: &ForwardRequest,
) -> ttrpc::Result<()> {
    let client = match connection {
        Some(client) => client,
        None => connection.insert(EventsClient::new(Client::connect(address).await?)),
    };
    client
        .forward(context::with_duration(TIMEOUT), request)
        .await
        .map(drop)
}
