//! Connections to a port that a pod listens on, made from inside its network
//! namespace: its loopback addresses exist nowhere else.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::OwnedFd;

use nix::errno::Errno;
use nix::sys::socket::{AddressFamily, SockFlag, SockType, socket};
use tokio::net::{TcpSocket, TcpStream};

use super::namespace::Pins;
use super::{Network, NetworkError, blocking, check_uid};

/// Why a port of a pod could not be reached.
#[derive(Debug, thiserror::Error)]
pub enum DialError {
    /// The pod has no network namespace (any more).
    #[error("the sandbox is not running")]
    NoNamespace,
    /// The kernel gave no socket.
    #[error("{0}")]
    Network(#[from] NetworkError),
    /// Nobody answers.
    #[error("failed to connect to localhost:{port} inside the pod, {attempts}")]
    Refused {
        /// The port.
        port: u16,
        /// What came of each address, in the words of Go's `net` package, which tools look for.
        attempts: String,
    },
}

/// Sockets belong to the namespace that they were made in, whoever connects them.
struct Sockets {
    v4: OwnedFd,
    /// `None` on a kernel without IPv6.
    v6: Option<OwnedFd>,
}

impl Network {
    /// Connects to `localhost:port` inside a pod, by IPv4 and then by IPv6, as containerd does
    /// for port-forward.
    ///
    /// # Errors
    /// See [`DialError`].
    pub async fn dial(&self, uid: &str, port: u16) -> Result<TcpStream, DialError> {
        check_uid(uid)?;
        let pins = Pins::new(&self.inner.pins, uid);
        let made = blocking(move || {
            pins.inside(sockets).map_err(NetworkError::io(
                "make a socket in the pod's network namespace",
            ))
        });
        let sockets = match made.await {
            Ok(sockets) => sockets,
            Err(NetworkError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
                return Err(DialError::NoNamespace);
            }
            Err(error) => return Err(error.into()),
        };
        let first = match connect(sockets.v4, Ipv4Addr::LOCALHOST.into(), port).await {
            Ok(stream) => return Ok(stream),
            Err(error) => attempt("tcp4", "127.0.0.1", port, &error),
        };
        let second = match sockets.v6 {
            None => "no IPv6".to_owned(),
            Some(socket) => match connect(socket, Ipv6Addr::LOCALHOST.into(), port).await {
                Ok(stream) => return Ok(stream),
                Err(error) => attempt("tcp6", "[::1]", port, &error),
            },
        };
        let attempts = format!("IPv4: {first} IPv6: {second}");
        Err(DialError::Refused { port, attempts })
    }
}

fn sockets() -> io::Result<Sockets> {
    let make = |family| {
        let flags = SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC;
        socket(family, SockType::Stream, flags, None)
    };
    Ok(Sockets {
        v4: make(AddressFamily::Inet)?,
        v6: match make(AddressFamily::Inet6) {
            Ok(socket) => Some(socket),
            Err(Errno::EAFNOSUPPORT) => None,
            Err(error) => return Err(error.into()),
        },
    })
}

async fn connect(socket: OwnedFd, address: IpAddr, port: u16) -> io::Result<TcpStream> {
    let socket = TcpSocket::from_std_stream(std::net::TcpStream::from(socket));
    let stream = socket.connect(SocketAddr::new(address, port)).await?;
    // Only a latency setting: the connection works without it.
    let _ = stream.set_nodelay(true);
    Ok(stream)
}

fn attempt(network: &str, address: &str, port: u16, error: &io::Error) -> String {
    let cause = error
        .raw_os_error()
        .map_or_else(|| error.to_string(), |code| go_words(Errno::from_raw(code)));
    format!("dial {network} {address}:{port}: connect: {cause}")
}

/// The kernel's text in lower case, as Go prints it.
fn go_words(errno: Errno) -> String {
    errno.desc().to_lowercase()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attempts_are_told_as_go_does() {
        let refused = io::Error::from_raw_os_error(libc::ECONNREFUSED);
        assert_eq!(
            attempt("tcp4", "127.0.0.1", 80, &refused),
            "dial tcp4 127.0.0.1:80: connect: connection refused"
        );
    }

    #[tokio::test]
    async fn sockets_connect_after_they_were_made() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let made = sockets().unwrap();
        let stream = connect(made.v4, address.ip(), address.port())
            .await
            .unwrap();
        let (_, peer) = listener.accept().await.unwrap();
        assert_eq!(peer, stream.local_addr().unwrap());
    }
}
