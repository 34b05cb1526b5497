//! NetworkPolicies against the kernel, in namespaces of the test's own.

use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::Command;
use std::time::Duration;

use super::services_tests::host_address;
use super::tests::{UID_A, UID_B, config, connect, in_own_namespaces, inside};
use super::*;

const UID_C: &str = "0a1b2c3d-0000-4000-8000-00000000000c";

fn statement(policies: Vec<v1::PodPolicy>, peers: Vec<v1::PeerSet>) -> v1::ClusterNetworkRequest {
    v1::ClusterNetworkRequest {
        version: "1".into(),
        enforce_policies: true,
        policies,
        peers,
        ..Default::default()
    }
}

fn open(uid: &str) -> v1::PodPolicy {
    v1::PodPolicy {
        uid: uid.into(),
        ..Default::default()
    }
}

fn isolation(peers: &[&str], ports: &[(u32, u32)]) -> Option<v1::Isolation> {
    let rule = v1::PolicyRule {
        anyone: false,
        peers: peers.iter().map(|id| (*id).to_owned()).collect(),
        ports: ports
            .iter()
            .map(|&(first, last)| v1::PortRange {
                protocol: "TCP".into(),
                first,
                last,
            })
            .collect(),
    };
    Some(v1::Isolation { rules: vec![rule] })
}

fn bits(address: IpAddr) -> u32 {
    match address {
        IpAddr::V4(address) => address.to_bits(),
        IpAddr::V6(_) => panic!("not IPv4"),
    }
}

fn peers(id: &str, addresses: &[IpAddr]) -> v1::PeerSet {
    v1::PeerSet {
        id: id.into(),
        addresses: addresses.iter().map(|&address| bits(address)).collect(),
        ranges: Vec::new(),
    }
}

async fn pod(network: &Network, uid: &str) -> PodNetwork {
    let made = network.setup(uid, v1::NetworkMode::Pod, "pod", &[]).await;
    made.unwrap()
}

fn listen(pod: &PodNetwork, port: u16) -> TcpListener {
    inside(&pod.netns, || TcpListener::bind(("0.0.0.0", port)).unwrap())
}

/// What is dropped gets no answer; everything between two namespaces has one by then.
fn dropped(from: &PodNetwork, to: SocketAddr) {
    let error = inside(&from.netns, || {
        TcpStream::connect_timeout(&to, Duration::from_secs(1)).unwrap_err()
    });
    assert_eq!(error.kind(), io::ErrorKind::TimedOut);
}

fn passes(from: &PodNetwork, to: SocketAddr) -> TcpStream {
    inside(&from.netns, || connect(to).unwrap())
}

