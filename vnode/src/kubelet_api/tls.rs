//! TLS of the kubelet API: asks each client for a certificate and lets the
//! handshake pass without a good one, as the kubelet does, so that a bad
//! certificate is a 401 with a reason and a caller with a token needs none.

use std::sync::Arc;

use rustls::client::danger::HandshakeSignatureValid;
use rustls::crypto::{WebPkiSupportedAlgorithms, verify_tls12_signature, verify_tls13_signature};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::server::{NoServerSessionStorage, ResolvesServerCert};
use rustls::{DigitallySignedStruct, DistinguishedName, ServerConfig, SignatureScheme, crypto};
use rustls_pki_types::{CertificateDer, UnixTime};

/// The API server uses HTTP/2 for logs and stats and asks for HTTP/1.1 alone
/// when it wants to upgrade.
pub(super) const ALPN_H2: &[u8] = b"h2";
const ALPN_HTTP1: &[u8] = b"http/1.1";

/// Server side TLS with certificates from `resolver`, which may change them at
/// any time.
pub(super) fn server_config(
    resolver: Arc<dyn ResolvesServerCert>,
) -> Result<ServerConfig, rustls::Error> {
    let provider = Arc::new(crypto::ring::default_provider());
    let verifier = Arc::new(AnyClientCertificate {
        algorithms: provider.signature_verification_algorithms,
    });
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()?
        .with_client_cert_verifier(verifier)
        .with_cert_resolver(resolver);
    config.alpn_protocols = vec![ALPN_H2.to_vec(), ALPN_HTTP1.to_vec()];
    // Callers keep their connections or make one for each stream: a ticket would
    // only be memory, and a resumed session would skip the client's proof that it
    // has the key.
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    Ok(config)
}

/// Checks that the client has the private key of whatever certificate it shows.
/// Who signed that certificate is authentication's business, request by request.
#[derive(Debug)]
struct AnyClientCertificate {
    algorithms: WebPkiSupportedAlgorithms,
}

impl ClientCertVerifier for AnyClientCertificate {
    fn client_auth_mandatory(&self) -> bool {
        false
    }

    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        _end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _now: UnixTime,
    ) -> Result<ClientCertVerified, rustls::Error> {
        Ok(ClientCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls12_signature(message, cert, dss, &self.algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls13_signature(message, cert, dss, &self.algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.algorithms.supported_schemes()
    }
}
