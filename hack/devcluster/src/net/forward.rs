//! A loopback port for what lives in a namespace, so that kubectl and tests need no privileges.
//! A connection is accepted in the machine's namespace and continued from inside the other.

use std::net::{SocketAddr, TcpListener};
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use anyhow::Context;
use tokio::net::TcpStream;

use super::enter;

/// Large enough that exec streams of a gigabyte are not bound by system calls.
const BUFFER: usize = 256 << 10;
/// A peer that is down answers at once inside one machine.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// One port forwarded into a namespace, written `LISTEN=NAMESPACE_FILE=TO` on the command line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Forward {
    /// Where to listen, in the machine's own namespace.
    pub(crate) listen: SocketAddr,
    /// File that pins the namespace.
    pub(crate) namespace: PathBuf,
    /// Where to connect, inside it.
    pub(crate) to: SocketAddr,
}

impl std::fmt::Display for Forward {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{}={}={}",
            self.listen,
            self.namespace.display(),
            self.to
        )
    }
}

impl FromStr for Forward {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut parts = text.splitn(3, '=');
        let mut next = || parts.next().ok_or("wants LISTEN=NAMESPACE_FILE=TO");
        let (listen, namespace, to) = (next()?, next()?, next()?);
        let address = |text: &str| {
            text.parse()
                .map_err(|error| format!("{text:?} is not an address: {error}"))
        };
        Ok(Self {
            listen: address(listen)?,
            namespace: namespace.into(),
            to: address(to)?,
        })
    }
}

/// Serves until the process is killed or one of the forwards fails.
pub(crate) fn serve(forwards: Vec<Forward>) -> anyhow::Result<()> {
    let (failed, failure) = std::sync::mpsc::channel();
    for forward in forwards {
        let listener = TcpListener::bind(forward.listen)
            .with_context(|| format!("cannot listen on {}", forward.listen))?;
        listener.set_nonblocking(true)?;
        let failed = failed.clone();
        std::thread::Builder::new()
            .name(forward.listen.to_string())
            .spawn(move || {
                // The receiver lives as long as the process does.
                let _ = failed.send(serve_one(listener, &forward));
            })?;
    }
    drop(failed);
    failure.recv().context("nothing to forward")?
}

/// One thread a namespace: sockets are born in the namespace of the thread that makes them.
fn serve_one(listener: TcpListener, forward: &Forward) -> anyhow::Result<()> {
    enter(&std::fs::File::open(&forward.namespace)?)?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    runtime.block_on(async {
        let listener = tokio::net::TcpListener::from_std(listener)?;
        loop {
            match listener.accept().await {
                Ok((client, _)) => {
                    tokio::spawn(relay(client, forward.to));
                }
                // Out of descriptors, or the client is already gone: both pass.
                Err(error) => {
                    tracing::warn!(%error, fd = ?listener.as_fd(), "cannot accept");
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
            }
        }
    })
}

async fn relay(mut client: TcpStream, to: SocketAddr) {
    let connect = tokio::time::timeout(CONNECT_TIMEOUT, TcpStream::connect(to)).await;
    let mut server = match connect {
        Ok(Ok(server)) => server,
        Ok(Err(error)) => return tracing::info!(%to, %error, "cannot connect"),
        Err(_) => return tracing::info!(%to, "connecting timed out"),
    };
    for stream in [&client, &server] {
        // Interactive streams are many small writes; failing to hurry them is harmless.
        let _ = stream.set_nodelay(true);
    }
    let copied =
        tokio::io::copy_bidirectional_with_sizes(&mut client, &mut server, BUFFER, BUFFER).await;
    if let Err(error) = copied {
        tracing::debug!(%to, %error, "connection ended");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forwards_read_back() {
        let forward = Forward {
            listen: "127.0.0.1:4000".parse().unwrap(),
            namespace: "/run/netns/x".into(),
            to: "10.0.0.1:443".parse().unwrap(),
        };
        assert_eq!(forward.to_string().parse(), Ok(forward));
        assert!("127.0.0.1:1=x".parse::<Forward>().is_err());
        assert!("127.0.0.1=x=10.0.0.1:1".parse::<Forward>().is_err());
    }
}
