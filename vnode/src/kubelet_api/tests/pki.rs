//! Certificates for one test.

use std::sync::Arc;

use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa,
    Issuer, KeyPair,
};
use rustls::crypto::ring::sign::any_supported_type;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;

/// An authority and its certificate.
pub(super) struct Authority {
    issuer: Issuer<'static, KeyPair>,
    der: CertificateDer<'static>,
    pub(super) pem: String,
}

/// A certificate with its key.
pub(super) struct Identity {
    pub(super) chain: Vec<CertificateDer<'static>>,
    key: PrivatePkcs8KeyDer<'static>,
}

impl Authority {
    pub(super) fn new(name: &str) -> Self {
        let mut params = CertificateParams::default();
        params.distinguished_name = named(name, &[]);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().expect("a key");
        let certificate = params.self_signed(&key).expect("a certificate");
        Self {
            der: certificate.der().clone(),
            pem: certificate.pem(),
            issuer: Issuer::new(params, key),
        }
    }

    pub(super) fn client(&self, name: &str, groups: &[&str]) -> Identity {
        self.issue(name, groups, ExtendedKeyUsagePurpose::ClientAuth)
    }

    pub(super) fn issue(
        &self,
        name: &str,
        groups: &[&str],
        usage: ExtendedKeyUsagePurpose,
    ) -> Identity {
        let mut params = CertificateParams::new(["localhost".to_owned()]).expect("a name");
        params.distinguished_name = named(name, groups);
        params.extended_key_usages = vec![usage];
        let key = KeyPair::generate().expect("a key");
        let certificate = params.signed_by(&key, &self.issuer).expect("a certificate");
        Identity {
            chain: vec![certificate.der().clone()],
            key: PrivatePkcs8KeyDer::from(key.serialize_der()),
        }
    }

    pub(super) fn roots(&self) -> rustls::RootCertStore {
        let mut roots = rustls::RootCertStore::empty();
        roots.add(self.der.clone()).expect("a root");
        roots
    }
}

impl Identity {
    pub(super) fn key(&self) -> PrivateKeyDer<'static> {
        PrivateKeyDer::Pkcs8(self.key.clone_key())
    }

    /// As the serving certificate of the server under test.
    pub(super) fn resolver(&self) -> Arc<dyn ResolvesServerCert> {
        let key = any_supported_type(&self.key()).expect("a signing key");
        Arc::new(Fixed(Arc::new(CertifiedKey::new(self.chain.clone(), key))))
    }
}

#[derive(Debug)]
struct Fixed(Arc<CertifiedKey>);

impl ResolvesServerCert for Fixed {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(Arc::clone(&self.0))
    }
}

fn named(name: &str, groups: &[&str]) -> DistinguishedName {
    let mut subject = DistinguishedName::new();
    subject.push(DnType::CommonName, name);
    // rcgen keeps one attribute a type; a second group needs another spelling of it.
    let types = [
        DnType::OrganizationName,
        DnType::CustomDnType(vec![2, 5, 4, 10]),
    ];
    assert!(groups.len() <= types.len());
    for (kind, group) in types.into_iter().zip(groups) {
        subject.push(kind, *group);
    }
    subject
}
