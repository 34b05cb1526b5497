//! A real kubelet with containerd and runc, as a node beside the virtual one: what Sandman is
//! measured against. Set up as a fleet would, with client rates as high as the scheduler's and its
//! images at hand, so that a comparison finds its limits and not those of its configuration.
//!
//! `down` removes all of it, except that a kubelet sets `vm.overcommit_memory`, `kernel.panic`,
//! `kernel.panic_on_oops` and `kernel.keys.*` of the whole machine, and nobody sets them back.

use std::path::PathBuf;

use sandman_certs::User;
use serde_json::json;

use super::control_plane::{BURST, QPS};
use super::{Component, KUBELET_API_PORT, Plan, Probe, REGISTRY_PORT, flag, path_flag, toml_path};
use crate::net::{Member, endpoint};
use crate::teardown::cgroup_hierarchies;

/// Name of its Node object.
pub(crate) const PEER_NODE: &str = "peer-0";
/// What `start` and `stop` call the whole of it.
pub(crate) const PEER: &str = "kubelet-peer";
/// Keeps all pods away but those of a comparison.
const TAINT: &str = "sandman.dev/peer";
/// As many as a host of ours takes.
const MAX_PODS: u32 = super::host::PODS;
/// Holds a pod's namespaces.
const PAUSE_IMAGE: &str = "sandman/pause:1";
/// Where Debian puts the plugins of `containernetworking-plugins`.
const CNI_PLUGINS: &str = "/usr/lib/cni";

/// Plugins of containerd that a kubelet does not use.
const DISABLED_PLUGINS: &str = r#"[
  "io.containerd.internal.v1.opt",
  "io.containerd.internal.v1.tracing",
  "io.containerd.tracing.processor.v1.otlp",
  "io.containerd.snapshotter.v1.aufs",
  "io.containerd.snapshotter.v1.btrfs",
  "io.containerd.snapshotter.v1.devmapper",
  "io.containerd.snapshotter.v1.zfs",
]"#;

