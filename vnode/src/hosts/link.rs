//! Keeps one host connected for ever: connects, feeds what the host says into
//! its state, tells the observer, and connects again with growing delays.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use futures::StreamExt;
use sandman_protocol::v1::watch_response::Item;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::host::HostError;
use super::{Entry, Observer, limits};
use crate::backoff::Backoff;

const FIRST_RETRY: Duration = Duration::from_millis(200);
/// A host that comes back waits for its pods' statuses no longer than this.
const MAX_RETRY: Duration = Duration::from_secs(5);
/// A host must complete its list within this time, or the connection is of no
/// use.
const LIST_TIMEOUT: Duration = Duration::from_secs(60);

/// Runs until `shutdown`.
pub(super) async fn run(
    entry: Arc<Entry>,
    observer: Arc<dyn Observer>,
    lost_after: Duration,
    shutdown: CancellationToken,
) {
    let (up, is_up) = watch::channel(false);
    let watchdog = watchdog(&entry, &*observer, lost_after, is_up);
    tokio::select! {
        () = keep_connected(&entry, &*observer, &up) => {}
        () = watchdog => {}
        () = shutdown.cancelled() => {}
    }
}

async fn keep_connected(entry: &Entry, observer: &dyn Observer, up: &watch::Sender<bool>) {
    let mut backoff = Backoff::new(FIRST_RETRY, MAX_RETRY);
    let mut announced_down = false;
    loop {
        let result = session(entry, observer, up, &mut backoff, &mut announced_down).await;
        up.send_replace(false);
        let was_up = entry.write(|state| {
            let was_up = state.connection() == super::Connection::Synced;
            state.disconnected(SystemTime::now());
            was_up
        });
        entry
            .metrics
            .host_connected
            .get_or_create(&entry.label())
            .set(0);
        let error = match result {
            Ok(()) => "the host closed the connection".to_owned(),
            Err(error) => error.to_string(),
        };
        if was_up {
            observer.connection_changed(&entry.name);
        } else {
            entry
                .metrics
                .host_connect_failures
                .get_or_create(&entry.label())
                .inc();
        }
        // One line a change of state: a host may be away for days.
        if was_up || !announced_down {
            announced_down = true;
            tracing::warn!(host = %entry.name, address = %entry.address, error, "host is not connected");
        }
        tokio::time::sleep(backoff.step()).await;
    }
}

/// One connection from its start to its end.
async fn session(
    entry: &Entry,
    observer: &dyn Observer,
    up: &watch::Sender<bool>,
    backoff: &mut Backoff,
    announced_down: &mut bool,
) -> Result<(), HostError> {
    let (inventory, mut updates) = entry.host.connect().await?;
    entry.write(|state| state.connected(inventory));
    observer.inventory_changed(&entry.name);
    let list_deadline = tokio::time::sleep(LIST_TIMEOUT);
    tokio::pin!(list_deadline);
    let mut synced = false;
    loop {
        let item = tokio::select! {
            item = updates.next() => item,
            () = &mut list_deadline, if !synced => {
                return Err(HostError::Failed("did not list its sandboxes in time".to_owned()));
            }
        };
        let Some(response) = item.transpose()? else {
            return Ok(());
        };
        match response.item {
            Some(Item::Report(report)) => {
                let changed = entry
                    .write(|state| state.report(report))
                    .map_err(|error| HostError::Failed(error.to_string()))?;
                if let Some(uid) = changed {
                    observer.sandboxes_changed(&entry.name, &[uid]);
                }
            }
            Some(Item::Synced(_)) if !synced => {
                synced = true;
                let changed = entry.write(super::HostState::synced);
                backoff.reset();
                *announced_down = false;
                entry
                    .metrics
                    .host_connected
                    .get_or_create(&entry.label())
                    .set(1);
                tracing::info!(host = %entry.name, "host is connected");
                up.send_replace(true);
                observer.connection_changed(&entry.name);
                observer.sandboxes_changed(&entry.name, &changed);
            }
            Some(Item::Event(event)) => {
                observer.event(&entry.name, limits::event(event));
            }
            Some(Item::Inventory(inventory)) => {
                if entry.write(|state| state.inventory_changed(inventory)) {
                    observer.inventory_changed(&entry.name);
                }
            }
            // A second mark, or an item that a newer host knows.
            Some(Item::Synced(_)) | None => {}
        }
    }
}

/// Declares the host lost when it is down for too long, and found when it is
/// back.
async fn watchdog(
    entry: &Entry,
    observer: &dyn Observer,
    lost_after: Duration,
    mut up: watch::Receiver<bool>,
) {
    loop {
        let back = tokio::time::timeout(lost_after, up.wait_for(|up| *up))
            .await
            .is_ok();
        if !back && entry.write(|state| state.set_lost(true)) {
            tracing::error!(host = %entry.name, seconds = lost_after.as_secs(), "host is lost");
            observer.connection_changed(&entry.name);
        }
        // The sender lives as long as this future, so neither wait can fail.
        let _ = up.wait_for(|up| *up).await;
        if entry.write(|state| state.set_lost(false)) {
            tracing::info!(host = %entry.name, "host is back");
            observer.connection_changed(&entry.name);
        }
        let _ = up.wait_for(|up| !*up).await;
    }
}
