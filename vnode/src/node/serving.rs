//! The certificate that the kubelet API shows. Either the cluster signs it, by
//! a CertificateSigningRequest for `kubernetes.io/kubelet-serving`, and it is
//! replaced long before it ends; or it comes from files that somebody else
//! renews. Connections always get the newest one.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::{Duration, SystemTime};

use futures::StreamExt;
use k8s_openapi::ByteString;
use k8s_openapi::api::certificates::v1::{
    CertificateSigningRequest, CertificateSigningRequestSpec,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::PostParams;
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Client};
use rcgen::{CertificateParams, DnType, ExtendedKeyUsagePurpose, KeyPair, SanType};
use rustls::crypto::ring::sign::any_supported_type;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use x509_parser::prelude::{FromDer, GeneralName, X509Certificate};

use crate::backoff::{Backoff, unit_random};
use crate::config::{Config, Serving};

const SIGNER: &str = "kubernetes.io/kubelet-serving";
/// A request that nobody approves is replaced after this time, as the kubelet
/// does: controllers delete old pending requests.
const APPROVAL_TIMEOUT: Duration = Duration::from_secs(15 * 60);
const FIRST_RETRY: Duration = Duration::from_secs(1);
const MAX_RETRY: Duration = Duration::from_secs(5 * 60);
/// Key and chain in one file, so that they always belong together.
const FILE_NAME: &str = "kubelet-serving.pem";

/// Why there is no usable certificate.
#[derive(Debug, thiserror::Error)]
pub enum ServingError {
    /// The API server refused something.
    #[error("{}", crate::errors::brief(.0))]
    Api(#[from] kube::Error),
    /// A file cannot be read or written.
    #[error("{}: {source}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The operating system's error.
        source: std::io::Error,
    },
    /// Not a certificate with its key.
    #[error("{0}")]
    Material(String),
    /// The request was denied or failed.
    #[error("certificate signing request {name} was {outcome}: {message}")]
    Refused {
        /// Name of the request.
        name: String,
        /// `denied` or `failed`.
        outcome: &'static str,
        /// What the approver or signer said.
        message: String,
    },
    /// Nobody decided in time.
    #[error(
        "certificate signing request {0} was not approved; approve it with `kubectl certificate approve {0}`"
    )]
    NotApproved(String),
}

/// Gives each connection the newest serving certificate.
#[derive(Debug, Default)]
pub struct ServingCertificate {
    current: RwLock<Option<Arc<CertifiedKey>>>,
    files: Option<Files>,
}

#[derive(Debug)]
struct Files {
    cert: PathBuf,
    key: PathBuf,
    seen: Mutex<Option<SystemTime>>,
}

impl ResolvesServerCert for ServingCertificate {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        self.refresh();
        self.current
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }
}

// === impl ServingCertificate ===

impl ServingCertificate {
    /// A certificate from files.
    ///
    /// # Errors
    /// When the files hold no certificate with its key.
    pub fn from_files(cert: &Path, key: &Path) -> Result<Self, ServingError> {
        let certified = certified_key(&read(cert)?, &read(key)?)?;
        Ok(Self {
            current: RwLock::new(Some(Arc::new(certified))),
            files: Some(Files {
                cert: cert.to_owned(),
                key: key.to_owned(),
                seen: Mutex::new(modified(cert, key)),
            }),
        })
    }

    /// Whether connections can be served at all.
    pub fn is_ready(&self) -> bool {
        self.current
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .is_some()
    }

    fn set(&self, key: CertifiedKey) {
        *self.current.write().unwrap_or_else(PoisonError::into_inner) = Some(Arc::new(key));
    }

    /// Reads files that changed; a half-written pair leaves the last one in use.
    fn refresh(&self) {
        let Some(files) = &self.files else { return };
        let mut seen = files.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let now = modified(&files.cert, &files.key);
        if *seen == now {
            return;
        }
        let material = read(&files.cert).and_then(|cert| certified_key(&cert, &read(&files.key)?));
        match material {
            Ok(key) => {
                *seen = now;
                self.set(key);
                tracing::info!(file = %files.cert.display(), "took over a new serving certificate");
            }
            Err(error) => tracing::warn!(%error, "keeping the old serving certificate"),
        }
    }
}

