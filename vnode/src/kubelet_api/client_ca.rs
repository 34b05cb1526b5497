//! The bundle of authorities that sign the certificates of kubelet API clients,
//! read again whenever its file changes.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, TrustAnchor, UnixTime};
use tokio::time::Instant;
use webpki::{EndEntityCert, KeyUsage};

/// Largest bundle that is read, in bytes.
const MAX_BUNDLE_BYTES: u64 = 1 << 20;
/// A changed file is seen by the first client certificate after this time.
const CHECK_EVERY: Duration = Duration::from_secs(1);

/// Why the bundle cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ClientCaError {
    /// The file cannot be read.
    #[error("{}: {source}", path.display())]
    Read {
        /// The configured file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The file has no certificate, or one that is not a certificate.
    #[error("{}: {reason}", path.display())]
    Invalid {
        /// The configured file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
}

/// Verifies client chains against a bundle in a file.
pub(super) struct ClientCa {
    path: PathBuf,
    current: Mutex<Current>,
}

struct Current {
    anchors: Arc<[TrustAnchor<'static>]>,
    version: Version,
    checked: Instant,
}

/// What tells one content of the file from the next without reading it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Version {
    modified: Option<SystemTime>,
    bytes: u64,
}

impl ClientCa {
    /// Reads the bundle; a node does not start without a good one.
    pub(super) async fn load(path: &Path) -> Result<Self, ClientCaError> {
        let (anchors, version) = read(path).await?;
        Ok(Self {
            path: path.to_owned(),
            current: Mutex::new(Current {
                anchors,
                version,
                checked: Instant::now(),
            }),
        })
    }

    /// Checks a chain, leaf first, as of now: signed by an authority of the
    /// bundle, in its time, and meant for client authentication.
    pub(super) async fn verify(&self, chain: &[CertificateDer<'_>]) -> Result<(), webpki::Error> {
        let anchors = self.anchors().await;
        let (leaf, intermediates) = chain.split_first().ok_or(webpki::Error::BadDer)?;
        EndEntityCert::try_from(leaf)?.verify_for_usage(
            webpki::ALL_VERIFICATION_ALGS,
            &anchors,
            intermediates,
            UnixTime::now(),
            KeyUsage::client_auth(),
            None,
            None,
        )?;
        Ok(())
    }

    /// The newest good bundle. While the file is unreadable or half written the
    /// last one stays in force.
    async fn anchors(&self) -> Arc<[TrustAnchor<'static>]> {
        let (anchors, known) = {
            let mut current = self.lock();
            let anchors = Arc::clone(&current.anchors);
            if current.checked.elapsed() < CHECK_EVERY {
                return anchors;
            }
            current.checked = Instant::now();
            (anchors, current.version)
        };
        match tokio::fs::metadata(&self.path).await {
            Ok(metadata) if Version::of(&metadata) == known => return anchors,
            _ => {}
        }
        match read(&self.path).await {
            Ok((anchors, version)) => {
                tracing::info!(path = %self.path.display(), "client CA bundle read again");
                let mut current = self.lock();
                current.anchors = Arc::clone(&anchors);
                current.version = version;
                anchors
            }
            Err(error) => {
                tracing::warn!(%error, "client CA bundle changed and cannot be used; the last one stays");
                anchors
            }
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Current> {
        self.current.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Version {
    fn of(metadata: &std::fs::Metadata) -> Self {
        Self {
            modified: metadata.modified().ok(),
            bytes: metadata.len(),
        }
    }
}

async fn read(path: &Path) -> Result<(Arc<[TrustAnchor<'static>]>, Version), ClientCaError> {
    let failed = |source| ClientCaError::Read {
        path: path.to_owned(),
        source,
    };
    let invalid = |reason: String| ClientCaError::Invalid {
        path: path.to_owned(),
        reason,
    };
    let metadata = tokio::fs::metadata(path).await.map_err(failed)?;
    let version = Version::of(&metadata);
    if version.bytes > MAX_BUNDLE_BYTES {
        return Err(invalid(format!(
            "the bundle is larger than {MAX_BUNDLE_BYTES} bytes"
        )));
    }
    let pem = tokio::fs::read(path).await.map_err(failed)?;
    let anchors = CertificateDer::pem_slice_iter(&pem)
        .map(|certificate| {
            let certificate = certificate.map_err(|error| invalid(error.to_string()))?;
            webpki::anchor_from_trusted_cert(&certificate)
                .map(|anchor| anchor.to_owned())
                .map_err(|error| invalid(error.to_string()))
        })
        .collect::<Result<Vec<_>, _>>()?;
    if anchors.is_empty() {
        return Err(invalid("no CERTIFICATE block in the file".into()));
    }
    Ok((anchors.into(), version))
}
