//! A host behind gRPC and mutual TLS. Commands and the watch share one
//! connection; exec and log streams use others, so that a stalled stream never
//! holds up a command.

use std::future::Future;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use futures::StreamExt;
use sandman_protocol::transport::{FleetTls, connect};
use sandman_protocol::v1::host_client::HostClient;
use sandman_protocol::{MAX_MESSAGE_BYTES, v1};
use tonic::transport::Channel;
use tonic::{Request, Response, Status};

use super::host::{Host, HostError, Updates};
use crate::view::{HostName, StreamError};

/// A command that has no answer by then has failed.
const CALL_TIMEOUT: Duration = Duration::from_secs(15);
/// Largest item of the watch. What is decoded takes a few hundred times more
/// memory in the worst case, before any limit on its parts can be looked at.
const MAX_ITEM_BYTES: usize = 4 << 20;
/// A stream that is not open by then is not opened: its client waits.
const OPEN_TIMEOUT: Duration = Duration::from_secs(10);
/// Usage is worth little when it is late.
const STATS_TIMEOUT: Duration = Duration::from_secs(5);
/// Connections that streams are spread over. They share a connection's flow
/// control window, so streams whose clients do not read slow down a part of the
/// others only.
const STREAM_CONNECTIONS: usize = 4;

/// Client of one host.
#[derive(Debug)]
pub(super) struct RemoteHost {
    name: HostName,
    address: SocketAddr,
    tls: FleetTls,
    term: u64,
    control: Mutex<Option<HostClient<Channel>>>,
    streams: [tokio::sync::Mutex<Option<HostClient<Channel>>>; STREAM_CONNECTIONS],
    next_stream: AtomicUsize,
}

impl RemoteHost {
    /// A client that is not connected yet. `term` is the leader's term that the
    /// host is told with every command.
    pub(super) fn new(name: HostName, address: SocketAddr, tls: FleetTls, term: u64) -> Self {
        Self {
            name,
            address,
            tls,
            term,
            control: Mutex::new(None),
            streams: Default::default(),
            next_stream: AtomicUsize::new(0),
        }
    }

    async fn open(&self) -> Result<HostClient<Channel>, HostError> {
        let channel = connect(&self.tls, self.name.as_str(), self.address)
            .await
            .map_err(|error| HostError::Unreachable(chain(&error)))?;
        Ok(HostClient::new(channel)
            .max_decoding_message_size(MAX_MESSAGE_BYTES)
            .max_encoding_message_size(MAX_MESSAGE_BYTES))
    }

    fn control(&self) -> Result<HostClient<Channel>, HostError> {
        let control = self.control.lock().unwrap_or_else(PoisonError::into_inner);
        control
            .clone()
            .ok_or_else(|| HostError::Unreachable("not connected".into()))
    }
}

#[async_trait]
impl Host for RemoteHost {
    async fn connect(&self) -> Result<(v1::Inventory, Updates), HostError> {
        let mut client = self.open().await?;
        let request = timed(v1::GetInventoryRequest {}, CALL_TIMEOUT);
        let inventory = answer(CALL_TIMEOUT, client.get_inventory(request)).await?;
        if inventory.host_name != self.name.as_str() {
            return Err(HostError::Refused(format!(
                "the host at {} calls itself {:?}",
                self.address, inventory.host_name
            )));
        }
        if inventory.term > self.term {
            return Err(HostError::Superseded);
        }
        let mut watcher = client.clone().max_decoding_message_size(MAX_ITEM_BYTES);
        // A deadline of the request would end the stream as well.
        let request = v1::WatchRequest { term: self.term };
        let updates = answer(CALL_TIMEOUT, watcher.watch(request)).await?;
        *self.control.lock().unwrap_or_else(PoisonError::into_inner) = Some(client);
        Ok((
            inventory,
            updates.map(|item| item.map_err(HostError::from)).boxed(),
        ))
    }

    async fn apply(&self, spec: v1::SandboxSpec) -> Result<(), HostError> {
        let request = v1::ApplyRequest {
            term: self.term,
            spec: Some(spec),
        };
        let mut client = self.control()?;
        answer(CALL_TIMEOUT, client.apply(timed(request, CALL_TIMEOUT))).await?;
        Ok(())
    }

    async fn remove(&self, uid: &str, grace: Duration, reason: &str) -> Result<(), HostError> {
        let request = v1::RemoveRequest {
            term: self.term,
            uid: uid.to_owned(),
            grace_period: Some(prost_types::Duration {
                seconds: i64::try_from(grace.as_secs()).unwrap_or(i64::MAX),
                nanos: 0,
            }),
            reason: reason.to_owned(),
        };
        let mut client = self.control()?;
        answer(CALL_TIMEOUT, client.remove(timed(request, CALL_TIMEOUT))).await?;
        Ok(())
    }

    async fn forget(&self, uid: &str) -> Result<(), HostError> {
        let request = v1::ForgetRequest {
            term: self.term,
            uid: uid.to_owned(),
        };
        let mut client = self.control()?;
        answer(CALL_TIMEOUT, client.forget(timed(request, CALL_TIMEOUT))).await?;
        Ok(())
    }

    async fn set_cluster_network(
        &self,
        mut wish: v1::ClusterNetworkRequest,
    ) -> Result<(), HostError> {
        wish.term = self.term;
        let mut client = self.control()?;
        let request = timed(wish, CALL_TIMEOUT);
        answer(CALL_TIMEOUT, client.set_cluster_network(request)).await?;
        Ok(())
    }

    async fn stats(&self) -> Result<v1::Stats, HostError> {
        let request = timed(v1::GetStatsRequest {}, STATS_TIMEOUT);
        let mut client = self.control()?;
        answer(STATS_TIMEOUT, client.get_stats(request)).await
    }

    async fn streams(&self) -> Result<HostClient<Channel>, StreamError> {
        let index = self.next_stream.fetch_add(1, Ordering::Relaxed) % STREAM_CONNECTIONS;
        let open = async {
            let mut slot = self.streams[index].lock().await;
            if let Some(client) = &*slot {
                // The channel connects again by itself when its connection broke.
                return Ok(client.clone());
            }
            Ok(slot.insert(self.open().await?).clone())
        };
        // The wait for others who connect counts as well.
        let opened = match tokio::time::timeout(OPEN_TIMEOUT, open).await {
            Ok(opened) => opened,
            Err(_) => Err(HostError::Unreachable(format!(
                "no connection in {OPEN_TIMEOUT:?}"
            ))),
        };
        opened.map_err(|error| {
            tracing::warn!(host = %self.name, %error, "cannot open a stream connection");
            StreamError::Unreachable(self.name.clone())
        })
    }
}

/// A request that the host knows the deadline of.
fn timed<T>(message: T, timeout: Duration) -> Request<T> {
    let mut request = Request::new(message);
    request.set_timeout(timeout);
    request
}

/// The deadline that a request carries ends with the first bytes of an answer;
/// this one ends with the last.
async fn answer<T>(
    limit: Duration,
    call: impl Future<Output = Result<Response<T>, Status>>,
) -> Result<T, HostError> {
    match tokio::time::timeout(limit, call).await {
        Ok(answered) => Ok(answered?.into_inner()),
        Err(_) => Err(HostError::Unreachable(format!("no answer in {limit:?}"))),
    }
}

/// The error with its causes; transport errors say nothing by themselves.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        let cause = error.to_string();
        if !text.ends_with(&cause) {
            text = format!("{text}: {cause}");
        }
        source = error.source();
    }
    text
}
