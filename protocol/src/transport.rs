//! Mutual TLS between the members of a fleet, as streams that tonic can use.
//! Certificates are read again whenever their files change, so a renewed
//! identity serves the next connection without a restart.

use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use hyper_util::rt::TokioIo;
use rustls::client::WebPkiServerVerifier;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio_rustls::{TlsAcceptor, TlsConnector};
use tonic::transport::{Channel, Endpoint, Uri};
use tower::service_fn;

use crate::handshakes::Handshakes;
use crate::identity::{Role, RoleUri, RoleUriError};
use crate::verify::{RoleClientVerifier, RoleServerVerifier};

/// A connection attempt, TCP and TLS together, may take this long.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Interval of HTTP/2 pings that notice a dead peer, and the wait for the answer.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(10);
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(10);
/// HTTP/2 flow-control windows, in bytes. A stream has enough credit for a fast
/// link; the connection has as much as HTTP/2 allows, so that streams whose
/// readers have stopped never take it from the others.
const STREAM_WINDOW: u32 = 512 << 10;
const CONNECTION_WINDOW: u32 = (1 << 31) - 1;
/// Connections that proved themselves and wait to be taken.
const BACKLOG: usize = 64;
const ALPN_H2: &[u8] = b"h2";

/// Why a fleet identity cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TransportError {
    /// A PEM file is missing, unreadable or malformed.
    #[error("{}: {source}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The certificate, key and CA do not make a usable TLS configuration.
    #[error("fleet identity in {}: {source}", dir.display())]
    Tls {
        /// The identity's folder.
        dir: PathBuf,
        /// What rustls says.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A name cannot be part of an identity.
    #[error(transparent)]
    Name(#[from] RoleUriError),
    /// The peer could not be reached, or is not who it should be.
    #[error("connect to {host_name} at {address}: {source}")]
    Connect {
        /// Host that was asked for.
        host_name: String,
        /// Its address.
        address: SocketAddr,
        /// The transport's error.
        source: tonic::transport::Error,
    },
}

/// Certificate, key and CA of one fleet member.
#[derive(Clone, Debug)]
pub struct FleetTls {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    dir: PathBuf,
    fleet: String,
    cached: Mutex<(Option<SystemTime>, Arc<Material>)>,
}

#[derive(Debug)]
struct Material {
    identity: Arc<SingleCertAndKey>,
    roots: Arc<RootCertStore>,
}

impl FleetTls {
    /// Reads `tls.crt`, `tls.key` and `ca.crt` of `dir`.
    ///
    /// # Errors
    /// [`TransportError::File`] names the file that cannot be used.
    pub fn load(dir: &Path, fleet: &str) -> Result<Self, TransportError> {
        RoleUri::new(fleet, Role::Vnode, "check")?;
        let modified = modified(dir);
        let material = Arc::new(Material::read(dir)?);
        let inner = Inner {
            dir: dir.to_owned(),
            fleet: fleet.to_owned(),
            cached: Mutex::new((modified, material)),
        };
        Ok(Self {
            inner: Arc::new(inner),
        })
    }

    /// The newest usable material. While a renewal is half written the last
    /// good one stays in use.
    fn material(&self) -> Arc<Material> {
        // A panic cannot happen while the lock is held with broken data inside.
        let mut cached = self
            .inner
            .cached
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let now = modified(&self.inner.dir);
        if now != cached.0
            && let Ok(material) = Material::read(&self.inner.dir)
        {
            *cached = (now, Arc::new(material));
        }
        Arc::clone(&cached.1)
    }

    fn tls_error(
        &self,
        source: impl Into<Box<dyn std::error::Error + Send + Sync>>,
    ) -> TransportError {
        TransportError::Tls {
            dir: self.inner.dir.clone(),
            source: source.into(),
        }
    }

    /// TLS configuration of a server that serves only `allowed` roles.
    ///
    /// # Errors
    /// [`TransportError::Tls`] when the CA makes no usable verifier.
    pub fn server_config(&self, allowed: &[Role]) -> Result<Arc<ServerConfig>, TransportError> {
        let material = self.material();
        let verifier =
            RoleClientVerifier::new(Arc::clone(&material.roots), &self.inner.fleet, allowed)
                .map_err(|error| self.tls_error(error))?;
        let mut config = ServerConfig::builder()
            .with_client_cert_verifier(Arc::new(verifier))
            .with_cert_resolver(Arc::clone(&material.identity) as _);
        config.alpn_protocols = vec![ALPN_H2.to_vec()];
        Ok(Arc::new(config))
    }

    /// TLS configuration of a client that speaks only to `want`.
    fn client_config(&self, want: RoleUri) -> Result<Arc<ClientConfig>, TransportError> {
        let material = self.material();
        let chain = WebPkiServerVerifier::builder(Arc::clone(&material.roots))
            .build()
            .map_err(|error| self.tls_error(error))?;
        let mut config = ClientConfig::builder()
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(RoleServerVerifier { chain, want }))
            .with_client_cert_resolver(Arc::clone(&material.identity) as _);
        config.alpn_protocols = vec![ALPN_H2.to_vec()];
        Ok(Arc::new(config))
    }
}

