//! Fleet certificates as a TLS peer sees them, and what happens to them on disk.

// Helpers of tests panic like the tests themselves.
#![allow(clippy::unwrap_used)]

use std::net::IpAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration as StdDuration;

use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, ServerName, UnixTime};
use sandman_certs::{
    Authority, Certificate, Error, FleetAuthority, IdentityPaths, Member, PairPaths, RenewOptions,
    Role, renew,
};
use tempfile::TempDir;
use time::{Duration, OffsetDateTime};
use webpki::{EndEntityCert, KeyUsage, anchor_from_trusted_cert, ring};

struct Fleet {
    dir: TempDir,
    authority: FleetAuthority,
}

impl Fleet {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let authority = FleetAuthority::create(&dir.path().join("ca"), "dev", 3650).unwrap();
        Self { dir, authority }
    }

    fn issue(&self, member: &Member) -> PathBuf {
        let out = self.dir.path().join(&member.name);
        self.authority.issue(member, 365, &out).unwrap();
        out
    }
}

fn member(role: Role, name: &str) -> Member {
    let ip: IpAddr = "10.9.0.7".parse().unwrap();
    Member {
        role,
        name: name.to_owned(),
        dns: vec![format!("{name}.example.org")],
        ips: vec![ip],
    }
}

fn read(path: &Path) -> Certificate {
    Certificate::parse(path, &std::fs::read_to_string(path).unwrap()).unwrap()
}

/// What rustls does with a peer's certificate.
fn verify(ca: &Path, leaf: &Path, usage: KeyUsage) -> Result<(), webpki::Error> {
    let ca = CertificateDer::from_pem_file(ca).unwrap();
    let leaf = CertificateDer::from_pem_file(leaf).unwrap();
    let anchors = [anchor_from_trusted_cert(&ca).unwrap()];
    let leaf = EndEntityCert::try_from(&leaf)?;
    let now = UnixTime::since_unix_epoch(StdDuration::from_secs(
        OffsetDateTime::now_utc().unix_timestamp().unsigned_abs(),
    ));
    leaf.verify_for_usage(
        &[ring::ECDSA_P256_SHA256],
        &anchors,
        &[],
        now,
        usage,
        None,
        None,
    )
    .map(|_| ())
}

fn mode(path: &Path) -> u32 {
    path.metadata().unwrap().permissions().mode() & 0o777
}

#[test]
fn chains_validate_for_the_role_and_for_no_other() {
    let fleet = Fleet::new();
    let (client, server) = (KeyUsage::client_auth, KeyUsage::server_auth);
    for (role, may_dial, may_answer) in [
        (Role::Vnode, true, false),
        (Role::Host, false, true),
        (Role::Peer, true, true),
    ] {
        let out = fleet.issue(&member(role, &format!("{role}-1")));
        let paths = IdentityPaths::new(&out);
        let check = |usage| verify(&paths.ca, &paths.pair.cert, usage).is_ok();
        assert_eq!(check(client()), may_dial, "{role} as a client");
        assert_eq!(check(server()), may_answer, "{role} as a server");
        let uri = format!("spiffe://sandman.dev/fleet/dev/{role}/{role}-1");
        assert_eq!(read(&paths.pair.cert).profile.uris, [uri]);
    }
}

#[test]
fn names_are_those_asked_for() {
    let fleet = Fleet::new();
    let paths = IdentityPaths::new(&fleet.issue(&member(Role::Host, "host-1")));
    let leaf = CertificateDer::from_pem_file(&paths.pair.cert).unwrap();
    let leaf = EndEntityCert::try_from(&leaf).unwrap();
    for name in ["host-1", "host-1.example.org", "10.9.0.7"] {
        leaf.verify_is_valid_for_subject_name(&ServerName::try_from(name).unwrap())
            .unwrap();
    }
    let other = ServerName::try_from("host-2").unwrap();
    assert!(leaf.verify_is_valid_for_subject_name(&other).is_err());
}

#[test]
fn another_fleet_is_not_trusted() {
    let (ours, theirs) = (Fleet::new(), Fleet::new());
    let leaf = IdentityPaths::new(&theirs.issue(&member(Role::Host, "host-1")));
    let ca = ours.dir.path().join("ca/ca.crt");
    assert!(verify(&ca, &leaf.pair.cert, KeyUsage::server_auth()).is_err());
    let error = renew(
        ours.authority.authority(),
        &leaf.pair.cert,
        RenewOptions {
            force: true,
            ..RenewOptions::default()
        },
        OffsetDateTime::now_utc(),
    );
    assert!(error.unwrap_err().to_string().contains("was not issued by"));
}

