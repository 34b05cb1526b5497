//! The cluster's DNS: CoreDNS beside the control plane, reached by Service `kube-dns`.

use super::{Component, Plan, Probe, path_flag};
use crate::net::{Member, endpoint};

/// Name of the component.
pub(crate) const DNS: &str = "dns";
/// ClusterIP of Service `kube-dns` in `manifests/dns`.
pub(super) const CLUSTER_DNS: &str = "10.96.0.10";
/// Port of names, and that of the addresses in `manifests/dns`.
const PORT: u16 = 53;

impl Plan<'_> {
    pub(super) fn dns(&self) -> Component {
        let address = endpoint(Member::Control, PORT);
        let content = format!(
            ".:{PORT} {{\n\
             bind {}\n\
             errors\n\
             kubernetes cluster.local in-addr.arpa {{\n\
             kubeconfig {}\n\
             pods insecure\n\
             ttl 5\n\
             }}\n\
             cache 5\n\
             }}\n",
            address.ip(),
            self.dns_kubeconfig().display(),
        );
        let config = self.config("Corefile");
        let program = self.settings.artifacts.coredns.clone().unwrap_or_default();
        let argv = vec![program.display().to_string(), path_flag("conf", &config)];
        let mut component = Component::new(DNS, Some(Member::Control), argv);
        component.files.push((config, content));
        component.inputs.push(self.dns_kubeconfig());
        component.ready = Probe::Tcp(address.into());
        component
    }

    /// Kubeconfig of its ServiceAccount; written once the API server can issue a token.
    pub(crate) fn dns_kubeconfig(&self) -> std::path::PathBuf {
        self.config("dns.kubeconfig")
    }
}
