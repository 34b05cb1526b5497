//! etcd and the Kubernetes control plane, in one namespace. Set up as for a fleet: TLS everywhere,
//! Node and RBAC authorization, and client rates above the defaults, which bind 50 pods a second.

use std::time::Duration;

use sandman_certs::User;

use super::{Component, Plan, Probe, flag, path_flag};
use crate::net::{Member, SERVICE_CIDR, endpoint};

/// Port of the API server.
pub(crate) const APISERVER_PORT: u16 = 6443;
/// Names of components that others refer to.
pub(crate) const APISERVER: &str = "apiserver";
/// See [`APISERVER`].
pub(crate) const CONTROLLER_MANAGER: &str = "controller-manager";
/// See [`APISERVER`].
pub(crate) const SCHEDULER: &str = "scheduler";

const ETCD_PORT: u16 = 2379;
const ETCD_PEER_PORT: u16 = 2380;
const CONTROLLER_MANAGER_PORT: u16 = 10257;
const SCHEDULER_PORT: u16 = 10259;
/// Requests a second, and burst, of the scheduler and the controller manager.
pub(super) const QPS: u32 = 500;
/// See [`QPS`].
pub(super) const BURST: u32 = 1000;
/// etcd stops taking writes above this.
const ETCD_QUOTA_BYTES: u64 = 8 << 30;

/// Size at which the audit log is rotated.
const AUDIT_LOG_MIB: u32 = 512;

/// Nodes' requests, so that what a node costs can be counted, and nobody else's: a burst must not
/// pay for a record of its own client.
fn audit_policy() -> String {
    let policy = serde_json::json!({
        "apiVersion": "audit.k8s.io/v1",
        "kind": "Policy",
        "omitStages": ["RequestReceived"],
        "rules": [
            {"level": "Metadata", "userGroups": ["system:nodes"]},
            {"level": "Metadata", "users": ["system:serviceaccount:sandman-system:sandman-vnode"]},
            {"level": "None"},
        ],
    });
    format!("{policy:#}\n")
}