#[test]
fn keys_are_for_their_owner_only() {
    let fleet = Fleet::new();
    let paths = IdentityPaths::new(&fleet.issue(&member(Role::Host, "host-1")));
    assert_eq!(mode(&paths.pair.key), 0o600);
    assert_eq!(mode(&fleet.dir.path().join("ca/ca.key")), 0o600);
}

#[test]
fn nothing_is_overwritten() {
    let fleet = Fleet::new();
    let ca_dir = fleet.dir.path().join("ca");
    let again = FleetAuthority::create(&ca_dir, "dev", 10);
    assert!(matches!(again, Err(Error::Exists { path }) if path == ca_dir.join("ca.crt")));

    for taken in ["tls.crt", "tls.key", "ca.crt"] {
        let out = fleet.dir.path().join(taken.replace('.', "-"));
        std::fs::create_dir(&out).unwrap();
        std::fs::write(out.join(taken), "mine").unwrap();
        let error = fleet
            .authority
            .issue(&member(Role::Host, "host-1"), 10, &out)
            .unwrap_err();
        assert!(
            matches!(&error, Error::Exists { path } if *path == out.join(taken)),
            "{error}"
        );
        assert_eq!(std::fs::read_to_string(out.join(taken)).unwrap(), "mine");
        assert_eq!(
            out.read_dir().unwrap().count(),
            1,
            "something was left beside {taken}"
        );
    }
}

#[test]
fn bad_members_are_refused_with_the_field() {
    let fleet = Fleet::new();
    type Change = fn(&mut Member);
    let cases: [(&str, Change); 3] = [
        ("--name", |m| m.name = "a/b".to_owned()),
        ("--dns", |m| m.dns = vec!["*.example.org".to_owned()]),
        ("--ip", |m| m.ips.clear()),
    ];
    for (field, break_it) in cases {
        let mut member = member(Role::Host, "host-1");
        break_it(&mut member);
        let error = fleet
            .authority
            .issue(&member, 10, &fleet.dir.path().join("x"))
            .unwrap_err();
        assert!(error.to_string().starts_with(field), "{error}");
    }
}

#[test]
fn an_authority_belongs_to_one_fleet() {
    let fleet = Fleet::new();
    let dir = fleet.dir.path().join("ca");
    assert_eq!(
        FleetAuthority::load_or_create(&dir, "dev", 10)
            .unwrap()
            .fleet(),
        "dev"
    );
    let error = FleetAuthority::load_or_create(&dir, "other", 10)
        .err()
        .unwrap();
    assert!(
        error.to_string().contains("belongs to the fleet \"dev\""),
        "{error}"
    );
}

#[test]
fn ensure_keeps_what_fits_and_refuses_what_does_not() {
    let fleet = Fleet::new();
    let host = member(Role::Host, "host-1");
    let out = fleet.issue(&host);
    let before = read(&out.join("tls.crt")).serial;
    fleet.authority.ensure(&host, 365, &out).unwrap();
    assert_eq!(read(&out.join("tls.crt")).serial, before);

    let error = fleet
        .authority
        .ensure(&member(Role::Vnode, "host-1"), 365, &out)
        .unwrap_err();
    assert!(error.to_string().contains("/host/host-1"), "{error}");
}

#[test]
fn ensure_completes_what_a_killed_run_began() {
    let fleet = Fleet::new();
    let host = member(Role::Host, "host-1");
    let out = fleet.issue(&host);
    std::fs::remove_file(out.join("tls.crt")).unwrap();
    fleet.authority.ensure(&host, 365, &out).unwrap();
    verify(
        &out.join("ca.crt"),
        &out.join("tls.crt"),
        KeyUsage::server_auth(),
    )
    .unwrap();
}

#[test]
fn renewing_keeps_the_names_and_changes_the_serial() {
    let fleet = Fleet::new();
    let out = fleet.issue(&member(Role::Host, "host-1"));
    let paths = IdentityPaths::new(&out);
    let key = std::fs::read(&paths.pair.key).unwrap();
    let before = read(&paths.pair.cert);
    let authority = fleet.authority.authority();

    let early = OffsetDateTime::now_utc() + Duration::days(250);
    renew(authority, &out, RenewOptions::default(), early).unwrap();
    assert_eq!(
        read(&paths.pair.cert).serial,
        before.serial,
        "renewed before 70 % of its life"
    );

    let late = OffsetDateTime::now_utc() + Duration::days(260);
    renew(authority, &out, RenewOptions::default(), late).unwrap();
    let after = read(&paths.pair.cert);
    assert_ne!(after.serial, before.serial);
    assert_eq!(after.profile, before.profile);
    assert_eq!(
        (after.not_after - after.not_before).whole_days(),
        (before.not_after - before.not_before).whole_days()
    );
    assert_eq!(std::fs::read(&paths.pair.key).unwrap(), key);
}