impl Material {
    fn read(dir: &Path) -> Result<Self, TransportError> {
        let file =
            |name: &str, source: Box<dyn std::error::Error + Send + Sync>| TransportError::File {
                path: dir.join(name),
                source,
            };
        let certificates = |name: &str| -> Result<Vec<CertificateDer<'static>>, TransportError> {
            let found = CertificateDer::pem_file_iter(dir.join(name))
                .and_then(Iterator::collect::<Result<Vec<_>, _>>)
                .map_err(|error| file(name, error.into()))?;
            if found.is_empty() {
                return Err(file(name, "has no certificate".into()));
            }
            Ok(found)
        };
        let chain = certificates("tls.crt")?;
        let key = PrivateKeyDer::from_pem_file(dir.join("tls.key"))
            .map_err(|error| file("tls.key", error.into()))?;
        // A renewal that swaps both files is seen half done by whoever looks
        // between the two: such a pair must never be taken.
        let provider = rustls::crypto::ring::default_provider();
        let certified = CertifiedKey::from_der(chain, key, &provider)
            .map_err(|error| file("tls.key", error.into()))?;
        let mut roots = RootCertStore::empty();
        for certificate in certificates("ca.crt")? {
            roots
                .add(certificate)
                .map_err(|error| file("ca.crt", error.into()))?;
        }
        Ok(Self {
            identity: Arc::new(certified.into()),
            roots: Arc::new(roots),
        })
    }
}

/// Newest modification time of the identity's files.
fn modified(dir: &Path) -> Option<SystemTime> {
    ["tls.crt", "tls.key", "ca.crt"]
        .iter()
        .filter_map(|name| std::fs::metadata(dir.join(name)).ok()?.modified().ok())
        .max()
}

/// Opens one HTTP/2 connection to a host and proves that it is `host_name`.
/// Each call makes a connection of its own: streams that may stall are kept
/// apart from commands by using two.
///
/// # Errors
/// [`TransportError::Connect`] within 5 s when the host does not answer or is
/// another one.
pub async fn connect(
    tls: &FleetTls,
    host_name: &str,
    address: SocketAddr,
) -> Result<Channel, TransportError> {
    let want = RoleUri::new(&tls.inner.fleet, Role::Host, host_name)?;
    let server_name = ServerName::try_from(host_name.to_owned())
        .map_err(|_| RoleUriError::Name(host_name.to_owned()))?;
    let tls = tls.clone();
    let connector = service_fn(move |_: Uri| {
        // Read for each connection: a channel outlives the identity it began with.
        let config = tls.client_config(want.clone());
        let server_name = server_name.clone();
        async move {
            let tls = TlsConnector::from(config.map_err(io::Error::other)?);
            let stream = TcpStream::connect(address).await?;
            stream.set_nodelay(true)?;
            let stream = tls.connect(server_name, stream).await?;
            Ok::<_, io::Error>(TokioIo::new(stream))
        }
    });
    // The URI only fills the `:authority` header; the connector knows the address.
    Endpoint::from_shared(format!("http://{host_name}"))
        .map_err(|source| connect_error(host_name, address, source))?
        .connect_timeout(CONNECT_TIMEOUT)
        .http2_keep_alive_interval(KEEPALIVE_INTERVAL)
        .keep_alive_timeout(KEEPALIVE_TIMEOUT)
        .keep_alive_while_idle(true)
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .connect_with_connector(connector)
        .await
        .map_err(|source| connect_error(host_name, address, source))
}

fn connect_error(
    host_name: &str,
    address: SocketAddr,
    source: tonic::transport::Error,
) -> TransportError {
    TransportError::Connect {
        host_name: host_name.to_owned(),
        address,
        source,
    }
}

/// A server with this crate's HTTP/2 settings; add services and serve it on
/// [`incoming`].
#[must_use]
pub fn server() -> tonic::transport::Server {
    tonic::transport::Server::builder()
        .http2_keepalive_interval(Some(KEEPALIVE_INTERVAL))
        .http2_keepalive_timeout(Some(KEEPALIVE_TIMEOUT))
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
}

/// Connections of `listener` whose peer proved an allowed role. Handshakes run
/// beside each other with a deadline, so a silent client holds up nobody; the
/// listener closes when the stream is dropped.
pub fn incoming(
    tls: &FleetTls,
    listener: TcpListener,
    allowed: &[Role],
) -> impl futures_core::Stream<Item = io::Result<tokio_rustls::server::TlsStream<TcpStream>>> + use<>
{
    let (ready, stream) = mpsc::channel(BACKLOG);
    let tls = tls.clone();
    let allowed = allowed.to_vec();
    tokio::spawn(async move {
        let handshakes = Handshakes::default();
        loop {
            let accepted = tokio::select! {
                accepted = listener.accept() => accepted,
                () = ready.closed() => return,
            };
            let (stream, peer) = match accepted {
                Ok(accepted) => accepted,
                Err(error) => {
                    // Out of descriptors, most likely: others will be freed.
                    tracing::warn!(%error, "cannot accept a fleet connection");
                    tokio::time::sleep(Duration::from_millis(100)).await;
                    continue;
                }
            };
            let Some(pending) = handshakes.begin(peer.ip()) else {
                tracing::warn!(%peer, "too many fleet connections without an identity");
                continue;
            };
            let config = match tls.server_config(&allowed) {
                Ok(config) => config,
                Err(error) => {
                    tracing::error!(%error, "refusing fleet connections");
                    continue;
                }
            };
            let ready = ready.clone();
            tokio::spawn(async move {
                // Only a latency setting: the connection works without it.
                let _ = stream.set_nodelay(true);
                let handshake = TlsAcceptor::from(config).accept(stream);
                let outcome = tokio::time::timeout(CONNECT_TIMEOUT, handshake).await;
                drop(pending);
                match outcome {
                    Ok(Ok(stream)) => {
                        // The receiver is gone only when the server stops.
                        let _ = ready.send(Ok(stream)).await;
                    }
                    Ok(Err(error)) => {
                        tracing::warn!(%peer, %error, "refused a fleet connection");
                    }
                    Err(_) => tracing::warn!(%peer, "fleet handshake timed out"),
                }
            });
        }
    });
    tokio_stream::wrappers::ReceiverStream::new(stream)
}
