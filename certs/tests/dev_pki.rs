//! The dev cluster's PKI: complete, verified when found, and refused when it is not the one asked for.

// Helpers of tests panic like the tests themselves.
#![allow(clippy::unwrap_used)]

use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use sandman_certs::{Certificate, DevPki, DevPkiSpec, Error, User};

fn spec() -> DevPkiSpec {
    let mut spec = DevPkiSpec::new("https://10.1.0.1:6443", "10.1.0.1".parse().unwrap());
    spec.nodes = vec!["sandman".to_owned(), "kubelet".to_owned()];
    spec
}

fn mismatch(dir: &Path, spec: &DevPkiSpec) -> String {
    let error = DevPki::create(dir, spec).unwrap_err();
    assert!(matches!(error, Error::Mismatch { .. }), "{error}");
    error.to_string()
}

#[test]
fn is_complete_and_found_again() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("pki");
    let pki = DevPki::create(&dir, &spec()).unwrap();
    assert_eq!(
        root.path().read_dir().unwrap().count(),
        1,
        "a staging directory was left behind"
    );

    let apiserver = std::fs::read_to_string(pki.apiserver().cert).unwrap();
    let apiserver = Certificate::parse(&dir, &apiserver).unwrap();
    for name in ["IP:10.1.0.1", "IP:10.96.0.1", "DNS:kubernetes.default.svc"] {
        assert!(
            apiserver.profile.names().contains(&name.to_owned()),
            "{name} is missing"
        );
    }
    for secret in [
        pki.ca().key,
        pki.client(&User::Admin).key,
        pki.service_account_key(),
        pki.kubeconfig(&User::Node("kubelet".to_owned())),
    ] {
        let mode = secret.metadata().unwrap().permissions().mode() & 0o777;
        assert_eq!(mode, 0o600, "{}", secret.display());
    }

    let again = DevPki::create(&dir, &spec()).unwrap();
    let serials = |pki: &DevPki| -> Vec<_> {
        pki.reports()
            .iter()
            .filter_map(|report| report.serial.clone())
            .collect()
    };
    assert_eq!(serials(&pki), serials(&again));
}

#[test]
fn authorities_are_apart() {
    let root = tempfile::tempdir().unwrap();
    let pki = DevPki::create(&root.path().join("pki"), &spec()).unwrap();
    let read = |path: std::path::PathBuf| {
        Certificate::parse(&path, &std::fs::read_to_string(&path).unwrap()).unwrap()
    };
    let (cluster, etcd) = (read(pki.ca().cert), read(pki.etcd_ca().cert));
    let front_proxy = read(pki.front_proxy_ca().cert);
    let admin = read(pki.client(&User::Admin).cert);
    admin.check_issued_by(&cluster).unwrap();
    admin.check_issued_by(&etcd).unwrap_err();
    admin.check_issued_by(&front_proxy).unwrap_err();
    read(pki.etcd_server().cert).check_issued_by(&etcd).unwrap();
    read(pki.front_proxy_client().cert)
        .check_issued_by(&front_proxy)
        .unwrap();
}

#[test]
fn kubeconfigs_carry_the_users_identity() {
    let root = tempfile::tempdir().unwrap();
    let pki = DevPki::create(&root.path().join("pki"), &spec()).unwrap();
    for user in [
        User::Admin,
        User::ControllerManager,
        User::Scheduler,
        User::Node("sandman".to_owned()),
    ] {
        let config = kube::config::Kubeconfig::read_from(pki.kubeconfig(&user)).unwrap();
        let cluster = config.clusters[0].cluster.as_ref().unwrap();
        assert_eq!(cluster.server.as_deref(), Some("https://10.1.0.1:6443"));
        let embedded = config.auth_infos[0].auth_info.as_ref().unwrap();
        let embedded = STANDARD
            .decode(embedded.client_certificate_data.as_ref().unwrap())
            .unwrap();
        assert_eq!(embedded, std::fs::read(pki.client(&user).cert).unwrap());
    }
}

#[test]
fn a_missing_file_is_named() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("pki");
    let pki = DevPki::create(&dir, &spec()).unwrap();
    std::fs::remove_file(pki.etcd_server().key).unwrap();
    let text = mismatch(&dir, &spec());
    assert!(text.contains("etcd/server.key"), "{text}");
    assert!(text.contains("remove the directory"), "{text}");
}

#[test]
fn another_spec_does_not_fit() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("pki");
    DevPki::create(&dir, &spec()).unwrap();

    let mut moved = spec();
    moved.server = "https://10.1.0.2:6443".to_owned();
    assert!(mismatch(&dir, &moved).contains("admin.conf"));
    let mut more_nodes = spec();
    more_nodes.nodes.push("third".to_owned());
    assert!(mismatch(&dir, &more_nodes).contains("nodes/third"));
    let mut other_address = spec();
    other_address.apiserver_ips = vec!["10.1.0.9".parse().unwrap()];
    assert!(mismatch(&dir, &other_address).contains("apiserver.crt"));
}

#[test]
fn a_readable_key_or_a_foreign_certificate_is_refused() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("pki");
    let pki = DevPki::create(&dir, &spec()).unwrap();
    let other = DevPki::create(&root.path().join("other"), &spec()).unwrap();

    let (ours, theirs) = (pki.apiserver(), other.apiserver());
    std::fs::copy(&theirs.cert, &ours.cert).unwrap();
    assert!(mismatch(&dir, &spec()).contains("is not the key of"));
    std::fs::copy(&theirs.key, &ours.key).unwrap();
    assert!(mismatch(&dir, &spec()).contains("was not issued by"));

    let open = std::fs::Permissions::from_mode(0o644);
    std::fs::set_permissions(pki.ca().key, open).unwrap();
    assert!(mismatch(&dir, &spec()).contains("chmod 0600"));
}

#[test]
fn what_a_killed_run_left_is_built_anew() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("pki");
    let staged = root.path().join(".pki.next");
    std::fs::create_dir(&staged).unwrap();
    std::fs::write(staged.join("ca.crt"), "half").unwrap();
    DevPki::create(&dir, &spec()).unwrap();
    assert!(!staged.exists());
}