fn tables() -> String {
    let output = Command::new("nft").args(["list", "ruleset"]).output();
    let output = output.unwrap();
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn pods_take_and_send_what_their_policies_allow() {
    in_own_namespaces(|folder| async move {
        host_address();
        let network = Network::start(config(&folder)).await.unwrap();
        let a = pod(&network, UID_A).await;
        let b = pod(&network, UID_B).await;
        let c = pod(&network, UID_C).await;
        let [ip_a, ip_b, ip_c] = [&a, &b, &c].map(|pod| pod.ip.unwrap());
        let _listeners = [
            listen(&b, 80),
            listen(&b, 81),
            listen(&c, 80),
            listen(&a, 80),
        ];
        let at = |ip, port| SocketAddr::new(ip, port);

        // b takes from a alone, on port 80 alone; what it sends is its own business.
        let guarded = v1::PodPolicy {
            ingress: isolation(&["aa"], &[(80, 80)]),
            ..open(UID_B)
        };
        let policies = vec![open(UID_A), guarded.clone(), open(UID_C)];
        network
            .set_cluster(statement(policies, vec![peers("aa", &[ip_a])]))
            .await
            .unwrap();
        let old = passes(&a, at(ip_b, 80));
        dropped(&a, at(ip_b, 81));
        dropped(&c, at(ip_b, 80));
        passes(&b, at(ip_c, 80));
        // Its host reaches it whatever it takes.
        connect(at(ip_b, 81)).unwrap();

        // The set changes, and with it who is let in; what was let in stays.
        let change = v1::ClusterNetworkRequest {
            base: "1".into(),
            version: "2".into(),
            ..statement(Vec::new(), vec![peers("aa", &[ip_c])])
        };
        network.set_cluster(change).await.unwrap();
        dropped(&a, at(ip_b, 80));
        passes(&c, at(ip_b, 80));
        use std::io::Write as _;
        (&old).write_all(b"x").unwrap();

        // c sends to a block without b, and not to the host; a takes what it likes.
        let sender = v1::PodPolicy {
            egress: isolation(&["bb"], &[(80, 90)]),
            ..open(UID_C)
        };
        let below_b = v1::AddressRange {
            first: 0,
            last: bits(ip_b) - 1,
        };
        let above_b = v1::AddressRange {
            first: bits(ip_b) + 1,
            last: u32::MAX,
        };
        let block = v1::PeerSet {
            id: "bb".into(),
            addresses: Vec::new(),
            ranges: vec![below_b, above_b],
        };
        let change = v1::ClusterNetworkRequest {
            base: "2".into(),
            version: "3".into(),
            removed_policies: vec![UID_B.into()],
            removed_peers: vec!["aa".into()],
            ..statement(vec![sender], vec![block])
        };
        network.set_cluster(change).await.unwrap();
        passes(&c, at(ip_a, 80));
        dropped(&c, at(ip_b, 80));
        dropped(&c, at(ip_a, 91));
        passes(&a, at(ip_b, 81));
        let _host = TcpListener::bind("0.0.0.0:7444").unwrap();
        let host = SocketAddr::new("192.0.2.1".parse().unwrap(), 7444);
        dropped(&c, host);
        passes(&a, host);

        // The next process finds the rules in force, and what it is told replaces them.
        drop(network);
        let network = Network::start(config(&folder)).await.unwrap();
        dropped(&c, at(ip_b, 80));
        let all_open = vec![open(UID_A), open(UID_B), open(UID_C)];
        network
            .set_cluster(statement(all_open, Vec::new()))
            .await
            .unwrap();
        passes(&c, at(ip_b, 80));
        let off = v1::ClusterNetworkRequest::default();
        network.set_cluster(off).await.unwrap();
        assert!(!tables().contains("sandman-policies"));
    });
}

#[test]
fn a_new_pod_is_closed_until_its_policies_are_known() {
    in_own_namespaces(|folder| async move {
        host_address();
        let network = Network::start(config(&folder)).await.unwrap();
        let a = pod(&network, UID_A).await;
        let _at_a = listen(&a, 80);
        let to_a = SocketAddr::new(a.ip.unwrap(), 80);

        // Nothing was stated yet: what the kernel has of others stays.
        assert!(network.close(UID_B).await.unwrap());
        let b = pod(&network, UID_B).await;
        let _at_b = listen(&b, 80);
        let to_b = SocketAddr::new(b.ip.unwrap(), 80);
        dropped(&b, to_a);
        dropped(&a, to_b);
        // Probes come through.
        connect(to_b).unwrap();
        // A pod that is there already is not closed.
        assert!(!network.close(UID_A).await.unwrap());
        let c = pod(&network, UID_C).await;
        passes(&c, to_a);

        // A statement that does not name it leaves it closed; one that does opens it.
        network
            .set_cluster(statement(vec![open(UID_A), open(UID_C)], Vec::new()))
            .await
            .unwrap();
        dropped(&b, to_a);
        passes(&c, to_a);
        let change = v1::ClusterNetworkRequest {
            base: "1".into(),
            version: "2".into(),
            ..statement(vec![open(UID_B)], Vec::new())
        };
        let (changed, ()) = tokio::join!(
            network.set_cluster(change),
            network.wait_for_policies(UID_B)
        );
        changed.unwrap();
        passes(&b, to_a);

        // After a restart, those that nobody names are closed by the first statement.
        drop(network);
        let network = Network::start(config(&folder)).await.unwrap();
        network.keep_closed([UID_A, UID_B].into_iter());
        passes(&b, to_a);
        network
            .set_cluster(statement(vec![open(UID_A)], Vec::new()))
            .await
            .unwrap();
        dropped(&b, to_a);
        network.teardown(UID_B).await.unwrap();
        assert!(!tables().contains("goto unknown"));
    });
}

#[test]
fn the_kernel_reads_the_rules_of_policies_as_meant() {
    in_own_namespaces(|folder| async move {
        host_address();
        let network = Network::start(config(&folder)).await.unwrap();
        let policy = v1::PodPolicy {
            ingress: isolation(&["aa", "bb"], &[(80, 80), (90, 99), (0, 65535)]),
            egress: Some(v1::Isolation::default()),
            ..open(UID_A)
        };
        let range = v1::AddressRange {
            first: 0x0a00_0000,
            last: 0x0a00_00ff,
        };
        let block = v1::PeerSet {
            id: "bb".into(),
            addresses: Vec::new(),
            ranges: vec![range],
        };
        let set = peers("aa", &[IpAddr::from([10, 64, 0, 9])]);
        network
            .set_cluster(statement(vec![policy], vec![set, block]))
            .await
            .unwrap();
        let rules = tables();
        let (_, ours) = rules.split_once("table inet sandman-policies").unwrap();
        let expected = include_str!("policies.nft").replace("LINK", &pod::link_name(UID_A));
        assert_eq!(ours.trim(), expected.trim());
    });
}
