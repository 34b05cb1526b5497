//! The decision, case by case: one good request, and what each single change to it makes of it.

use k8s_openapi::ByteString;
use k8s_openapi::api::certificates::v1::{
    CertificateSigningRequestCondition, CertificateSigningRequestSpec,
    CertificateSigningRequestStatus,
};
use rcgen::{CertificateParams, DistinguishedName, DnType, KeyPair, SanType};

use super::*;

/// What a test may change about a request.
struct Case {
    params: CertificateParams,
    csr: CertificateSigningRequest,
}

fn subject(pairs: &[(DnType, &str)]) -> DistinguishedName {
    let mut name = DistinguishedName::new();
    for (kind, value) in pairs {
        name.push(kind.clone(), *value);
    }
    name
}

fn node_subject(common_name: &str) -> DistinguishedName {
    subject(&[
        (DnType::OrganizationName, "system:nodes"),
        (DnType::CommonName, common_name),
    ])
}

fn good() -> Case {
    let mut params = CertificateParams::new(["sandman".to_owned(), "10.1.0.5".to_owned()]).unwrap();
    params.distinguished_name = node_subject("system:node:sandman");
    let strings = |items: &[&str]| Some(items.iter().map(|&item| item.to_owned()).collect());
    Case {
        params,
        csr: CertificateSigningRequest {
            spec: CertificateSigningRequestSpec {
                signer_name: SIGNER.to_owned(),
                username: Some("system:node:sandman".to_owned()),
                groups: strings(&["system:nodes", "system:authenticated"]),
                usages: strings(&["digital signature", "server auth"]),
                ..Default::default()
            },
            ..Default::default()
        },
    }
}

fn nodes() -> ExpectedNodes {
    ["sandman=10.1.0.5,vnode.example.org", "other=10.1.0.6"]
        .map(|text| text.parse().unwrap())
        .into_iter()
        .collect()
}

fn pem(params: &CertificateParams) -> String {
    let key = KeyPair::generate().unwrap();
    params.serialize_request(&key).unwrap().pem().unwrap()
}

fn decision(change: impl FnOnce(&mut Case)) -> Decision {
    let mut case = good();
    change(&mut case);
    if case.csr.spec.request.0.is_empty() {
        case.csr.spec.request = ByteString(pem(&case.params).into_bytes());
    }
    decide(&case.csr, &nodes())
}

fn condition(case: &mut Case, kind: &str) {
    case.csr.status = Some(CertificateSigningRequestStatus {
        conditions: Some(vec![CertificateSigningRequestCondition {
            type_: kind.to_owned(),
            status: "True".to_owned(),
            ..Default::default()
        }]),
        ..Default::default()
    });
}

#[track_caller]
fn denied(part: &str, change: impl FnOnce(&mut Case)) {
    match decision(change) {
        Decision::Deny(reason) => assert!(reason.contains(part), "{reason}"),
        other => panic!("{other:?}, not denied for {part:?}"),
    }
}

#[track_caller]
fn ignored(change: impl FnOnce(&mut Case)) {
    assert_eq!(decision(change), Decision::Ignore);
}

#[track_caller]
fn approved(change: impl FnOnce(&mut Case)) {
    assert_eq!(decision(change), Decision::Approve);
}

#[test]
fn a_node_gets_its_own_names() {
    approved(|_| ());
    approved(|c| c.params.subject_alt_names.truncate(1));
    approved(|c| {
        c.params.subject_alt_names = vec![SanType::IpAddress("::ffff:10.1.0.5".parse().unwrap())];
    });
    approved(|c| {
        c.csr
            .spec
            .usages
            .as_mut()
            .unwrap()
            .push("key encipherment".to_owned())
    });
}

#[test]
fn others_requests_are_left_alone() {
    ignored(|c| c.csr.spec.signer_name = "kubernetes.io/kube-apiserver-client-kubelet".to_owned());
    ignored(|c| {
        c.csr.spec.username = Some("system:node:stranger".to_owned());
        c.params.distinguished_name = node_subject("system:node:stranger");
    });
    ignored(|c| {
        c.csr.spec.username = Some("stranger".to_owned());
        c.csr.spec.request = ByteString(b"garbage".to_vec());
    });
}