/// Keeps a certificate signed by the cluster.
pub struct CsrController {
    config: Arc<Config>,
    api: Api<CertificateSigningRequest>,
    certificate: Arc<ServingCertificate>,
}

// === impl CsrController ===

impl CsrController {
    /// A controller that fills `certificate`.
    pub fn new(config: Arc<Config>, client: Client, certificate: Arc<ServingCertificate>) -> Self {
        Self {
            config,
            api: Api::all(client),
            certificate,
        }
    }

    /// The certificate of an [`Serving`] setting, with what keeps it fresh.
    ///
    /// # Errors
    /// When configured files cannot be used.
    pub fn for_config(
        config: &Arc<Config>,
        client: Client,
    ) -> Result<(Arc<ServingCertificate>, Option<Self>), ServingError> {
        match &config.kubelet_api.serving {
            Serving::Files { cert, key } => {
                Ok((Arc::new(ServingCertificate::from_files(cert, key)?), None))
            }
            Serving::Csr => {
                let certificate = Arc::new(ServingCertificate::default());
                let controller = Self::new(Arc::clone(config), client, Arc::clone(&certificate));
                Ok((certificate, Some(controller)))
            }
        }
    }

    /// Ends only by being dropped.
    pub async fn run(self) {
        let mut backoff = Backoff::new(FIRST_RETRY, MAX_RETRY);
        let mut rotate_in = self.load().unwrap_or_default();
        loop {
            tokio::time::sleep(rotate_in).await;
            match self.request().await {
                Ok(next) => {
                    backoff.reset();
                    rotate_in = next;
                }
                Err(error) => {
                    tracing::warn!(%error, "no new serving certificate");
                    rotate_in = backoff.step();
                }
            }
        }
    }

    fn path(&self) -> PathBuf {
        self.config.state_dir.join(FILE_NAME)
    }

    /// Uses the stored certificate, if it is still good. Returns when to replace
    /// it.
    fn load(&self) -> Option<Duration> {
        let pem = std::fs::read(self.path()).ok()?;
        let key = match certified_key(&pem, &pem) {
            Ok(key) => key,
            Err(error) => {
                tracing::warn!(%error, "ignoring the stored serving certificate");
                return None;
            }
        };
        let life = Life::of(key.cert.first()?, &self.config)?;
        self.certificate.set(key);
        Some(life.rotate_in(SystemTime::now()))
    }

    /// Has a new key signed, and uses it. Returns when to replace it.
    async fn request(&self) -> Result<Duration, ServingError> {
        let key = KeyPair::generate().map_err(|error| ServingError::Material(error.to_string()))?;
        let name = self.submit(&key).await?;
        tracing::info!(csr = name, "requested a serving certificate");
        let chain = tokio::time::timeout(APPROVAL_TIMEOUT, self.issued(&name))
            .await
            .map_err(|_| ServingError::NotApproved(name))??;
        let mut pem = key.serialize_pem().into_bytes();
        pem.extend_from_slice(&chain);
        let certified = certified_key(&pem, &pem)?;
        let life = certified
            .cert
            .first()
            .and_then(|leaf| Life::of(leaf, &self.config))
            .ok_or_else(|| {
                ServingError::Material("the signed certificate does not name this node".to_owned())
            })?;
        self.store(&pem)?;
        self.certificate.set(certified);
        tracing::info!("took over a new serving certificate");
        Ok(life.rotate_in(SystemTime::now()))
    }

