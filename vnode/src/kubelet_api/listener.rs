//! Connections of the kubelet API: accepting, TLS, HTTP/1.1 and HTTP/2, and the
//! limits that keep one caller from taking the server away from the others.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response};
use hyper::body::{Body as HttpBody, Frame, Incoming, SizeHint};
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto::Builder;
use rustls_pki_types::CertificateDer;
use socket2::{SockRef, TcpKeepalive};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

use super::admission::Place;
use super::api::Api;
use super::dispatch;
use super::respond::{Body, BodyError};
use super::tls::ALPN_H2;

const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// For a request's head, and for the pause between two requests of HTTP/1.1.
const HEADER_TIMEOUT: Duration = Duration::from_secs(30);
/// A connection without a request is closed after this: the kubelet's
/// `IdleTimeout`.
const IDLE_TIMEOUT: Duration = Duration::from_secs(90);
/// Largest head of a request, in bytes.
const MAX_HEAD_BYTES: u32 = 256 << 10;
/// Go's default, after which its clients open another connection.
const MAX_HTTP2_STREAMS: u32 = 250;
/// First sign of life that is asked of a silent peer, and the pause between more.
const KEEPALIVE: Duration = Duration::from_secs(15);
/// A peer that acknowledges nothing for this long is gone.
const PEER_LOST_AFTER: Duration = Duration::from_secs(60);
/// Out of file descriptors is an accept error that passes; retrying at once
/// would only burn CPU.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// The other end of a connection.
pub(super) struct Peer {
    pub(super) address: SocketAddr,
    /// As shown in the handshake, leaf first; proven to be theirs, not checked.
    pub(super) chain: Vec<CertificateDer<'static>>,
    pub(super) place: Place,
    _slot: OwnedSemaphorePermit,
}

/// What a connection takes up.
struct Slot {
    place: Place,
    slot: OwnedSemaphorePermit,
}

