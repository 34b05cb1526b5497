//! Tells one host what is to be known of the cluster's network, again and again.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;

use super::state::State;
use crate::backoff::Backoff;
use crate::hosts::{Connection, HostError, Hosts};
use crate::view::HostName;

const FIRST_RETRY: Duration = Duration::from_millis(200);
const MAX_RETRY: Duration = Duration::from_secs(10);

/// What a host has taken, and on which of its connections. On a new one it is told everything: it
/// may have been restarted.
struct Taken {
    epoch: u64,
    state: Arc<State>,
}

/// Runs until it is dropped.
pub(super) async fn run(
    host: HostName,
    hosts: Arc<Hosts>,
    mut newest: watch::Receiver<Option<Arc<State>>>,
) {
    let process = format!("{:x}", std::process::id());
    let started = jiff::Timestamp::now().as_nanosecond();
    let name = |number| format!("{process}-{started:x}-{number}");
    let mut connections = hosts.changes();
    let mut taken: Option<Taken> = None;
    let mut backoff = Backoff::new(FIRST_RETRY, MAX_RETRY);
    let mut failing = false;
    loop {
        let state = newest.borrow_and_update().clone();
        connections.borrow_and_update();
        let view = hosts.view(&host);
        let connected = view.filter(|view| view.connection == Connection::Synced);
        if let (Some(state), Some(view), Some(commands)) = (state, connected, hosts.host(&host)) {
            let known = taken.take().filter(|taken| taken.epoch == view.epoch);
            let up_to_date = known
                .as_ref()
                .is_some_and(|taken| state.is_same_for(&taken.state, view.ip));
            if up_to_date {
                taken = known;
            } else {
                let before = known.as_ref().map(|taken| &*taken.state);
                let wish = state.since(before, view.ip, name);
                let done = match commands.set_cluster_network(wish).await {
                    // An older host, which has no rules to remove.
                    Err(HostError::Refused(_)) if state.is_off() => Ok(()),
                    done => done,
                };
                match done {
                    Ok(()) => {
                        backoff.reset();
                        failing = false;
                        let epoch = view.epoch;
                        taken = Some(Taken { epoch, state });
                    }
                    Err(error) => {
                        // One line until it works again: it is tried for ever.
                        if !failing {
                            failing = true;
                            tracing::warn!(%host, %error, "host does not take the cluster's network");
                        }
                        tokio::time::sleep(backoff.step()).await;
                    }
                }
                continue;
            }
        }
        tokio::select! {
            changed = newest.changed() => if changed.is_err() {
                // Nothing will change any more, but hosts will still come back.
                if connections.changed().await.is_err() {
                    return;
                }
            },
            changed = connections.changed() => if changed.is_err() {
                return;
            },
        }
    }
}
