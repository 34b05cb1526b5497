//! A certificate authority: its certificate and key, and the one place where certificates are signed.

use std::path::Path;

use rcgen::{Issuer, KeyPair, PKCS_ECDSA_P256_SHA256, PublicKeyData, SerialNumber};
use time::{Duration, OffsetDateTime};

use crate::certificate::Certificate;
use crate::error::{Error, Result};
use crate::profile::{Profile, Usage};
use crate::store::{PairPaths, Stored};

/// Certificates start this much in the past, so that a peer whose clock is a little behind accepts them.
pub(crate) const CLOCK_SKEW: Duration = Duration::minutes(5);

/// A certificate and its private key, in memory only.
pub struct Identity {
    /// The certificate, PEM.
    pub certificate: Certificate,
    /// The key, PKCS #8 PEM. Secret.
    pub key_pem: String,
}

/// A certificate authority that can sign.
pub struct Authority {
    certificate: Certificate,
    key_pem: String,
    issuer: Issuer<'static, KeyPair>,
}

impl Authority {
    /// Makes a new self-signed authority with its own ECDSA P-256 key.
    pub fn generate(profile: &Profile, days: u16, now: OffsetDateTime) -> Result<Self> {
        let fault = generate_fault(profile);
        let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).map_err(&fault)?;
        let mut params = profile.params().map_err(&fault)?;
        params.serial_number = Some(random_serial()?);
        params.not_before = now - CLOCK_SKEW;
        params.not_after = now + Duration::days(days.into());
        let pem = params.self_signed(&key).map_err(&fault)?.pem();
        Ok(Self {
            certificate: Certificate::parse(Path::new(&profile.common_name), &pem)?,
            key_pem: key.serialize_pem(),
            issuer: Issuer::new(params, key),
        })
    }

    /// Loads an authority from its two files and checks that it is one and still valid.
    pub fn load(paths: &PairPaths, now: OffsetDateTime) -> Result<Self> {
        let Stored { certificate, key } = Stored::load(paths)?;
        if certificate.profile.usage != Usage::Authority {
            return Err(Error::content(
                &paths.cert,
                "is not the certificate of an authority",
            ));
        }
        certificate
            .check_valid_at(now)
            .map_err(|e| Error::content(&paths.cert, e))?;
        let key_pem = key.serialize_pem();
        let issuer = Issuer::from_ca_cert_pem(&certificate.pem, key)
            .map_err(|e| Error::content(&paths.cert, e.to_string()))?;
        Ok(Self {
            certificate,
            key_pem,
            issuer,
        })
    }

    /// The authority's own certificate.
    pub fn certificate(&self) -> &Certificate {
        &self.certificate
    }

    /// The authority as a pair that can be written to disk.
    pub fn identity(&self) -> Identity {
        Identity {
            certificate: self.certificate.clone(),
            key_pem: self.key_pem.clone(),
        }
    }

    /// Issues a certificate for a new ECDSA P-256 key. It ends with the authority at the latest.
    pub fn issue(&self, profile: &Profile, days: u16, now: OffsetDateTime) -> Result<Identity> {
        let key =
            KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).map_err(generate_fault(profile))?;
        Ok(Identity {
            certificate: self.sign(profile, &key, Duration::days(days.into()), now)?,
            key_pem: key.serialize_pem(),
        })
    }

    /// Signs a certificate for a key that exists, with a fresh random serial number.
    pub(crate) fn sign(
        &self,
        profile: &Profile,
        key: &impl PublicKeyData,
        lifetime: Duration,
        now: OffsetDateTime,
    ) -> Result<Certificate> {
        let fault = generate_fault(profile);
        let mut params = profile.params().map_err(&fault)?;
        params.serial_number = Some(random_serial()?);
        params.not_before = now - CLOCK_SKEW;
        params.not_after = (now + lifetime).min(self.certificate.not_after);
        let pem = params.signed_by(key, &self.issuer).map_err(&fault)?.pem();
        Certificate::parse(Path::new(&profile.common_name), &pem)
    }
}

fn generate_fault(profile: &Profile) -> impl Fn(rcgen::Error) -> Error {
    let subject = profile.subject();
    move |source| Error::Generate {
        subject: subject.clone(),
        source,
    }
}

/// 126 random bits: the sign bit stays clear and the next one is set, so that the
/// encoding has a fixed length. The library's default is a hash of the public key, which would
/// repeat when a certificate is renewed with its key.
fn random_serial() -> Result<SerialNumber> {
    let mut octets = [0_u8; 16];
    rustls::crypto::ring::default_provider()
        .secure_random
        .fill(&mut octets)
        .map_err(|_| Error::Random)?;
    octets[0] = (octets[0] & 0x7f) | 0x40;
    Ok(SerialNumber::from_slice(&octets))
}
