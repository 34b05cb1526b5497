//! NetworkPolicies by example: who may talk to whom, on which port.

use std::collections::{BTreeSet, HashMap};
use std::net::{IpAddr, Ipv4Addr};

use serde_json::{Value, json};

use super::policies::{HostPolicies, Input, Known, KnownPod, compile};

const HOST: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1));

/// Two namespaces: `ns` with web, db and tool, `other` with web.
fn pods() -> Vec<Value> {
    let pod = |namespace: &str, name: &str, last: u8, labels: Value, port: u16| {
        json!({
            "metadata": {"namespace": namespace, "name": name, "uid": format!("{namespace}-{name}"),
                "labels": labels},
            "spec": {"containers": [{"name": "c", "ports": [{"name": "http", "containerPort": port}]}]},
            "status": {"hostIP": "192.0.2.1", "podIP": format!("10.0.0.{last}"),
                "podIPs": [{"ip": format!("10.0.0.{last}")}]},
        })
    };
    vec![
        pod("ns", "web", 1, json!({"app": "web"}), 8080),
        pod("ns", "db", 2, json!({"app": "db", "tier": "back"}), 5432),
        pod("ns", "tool", 3, json!({}), 80),
        pod("other", "web", 4, json!({"app": "web"}), 9090),
    ]
}

fn policy(name: &str, spec: Value) -> Value {
    json!({"metadata": {"namespace": "ns", "name": name}, "spec": spec})
}

fn compiled(pods: &[Value], policies: &[Value]) -> HostPolicies {
    let name = |object: &Value| {
        let field = |key: &str| object["metadata"][key].as_str().unwrap_or("").to_owned();
        (field("namespace"), field("name"))
    };
    let known = |object: &Value| KnownPod::of(&serde_json::from_value(object.clone()).unwrap());
    let pods: HashMap<_, _> = pods
        .iter()
        .map(|pod| (name(pod), known(pod).unwrap()))
        .collect();
    let read = |object: &Value| Known::of(&serde_json::from_value(object.clone()).unwrap());
    let policies: HashMap<_, _> = policies
        .iter()
        .map(|policy| (name(policy), read(policy).unwrap()))
        .collect();
    let namespaces = ["ns", "other"].map(|namespace| {
        let labels = [("team".to_owned(), namespace.to_owned())].into();
        ((String::new(), namespace.to_owned()), labels)
    });
    let input = Input {
        pods: &pods,
        namespaces: &namespaces.into(),
        policies: &policies,
    };
    compile(input, &BTreeSet::from([HOST]))
        .remove(&HOST)
        .unwrap()
}

/// What one pod takes (or sends), a line a rule: peers' addresses and ports; `None` if it is open.
fn allowed(host: &HostPolicies, uid: &str, egress: bool) -> Option<Vec<String>> {
    let policy = &host.pods[uid];
    let isolation = if egress {
        &policy.egress
    } else {
        &policy.ingress
    };
    let rules = isolation.as_ref()?.rules.iter().map(|rule| {
        let mut peers = Vec::new();
        for id in &rule.peers {
            let set = &host.peers[id];
            let address = Ipv4Addr::from_bits;
            peers.extend(set.addresses.iter().map(|a| address(*a).to_string()));
            let ranges = set.ranges.iter();
            peers.extend(ranges.map(|r| format!("{}-{}", address(r.first), address(r.last))));
        }
        if rule.anyone {
            peers.push("anyone".to_owned());
        }
        let ports = rule.ports.iter();
        let ports = ports.map(|p| format!("{} {}-{}", p.protocol, p.first, p.last));
        let ports: Vec<_> = ports.collect();
        format!("{} : {}", peers.join(", "), ports.join(", "))
    });
    Some(rules.collect())
}

fn takes(host: &HostPolicies, uid: &str) -> Option<Vec<String>> {
    allowed(host, uid, false)
}

fn sends(host: &HostPolicies, uid: &str) -> Option<Vec<String>> {
    allowed(host, uid, true)
}

#[test]
fn pods_without_policies_are_named_and_open() {
    let host = compiled(&pods(), &[]);
    assert_eq!(host.pods.len(), 4);
    assert_eq!(
        (takes(&host, "ns-web"), sends(&host, "ns-web")),
        (None, None)
    );
}

