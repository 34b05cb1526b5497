//! Reading certificates back. Everything that is verified, listed or renewed goes through [`Certificate`].

use std::path::Path;

use time::OffsetDateTime;
use x509_parser::certificate::X509Certificate;
use x509_parser::prelude::FromDer;

use crate::error::{Error, Result};
use crate::profile::Profile;

/// A parsed certificate.
#[derive(Clone, Debug)]
pub struct Certificate {
    /// Subject, names and usage.
    pub profile: Profile,
    /// Serial number, lower-case hexadecimal octets joined by colons.
    pub serial: String,
    /// First instant of validity.
    pub not_before: OffsetDateTime,
    /// Last instant of validity.
    pub not_after: OffsetDateTime,
    /// Subject public key info in DER; equal for a certificate and its key.
    pub(crate) public_key: Vec<u8>,
    pub(crate) der: Vec<u8>,
    pub(crate) pem: String,
}

impl Certificate {
    /// Parses the one certificate of a PEM text; `path` is for error texts.
    pub fn parse(path: &Path, pem: &str) -> Result<Self> {
        let fault = |reason: String| Error::content(path, reason);
        let (rest, block) = x509_parser::pem::parse_x509_pem(pem.as_bytes())
            .map_err(|e| fault(format!("is not PEM: {e}")))?;
        if block.label != "CERTIFICATE" {
            return Err(fault(format!(
                "holds a {:?}, not a CERTIFICATE",
                block.label
            )));
        }
        if !rest.trim_ascii().is_empty() {
            return Err(fault("holds more than one certificate".to_owned()));
        }
        let x509 = parse_der(&block.contents).map_err(fault)?;
        Ok(Self {
            profile: Profile::from_x509(&x509).map_err(fault)?,
            serial: x509.raw_serial_as_string(),
            not_before: x509.validity().not_before.to_datetime(),
            not_after: x509.validity().not_after.to_datetime(),
            public_key: x509.public_key().raw.to_vec(),
            der: block.contents.clone(),
            pem: pem.to_owned(),
        })
    }

    /// Checks name and signature: that `authority` issued this certificate.
    /// Dates are not looked at, since expired certificates may be renewed.
    pub fn check_issued_by(&self, authority: &Self) -> std::result::Result<(), String> {
        let (own, issuer) = (parse_der(&self.der)?, parse_der(&authority.der)?);
        if own.issuer().as_raw() != issuer.subject().as_raw()
            || own.verify_signature(Some(issuer.public_key())).is_err()
        {
            return Err(format!(
                "was not issued by {:?}",
                authority.profile.subject()
            ));
        }
        Ok(())
    }

    /// Checks that `now` lies within the validity.
    pub fn check_valid_at(&self, now: OffsetDateTime) -> std::result::Result<(), String> {
        if now > self.not_after {
            Err(format!("expired at {}", self.not_after))
        } else if now < self.not_before {
            Err(format!(
                "is not valid before {}; is the clock right?",
                self.not_before
            ))
        } else {
            Ok(())
        }
    }

    /// Checks that subject, names and usage are the expected ones.
    pub(crate) fn check_profile(&self, expected: &Profile) -> std::result::Result<(), String> {
        let found = &self.profile;
        if found == expected {
            return Ok(());
        }
        Err(format!(
            "is for {} [{}] ({:?}), not for {} [{}] ({:?})",
            found.subject(),
            found.names().join(" "),
            found.usage,
            expected.subject(),
            expected.names().join(" "),
            expected.usage,
        ))
    }

    /// Whether 70 % of the life is over, when Kubernetes components renew theirs too.
    pub fn is_due(&self, now: OffsetDateTime) -> bool {
        now >= self.not_before + (self.not_after - self.not_before) * 7 / 10
    }
}

fn parse_der(der: &[u8]) -> std::result::Result<X509Certificate<'_>, String> {
    let (rest, certificate) =
        X509Certificate::from_der(der).map_err(|e| format!("is not an X.509 certificate: {e}"))?;
    if rest.is_empty() {
        Ok(certificate)
    } else {
        Err("has data after the certificate".to_owned())
    }
}
