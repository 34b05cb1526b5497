//! What a cluster PKI consists of, as data. Creating and verifying walk the same plan, so they cannot disagree.

use std::net::{IpAddr, Ipv4Addr};

use crate::error::{Error, Result};
use crate::name::check_subdomain;
use crate::profile::{Profile, Usage};

/// What the PKI is for.
#[derive(Clone, Debug)]
pub struct DevPkiSpec {
    /// URL of the API server in the kubeconfigs: `https://ADDRESS:PORT`.
    pub server: String,
    /// Addresses of the API server, besides loopback and the service address.
    pub apiserver_ips: Vec<IpAddr>,
    /// DNS names of the API server, besides localhost and the service names.
    pub apiserver_dns: Vec<String>,
    /// Address of the `kubernetes` Service, the first of the service range.
    pub service_ip: IpAddr,
    /// Addresses of etcd, besides loopback.
    pub etcd_ips: Vec<IpAddr>,
    /// Kubernetes nodes that get a client certificate and a kubeconfig.
    pub nodes: Vec<String>,
    /// Life of every certificate, authorities included, in days.
    pub days: u16,
}

impl DevPkiSpec {
    /// A PKI for an API server at `server`, reached by `ip`, with the usual service address and a year to live.
    pub fn new(server: impl Into<String>, ip: IpAddr) -> Self {
        Self {
            server: server.into(),
            apiserver_ips: vec![ip],
            apiserver_dns: Vec::new(),
            service_ip: IpAddr::V4(Ipv4Addr::new(10, 96, 0, 1)),
            etcd_ips: Vec::new(),
            nodes: Vec::new(),
            days: 365,
        }
    }

    pub(super) fn check(&self) -> Result<()> {
        let host = self.server.strip_prefix("https://");
        if host.is_none_or(|host| host.is_empty() || host.contains(char::is_whitespace)) {
            return Err(Error::Invalid {
                field: "--server",
                value: self.server.clone(),
                reason: "must be a URL of the form https://HOST:PORT".to_owned(),
            });
        }
        for name in &self.apiserver_dns {
            check_subdomain("--apiserver-dns", name)?;
        }
        for name in &self.nodes {
            check_subdomain("--node", name)?;
        }
        Ok(())
    }
}

/// The three authorities. They are apart because each is trusted for one thing only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ca {
    /// API clients, and serving certificates of the API server and of nodes.
    Cluster,
    /// The API server towards extension API servers.
    FrontProxy,
    /// etcd and its clients.
    Etcd,
}

impl Ca {
    pub(super) const ALL: [Self; 3] = [Self::Cluster, Self::FrontProxy, Self::Etcd];

    /// Path below the PKI's directory, without extension; the names are kubeadm's.
    pub(super) fn stem(self) -> &'static str {
        match self {
            Self::Cluster => "ca",
            Self::FrontProxy => "front-proxy-ca",
            Self::Etcd => "etcd/ca",
        }
    }

    pub(super) fn profile(self) -> Profile {
        let name = match self {
            Self::Cluster => "sandman-dev-ca",
            Self::FrontProxy => "sandman-dev-front-proxy-ca",
            Self::Etcd => "sandman-dev-etcd-ca",
        };
        Profile::new(name, Usage::Authority)
    }
}

pub(super) const APISERVER: &str = "apiserver";
pub(super) const APISERVER_ETCD_CLIENT: &str = "apiserver-etcd-client";
pub(super) const APISERVER_KUBELET_CLIENT: &str = "apiserver-kubelet-client";
pub(super) const FRONT_PROXY_CLIENT: &str = "front-proxy-client";
pub(super) const ETCD_SERVER: &str = "etcd/server";

/// A certificate of the PKI.
pub(super) struct Leaf {
    /// Path below the PKI's directory, without extension.
    pub(super) stem: String,
    pub(super) ca: Ca,
    pub(super) profile: Profile,
}

/// Somebody who talks to the API server with a kubeconfig.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum User {
    /// May do anything (`system:masters`).
    Admin,
    /// kube-controller-manager.
    ControllerManager,
    /// kube-scheduler.
    Scheduler,
    /// The node of this name, under the Node authorizer.
    Node(String),
}

impl User {
    /// Path below the PKI's directory, without extension.
    pub(super) fn stem(&self) -> String {
        match self {
            Self::Admin => "clients/admin".to_owned(),
            Self::ControllerManager => "clients/controller-manager".to_owned(),
            Self::Scheduler => "clients/scheduler".to_owned(),
            Self::Node(name) => format!("nodes/{name}"),
        }
    }

