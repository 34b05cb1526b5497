//! Services against the kernel, in namespaces of the test's own.

use std::net::{SocketAddr, UdpSocket};
use std::process::Command;
use std::time::Duration;

use super::tests::{UID_A, UID_B, config, connect, in_own_namespaces, inside};
use super::*;

const CLUSTER_IP: Ipv4Addr = Ipv4Addr::new(10, 96, 0, 10);

fn service(protocol: &str, port: u32, endpoints: &[(IpAddr, u32)]) -> v1::ServicePort {
    v1::ServicePort {
        key: Some(key(protocol, port)),
        endpoints: endpoints
            .iter()
            .map(|&(address, port)| v1::Endpoint {
                address: match address {
                    IpAddr::V4(address) => address.to_bits(),
                    IpAddr::V6(_) => panic!("not IPv4"),
                },
                port,
            })
            .collect(),
        affinity_seconds: 0,
    }
}

fn key(protocol: &str, port: u32) -> v1::ServiceKey {
    v1::ServiceKey {
        address: CLUSTER_IP.to_bits(),
        port,
        protocol: protocol.into(),
    }
}

fn whole(services: Vec<v1::ServicePort>) -> v1::ClusterNetworkRequest {
    v1::ClusterNetworkRequest {
        version: "1".into(),
        serve_services: true,
        services,
        ..Default::default()
    }
}