#[test]
fn what_is_decided_stays_so() {
    for kind in ["Approved", "Denied", "Failed"] {
        ignored(|c| condition(c, kind));
    }
    ignored(|c| {
        c.csr.status = Some(CertificateSigningRequestStatus {
            certificate: Some(ByteString(b"issued".to_vec())),
            ..Default::default()
        });
    });
}

#[test]
fn nobody_gets_another_ones_certificate() {
    denied("asks for a certificate of", |c| {
        c.csr.spec.username = Some("system:node:other".to_owned());
    });
    denied("asks for a certificate of", |c| {
        c.csr.spec.username = Some("mallory".to_owned())
    });
    denied("asks for a certificate of", |c| c.csr.spec.username = None);
    denied("asks for a certificate of", |c| {
        c.params.distinguished_name = node_subject("system:node:stranger");
    });
    denied("not in the group", |c| c.csr.spec.groups = None);
}

#[test]
fn the_subject_is_exactly_a_nodes() {
    denied("organization is \"system:masters\"", |c| {
        c.params.distinguished_name = subject(&[
            (DnType::OrganizationName, "system:masters"),
            (DnType::CommonName, "system:node:sandman"),
        ]);
    });
    denied("exactly one O and one CN", |c| {
        c.params.distinguished_name = subject(&[(DnType::CommonName, "system:node:sandman")]);
    });
    denied("besides O and CN", |c| {
        c.params
            .distinguished_name
            .push(DnType::OrganizationalUnitName, "x");
    });
}

#[test]
fn only_the_nodes_addresses_are_certified() {
    denied("is required", |c| c.params.subject_alt_names.clear());
    denied("address 10.1.0.6 is not of the node sandman", |c| {
        c.params
            .subject_alt_names
            .push(SanType::IpAddress("10.1.0.6".parse().unwrap()));
    });
    denied("DNS name \"kubernetes\"", |c| {
        c.params
            .subject_alt_names
            .push(SanType::DnsName("kubernetes".try_into().unwrap()));
    });
    denied("only DNS and IP", |c| {
        c.params
            .subject_alt_names
            .push(SanType::URI("spiffe://x/y".try_into().unwrap()));
    });
    denied("only DNS and IP", |c| {
        c.params
            .subject_alt_names
            .push(SanType::Rfc822Name("a@b.c".try_into().unwrap()));
    });
}

#[test]
fn only_for_serving() {
    for usages in [
        vec!["digital signature", "client auth"],
        vec!["digital signature", "server auth", "client auth"],
        vec!["server auth"],
        vec![],
    ] {
        denied("usages must be", |c| {
            c.csr.spec.usages = Some(usages.iter().map(|&usage| usage.to_owned()).collect());
        });
    }
}

#[test]
fn requests_that_two_readers_could_take_differently_are_denied() {
    denied("does not begin with", |c| {
        c.csr.spec.request = ByteString(format!("x\n{}", pem(&c.params)).into_bytes());
    });
    denied("data after its end", |c| {
        let twice = pem(&c.params) + &pem(&c.params);
        c.csr.spec.request = ByteString(twice.into_bytes());
    });
    denied("larger than", |c| {
        let padded = pem(&c.params) + &"\n".repeat(40_000);
        c.csr.spec.request = ByteString(padded.into_bytes());
    });
    denied("not valid", |c| {
        let cut: String = pem(&c.params)
            .lines()
            .filter(|line| line.len() != 64)
            .collect();
        c.csr.spec.request = ByteString(cut.replace("-----M", "-----\nM").into_bytes());
    });
}

#[test]
fn a_request_for_somebody_elses_key_is_denied() {
    denied("not signed with the key", |c| {
        let mut der = {
            let key = KeyPair::generate().unwrap();
            c.params.serialize_request(&key).unwrap().der().to_vec()
        };
        // The last octet belongs to the signature.
        *der.last_mut().unwrap() ^= 1;
        use base64::Engine;
        let text = base64::engine::general_purpose::STANDARD.encode(der);
        let lines: Vec<&str> = text
            .as_bytes()
            .chunks(64)
            .map(|line| std::str::from_utf8(line).unwrap())
            .collect();
        let body = lines.join("\n");
        let pem = format!(
            "-----BEGIN CERTIFICATE REQUEST-----\n{body}\n-----END CERTIFICATE REQUEST-----\n"
        );
        c.csr.spec.request = ByteString(pem.into_bytes());
    });
}