#[test]
fn deny_all_isolates_the_namespace_in_the_directions_that_it_names() {
    let all = policy(
        "deny",
        json!({"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}),
    );
    let host = compiled(&pods(), &[all]);
    for uid in ["ns-web", "ns-db", "ns-tool"] {
        assert_eq!(takes(&host, uid), Some(vec![]), "{uid}");
        assert_eq!(sends(&host, uid), Some(vec![]), "{uid}");
    }
    assert_eq!(takes(&host, "other-web"), None);
    let ingress = policy("deny", json!({"podSelector": {}}));
    let host = compiled(&pods(), &[ingress]);
    assert_eq!(takes(&host, "ns-web"), Some(vec![]));
    assert_eq!(sends(&host, "ns-web"), None, "Ingress is the default");
    let egress = policy(
        "deny",
        json!({"podSelector": {}, "policyTypes": ["Egress"]}),
    );
    let host = compiled(&pods(), &[egress]);
    assert_eq!(takes(&host, "ns-web"), None);
    assert_eq!(sends(&host, "ns-web"), Some(vec![]));
}

#[test]
fn peers_are_chosen_by_pod_namespace_and_both() {
    let from = |peers: Value| {
        let spec =
            json!({"podSelector": {"matchLabels": {"app": "db"}}, "ingress": [{"from": peers}]});
        let host = compiled(&pods(), &[policy("p", spec)]);
        assert_eq!(takes(&host, "ns-web"), None, "another pod");
        takes(&host, "ns-db").unwrap()
    };
    let web = json!({"matchLabels": {"app": "web"}});
    let other = json!({"matchLabels": {"team": "other"}});
    assert_eq!(from(json!([{"podSelector": web}])), ["10.0.0.1 : "]);
    assert_eq!(from(json!([{"namespaceSelector": other}])), ["10.0.0.4 : "]);
    assert_eq!(
        from(json!([{"namespaceSelector": {}, "podSelector": web}])),
        ["10.0.0.1, 10.0.0.4 : "]
    );
    assert_eq!(
        from(json!([{"namespaceSelector": other}, {"podSelector": {}}])),
        ["10.0.0.4, 10.0.0.1, 10.0.0.2, 10.0.0.3 : "]
    );
    let expression = json!({"matchExpressions": [
        {"key": "app", "operator": "NotIn", "values": ["web"]},
        {"key": "tier", "operator": "DoesNotExist"}]});
    assert_eq!(from(json!([{"podSelector": expression}])), ["10.0.0.3 : "]);
    assert_eq!(from(json!([])), ["anyone : "]);
    let nobody = json!({"matchLabels": {"app": "none"}});
    assert_eq!(from(json!([{"podSelector": nobody}])), [" : "]);
}

#[test]
fn blocks_lack_their_exceptions() {
    let to = |block: Value| {
        let spec = json!({"podSelector": {}, "policyTypes": ["Egress"], "egress": [{"to": [{"ipBlock": block}]}]});
        let host = compiled(&pods(), &[policy("p", spec)]);
        sends(&host, "ns-web").unwrap()
    };
    assert_eq!(
        to(json!({"cidr": "10.0.0.0/8"})),
        ["10.0.0.0-10.255.255.255 : "]
    );
    assert_eq!(
        to(json!({"cidr": "10.0.0.0/8", "except": ["10.1.0.0/16", "10.0.0.0/24"]})),
        ["10.0.1.0-10.0.255.255, 10.2.0.0-10.255.255.255 : "]
    );
    assert_eq!(
        to(json!({"cidr": "0.0.0.0/0", "except": ["255.0.0.0/8", "255.255.0.0/16"]})),
        ["0.0.0.0-254.255.255.255 : "]
    );
    assert_eq!(
        to(json!({"cidr": "1.2.3.4/32", "except": ["1.2.3.4/32"]})),
        [" : "]
    );
    assert_eq!(
        to(json!({"cidr": "fd00::/8"})),
        [" : "],
        "nobody that pods reach"
    );
}

#[test]
fn ports_are_numbers_ranges_and_names() {
    let ports = |ports: Value| {
        let spec = json!({"podSelector": {}, "policyTypes": ["Ingress", "Egress"],
            "ingress": [{"ports": ports}], "egress": [{"ports": ports}]});
        let host = compiled(&pods(), &[policy("p", spec)]);
        (
            takes(&host, "ns-db").unwrap(),
            sends(&host, "ns-db").unwrap(),
        )
    };
    let both = |rule: &str| (vec![rule.to_owned()], vec![rule.to_owned()]);
    assert_eq!(ports(json!([])), both("anyone : "));
    assert_eq!(ports(json!([{"port": 80}])), both("anyone : TCP 80-80"));
    assert_eq!(
        ports(json!([{"protocol": "UDP"}])),
        both("anyone : UDP 0-65535")
    );
    assert_eq!(
        ports(json!([{"port": 80, "endPort": 90}, {"protocol": "SCTP", "port": 5}])),
        both("anyone : TCP 80-90, SCTP 5-5")
    );
    // A name is the receiver's: the pod's own, or each peer's.
    let (takes, sends) = ports(json!([{"port": "http"}]));
    assert_eq!(takes, ["anyone : TCP 5432-5432"]);
    assert_eq!(
        sends,
        [
            "10.0.0.3 : TCP 80-80",
            "10.0.0.2 : TCP 5432-5432",
            "10.0.0.1 : TCP 8080-8080",
            "10.0.0.4 : TCP 9090-9090"
        ]
    );
    let (takes, sends) = ports(json!([{"port": "nobody-has-it"}]));
    assert_eq!(
        (takes, sends),
        (vec![], vec![]),
        "nothing, rather than everything"
    );
}

#[test]
fn policies_add_up() {
    let one = json!({"podSelector": {}, "ingress": [{"ports": [{"port": 1}]}]});
    let two = json!({"podSelector": {"matchLabels": {"app": "db"}}, "ingress": [{"ports": [{"port": 2}]}]});
    let host = compiled(&pods(), &[policy("one", one), policy("two", two)]);
    assert_eq!(takes(&host, "ns-web").unwrap(), ["anyone : TCP 1-1"]);
    assert_eq!(
        takes(&host, "ns-db").unwrap(),
        ["anyone : TCP 1-1", "anyone : TCP 2-2"]
    );
}

#[test]
fn only_pods_with_a_network_of_their_own_count() {
    let mut pods = pods();
    pods[0]["spec"]["hostNetwork"] = json!(true);
    pods[2]["status"]["phase"] = json!("Succeeded");
    pods[3]["status"]["hostIP"] = json!("192.0.2.9");
    let spec = json!({"podSelector": {}, "ingress": [{"from": [{"namespaceSelector": {}}]}]});
    let host = compiled(&pods, &[policy("p", spec)]);
    assert_eq!(host.pods.keys().collect::<Vec<_>>(), ["ns-db", "ns-tool"]);
    // Those of other hosts are peers; those without an address of their own are not.
    assert_eq!(takes(&host, "ns-db").unwrap(), ["10.0.0.2, 10.0.0.4 : "]);
}
