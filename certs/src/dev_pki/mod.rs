//! A complete cluster PKI for the dev cluster: authorities, serving and client certificates, the
//! service-account key and kubeconfigs. Made in one step; found again, it is verified instead.

mod kubeconfig;
mod plan;

use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rcgen::{KeyPair, PKCS_ECDSA_P256_SHA256};
use time::OffsetDateTime;

use self::plan::{
    APISERVER, APISERVER_ETCD_CLIENT, APISERVER_KUBELET_CLIENT, Ca, ETCD_SERVER, FRONT_PROXY_CLIENT,
};
pub use self::plan::{DevPkiSpec, User};
use crate::authority::Authority;
use crate::certificate::Certificate;
use crate::error::{Error, Result};
use crate::files;
use crate::report::{Action, Report};
use crate::store::{PairPaths, Stored};

/// A PKI on disk that was created or verified by this process.
#[derive(Debug)]
pub struct DevPki {
    dir: PathBuf,
    reports: Vec<Report>,
}

impl DevPki {
    /// Creates the PKI in `dir`, or verifies the one that is there.
    ///
    /// The directory appears complete or not at all. An existing one must hold every file of
    /// `spec`, unexpired; what it has besides is left alone.
    pub fn create(dir: &Path, spec: &DevPkiSpec) -> Result<Self> {
        spec.check()?;
        let now = OffsetDateTime::now_utc();
        let parent = match dir.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent,
            _ => Path::new("."),
        };
        files::create_directory(parent)?;
        // Held to the end: of two processes one creates and the other verifies.
        let lock = File::open(parent).map_err(Error::io("open", parent))?;
        lock.lock().map_err(Error::io("lock", parent))?;

        let present = dir.is_dir()
            && dir
                .read_dir()
                .map_err(Error::io("read", dir))?
                .next()
                .is_some();
        let action = if present {
            Action::Kept
        } else {
            build(dir, spec, now)?;
            Action::Created
        };
        let verified = verify(dir, spec, now, action).map_err(|error| match error {
            Error::Mismatch { .. } => error,
            other => Error::Mismatch {
                dir: dir.to_owned(),
                reason: other.to_string(),
            },
        })?;
        Ok(Self {
            dir: dir.to_owned(),
            reports: verified,
        })
    }

    /// What was made or found, a line a file.
    pub fn reports(&self) -> &[Report] {
        &self.reports
    }

    /// Authority of API clients and of serving certificates, the kubelets' included.
    pub fn ca(&self) -> PairPaths {
        self.pair(Ca::Cluster.stem())
    }

    /// Authority of the front proxy.
    pub fn front_proxy_ca(&self) -> PairPaths {
        self.pair(Ca::FrontProxy.stem())
    }

    /// Authority of etcd and its clients.
    pub fn etcd_ca(&self) -> PairPaths {
        self.pair(Ca::Etcd.stem())
    }

    /// Serving certificate of etcd.
    pub fn etcd_server(&self) -> PairPaths {
        self.pair(ETCD_SERVER)
    }

    /// Serving certificate of the API server.
    pub fn apiserver(&self) -> PairPaths {
        self.pair(APISERVER)
    }

    /// The API server towards etcd.
    pub fn apiserver_etcd_client(&self) -> PairPaths {
        self.pair(APISERVER_ETCD_CLIENT)
    }

    /// The API server towards kubelets: user `kube-apiserver-kubelet-client`.
    pub fn apiserver_kubelet_client(&self) -> PairPaths {
        self.pair(APISERVER_KUBELET_CLIENT)
    }

    /// The API server towards extension API servers: user `front-proxy-client`.
    pub fn front_proxy_client(&self) -> PairPaths {
        self.pair(FRONT_PROXY_CLIENT)
    }

    /// Private key that signs service-account tokens (ECDSA P-256, PKCS #8).
    pub fn service_account_key(&self) -> PathBuf {
        self.dir.join(SERVICE_ACCOUNT_KEY)
    }

    /// Public key that verifies service-account tokens.
    pub fn service_account_public_key(&self) -> PathBuf {
        self.dir.join(SERVICE_ACCOUNT_PUBLIC_KEY)
    }

    /// Client certificate of a user. A node must be one of the spec's.
    pub fn client(&self, user: &User) -> PairPaths {
        self.pair(&user.stem())
    }

    /// Kubeconfig of a user, everything embedded. A node must be one of the spec's.
    pub fn kubeconfig(&self, user: &User) -> PathBuf {
        kubeconfig_path(&self.dir, user)
    }

    fn pair(&self, stem: &str) -> PairPaths {
        PairPaths::new(&self.dir, stem)
    }
}

const SERVICE_ACCOUNT_KEY: &str = "sa.key";
const SERVICE_ACCOUNT_PUBLIC_KEY: &str = "sa.pub";

fn kubeconfig_path(dir: &Path, user: &User) -> PathBuf {
    dir.join(format!("{}.conf", user.stem()))
}