impl Plan<'_> {
    /// The whole node, in the order of starting.
    pub(crate) fn kubelet_peer(&self) -> [Component; 2] {
        [self.peer_containerd(), self.peer_kubelet()]
    }

    fn peer_containerd(&self) -> Component {
        let registry = endpoint(Member::Registry, REGISTRY_PORT);
        let root = self.peer_data().join("containerd");
        let run = self.layout.host_run_dir(Member::Kubelet);
        let state = run.join("containerd");
        let socket = self.layout.containerd_socket(Member::Kubelet);
        let config_dir = self.layout.config_dir().join("peer");
        let hosts = config_dir.join("registries");
        let networks = config_dir.join("cni");
        // Root here lacks CAP_SYS_RESOURCE: a container's OOM score cannot go below our own. The
        // other settings keep what containerd would put into folders of the machine in ours.
        let content = format!(
            r#"version = 2
root = {root}
state = {state}
disabled_plugins = {DISABLED_PLUGINS}

[grpc]
address = {address}

[ttrpc]
address = {ttrpc}

[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "{registry}/{PAUSE_IMAGE}"
restrict_oom_score_adj = true
netns_mounts_under_state_dir = true

[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "{CNI_PLUGINS}"
conf_dir = {networks}

[plugins."io.containerd.grpc.v1.cri".containerd]
default_runtime_name = "runc"

[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"

[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
SystemdCgroup = false
Root = {runc}

[plugins."io.containerd.grpc.v1.cri".registry]
config_path = {hosts}
"#,
            root = toml_path(&root),
            state = toml_path(&state),
            address = toml_path(&socket),
            ttrpc = toml_path(&socket.with_extension("sock.ttrpc")),
            networks = toml_path(&networks),
            runc = toml_path(&run.join("runc")),
            hosts = toml_path(&hosts),
        );
        let config = self.config("peer-containerd.toml");
        let argv = vec![
            "/usr/bin/containerd".to_owned(),
            "--config".to_owned(),
            config.display().to_string(),
        ];
        let mut component = Component::new("peer-containerd", Some(Member::Kubelet), argv);
        component.files = vec![
            (config, content),
            (
                hosts.join(registry.to_string()).join("hosts.toml"),
                // containerd only drops TLS for a host that is listed, not for the default one.
                format!("[host.\"http://{registry}\"]\ncapabilities = [\"pull\", \"resolve\"]\n"),
            ),
            (networks.join("10-pods.conflist"), self.peer_network()),
        ];
        component.dirs.extend([root, state]);
        component.ready = Probe::Unix(socket);
        component
    }

    /// A routed veth a pod, as our hosts have: a bridge takes no more than 1,023.
    fn peer_network(&self) -> String {
        let content = json!({
            "cniVersion": "1.0.0",
            "name": self.layout.cni_network(),
            "plugins": [{
                "type": "ptp",
                "ipam": {
                    "type": "host-local",
                    "ranges": [[{"subnet": Member::Kubelet.pod_cidr()}]],
                    "routes": [{"dst": "0.0.0.0/0"}],
                    "dataDir": self.layout.host_run_dir(Member::Kubelet).join("addresses"),
                },
            }],
        });
        format!("{content:#}\n")
    }

    fn peer_kubelet(&self) -> Component {
        let kubeconfig = self.pki.kubeconfig(&User::Node(PEER_NODE.to_owned()));
        let address = endpoint(Member::Kubelet, KUBELET_API_PORT);
        let data = self.peer_data();
        let cgroup_root = format!("{}/kubelet", self.layout.cgroup_parent());
        let content = json!({
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "address": address.ip(),
            "port": address.port(),
            "authentication": {
                "anonymous": {"enabled": false},
                "webhook": {"enabled": true},
                "x509": {"clientCAFile": self.pki.ca().cert},
            },
            "authorization": {"mode": "Webhook"},
            "serverTLSBootstrap": true,
            "containerRuntimeEndpoint":
                format!("unix://{}", self.layout.containerd_socket(Member::Kubelet).display()),
            "podLogsDir": data.join("logs"),
            "volumePluginDir": data.join("volume-plugins"),
            "registerWithTaints": [{"key": TAINT, "value": "kubelet", "effect": "NoSchedule"}],
            "maxPods": MAX_PODS,
            "kubeAPIQPS": QPS,
            "kubeAPIBurst": BURST,
            "clusterDomain": "cluster.local",
            // The development machine has the old hierarchies.
            "failCgroupV1": false,
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": cgroup_root,
            "cgroupsPerQOS": true,
            "enforceNodeAllocatable": [],
            "failSwapOn": false,
            // There are no Services on this node.
            "makeIPTablesUtilChains": false,
            // A developer's disk is often nearly full; that must not evict pods or their images.
            "imageGCHighThresholdPercent": 100,
            "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%",
                "nodefs.inodesFree": "1%", "imagefs.available": "1%"},
        });
        let config = self.config("peer-kubelet.json");
        let mut argv = self.kube("kubelet");
        argv.extend([
            path_flag("config", &config),
            path_flag("kubeconfig", &kubeconfig),
            path_flag("root-dir", &data.join("kubelet")),
            path_flag("cert-dir", &data.join("pki")),
            flag("hostname-override", PEER_NODE),
            flag("node-ip", address.ip()),
        ]);
        let mut component = Component::new("peer-kubelet", Some(Member::Kubelet), argv);
        component.files.push((config, format!("{content:#}\n")));
        component.dirs.push(data);
        // The kubelet wants its parent in every hierarchy before it starts.
        component.dirs.extend(
            cgroup_hierarchies()
                .into_iter()
                .map(|hierarchy| hierarchy.join(cgroup_root.trim_start_matches('/'))),
        );
        component.inputs.push(kubeconfig);
        component.ready = Probe::Tcp(address.into());
        component
    }

    fn peer_data(&self) -> PathBuf {
        self.layout.data_dir(&Member::Kubelet.to_string())
    }
}