    async fn submit(&self, key: &KeyPair) -> Result<String, ServingError> {
        let material = |error: rcgen::Error| ServingError::Material(error.to_string());
        let mut params = CertificateParams::default();
        params
            .distinguished_name
            .push(DnType::OrganizationName, "system:nodes");
        params.distinguished_name.push(
            DnType::CommonName,
            format!("system:node:{}", self.config.node_name),
        );
        params.subject_alt_names = vec![
            SanType::DnsName(
                self.config
                    .node_name
                    .as_str()
                    .try_into()
                    .map_err(material)?,
            ),
            SanType::IpAddress(self.config.kubelet_api.address),
        ];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        let request = params
            .serialize_request(key)
            .and_then(|r| r.pem())
            .map_err(material)?;
        let csr = CertificateSigningRequest {
            metadata: ObjectMeta {
                generate_name: Some("csr-".to_owned()),
                ..ObjectMeta::default()
            },
            spec: CertificateSigningRequestSpec {
                request: ByteString(request.into_bytes()),
                signer_name: SIGNER.to_owned(),
                usages: Some(vec![
                    "digital signature".to_owned(),
                    "server auth".to_owned(),
                ]),
                ..CertificateSigningRequestSpec::default()
            },
            status: None,
        };
        let created = self.api.create(&PostParams::default(), &csr).await?;
        created.metadata.name.ok_or_else(|| {
            ServingError::Material("the API server gave the request no name".to_owned())
        })
    }

    /// Waits for the certificate of a request.
    async fn issued(&self, name: &str) -> Result<Vec<u8>, ServingError> {
        let watch = watcher::watch_object(self.api.clone(), name)
            .backoff(watcher::DefaultBackoff::default());
        tokio::pin!(watch);
        while let Some(event) = watch.next().await {
            let csr = match event {
                Ok(Some(csr)) => csr,
                Ok(None) => {
                    return Err(ServingError::Refused {
                        name: name.to_owned(),
                        outcome: "deleted",
                        message: "somebody deleted it".to_owned(),
                    });
                }
                Err(error) => {
                    tracing::debug!(%error, "watching a certificate signing request");
                    continue;
                }
            };
            let Some(status) = csr.status else { continue };
            for condition in status.conditions.iter().flatten() {
                let outcome = match condition.type_.as_str() {
                    "Denied" => "denied",
                    "Failed" => "failed",
                    _ => continue,
                };
                return Err(ServingError::Refused {
                    name: name.to_owned(),
                    outcome,
                    message: condition.message.clone().unwrap_or_default(),
                });
            }
            if let Some(certificate) = status.certificate {
                return Ok(certificate.0);
            }
        }
        Err(ServingError::Material("the watch ended".to_owned()))
    }

    fn store(&self, pem: &[u8]) -> Result<(), ServingError> {
        use std::io::Write;
        use std::os::unix::fs::OpenOptionsExt;
        let path = self.path();
        let temporary = path.with_extension("tmp");
        let write = || -> std::io::Result<()> {
            std::fs::create_dir_all(&self.config.state_dir)?;
            match std::fs::remove_file(&temporary) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
            let mut file = std::fs::OpenOptions::new()
                .write(true)
                .create_new(true)
                .mode(0o600)
                .open(&temporary)?;
            file.write_all(pem)?;
            file.sync_all()?;
            std::fs::rename(&temporary, &path)
        };
        write().map_err(|source| ServingError::File {
            path: path.clone(),
            source,
        })
    }
}

/// The time in which a certificate is good.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Life {
    from: SystemTime,
    until: SystemTime,
}

impl Life {
    /// Life of a certificate that names this node's address; `None` for any
    /// other.
    fn of(leaf: &CertificateDer<'_>, config: &Config) -> Option<Self> {
        let (_, certificate) = X509Certificate::from_der(leaf).ok()?;
        let wanted = match config.kubelet_api.address {
            std::net::IpAddr::V4(ip) => ip.octets().to_vec(),
            std::net::IpAddr::V6(ip) => ip.octets().to_vec(),
        };
        let names = certificate
            .subject_alternative_name()
            .ok()??
            .value
            .general_names
            .iter();
        let named = names.into_iter().any(|name| match name {
            GeneralName::IPAddress(ip) => *ip == wanted.as_slice(),
            _ => false,
        });
        let at = |seconds: i64| {
            Some(SystemTime::UNIX_EPOCH + Duration::from_secs(u64::try_from(seconds).ok()?))
        };
        let validity = certificate.validity();
        named.then_some(Self {
            from: at(validity.not_before.timestamp())?,
            until: at(validity.not_after.timestamp())?,
        })
    }

