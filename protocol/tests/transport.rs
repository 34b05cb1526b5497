//! Both ends of the fleet transport, with real TLS over loopback: who gets in,
//! who does not, and what a renewed certificate changes.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::net::SocketAddr;
use std::path::Path;

use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair, SanType};
use sandman_protocol::identity::{Role, RoleUri};
use sandman_protocol::transport::{FleetTls, TransportError, connect, incoming};
use tokio::net::TcpListener;
use tokio_stream::StreamExt;

struct Authority(Issuer<'static, KeyPair>, String);

impl Authority {
    fn new() -> Self {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let pem = params.self_signed(&key).unwrap().pem();
        Self(Issuer::new(params, key), pem)
    }

    fn issue(&self, dir: &Path, uris: &[&str], dns: &str) {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(vec![dns.to_owned()]).unwrap();
        for uri in uris {
            params
                .subject_alt_names
                .push(SanType::URI((*uri).try_into().unwrap()));
        }
        let pem = params.signed_by(&key, &self.0).unwrap().pem();
        std::fs::create_dir_all(dir).unwrap();
        std::fs::write(dir.join("tls.crt"), pem).unwrap();
        std::fs::write(dir.join("tls.key"), key.serialize_pem()).unwrap();
        std::fs::write(dir.join("ca.crt"), &self.1).unwrap();
    }

    fn member(&self, dir: &Path, fleet: &str, role: Role, name: &str) -> FleetTls {
        let uri = RoleUri::new(fleet, role, name).unwrap().to_string();
        self.issue(dir, &[&uri], name);
        FleetTls::load(dir, "dev").unwrap()
    }
}

/// A host that accepts one vnode at a time and reports each handshake it let through.
async fn serve(tls: &FleetTls) -> (SocketAddr, tokio::sync::mpsc::Receiver<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let mut connections = Box::pin(incoming(tls, listener, &[Role::Vnode]));
    let (sender, receiver) = tokio::sync::mpsc::channel(8);
    tokio::spawn(async move {
        let mut open = Vec::new();
        while let Some(connection) = connections.next().await {
            open.push(connection.unwrap());
            sender.send(()).await.unwrap();
        }
    });
    (address, receiver)
}

fn install_provider() {
    // A second call in the same process reports the first: nothing to do.
    let _ = rustls::crypto::ring::default_provider().install_default();
}

fn refusal(result: Result<tonic::transport::Channel, TransportError>) -> String {
    let mut text = String::new();
    let error = result.expect_err("the connection must be refused");
    let mut source: Option<&dyn std::error::Error> = Some(&error);
    while let Some(error) = source {
        text.push_str(&error.to_string());
        text.push_str("; ");
        source = error.source();
    }
    text
}

#[tokio::test]
async fn vnode_reaches_the_host_it_names() {
    install_provider();
    let dir = tempfile::tempdir().unwrap();
    let ca = Authority::new();
    let host = ca.member(&dir.path().join("host"), "dev", Role::Host, "host-0");
    let vnode = ca.member(&dir.path().join("vnode"), "dev", Role::Vnode, "vnode");
    let (address, mut accepted) = serve(&host).await;
    let _channel = connect(&vnode, "host-0", address).await.unwrap();
    accepted.recv().await.unwrap();
}

#[tokio::test]
async fn another_host_at_the_address_is_refused() {
    install_provider();
    let dir = tempfile::tempdir().unwrap();
    let ca = Authority::new();
    // Its certificate even names host-0 as a DNS name: the role URI decides.
    let path = dir.path().join("host");
    ca.issue(
        &path,
        &["spiffe://sandman.dev/fleet/dev/host/host-1"],
        "host-0",
    );
    let host = FleetTls::load(&path, "dev").unwrap();
    let vnode = ca.member(&dir.path().join("vnode"), "dev", Role::Vnode, "vnode");
    let (address, _accepted) = serve(&host).await;
    let text = refusal(connect(&vnode, "host-0", address).await);
    assert!(text.contains("host-1"), "{text}");
}

#[tokio::test]
async fn a_foreign_ca_is_refused() {
    install_provider();
    let dir = tempfile::tempdir().unwrap();
    let host = Authority::new().member(&dir.path().join("host"), "dev", Role::Host, "host-0");
    let vnode = Authority::new().member(&dir.path().join("vnode"), "dev", Role::Vnode, "vnode");
    let (address, _accepted) = serve(&host).await;
    let text = refusal(connect(&vnode, "host-0", address).await);
    assert!(text.contains("certificate"), "{text}");
}

#[tokio::test]
async fn only_vnodes_of_the_fleet_get_in() {
    install_provider();
    let dir = tempfile::tempdir().unwrap();
    let ca = Authority::new();
    let host = ca.member(&dir.path().join("host"), "dev", Role::Host, "host-0");
    let (address, mut accepted) = serve(&host).await;
    let peer = ca.member(&dir.path().join("peer"), "dev", Role::Peer, "host-1");
    let other = ca.member(&dir.path().join("other"), "prod", Role::Vnode, "vnode");
    let two = dir.path().join("two");
    ca.issue(
        &two,
        &[
            "spiffe://sandman.dev/fleet/dev/vnode/vnode",
            "spiffe://sandman.dev/fleet/dev/host/host-1",
        ],
        "vnode",
    );
    let two = FleetTls::load(&two, "dev").unwrap();
    for intruder in [&peer, &other, &two] {
        // TLS 1.3: the client may learn of the refusal only on its first read.
        let _ = connect(intruder, "host-0", address).await;
    }
    let vnode = ca.member(&dir.path().join("vnode"), "dev", Role::Vnode, "vnode");
    let _channel = connect(&vnode, "host-0", address).await.unwrap();
    accepted.recv().await.unwrap();
    assert!(accepted.try_recv().is_err(), "an intruder got through");
}

#[tokio::test]
async fn a_renewed_identity_serves_the_next_connection() {
    install_provider();
    let dir = tempfile::tempdir().unwrap();
    let old = Authority::new();
    let host = old.member(&dir.path().join("host"), "dev", Role::Host, "host-0");
    let (address, mut accepted) = serve(&host).await;
    // A new CA for both, written over the files that the running host uses.
    let new = Authority::new();
    new.member(&dir.path().join("host"), "dev", Role::Host, "host-0");
    let vnode = new.member(&dir.path().join("vnode"), "dev", Role::Vnode, "vnode");
    let _channel = connect(&vnode, "host-0", address).await.unwrap();
    accepted.recv().await.unwrap();
}

#[test]
fn a_key_of_another_certificate_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let ca = Authority::new();
    ca.issue(
        dir.path(),
        &["spiffe://sandman.dev/fleet/dev/host/host-0"],
        "host-0",
    );
    let old = std::fs::read(dir.path().join("tls.key")).unwrap();
    ca.issue(
        dir.path(),
        &["spiffe://sandman.dev/fleet/dev/host/host-0"],
        "host-0",
    );
    std::fs::write(dir.path().join("tls.key"), old).unwrap();
    let error = FleetTls::load(dir.path(), "dev").unwrap_err();
    assert!(error.to_string().contains("tls.key"), "{error}");
}

#[test]
fn a_missing_file_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let error = FleetTls::load(dir.path(), "dev").unwrap_err();
    assert!(error.to_string().contains("tls.crt"), "{error}");
}
