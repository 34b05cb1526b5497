//! A host behind gRPC and mutual TLS. Commands and the watch share one
//! connection; exec and log streams use others, so that a stalled stream never
//! holds up a command.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use futures::StreamExt;
use sandman_protocol::transport::{FleetTls, connect};
use sandman_protocol::v1::host_client::HostClient;
use sandman_protocol::{MAX_MESSAGE_BYTES, v1};
use tonic::Request;
use tonic::transport::Channel;

use super::host::{Host, HostError, Updates};
use crate::view::{HostName, StreamError};

/// A command that has no answer by then has failed.
const CALL_TIMEOUT: Duration = Duration::from_secs(15);
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
        let inventory = client
            .get_inventory(timed(v1::GetInventoryRequest {}, CALL_TIMEOUT))
            .await?
            .into_inner();
        if inventory.host_name != self.name.as_str() {
            return Err(HostError::Refused(format!(
                "the host at {} calls itself {:?}",
                self.address, inventory.host_name
            )));
        }
        if inventory.term > self.term {
            return Err(HostError::Superseded);
        }
        let updates = client
            .watch(v1::WatchRequest { term: self.term })
            .await?
            .into_inner();
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
        self.control()?.apply(timed(request, CALL_TIMEOUT)).await?;
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
        self.control()?.remove(timed(request, CALL_TIMEOUT)).await?;
        Ok(())
    }

    async fn forget(&self, uid: &str) -> Result<(), HostError> {
        let request = v1::ForgetRequest {
            term: self.term,
            uid: uid.to_owned(),
        };
        self.control()?.forget(timed(request, CALL_TIMEOUT)).await?;
        Ok(())
    }

    async fn stats(&self) -> Result<v1::Stats, HostError> {
        let request = timed(v1::GetStatsRequest {}, STATS_TIMEOUT);
        Ok(self.control()?.get_stats(request).await?.into_inner())
    }

    async fn streams(&self) -> Result<HostClient<Channel>, StreamError> {
        let index = self.next_stream.fetch_add(1, Ordering::Relaxed) % STREAM_CONNECTIONS;
        let mut slot = self.streams[index].lock().await;
        if let Some(client) = &*slot {
            // The channel connects again by itself when its connection broke.
            return Ok(client.clone());
        }
        let client = self.open().await.map_err(|error| {
            tracing::warn!(host = %self.name, %error, "cannot open a stream connection");
            StreamError::Unreachable(self.name.clone())
        })?;
        Ok(slot.insert(client).clone())
    }
}

fn timed<T>(message: T, timeout: Duration) -> Request<T> {
    let mut request = Request::new(message);
    request.set_timeout(timeout);
    request
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
