//! The `Watch` stream: every report once, then what changes, events, and the inventory on change.

use std::sync::Arc;
use std::time::Duration;

use sandman_protocol::v1;
use tokio::sync::mpsc;
use tokio::time::{Interval, MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;
use tonic::Status;
use v1::watch_response::Item;

use super::inventory::InventorySource;
use super::term::Term;
use crate::eviction::Pressure;
use crate::sandbox::board::{Board, Reader};

/// How often the inventory is compared with the one sent last. Images have no event to wait for.
const INVENTORY_INTERVAL: Duration = Duration::from_secs(10);

type Sender = mpsc::Sender<Result<v1::WatchResponse, Status>>;

/// Serves one stream until the client goes, a newer leader comes or the service stops.
pub(super) async fn serve(
    board: Arc<Board>,
    inventory: InventorySource,
    term: Arc<Term>,
    asked: u64,
    shutdown: CancellationToken,
    sender: Sender,
) {
    let mut terms = term.follow();
    let newer = async {
        // A closed channel means that the process ends.
        let _ = terms.wait_for(|highest| *highest > asked).await;
    };
    tokio::select! {
        () = stream(board, inventory, asked, &sender) => {}
        () = newer => {
            // The client may be gone already, which is as good.
            let _ = sender.send(Err(Status::aborted("a newer leader watches this host"))).await;
        }
        () = sender.closed() => {}
        () = shutdown.cancelled() => {}
    }
}

async fn stream(board: Arc<Board>, inventory: InventorySource, term: u64, sender: &Sender) {
    let mut reader = board.reader();
    if !send_reports(&mut reader, sender).await {
        return;
    }
    if !send(sender, Item::Synced(v1::Synced {})).await {
        return;
    }
    let mut sent = v1::Inventory::default();
    let mut pressure = inventory.pressure();
    let mut tick = interval(INVENTORY_INTERVAL);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            changed = reader.changed() => {
                if !changed
                    || !send_reports(&mut reader, sender).await
                    || !send_events(&mut reader, sender).await
                {
                    return;
                }
            }
            () = news(&mut tick, &mut pressure) => {
                let now = inventory.inventory(term).await;
                if now != sent {
                    sent.clone_from(&now);
                    if !send(sender, Item::Inventory(now)).await {
                        return;
                    }
                }
            }
        }
    }
}

/// The moment of the next look, or an earlier one at which the host falls ill or is well again.
async fn news(tick: &mut Interval, pressure: &mut Pressure) {
    tokio::select! {
        _ = tick.tick() => {}
        () = pressure.changed() => {}
    }
}

async fn send(sender: &Sender, item: Item) -> bool {
    sender
        .send(Ok(v1::WatchResponse { item: Some(item) }))
        .await
        .is_ok()
}

async fn send_reports(reader: &mut Reader, sender: &Sender) -> bool {
    loop {
        // The slot first: a report that waits for a slow reader would grow stale.
        let Ok(slot) = sender.reserve().await else {
            return false;
        };
        let Some(report) = reader.next_report() else {
            return true;
        };
        let item = Some(Item::Report((*report).clone()));
        slot.send(Ok(v1::WatchResponse { item }));
    }
}

async fn send_events(reader: &mut Reader, sender: &Sender) -> bool {
    loop {
        // The slot first: an event taken for a reader that is gone would be lost.
        let Ok(slot) = sender.reserve().await else {
            return false;
        };
        let Some(event) = reader.next_event() else {
            return true;
        };
        slot.send(Ok(v1::WatchResponse {
            item: Some(Item::Event(event)),
        }));
    }
}