/// Builds everything in a directory beside `dir`, then moves it there.
fn build(dir: &Path, spec: &DevPkiSpec, now: OffsetDateTime) -> Result<()> {
    let staged = files::staged_path(dir);
    if staged.exists() {
        std::fs::remove_dir_all(&staged).map_err(Error::io("remove", &staged))?;
    }
    for sub in ["etcd", "clients", "nodes"] {
        files::create_directory(&staged.join(sub))?;
    }

    let mut authorities = Vec::new();
    for ca in Ca::ALL {
        let authority = Authority::generate(&ca.profile(), spec.days, now)?;
        PairPaths::new(&staged, ca.stem()).create(&authority.identity())?;
        authorities.push((ca, authority));
    }
    for leaf in plan::leaves(spec) {
        let Some((_, authority)) = authorities.iter().find(|(ca, _)| *ca == leaf.ca) else {
            continue;
        };
        let identity = authority.issue(&leaf.profile, spec.days, now)?;
        PairPaths::new(&staged, &leaf.stem).create(&identity)?;
    }
    for user in plan::users(spec) {
        let text = expected_kubeconfig(&staged, spec, &user)?;
        files::create(&kubeconfig_path(&staged, &user), &text, files::SECRET)?;
    }

    let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).map_err(|source| Error::Generate {
        subject: "service-account key".to_owned(),
        source,
    })?;
    let private = key.serialize_pem();
    files::create(&staged.join(SERVICE_ACCOUNT_KEY), &private, files::SECRET)?;
    let public = key.public_key_pem();
    files::create(
        &staged.join(SERVICE_ACCOUNT_PUBLIC_KEY),
        &public,
        files::PUBLIC,
    )?;
    files::commit(&staged, dir)
}

/// Walks the plan over the files of `dir` and reports each.
fn verify(
    dir: &Path,
    spec: &DevPkiSpec,
    now: OffsetDateTime,
    action: Action,
) -> Result<Vec<Report>> {
    let mut reports = Vec::new();
    let mut authorities: Vec<(Ca, Certificate)> = Vec::new();
    for ca in Ca::ALL {
        let paths = PairPaths::new(dir, ca.stem());
        let certificate = verify_pair(&paths, now)?;
        certificate
            .check_profile(&ca.profile())
            .map_err(|reason| Error::content(&paths.cert, reason))?;
        reports.push(Report::certificate(action, &paths.cert, &certificate));
        reports.push(Report::file(action, &paths.key));
        authorities.push((ca, certificate));
    }
    for leaf in plan::leaves(spec) {
        let paths = PairPaths::new(dir, &leaf.stem);
        let certificate = verify_pair(&paths, now)?;
        certificate
            .check_profile(&leaf.profile)
            .and_then(|()| {
                let ca = authorities.iter().find(|(ca, _)| *ca == leaf.ca);
                ca.map_or(Ok(()), |(_, authority)| {
                    certificate.check_issued_by(authority)
                })
            })
            .map_err(|reason| Error::content(&paths.cert, reason))?;
        reports.push(Report::certificate(action, &paths.cert, &certificate));
        reports.push(Report::file(action, &paths.key));
    }
    for user in plan::users(spec) {
        let path = kubeconfig_path(dir, &user);
        check_secret(&path)?;
        if files::read(&path)? != expected_kubeconfig(dir, spec, &user)? {
            return Err(Error::content(
                &path,
                format!(
                    "is not for {} or does not match its certificate files",
                    spec.server
                ),
            ));
        }
        reports.push(Report::file(action, &path));
    }

    let (private, public) = (
        dir.join(SERVICE_ACCOUNT_KEY),
        dir.join(SERVICE_ACCOUNT_PUBLIC_KEY),
    );
    check_secret(&private)?;
    let key = crate::store::read_key(&private)?;
    if files::read(&public)? != key.public_key_pem() {
        return Err(Error::content(
            &public,
            format!("is not the key of {}", private.display()),
        ));
    }
    reports.push(Report::file(action, &private));
    reports.push(Report::file(action, &public));
    Ok(reports)
}

fn verify_pair(paths: &PairPaths, now: OffsetDateTime) -> Result<Certificate> {
    check_secret(&paths.key)?;
    let Stored { certificate, .. } = Stored::load(paths)?;
    certificate
        .check_valid_at(now)
        .map_err(|reason| Error::content(&paths.cert, reason))?;
    Ok(certificate)
}

fn check_secret(path: &Path) -> Result<()> {
    let mode = path.metadata().map_err(Error::io("read", path))?.mode() & 0o777;
    if mode & 0o077 != 0 {
        return Err(Error::content(
            path,
            format!("is a secret with mode {mode:04o}; others must not read it (chmod 0600)"),
        ));
    }
    Ok(())
}

fn expected_kubeconfig(dir: &Path, spec: &DevPkiSpec, user: &User) -> Result<String> {
    let paths = PairPaths::new(dir, &user.stem());
    let ca = files::read(&PairPaths::new(dir, Ca::Cluster.stem()).cert)?;
    let (cert, key) = (files::read(&paths.cert)?, files::read(&paths.key)?);
    kubeconfig::render(&spec.server, &user.profile().common_name, &ca, &cert, &key)
        .map_err(|e| Error::content(kubeconfig_path(dir, user), e.to_string()))
}