    /// How long to wait before replacing it: until 70 to 90 % of its life are
    /// over.
    fn rotate_in(&self, now: SystemTime) -> Duration {
        let life = self.until.duration_since(self.from).unwrap_or_default();
        let at = self.from + life.mul_f64(0.7 + 0.2 * unit_random());
        at.duration_since(now).unwrap_or_default()
    }
}

fn certified_key(chain: &[u8], key: &[u8]) -> Result<CertifiedKey, ServingError> {
    let material = |error: &dyn std::fmt::Display| ServingError::Material(error.to_string());
    let chain: Vec<_> = CertificateDer::pem_slice_iter(chain)
        .collect::<Result<_, _>>()
        .map_err(|error| material(&error))?;
    if chain.is_empty() {
        return Err(ServingError::Material(
            "no certificate in the file".to_owned(),
        ));
    }
    let key = PrivateKeyDer::from_pem_slice(key).map_err(|error| material(&error))?;
    let key = any_supported_type(&key).map_err(|error| material(&error))?;
    let certified = CertifiedKey::new(chain, key);
    certified.keys_match().map_err(|error| material(&error))?;
    Ok(certified)
}

fn read(path: &Path) -> Result<Vec<u8>, ServingError> {
    std::fs::read(path).map_err(|source| ServingError::File {
        path: path.to_owned(),
        source,
    })
}

fn modified(cert: &Path, key: &Path) -> Option<SystemTime> {
    let time = |path: &Path| std::fs::metadata(path).and_then(|m| m.modified()).ok();
    time(cert).max(time(key))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair() -> (String, String) {
        let key = KeyPair::generate().unwrap();
        let certificate = CertificateParams::new(vec!["node".to_owned()])
            .unwrap()
            .self_signed(&key);
        (certificate.unwrap().pem(), key.serialize_pem())
    }

    #[test]
    fn files_are_read_again_when_they_change() {
        let dir = tempfile::tempdir().unwrap();
        let (cert, key) = (dir.path().join("tls.crt"), dir.path().join("tls.key"));
        let write = |pair: &(String, String), age: u64| {
            for (path, text) in [(&cert, &pair.0), (&key, &pair.1)] {
                std::fs::write(path, text).unwrap();
                let time = SystemTime::now() - Duration::from_secs(age);
                std::fs::File::options()
                    .write(true)
                    .open(path)
                    .unwrap()
                    .set_modified(time)
                    .unwrap();
            }
        };
        let (first, second) = (pair(), pair());
        write(&first, 100);
        let serving = ServingCertificate::from_files(&cert, &key).unwrap();
        let shown = || serving.current.read().unwrap().as_ref().unwrap().cert[0].clone();
        let old = shown();

        write(&(second.0.clone(), first.1), 50);
        serving.refresh();
        assert_eq!(shown(), old, "a certificate without its key is not taken");
        write(&second, 40);
        serving.refresh();
        assert_ne!(shown(), old);
    }

    #[test]
    fn rotation_comes_late_in_life_but_before_its_end() {
        let at = |seconds| SystemTime::UNIX_EPOCH + Duration::from_secs(seconds);
        let life = Life {
            from: at(0),
            until: at(1000),
        };
        for _ in 0..100 {
            let wait = life.rotate_in(at(0)).as_secs();
            assert!((700..=900).contains(&wait), "{wait}");
        }
        assert_eq!(life.rotate_in(at(2000)), Duration::ZERO);
    }
}
