//! What tests and scripts need to know of a running cluster, as shell assignments or JSON.

use std::collections::BTreeMap;

use sandman_certs::User;

use crate::components::{
    FLEET, HOST_API_PORT, KUBELET_API_PORT, NODE, PASSWORD, PRIVATE_PORT, REGISTRY_PORT, USER,
};
use crate::layout::Layout;
use crate::net::{Member, NetNs, endpoint};
use crate::pki;
use crate::settings::Settings;

/// Names and values.
pub(crate) fn variables(layout: &Layout) -> anyhow::Result<BTreeMap<&'static str, String>> {
    let settings = Settings::require(layout)?;
    let pki = pki::control_plane(layout)?;
    let node = pki::write_node_kubeconfig(layout, &pki, &settings, NODE)?;
    let loopback = |port: u16| format!("127.0.0.1:{port}");
    let admin = pki.client(&User::Admin);
    let mut variables = BTreeMap::from([
        (
            "KUBECONFIG",
            pki::admin_kubeconfig_path(layout).display().to_string(),
        ),
        (
            "SANDMAN_DEV",
            std::env::current_exe()?.display().to_string(),
        ),
        (
            "SANDMAN_STATE_DIR",
            layout.state_dir().display().to_string(),
        ),
        ("SANDMAN_LOG_DIR", layout.log_dir().display().to_string()),
        (
            "SANDMAN_AUDIT_LOG",
            layout.audit_log().display().to_string(),
        ),
        ("SANDMAN_INSTANCE", layout.id().to_owned()),
        ("SANDMAN_CGROUP_PARENT", layout.cgroup_parent()),
        ("SANDMAN_NODE", NODE.to_owned()),
        ("SANDMAN_HOSTS", settings.hosts.to_string()),
        (
            "SANDMAN_CTR",
            settings
                .artifacts
                .containerd_dir()
                .join("ctr")
                .display()
                .to_string(),
        ),
        // Sockets of the hosts' containerd, in the hosts' order.
        (
            "SANDMAN_CONTAINERD",
            Member::hosts(settings.hosts)
                .map(|host| layout.containerd_socket(host).display().to_string())
                .collect::<Vec<_>>()
                .join(":"),
        ),
        // Their APIs, which only their own namespaces reach; and who may use them.
        (
            "SANDMAN_HOST_API",
            Member::hosts(settings.hosts)
                .map(|host| format!("{host}={}", endpoint(host, HOST_API_PORT)))
                .collect::<Vec<_>>()
                .join(","),
        ),
        (
            "SANDMAN_HOST_NETNS",
            Member::hosts(settings.hosts)
                .map(|host| NetNs::named(&layout.netns_name(host)))
                .map(|namespace| namespace.path().display().to_string())
                .collect::<Vec<_>>()
                .join(":"),
        ),
        ("SANDMAN_FLEET", FLEET.to_owned()),
        (
            "SANDMAN_FLEET_TLS",
            layout.fleet_dir().join("vnode").display().to_string(),
        ),
        (
            "SANDMAN_KUBE_DEV",
            settings.artifacts.kube_dev.display().to_string(),
        ),
        // Names of images, as the hosts reach them; and the same registries from here.
        (
            "SANDMAN_REGISTRY",
            endpoint(Member::Registry, REGISTRY_PORT).to_string(),
        ),
        ("SANDMAN_REGISTRY_LOCAL", loopback(settings.ports.registry)),
        (
            "SANDMAN_PRIVATE_REGISTRY",
            endpoint(Member::Registry, PRIVATE_PORT).to_string(),
        ),
        (
            "SANDMAN_PRIVATE_REGISTRY_LOCAL",
            loopback(settings.ports.private_registry),
        ),
        ("SANDMAN_PRIVATE_REGISTRY_USER", USER.to_owned()),
        ("SANDMAN_PRIVATE_REGISTRY_PASSWORD", PASSWORD.to_owned()),
        // The node's own API: from here, and as the API server dials it.
        (
            "SANDMAN_KUBELET_LOCAL",
            loopback(settings.ports.kubelet_api),
        ),
        (
            "SANDMAN_KUBELET",
            endpoint(Member::Vnode, KUBELET_API_PORT).to_string(),
        ),
        ("SANDMAN_CLUSTER_CA", pki.ca().cert.display().to_string()),
        ("SANDMAN_ADMIN_CERT", admin.cert.display().to_string()),
        ("SANDMAN_ADMIN_KEY", admin.key.display().to_string()),
        ("SANDMAN_NODE_KUBECONFIG", node.display().to_string()),
    ]);
    // A cluster without hosts has no use for images.
    if let Ok(program) = settings.artifacts.binary("sandman-images") {
        variables.insert("SANDMAN_IMAGES", program.display().to_string());
    }
    Ok(variables)
}

/// Prints the variables.
pub(crate) fn print(layout: &Layout, json: bool) -> anyhow::Result<()> {
    let variables = variables(layout)?;
    if json {
        println!("{:#}", serde_json::to_value(variables)?);
        return Ok(());
    }
    for (name, value) in variables {
        println!("export {name}='{}'", value.replace('\'', r"'\''"));
    }
    Ok(())
}
