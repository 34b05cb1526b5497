//! The virtual node, and the approver of its serving certificate.

use std::path::{Path, PathBuf};

use sandman_certs::User;

use super::dns::CLUSTER_DNS;
use super::host::{HOST_ACCESS, HOST_API_PORT};
use super::kubelet::PEER_NODE;
use super::{Component, Plan, path_flag, toml_path, toml_string};
use crate::net::{Member, endpoint};

/// Name of the fleet.
pub(crate) const FLEET: &str = "dev";
/// Name of the virtual node.
pub(crate) const NODE: &str = "sandman";
/// Name of a virtual node whose host does no work, for comparisons.
const NULL_NODE: &str = "sandman-null";
/// Addresses that its pods are said to have; nothing answers there.
const NULL_POD_CIDR: &str = "10.80.0.0/16";
/// Name of the component that is the virtual node.
pub(crate) const VNODE: &str = "vnode";
/// A second replica of it, which stands by; started by name.
pub(crate) const STANDBY: &str = "vnode-standby";
/// Name of the component that approves serving certificates.
pub(crate) const APPROVER: &str = "approver";
/// Nodes that have an identity: the virtual ones and a real kubelet.
pub(crate) const NODES: [&str; 3] = [NODE, NULL_NODE, PEER_NODE];
/// Port of the kubelet API.
pub(crate) const KUBELET_API_PORT: u16 = 10250;

/// The machine also compiles and tests: the API server may be slow for longer than a leader of a
/// cluster waits by default, and nobody starts a process again that steps down.
const ELECTION_SECONDS: u8 = 60;
/// Metrics of the virtual node, on loopback of its namespace.
const METRICS_PORT: u16 = 9441;