impl Plan<'_> {
    pub(super) fn etcd(&self) -> Component {
        let data = self.layout.data_dir("etcd");
        let client_url = format!("https://127.0.0.1:{ETCD_PORT}");
        let peer_url = format!("http://127.0.0.1:{ETCD_PEER_PORT}");
        let server = self.pki.etcd_server();
        let mut argv = self.kube("etcd");
        argv.extend([
            flag("name", "dev"),
            path_flag("data-dir", &data),
            flag("listen-client-urls", &client_url),
            flag("advertise-client-urls", &client_url),
            // The only member: nobody else can reach this port.
            flag("listen-peer-urls", &peer_url),
            flag("initial-advertise-peer-urls", &peer_url),
            flag("initial-cluster", format!("dev={peer_url}")),
            path_flag("cert-file", &server.cert),
            path_flag("key-file", &server.key),
            path_flag("trusted-ca-file", &self.pki.etcd_ca().cert),
            "--client-cert-auth".to_owned(),
            flag("quota-backend-bytes", ETCD_QUOTA_BYTES),
            // A dev cluster that loses power is thrown away.
            "--unsafe-no-fsync".to_owned(),
            flag("log-level", "warn"),
        ]);
        let mut component = Component::new("etcd", Some(Member::Control), argv);
        component.dirs.push(data);
        component.inputs.push(server.cert);
        component.ready = Probe::Tcp(([127, 0, 0, 1], ETCD_PORT).into());
        component
    }

    pub(super) fn apiserver(&self) -> Component {
        let pki = self.pki;
        let serving = pki.apiserver();
        let etcd = pki.apiserver_etcd_client();
        let kubelet = pki.apiserver_kubelet_client();
        let proxy = pki.front_proxy_client();
        let address = endpoint(Member::Control, APISERVER_PORT);
        let mut argv = self.kube("apiserver");
        argv.extend([
            flag("advertise-address", address.ip()),
            flag("secure-port", address.port()),
            flag("etcd-servers", format!("https://127.0.0.1:{ETCD_PORT}")),
            path_flag("etcd-cafile", &pki.etcd_ca().cert),
            path_flag("etcd-certfile", &etcd.cert),
            path_flag("etcd-keyfile", &etcd.key),
            path_flag("tls-cert-file", &serving.cert),
            path_flag("tls-private-key-file", &serving.key),
            path_flag("client-ca-file", &pki.ca().cert),
            flag("authorization-mode", "Node,RBAC"),
            flag("enable-admission-plugins", "NodeRestriction"),
            flag("allow-privileged", true),
            flag("service-cluster-ip-range", SERVICE_CIDR),
            flag("service-account-issuer", "https://kubernetes.default.svc"),
            path_flag(
                "service-account-key-file",
                &pki.service_account_public_key(),
            ),
            path_flag(
                "service-account-signing-key-file",
                &pki.service_account_key(),
            ),
            path_flag("kubelet-client-certificate", &kubelet.cert),
            path_flag("kubelet-client-key", &kubelet.key),
            path_flag("kubelet-certificate-authority", &pki.ca().cert),
            flag("kubelet-preferred-address-types", "InternalIP"),
            path_flag("proxy-client-cert-file", &proxy.cert),
            path_flag("proxy-client-key-file", &proxy.key),
            path_flag("requestheader-client-ca-file", &pki.front_proxy_ca().cert),
            flag("requestheader-allowed-names", "front-proxy-client"),
            flag("requestheader-extra-headers-prefix", "X-Remote-Extra-"),
            flag("requestheader-group-headers", "X-Remote-Group"),
            flag("requestheader-username-headers", "X-Remote-User"),
            // There is no kube-proxy: extension servers are dialled at their endpoints.
            flag("enable-aggregator-routing", true),
        ]);
        let policy = self.config("audit-policy.json");
        argv.extend([
            path_flag("audit-policy-file", &policy),
            path_flag("audit-log-path", &self.layout.audit_log()),
            flag("audit-log-maxsize", AUDIT_LOG_MIB),
            flag("audit-log-maxbackup", 1),
        ]);
        let mut component = Component::new(APISERVER, Some(Member::Control), argv);
        component.files.push((policy, audit_policy()));
        component.dirs.push(self.layout.log_dir());
        component.inputs.push(serving.cert);
        component.ready = Probe::ApiServer;
        component.ready_within = Duration::from_secs(180);
        // It would wait for watches to end, a minute by default.
        component.stop_grace = Duration::from_secs(5);
        component
    }

    pub(super) fn controller_manager(&self) -> Component {
        let pki = self.pki;
        let kubeconfig = pki.kubeconfig(&User::ControllerManager);
        let ca = pki.ca();
        let mut argv = self.kube("controller-manager");
        argv.extend(self.component_flags(&kubeconfig, CONTROLLER_MANAGER_PORT));
        argv.extend([
            path_flag("kubeconfig", &kubeconfig),
            path_flag("root-ca-file", &ca.cert),
            path_flag("cluster-signing-cert-file", &ca.cert),
            path_flag("cluster-signing-key-file", &ca.key),
            path_flag(
                "service-account-private-key-file",
                &pki.service_account_key(),
            ),
            "--use-service-account-credentials".to_owned(),
            flag("service-cluster-ip-range", SERVICE_CIDR),
            flag("kube-api-qps", QPS),
            flag("kube-api-burst", BURST),
            flag("leader-elect", false),
        ]);
        let mut component = Component::new(CONTROLLER_MANAGER, Some(Member::Control), argv);
        component.inputs.push(ca.cert);
        component.ready = Probe::Tcp(([127, 0, 0, 1], CONTROLLER_MANAGER_PORT).into());
        component
    }

    pub(super) fn scheduler(&self) -> Component {
        let kubeconfig = self.pki.kubeconfig(&User::Scheduler);
        let config = self.config("scheduler.json");
        let content = serde_json::json!({
            "apiVersion": "kubescheduler.config.k8s.io/v1",
            "kind": "KubeSchedulerConfiguration",
            "clientConnection": {"kubeconfig": kubeconfig, "qps": QPS, "burst": BURST},
            "leaderElection": {"leaderElect": false},
        });
        let mut argv = self.kube("scheduler");
        argv.extend(self.component_flags(&kubeconfig, SCHEDULER_PORT));
        argv.push(path_flag("config", &config));
        let mut component = Component::new(SCHEDULER, Some(Member::Control), argv);
        component.files.push((config, format!("{content:#}\n")));
        component.inputs.push(kubeconfig);
        component.ready = Probe::Tcp(([127, 0, 0, 1], SCHEDULER_PORT).into());
        component
    }

    /// How the controller manager and the scheduler serve their own metrics and health.
    fn component_flags(&self, kubeconfig: &std::path::Path, port: u16) -> [String; 5] {
        [
            path_flag("authentication-kubeconfig", kubeconfig),
            path_flag("authorization-kubeconfig", kubeconfig),
            path_flag(
                "requestheader-client-ca-file",
                &self.pki.front_proxy_ca().cert,
            ),
            flag("bind-address", "127.0.0.1"),
            flag("secure-port", port),
        ]
    }
}
