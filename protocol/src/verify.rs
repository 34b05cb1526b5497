//! rustls verifiers that accept a chain to the fleet CA only when its leaf
//! carries an allowed role. The chain itself is checked by rustls' own
//! verifiers; these add the name.

use std::sync::Arc;

use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::WebPkiClientVerifier;
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{
    CertificateError, DigitallySignedStruct, DistinguishedName, Error, OtherError, SignatureScheme,
};
use x509_parser::extensions::GeneralName;
use x509_parser::prelude::{FromDer, X509Certificate};

use crate::identity::{Role, RoleUri};

/// Why a certificate of the right CA is refused all the same.
#[derive(Debug, thiserror::Error)]
enum NameError {
    #[error("certificate has no fleet identity: want exactly one URI name, it has {0}")]
    Count(usize),
    #[error("certificate cannot be read")]
    Unreadable,
    #[error(transparent)]
    Form(#[from] crate::identity::RoleUriError),
    #[error("peer is {found}, which may not do this here (want {want})")]
    Role { found: RoleUri, want: String },
}

impl From<NameError> for Error {
    fn from(error: NameError) -> Self {
        Self::InvalidCertificate(CertificateError::Other(OtherError(Arc::new(error))))
    }
}

/// Reads the one role URI of a certificate.
///
/// # Errors
/// When the certificate cannot be parsed or does not carry exactly one.
fn role_uri(certificate: &CertificateDer<'_>) -> Result<RoleUri, NameError> {
    let (_, parsed) = X509Certificate::from_der(certificate).map_err(|_| NameError::Unreadable)?;
    let names = parsed
        .subject_alternative_name()
        .map_err(|_| NameError::Unreadable)?;
    let uris: Vec<&str> = names
        .iter()
        .flat_map(|extension| &extension.value.general_names)
        .filter_map(|name| match name {
            GeneralName::URI(uri) => Some(*uri),
            _ => None,
        })
        .collect();
    match uris[..] {
        [uri] => Ok(uri.parse()?),
        _ => Err(NameError::Count(uris.len())),
    }
}

/// Server side: any fleet member in one of `roles`.
#[derive(Debug)]
pub(crate) struct RoleClientVerifier {
    pub(crate) chain: Arc<dyn ClientCertVerifier>,
    pub(crate) fleet: String,
    pub(crate) roles: Vec<Role>,
}

impl RoleClientVerifier {
    pub(crate) fn new(
        roots: Arc<rustls::RootCertStore>,
        fleet: &str,
        roles: &[Role],
    ) -> Result<Self, rustls::server::VerifierBuilderError> {
        Ok(Self {
            chain: WebPkiClientVerifier::builder(roots).build()?,
            fleet: fleet.to_owned(),
            roles: roles.to_vec(),
        })
    }
}

impl ClientCertVerifier for RoleClientVerifier {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.chain.root_hint_subjects()
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        let verified = self
            .chain
            .verify_client_cert(end_entity, intermediates, now)?;
        let found = role_uri(end_entity)?;
        if found.fleet() != self.fleet || !self.roles.contains(&found.role()) {
            let roles: Vec<&str> = self.roles.iter().map(|role| role.as_str()).collect();
            let want = format!("{} of fleet {}", roles.join(" or "), self.fleet);
            return Err(NameError::Role { found, want }.into());
        }
        Ok(verified)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.chain.verify_tls12_signature(message, cert, dss)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.chain.verify_tls13_signature(message, cert, dss)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.chain.supported_verify_schemes()
    }
}

/// Client side: exactly one fleet member.
#[derive(Debug)]
pub(crate) struct RoleServerVerifier {
    pub(crate) chain: Arc<WebPkiServerVerifier>,
    pub(crate) want: RoleUri,
}

impl ServerCertVerifier for RoleServerVerifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let verified = self.chain.verify_server_cert(
            end_entity,
            intermediates,
            server_name,
            ocsp_response,
            now,
        )?;
        let found = role_uri(end_entity)?;
        if found != self.want {
            return Err(NameError::Role {
                found,
                want: self.want.to_string(),
            }
            .into());
        }
        Ok(verified)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.chain.verify_tls12_signature(message, cert, dss)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.chain.verify_tls13_signature(message, cert, dss)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.chain.supported_verify_schemes()
    }
}