#[test]
fn a_new_key_comes_with_its_certificate() {
    let fleet = Fleet::new();
    let out = fleet.issue(&member(Role::Host, "host-1"));
    let paths = IdentityPaths::new(&out);
    let key = std::fs::read(&paths.pair.key).unwrap();
    let options = RenewOptions {
        force: true,
        new_key: true,
    };
    renew(
        fleet.authority.authority(),
        &out,
        options,
        OffsetDateTime::now_utc(),
    )
    .unwrap();
    assert_ne!(std::fs::read(&paths.pair.key).unwrap(), key);
    assert_eq!(mode(&paths.pair.key), 0o600);
    verify(&paths.ca, &paths.pair.cert, KeyUsage::server_auth()).unwrap();
    assert_eq!(
        out.read_dir().unwrap().count(),
        3,
        "a staged file was left behind"
    );
}

#[test]
fn a_swap_cut_between_its_renames_is_completed() {
    let fleet = Fleet::new();
    let out = fleet.issue(&member(Role::Host, "host-1"));
    let other = fleet.issue(&member(Role::Host, "host-2"));
    // As a crash leaves it: the next key is in place, its certificate still staged.
    std::fs::copy(other.join("tls.key"), out.join("tls.key")).unwrap();
    std::fs::copy(other.join("tls.crt"), out.join(".tls.crt.next")).unwrap();
    let now = OffsetDateTime::now_utc();
    renew(
        fleet.authority.authority(),
        &out,
        RenewOptions::default(),
        now,
    )
    .unwrap();
    assert_eq!(
        read(&out.join("tls.crt")).serial,
        read(&other.join("tls.crt")).serial
    );
    assert!(!out.join(".tls.crt.next").exists());
}

#[test]
fn a_swap_that_never_began_is_forgotten() {
    let fleet = Fleet::new();
    let out = fleet.issue(&member(Role::Host, "host-1"));
    let other = fleet.issue(&member(Role::Host, "host-2"));
    let before = read(&out.join("tls.crt")).serial;
    std::fs::copy(other.join("tls.key"), out.join(".tls.key.next")).unwrap();
    std::fs::copy(other.join("tls.crt"), out.join(".tls.crt.next")).unwrap();
    let now = OffsetDateTime::now_utc();
    renew(
        fleet.authority.authority(),
        &out,
        RenewOptions::default(),
        now,
    )
    .unwrap();
    assert_eq!(read(&out.join("tls.crt")).serial, before);
    assert_eq!(out.read_dir().unwrap().count(), 3);
}

#[test]
fn a_certificate_ends_with_its_authority() {
    let dir = tempfile::tempdir().unwrap();
    let fleet = FleetAuthority::create(&dir.path().join("ca"), "dev", 100).unwrap();
    let out = dir.path().join("host-1");
    fleet
        .issue(&member(Role::Host, "host-1"), 365, &out)
        .unwrap();
    let (leaf, ca) = (
        read(&out.join("tls.crt")),
        read(&dir.path().join("ca/ca.crt")),
    );
    assert_eq!(leaf.not_after, ca.not_after);

    let late = OffsetDateTime::now_utc() + Duration::days(90);
    let error = renew(fleet.authority(), &out, RenewOptions::default(), late).unwrap_err();
    assert!(
        error.to_string().contains("cannot outlive its CA"),
        "{error}"
    );
}

#[test]
fn an_expired_or_foreign_authority_does_not_sign() {
    let fleet = Fleet::new();
    let paths = PairPaths::new(&fleet.dir.path().join("ca"), "ca");
    let late = OffsetDateTime::now_utc() + Duration::days(4000);
    assert!(
        Authority::load(&paths, late)
            .err()
            .unwrap()
            .to_string()
            .contains("expired")
    );

    let leaf = IdentityPaths::new(&fleet.issue(&member(Role::Host, "host-1"))).pair;
    let error = Authority::load(&leaf, OffsetDateTime::now_utc())
        .err()
        .unwrap();
    assert!(
        error
            .to_string()
            .contains("not the certificate of an authority"),
        "{error}"
    );
}