    pub(super) fn profile(&self) -> Profile {
        match self {
            Self::Admin => {
                Profile::new("kubernetes-admin", Usage::Client).organization("system:masters")
            }
            Self::ControllerManager => {
                Profile::new("system:kube-controller-manager", Usage::Client)
            }
            Self::Scheduler => Profile::new("system:kube-scheduler", Usage::Client),
            Self::Node(name) => Profile::new(format!("system:node:{name}"), Usage::Client)
                .organization("system:nodes"),
        }
    }
}

/// All users of the PKI.
pub(super) fn users(spec: &DevPkiSpec) -> Vec<User> {
    [User::Admin, User::ControllerManager, User::Scheduler]
        .into_iter()
        .chain(spec.nodes.iter().cloned().map(User::Node))
        .collect()
}

/// All certificates of the PKI but the authorities'.
pub(super) fn leaves(spec: &DevPkiSpec) -> Vec<Leaf> {
    let leaf = |stem: &str, ca, profile| Leaf {
        stem: stem.to_owned(),
        ca,
        profile,
    };
    let loopback = IpAddr::V4(Ipv4Addr::LOCALHOST);
    let apiserver_dns = [
        "localhost",
        "kubernetes",
        "kubernetes.default",
        "kubernetes.default.svc",
        "kubernetes.default.svc.cluster.local",
    ];
    let apiserver = Profile::new("kube-apiserver", Usage::Server).hosts(
        apiserver_dns
            .map(str::to_owned)
            .into_iter()
            .chain(spec.apiserver_dns.iter().cloned()),
        [loopback, spec.service_ip]
            .into_iter()
            .chain(spec.apiserver_ips.iter().copied()),
    );
    // etcd opens connections to itself with its serving certificate, hence the client usage.
    let etcd = Profile::new("etcd", Usage::Peer).hosts(
        ["localhost".to_owned()],
        std::iter::once(loopback).chain(spec.etcd_ips.iter().copied()),
    );
    let client = |name: &str| Profile::new(name, Usage::Client);
    let mut leaves = vec![
        leaf(APISERVER, Ca::Cluster, apiserver),
        leaf(
            APISERVER_KUBELET_CLIENT,
            Ca::Cluster,
            client("kube-apiserver-kubelet-client"),
        ),
        leaf(
            APISERVER_ETCD_CLIENT,
            Ca::Etcd,
            client("kube-apiserver-etcd-client"),
        ),
        leaf(
            FRONT_PROXY_CLIENT,
            Ca::FrontProxy,
            client("front-proxy-client"),
        ),
        leaf(ETCD_SERVER, Ca::Etcd, etcd),
    ];
    leaves.extend(
        users(spec)
            .iter()
            .map(|user| leaf(&user.stem(), Ca::Cluster, user.profile())),
    );
    leaves
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec() -> DevPkiSpec {
        let mut spec = DevPkiSpec::new("https://10.1.0.1:6443", "10.1.0.1".parse().unwrap());
        spec.nodes = vec!["sandman-1".to_owned()];
        spec
    }

    #[test]
    fn the_api_server_answers_to_all_its_names() {
        let leaves = leaves(&spec());
        let names = leaves
            .iter()
            .find(|l| l.stem == APISERVER)
            .unwrap()
            .profile
            .names();
        assert_eq!(
            names,
            [
                "DNS:localhost",
                "DNS:kubernetes",
                "DNS:kubernetes.default",
                "DNS:kubernetes.default.svc",
                "DNS:kubernetes.default.svc.cluster.local",
                "IP:127.0.0.1",
                "IP:10.96.0.1",
                "IP:10.1.0.1",
            ]
        );
    }

    #[test]
    fn nodes_are_known_to_the_node_authorizer() {
        let leaves = leaves(&spec());
        let node = leaves.iter().find(|l| l.stem == "nodes/sandman-1").unwrap();
        assert_eq!(
            node.profile.subject(),
            "O=system:nodes, CN=system:node:sandman-1"
        );
        assert_eq!(node.profile.usage, Usage::Client);
    }

    #[test]
    fn bad_values_are_refused_with_their_field() {
        type Change = fn(&mut DevPkiSpec);
        let cases: [(&str, Change); 4] = [
            ("--server", |s| s.server = "http://10.1.0.1".to_owned()),
            ("--server", |s| s.server = "https://".to_owned()),
            ("--node", |s| s.nodes = vec!["../x".to_owned()]),
            ("--apiserver-dns", |s| {
                s.apiserver_dns = vec!["A".to_owned()]
            }),
        ];
        for (field, break_it) in cases {
            let mut spec = spec();
            break_it(&mut spec);
            assert!(spec.check().unwrap_err().to_string().starts_with(field));
        }
        spec().check().unwrap();
    }
}