/// Accepts until shutdown. Connections go on in `api.tasks`.
pub(super) async fn run(api: Arc<Api>, listener: TcpListener, tls: TlsAcceptor) {
    let slots = Arc::new(Semaphore::new(api.config.max_connections));
    loop {
        let next = async {
            // Above the limit callers wait in the backlog. The semaphore is never
            // closed, so there is always a permit in the end.
            let slot = Arc::clone(&slots).acquire_owned().await.ok()?;
            Some((listener.accept().await, slot))
        };
        let (accepted, slot) = tokio::select! {
            next = next => match next {
                Some(next) => next,
                None => return,
            },
            () = api.shutdown.cancelled() => return,
        };
        match accepted {
            Ok((socket, address)) => {
                // Refused by closing: whoever floods gets no handshake from us.
                let Some(place) = api.admission.admit(address.ip()) else {
                    api.node.metrics.connections_refused.inc();
                    continue;
                };
                let slot = Slot { place, slot };
                let connection = connection(Arc::clone(&api), socket, address, tls.clone(), slot);
                api.tasks.spawn(connection);
            }
            Err(error) => {
                tracing::warn!(%error, "kubelet API cannot accept a connection");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

async fn connection(
    api: Arc<Api>,
    socket: TcpStream,
    address: SocketAddr,
    tls: TlsAcceptor,
    slot: Slot,
) {
    if let Err(error) = tune(&socket) {
        tracing::debug!(%address, %error, "socket options refused");
    }
    let handshake = tokio::time::timeout(HANDSHAKE_TIMEOUT, tls.accept(socket));
    let stream = tokio::select! {
        finished = handshake => match finished {
            Ok(Ok(stream)) => stream,
            Ok(Err(error)) => {
                tracing::debug!(%address, %error, "TLS handshake failed");
                api.node.metrics.handshake_failures.inc();
                return;
            }
            Err(_) => {
                tracing::debug!(%address, "TLS handshake took too long");
                api.node.metrics.handshake_failures.inc();
                return;
            }
        },
        () = api.shutdown.cancelled() => return,
    };
    api.node.metrics.connections.inc();
    serve(&api, stream, address, slot).await;
    api.node.metrics.connections.dec();
}

async fn serve(api: &Arc<Api>, stream: TlsStream<TcpStream>, address: SocketAddr, slot: Slot) {
    let session = stream.get_ref().1;
    let http2 = session.alpn_protocol() == Some(ALPN_H2);
    let chain = session.peer_certificates().unwrap_or_default();
    let peer = Arc::new(Peer {
        address,
        chain: chain.to_vec(),
        place: slot.place,
        _slot: slot.slot,
    });
    let activity = Activity::default();
    let service = service_fn(|request: Request<Incoming>| {
        let (api, peer, busy) = (Arc::clone(api), Arc::clone(&peer), activity.begin());
        async move {
            let response: Response<Body> = dispatch::respond(&api, &peer, request).await;
            Ok::<_, Infallible>(response.map(|inner| Tracked { inner, _busy: busy }))
        }
    });
    let builder = builder(http2);
    let mut connection =
        pin!(builder.serve_connection_with_upgrades(TokioIo::new(stream), service));
    let finished = tokio::select! {
        finished = connection.as_mut() => finished,
        () = activity.idle(IDLE_TIMEOUT) => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
        () = api.shutdown.cancelled() => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = finished {
        tracing::debug!(%address, %error, "connection ended");
    }
}

/// HTTP as both ends agreed on it in the handshake.
fn builder(http2: bool) -> Builder<TokioExecutor> {
    let builder = Builder::new(TokioExecutor::new());
    let mut builder = if http2 {
        builder.http2_only()
    } else {
        builder.http1_only()
    };
    builder
        .http1()
        .timer(TokioTimer::new())
        .header_read_timeout(HEADER_TIMEOUT)
        .max_buf_size(MAX_HEAD_BYTES as usize)
        .http2()
        .timer(TokioTimer::new())
        .max_header_list_size(MAX_HEAD_BYTES)
        .max_concurrent_streams(MAX_HTTP2_STREAMS)
        .keep_alive_interval(KEEPALIVE)
        .keep_alive_timeout(PEER_LOST_AFTER);
    builder
}

/// Frames of a stream are small and each is waited for; a vanished peer must not
/// hold a process for hours.
fn tune(socket: &TcpStream) -> std::io::Result<()> {
    socket.set_nodelay(true)?;
    let socket = SockRef::from(socket);
    let keepalive = TcpKeepalive::new()
        .with_time(KEEPALIVE)
        .with_interval(KEEPALIVE);
    socket.set_tcp_keepalive(&keepalive)?;
    socket.set_tcp_user_timeout(Some(PEER_LOST_AFTER))
}

/// Counts the requests of one connection that are being answered.
#[derive(Debug, Clone)]
struct Activity(watch::Sender<usize>);

impl Default for Activity {
    fn default() -> Self {
        Self(watch::Sender::new(0))
    }
}

impl Activity {
    fn begin(&self) -> Busy {
        self.0.send_modify(|open| *open += 1);
        Busy(self.clone())
    }

    /// Returns once there was no request for the whole time.
    async fn idle(&self, time: Duration) {
        let mut open = self.0.subscribe();
        loop {
            // `self` holds a sender, so waiting cannot fail.
            let _ = open.wait_for(|open| *open == 0).await;
            let busy = open.wait_for(|open| *open > 0);
            if tokio::time::timeout(time, busy).await.is_err() {
                return;
            }
        }
    }
}

#[derive(Debug)]
struct Busy(Activity);

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.0.send_modify(|open| *open -= 1);
    }
}

/// A body that keeps its connection busy until it is sent.
struct Tracked {
    inner: Body,
    _busy: Busy,
}

impl HttpBody for Tracked {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        Pin::new(&mut self.inner).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_connection_is_idle_only_between_requests() {
        let activity = Activity::default();
        let begun = tokio::time::Instant::now();
        let busy = activity.begin();
        let release = async {
            tokio::time::sleep(Duration::from_secs(200)).await;
            drop(busy);
        };
        tokio::join!(activity.idle(IDLE_TIMEOUT), release);
        assert_eq!(begun.elapsed(), Duration::from_secs(200) + IDLE_TIMEOUT);
    }
}
