//! Certificates of this crate in the transport that uses them: the fleet's own mutual TLS.

// Helpers of tests panic like the tests themselves.
#![allow(clippy::unwrap_used)]

use std::net::SocketAddr;
use std::path::PathBuf;
use std::pin::pin;
use std::time::Duration;

use futures::StreamExt;
use sandman_certs::{FleetAuthority, Member, RenewOptions, Role, renew};
use sandman_protocol::transport::{FleetTls, connect, incoming};
use tempfile::TempDir;
use time::OffsetDateTime;
use tokio::net::TcpListener;

const DEADLINE: Duration = Duration::from_secs(20);

struct Fleet {
    dir: TempDir,
    authority: FleetAuthority,
}

impl Fleet {
    fn new() -> Self {
        // Another test of this process may have been first.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let dir = tempfile::tempdir().unwrap();
        let authority = FleetAuthority::create(&dir.path().join("ca"), "dev", 10).unwrap();
        Self { dir, authority }
    }

    fn issue(&self, role: Role, name: &str) -> PathBuf {
        let member = Member {
            role,
            name: name.to_owned(),
            dns: Vec::new(),
            ips: vec!["127.0.0.1".parse().unwrap()],
        };
        let out = self.dir.path().join(name);
        self.authority.issue(&member, 10, &out).unwrap();
        out
    }

    fn tls(&self, role: Role, name: &str) -> FleetTls {
        FleetTls::load(&self.issue(role, name), "dev").unwrap()
    }
}

/// Whether a host that serves virtual nodes lets `client` in as it dials `name`.
async fn accepted(host: &FleetTls, client: &FleetTls, name: &str) -> bool {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address: SocketAddr = listener.local_addr().unwrap();
    let mut connections = pin!(incoming(host, listener, &[Role::Vnode]));
    // The client learns of a refusal only after its own part of the handshake, so the host's
    // view counts. A refused connection is not yielded; the failing dial ends the wait.
    let dial = async {
        match connect(client, name, address).await {
            Ok(channel) => {
                let _open = channel;
                std::future::pending().await
            }
            Err(_) => false,
        }
    };
    tokio::time::timeout(DEADLINE, async {
        tokio::select! {
            connection = connections.next() => connection.is_some_and(|c| c.is_ok()),
            refused = dial => refused,
        }
    })
    .await
    .unwrap_or(false)
}

#[tokio::test]
async fn a_vnode_reaches_its_host_and_no_other() {
    let fleet = Fleet::new();
    let host = fleet.tls(Role::Host, "host-1");
    let vnode = fleet.tls(Role::Vnode, "vnode");
    assert!(accepted(&host, &vnode, "host-1").await);
    assert!(
        !accepted(&host, &vnode, "host-2").await,
        "host-1 passed for host-2"
    );
}

#[tokio::test]
async fn a_vnode_is_no_host() {
    let fleet = Fleet::new();
    let vnode = fleet.tls(Role::Vnode, "vnode");
    let impostor = fleet.tls(Role::Vnode, "host-1");
    assert!(!accepted(&impostor, &vnode, "host-1").await);
}

#[tokio::test]
async fn a_renewed_identity_still_connects() {
    let fleet = Fleet::new();
    let host_dir = fleet.issue(Role::Host, "host-1");
    let host = FleetTls::load(&host_dir, "dev").unwrap();
    let vnode = fleet.tls(Role::Vnode, "vnode");
    for new_key in [false, true] {
        let options = RenewOptions {
            force: true,
            new_key,
        };
        let now = OffsetDateTime::now_utc();
        renew(fleet.authority.authority(), &host_dir, options, now).unwrap();
        assert!(
            accepted(&host, &vnode, "host-1").await,
            "after renewal, new_key: {new_key}"
        );
    }
}