impl Plan<'_> {
    pub(super) fn vnode(&self) -> anyhow::Result<Component> {
        self.replica(VNODE, Member::Vnode)
    }

    /// A second replica, at the place of the node without hosts' work: only one of the two runs.
    /// Not part of `up`; started by name.
    pub(super) fn standby(&self) -> anyhow::Result<Component> {
        self.replica(STANDBY, Member::SecondVnode)
    }

    fn replica(&self, name: &str, member: Member) -> anyhow::Result<Component> {
        let mut content = self.vnode_config(NODE, member);
        content.push_str(&format!(
            "\n[election]\nkubeconfig = {}\nidentity = {}\nduration_seconds = {ELECTION_SECONDS}\n",
            toml_path(&self.election_kubeconfig()),
            toml_string(name),
        ));
        for host in Member::hosts(self.settings.hosts) {
            content.push_str(&format!(
                "\n[[hosts]]\nname = {}\naddress = \"{}\"\npod_cidr = \"{}\"\n",
                toml_string(host),
                endpoint(host, HOST_API_PORT),
                host.pod_cidr().unwrap_or_default(),
            ));
        }
        self.vnode_component(name, NODE, member, content, &[])
    }

    /// The same program with a host that does no work, on which pods run at once: the rate that
    /// the control plane alone allows. Not part of `up`; started by name.
    pub(crate) fn null_vnode(&self) -> anyhow::Result<Component> {
        let mut content = self.vnode_config(NULL_NODE, Member::SecondVnode);
        content.push_str(&format!(
            "\n[[hosts]]\nname = \"null-0\"\naddress = \"{}\"\npod_cidr = \"{NULL_POD_CIDR}\"\n",
            endpoint(Member::SecondVnode, HOST_API_PORT),
        ));
        self.vnode_component(
            "vnode-null",
            NULL_NODE,
            Member::SecondVnode,
            content,
            &["--null-hosts"],
        )
    }

    fn vnode_config(&self, node: &str, member: Member) -> String {
        let api = endpoint(member, KUBELET_API_PORT);
        format!(
            r#"node_name = {name}
kubeconfig = {kubeconfig}
fleet = {fleet}
fleet_tls = {tls}
state_dir = {state}
metrics_listen = "127.0.0.1:{METRICS_PORT}"
cluster_dns = ["{CLUSTER_DNS}"]

{HOST_ACCESS}
[kubelet_api]
listen = "{api}"
address = "{ip}"
client_ca = {ca}
websockets = {websockets}

[cluster_network]
services = true
policies = true
kubeconfig = {reader}
"#,
            reader = toml_path(&self.election_kubeconfig()),
            name = toml_string(node),
            kubeconfig = toml_path(&self.pki.kubeconfig(&User::Node(node.to_owned()))),
            fleet = toml_string(FLEET),
            tls = toml_path(&self.layout.fleet_dir().join("vnode")),
            state = toml_path(&self.layout.data_dir(&member.to_string())),
            ip = api.ip(),
            websockets = self.settings.websockets,
            ca = toml_path(&self.pki.ca().cert),
        )
    }

    fn vnode_component(
        &self,
        name: &str,
        node: &str,
        member: Member,
        content: String,
        arguments: &[&str],
    ) -> anyhow::Result<Component> {
        let config = self.config(&format!("{name}.toml"));
        let mut argv = vec![
            self.settings
                .artifacts
                .binary("sandman-vnode")?
                .display()
                .to_string(),
            "--config".to_owned(),
            config.display().to_string(),
        ];
        argv.extend(arguments.iter().map(|&argument| argument.to_owned()));
        let mut component = Component::new(name, Some(member), argv);
        component.files.push((config, content));
        component
            .dirs
            .push(self.layout.data_dir(&member.to_string()));
        component.inputs.extend([
            self.pki.kubeconfig(&User::Node(node.to_owned())),
            self.election_kubeconfig(),
            self.layout.fleet_dir().join("vnode/tls.crt"),
        ]);
        Ok(component)
    }

    /// Approves the serving certificates of the nodes.
    pub(super) fn approver(&self) -> anyhow::Result<Component> {
        let program = self.settings.artifacts.binary("sandman-certs")?;
        let nodes = [
            (NODE, vec![Member::Vnode, Member::SecondVnode]),
            (NULL_NODE, vec![Member::SecondVnode]),
            (PEER_NODE, vec![Member::Kubelet]),
        ];
        Ok(approver(program, &self.approver_kubeconfig(), &nodes))
    }

    /// A kubeconfig for use inside the control plane's namespace.
    pub(crate) fn token_kubeconfig(&self, user: &str, token: &str) -> String {
        let server = endpoint(Member::Control, super::APISERVER_PORT);
        let content = serde_json::json!({
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "dev", "cluster": {
                "server": format!("https://{server}"),
                "certificate-authority": self.pki.ca().cert,
            }}],
            "users": [{"name": user, "user": {"token": token}}],
            "contexts": [{"name": "dev", "context": {"cluster": "dev", "user": user}}],
            "current-context": "dev",
        });
        format!("{content:#}\n")
    }

    /// Kubeconfig of the approver's ServiceAccount; written once the API server can issue a token.
    pub(crate) fn approver_kubeconfig(&self) -> PathBuf {
        self.config("approver.kubeconfig")
    }

    /// Kubeconfig of the replicas' ServiceAccount, which elects and reads Services, likewise.
    pub(crate) fn election_kubeconfig(&self) -> PathBuf {
        self.config("vnode-election.kubeconfig")
    }
}

fn approver(program: &Path, kubeconfig: &Path, nodes: &[(&str, Vec<Member>)]) -> Component {
    let mut argv = vec![
        program.display().to_string(),
        "approve".to_owned(),
        path_flag("kubeconfig", kubeconfig),
    ];
    for (node, members) in nodes {
        let addresses = members.iter().filter_map(|member| member.address());
        let addresses: Vec<_> = addresses.map(|address| address.to_string()).collect();
        argv.push(format!("--node={node}={}", addresses.join(",")));
    }
    let mut component = Component::new(APPROVER, Some(Member::Control), argv);
    component.inputs.push(kubeconfig.to_owned());
    component
}
