//! How one sees that a component is ready. Looked at from where its clients are: inside its
//! namespace, or through the forwarded port.

use std::net::{SocketAddr, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;

use crate::net::NetNs;

/// Loopback and veth answer at once or not at all.
const TIMEOUT: Duration = Duration::from_secs(1);

/// A sign of readiness.
#[derive(Clone, Debug)]
pub(crate) enum Probe {
    /// It runs; what comes of it is waited for elsewhere.
    Alive,
    /// It accepts connections at this address of its namespace.
    Tcp(SocketAddr),
    /// It accepts connections on this socket.
    Unix(PathBuf),
    /// The API server says that it and all its hooks are ready.
    ApiServer,
}

/// What probes need besides the component.
#[derive(Clone)]
pub(crate) struct ProbeContext {
    /// The API server through the forwarder, as administrator.
    pub(crate) client: kube::Client,
}

impl Probe {
    /// Looks once.
    pub(crate) async fn check(&self, namespace: Option<&NetNs>, context: &ProbeContext) -> bool {
        match self {
            Self::Alive => true,
            Self::Unix(path) => match UnixStream::connect(path) {
                Ok(_) => true,
                // Somebody listens, for packets instead of a stream.
                Err(error) => error.raw_os_error() == Some(nix::libc::EPROTOTYPE),
            },
            Self::Tcp(address) => {
                let connect = || Ok(TcpStream::connect_timeout(address, TIMEOUT)?);
                match namespace {
                    Some(namespace) => namespace.run(connect).is_ok(),
                    None => connect().is_ok(),
                }
            }
            Self::ApiServer => {
                let Ok(request) = http::Request::get("/readyz").body(Vec::new()) else {
                    return false;
                };
                let answer = context.client.request_text(request);
                matches!(tokio::time::timeout(TIMEOUT * 5, answer).await, Ok(Ok(_)))
            }
        }
    }
}
