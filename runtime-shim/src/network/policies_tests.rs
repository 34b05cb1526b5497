//! NetworkPolicies against the kernel, in namespaces of the test's own.

use std::process::Command;

use super::tests::{UID_A, config, in_own_namespaces};
use super::*;

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

fn tables() -> String {
    let output = Command::new("nft").args(["list", "ruleset"]).output();
    let output = output.unwrap();
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
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