fn ruleset() -> String {
    let output = Command::new("nft").args(["list", "ruleset"]).output();
    let output = output.unwrap();
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// A host has an address, which pods that reach themselves are given as the source.
pub(super) fn host_address() {
    for arguments in [
        &["link", "set", "lo", "up"][..],
        &["addr", "add", "192.0.2.1/32", "dev", "lo"],
    ] {
        let status = Command::new("ip").args(arguments).status();
        assert!(status.unwrap().success());
    }
}

async fn pod(network: &Network, uid: &str) -> PodNetwork {
    let made = network.setup(uid, v1::NetworkMode::Pod, "pod", &[]).await;
    made.unwrap()
}

#[test]
fn the_kernel_reads_the_rules_of_services_as_meant() {
    in_own_namespaces(|folder| async move {
        let network = Network::start(config(&folder)).await.unwrap();
        let a = IpAddr::from([10, 64, 0, 2]);
        let services = vec![service("TCP", 80, &[(a, 8080)]), service("TCP", 81, &[])];
        let request = whole(services);
        // Twice: replaced, not added to.
        network.set_cluster(request.clone()).await.unwrap();
        network.set_cluster(request).await.unwrap();
        let rules = ruleset();
        let (_, ours) = rules.split_once("table inet sandman-services").unwrap();
        let expected = include_str!("services.nft");
        assert_eq!(ours.trim(), expected.trim());
        let off = v1::ClusterNetworkRequest::default();
        network.set_cluster(off).await.unwrap();
        assert!(!ruleset().contains("sandman-services"));
    });
}

#[test]
fn connections_go_to_endpoints_and_to_none_that_is_gone() {
    in_own_namespaces(|folder| async move {
        host_address();
        let network = Network::start(config(&folder)).await.unwrap();
        let (a, b) = (pod(&network, UID_A).await, pod(&network, UID_B).await);
        let (ip_a, ip_b) = (a.ip.unwrap(), b.ip.unwrap());
        let serve = |pod: &PodNetwork| {
            inside(&pod.netns, || {
                std::net::TcpListener::bind("0.0.0.0:8080").unwrap()
            })
        };
        let (at_a, at_b) = (serve(&a), serve(&b));
        let address = SocketAddr::new(CLUSTER_IP.into(), 80);
        let services = |endpoints: &[(IpAddr, u32)]| whole(vec![service("TCP", 80, endpoints)]);

        network
            .set_cluster(services(&[(ip_b, 8080)]))
            .await
            .unwrap();
        inside(&a.netns, || connect(address).unwrap());
        assert_eq!(at_b.accept().unwrap().1.ip(), ip_a, "its own address");
        // To itself: by another address, or the answer would not be translated back.
        inside(&b.netns, || connect(address).unwrap());
        assert_ne!(at_b.accept().unwrap().1.ip(), ip_b);

        // The one leaves, the other comes; the connection that there is goes on.
        use std::io::{Read as _, Write as _};
        let mut old = inside(&a.netns, || connect(address).unwrap());
        let (mut accepted, _) = at_b.accept().unwrap();
        let mut change = services(&[(ip_a, 8080)]);
        (change.base, change.version) = ("1".into(), "2".into());
        network.set_cluster(change).await.unwrap();
        inside(&b.netns, || connect(address).unwrap());
        at_a.accept().unwrap();
        accepted.write_all(b"x").unwrap();
        old.read_exact(&mut [0]).unwrap();

        // Nobody left: refused at once, and so is a port that the Service has not.
        let mut change = services(&[]);
        (change.base, change.version) = ("2".into(), "3".into());
        network.set_cluster(change).await.unwrap();
        for port in [80, 81] {
            let address = SocketAddr::new(CLUSTER_IP.into(), port);
            let refused = inside(&a.netns, || connect(address).unwrap_err());
            assert_eq!(refused.kind(), io::ErrorKind::ConnectionRefused, "{port}");
        }
        // A host that missed something says so, and takes only all of it then.
        let mut late = services(&[(ip_a, 8080)]);
        (late.base, late.version) = ("1".into(), "4".into());
        let error = network.set_cluster(late).await.unwrap_err();
        assert!(matches!(error, ClusterNetworkError::Base { .. }), "{error}");
        network
            .set_cluster(services(&[(ip_a, 8080)]))
            .await
            .unwrap();
        // The next process of this service finds the rules in force.
        drop(network);
        let network = Network::start(config(&folder)).await.unwrap();
        inside(&b.netns, || connect(address).unwrap());
        let mut removed = whole(Vec::new());
        (removed.base, removed.version) = (String::new(), "5".into());
        network.set_cluster(removed).await.unwrap();
        assert!(!ruleset().contains("10.96.0.10"));
    });
}

#[test]
fn connections_are_spread_and_clients_with_affinity_are_not() {
    in_own_namespaces(|folder| async move {
        host_address();
        let network = Network::start(config(&folder)).await.unwrap();
        let (a, b) = (pod(&network, UID_A).await, pod(&network, UID_B).await);
        let (ip_a, ip_b) = (a.ip.unwrap(), b.ip.unwrap());
        let listen = || std::net::TcpListener::bind("0.0.0.0:8080").unwrap();
        let listeners = [&a, &b].map(|pod| inside(&pod.netns, listen));
        for listener in &listeners {
            listener.set_nonblocking(true).unwrap();
        }
        let address = SocketAddr::new(CLUSTER_IP.into(), 80);
        let reached = || {
            // Connected is accepted: both ends are this machine.
            let clients: Vec<_> = inside(&a.netns, || {
                (0..64).map(|_| connect(address).unwrap()).collect()
            });
            let counts = listeners
                .each_ref()
                .map(|l| std::iter::from_fn(|| l.accept().ok()).count());
            assert_eq!(counts.iter().sum::<usize>(), clients.len());
            counts
        };
        let mut both = service("TCP", 80, &[(ip_a, 8080), (ip_b, 8080)]);
        network
            .set_cluster(whole(vec![both.clone()]))
            .await
            .unwrap();
        let spread = reached();
        assert!(spread.iter().all(|&count| count > 0), "{spread:?}");

        both.affinity_seconds = 600;
        network.set_cluster(whole(vec![both])).await.unwrap();
        let stuck = reached();
        assert!(stuck.contains(&64), "{stuck:?}");
        // Its endpoint goes: it finds another one, and stays there.
        let other = if stuck[0] == 64 { ip_b } else { ip_a };
        let mut left = service("TCP", 80, &[(other, 8080)]);
        left.affinity_seconds = 600;
        let change = v1::ClusterNetworkRequest {
            base: "1".into(),
            version: "2".into(),
            ..whole(vec![left])
        };
        network.set_cluster(change).await.unwrap();
        let moved = reached();
        assert_eq!((moved[0], moved[1]), (stuck[1], stuck[0]));
    });
}

#[test]
fn a_flow_of_datagrams_leaves_an_endpoint_that_is_gone() {
    in_own_namespaces(|folder| async move {
        let network = Network::start(config(&folder)).await.unwrap();
        let (a, b) = (pod(&network, UID_A).await, pod(&network, UID_B).await);
        let serve = |pod: &PodNetwork, port: u16| {
            let socket = inside(&pod.netns, || UdpSocket::bind(("0.0.0.0", port)).unwrap());
            socket
                .set_read_timeout(Some(Duration::from_secs(20)))
                .unwrap();
            socket
        };
        let [first, second] = [serve(&b, 5300), serve(&b, 5301)];
        // One socket: to the kernel all of it is one flow.
        let client = serve(&a, 0);
        let send = || client.send_to(b"x", (CLUSTER_IP, 53)).unwrap();
        let to = |port| whole(vec![service("UDP", 53, &[(b.ip.unwrap(), port)])]);
        network.set_cluster(to(5300)).await.unwrap();
        send();
        first.recv(&mut [0]).unwrap();
        let mut change = to(5301);
        (change.base, change.version) = ("1".into(), "2".into());
        network.set_cluster(change).await.unwrap();
        send();
        second.recv(&mut [0]).unwrap();
        // The next process does not know what was before.
        drop(network);
        let network = Network::start(config(&folder)).await.unwrap();
        network.set_cluster(to(5300)).await.unwrap();
        send();
        first.recv(&mut [0]).unwrap();
    });
}

#[test]
fn thousands_of_services_are_one_transaction() {
    in_own_namespaces(|folder| async move {
        let network = Network::start(config(&folder)).await.unwrap();
        let endpoints: Vec<(IpAddr, u32)> = (1..=8)
            .map(|last| (IpAddr::from([10, 64, 1, last]), 8080))
            .collect();
        let services = (1..=5000).map(|port| service("TCP", port, &endpoints));
        let services: Vec<_> = services.collect();
        network.set_cluster(whole(services.clone())).await.unwrap();
        let change = v1::ClusterNetworkRequest {
            base: "1".into(),
            version: "2".into(),
            removed_services: services[1..].iter().filter_map(|s| s.key.clone()).collect(),
            serve_services: true,
            ..Default::default()
        };
        network.set_cluster(change).await.unwrap();
        let rules = ruleset();
        let expected = "elements = { tcp . 10.96.0.10 . 1 : goto one-of-8 }";
        assert!(rules.contains(expected), "{rules}");
    });
}
