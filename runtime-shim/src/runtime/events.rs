//! containerd's event stream, kept open for ever and boiled down to hints.

use std::time::Duration;

use containerd_client::events::TaskExit;
use containerd_client::services::v1::SubscribeRequest;
use containerd_client::services::v1::events_client::EventsClient;
use containerd_client::types::Envelope;
use prost::Message;
use tokio::sync::broadcast;
use tonic::transport::Channel;
use tracing::{info, warn};

use super::RuntimeEvent;
use super::request::{NAMESPACE, endless};

/// Hints kept for a slow receiver; one that lags more looks at everything.
const CAPACITY: usize = 4096;
const RETRY: Duration = Duration::from_millis(500);

/// Starts following events.
pub(super) fn follow(channel: Channel) -> broadcast::Sender<RuntimeEvent> {
    let (sender, _) = broadcast::channel(CAPACITY);
    let hints = sender.clone();
    tokio::spawn(async move {
        let mut told = false;
        loop {
            match follow_once(&channel, &hints).await {
                Ok(()) => {
                    told = false;
                    info!("containerd closed the event stream");
                }
                // Once, not at every try.
                Err(status) if !std::mem::replace(&mut told, true) => {
                    warn!(error = %status.message(), "no events from containerd");
                }
                Err(_) => {}
            }
            tokio::time::sleep(RETRY).await;
        }
    });
    sender
}

async fn follow_once(
    channel: &Channel,
    hints: &broadcast::Sender<RuntimeEvent>,
) -> Result<(), tonic::Status> {
    let filters = vec![format!(r#"namespace=="{NAMESPACE}",topic=="/tasks/exit""#)];
    let mut stream = EventsClient::new(channel.clone())
        .subscribe(endless(SubscribeRequest { filters }))
        .await?
        .into_inner();
    // Whatever happened while nobody listened shows in the tasks' states. Without receivers
    // there is nobody to tell, which is no error.
    let _ = hints.send(RuntimeEvent::Resync);
    while let Some(envelope) = stream.message().await? {
        if let Some(hint) = hint(&envelope) {
            let _ = hints.send(hint);
        }
    }
    Ok(())
}

fn hint(envelope: &Envelope) -> Option<RuntimeEvent> {
    let event = envelope.event.as_ref()?;
    let exit = TaskExit::decode(event.value.as_slice()).ok()?;
    // The main process bears the container's own id; others are execs, which have waiters.
    (exit.id == exit.container_id || exit.id.is_empty()).then_some(RuntimeEvent::Exited {
        container_id: exit.container_id,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn envelope(container: &str, id: &str) -> Envelope {
        let exit = TaskExit {
            container_id: container.into(),
            id: id.into(),
            ..Default::default()
        };
        let event = prost_types::Any {
            type_url: "containerd.events.TaskExit".into(),
            value: exit.encode_to_vec(),
        };
        Envelope {
            event: Some(event),
            ..Default::default()
        }
    }

    #[test]
    fn only_main_processes_count() {
        assert!(matches!(
            hint(&envelope("c", "c")),
            Some(RuntimeEvent::Exited { container_id }) if container_id == "c"
        ));
        assert!(hint(&envelope("c", "exec-1")).is_none());
        assert!(hint(&Envelope::default()).is_none());
    }
}
