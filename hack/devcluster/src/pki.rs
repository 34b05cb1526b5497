//! Certificates of the dev cluster: those of the control plane, the fleet's, and the kubeconfig of
//! the person at the keyboard. Kept from one `up` to the next.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Context;
use sandman_certs::{DevPki, DevPkiSpec, FleetAuthority, Member as FleetMember, Role, User};

use crate::components::{APISERVER_PORT, FLEET, NODES};
use crate::layout::Layout;
use crate::net::{Member, endpoint};
use crate::settings::Settings;

/// A dev cluster is made anew more often than this.
const DAYS: u16 = 365;

/// Creates or verifies the control plane's certificates.
pub(crate) fn control_plane(layout: &Layout) -> anyhow::Result<DevPki> {
    let server = endpoint(Member::Control, APISERVER_PORT);
    let mut spec = DevPkiSpec::new(format!("https://{server}"), (*server.ip()).into());
    spec.nodes = NODES.map(str::to_owned).to_vec();
    spec.days = DAYS;
    DevPki::create(&layout.pki_dir(), &spec)
        .context("the certificates do not fit; `hack/dev down` clears them")
}

/// Creates or verifies the identities of the virtual node and the hosts.
pub(crate) fn fleet(layout: &Layout, hosts: u8) -> anyhow::Result<()> {
    let dir = layout.fleet_dir();
    let authority = FleetAuthority::load_or_create(&dir.join("ca"), FLEET, DAYS)?;
    let ensure = |role, member: Member| -> anyhow::Result<()> {
        let ips = match role {
            // Dials only.
            Role::Vnode => Vec::new(),
            _ => member.address().map(Into::into).into_iter().collect(),
        };
        let name = member.to_string();
        let identity = FleetMember {
            role,
            name: name.clone(),
            dns: Vec::new(),
            ips,
        };
        authority.ensure(&identity, DAYS, &dir.join(name))?;
        Ok(())
    };
    ensure(Role::Vnode, Member::Vnode)?;
    Member::hosts(hosts).try_for_each(|host| ensure(Role::Host, host))
}

/// Path of the administrator's kubeconfig.
pub(crate) fn admin_kubeconfig_path(layout: &Layout) -> PathBuf {
    layout.pki_dir().join("kubeconfig")
}

/// Writes the administrator's kubeconfig, which goes through the loopback port.
pub(crate) fn write_admin_kubeconfig(
    layout: &Layout,
    pki: &DevPki,
    settings: &Settings,
) -> anyhow::Result<PathBuf> {
    let path = admin_kubeconfig_path(layout);
    forwarded_copy(&pki.kubeconfig(&User::Admin), settings, &path)?;
    Ok(path)
}

/// Writes the virtual node's own kubeconfig as reached from outside, for tests of what that
/// identity may not do.
pub(crate) fn write_node_kubeconfig(
    layout: &Layout,
    pki: &DevPki,
    settings: &Settings,
    node: &str,
) -> anyhow::Result<PathBuf> {
    let path = layout.pki_dir().join(format!("kubeconfig-node-{node}"));
    forwarded_copy(
        &pki.kubeconfig(&User::Node(node.to_owned())),
        settings,
        &path,
    )?;
    Ok(path)
}

fn forwarded_copy(from: &Path, settings: &Settings, to: &Path) -> anyhow::Result<()> {
    let inside = format!("https://{}", endpoint(Member::Control, APISERVER_PORT));
    let outside = format!("https://127.0.0.1:{}", settings.ports.apiserver);
    let text = fs::read_to_string(from)
        .with_context(|| format!("cannot read {}", from.display()))?
        .replace(&inside, &outside);
    crate::supervise::write_private(to, &text)
}
