//! A certificate and its key as two files. The pair is checked whenever it is read: a key that fits no certificate is found here, not in a handshake.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rcgen::{KeyPair, PublicKeyData};

use crate::authority::Identity;
use crate::certificate::Certificate;
use crate::error::{Error, Result};
use crate::files;

/// Where a certificate and its key live.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PairPaths {
    /// The certificate, PEM, readable by all.
    pub cert: PathBuf,
    /// The key, PKCS #8 PEM, mode 0600.
    pub key: PathBuf,
}

impl PairPaths {
    /// `DIR/NAME.crt` and `DIR/NAME.key`.
    pub fn new(dir: &Path, name: &str) -> Self {
        Self {
            cert: dir.join(format!("{name}.crt")),
            key: dir.join(format!("{name}.key")),
        }
    }

    /// Writes a pair where neither file exists. The certificate comes last: where it is, the key is.
    pub(crate) fn create(&self, identity: &Identity) -> Result<()> {
        files::check_absent([self.cert.as_path(), self.key.as_path()])?;
        files::create(&self.key, &identity.key_pem, files::SECRET)?;
        files::create(&self.cert, &identity.certificate.pem, files::PUBLIC)
    }

    /// Replaces both files. Two renames cannot be one step, so the new pair is durable beside the
    /// old one first, and [`PairPaths::finish_replace`] completes a swap that was cut in between.
    pub(crate) fn replace(&self, identity: &Identity) -> Result<()> {
        let key = files::stage(&self.key, &identity.key_pem, files::SECRET)?;
        let cert = files::stage(&self.cert, &identity.certificate.pem, files::PUBLIC)?;
        // The certificate comes last. Readers that watch modification times must notice it even
        // if they looked between the renames, so it is strictly the newer file.
        let newer = key
            .metadata()
            .and_then(|metadata| metadata.modified())
            .map_err(Error::io("look at", &key))?
            + Duration::from_millis(1);
        File::options()
            .write(true)
            .open(&cert)
            .and_then(|file| file.set_modified(newer))
            .map_err(Error::io("write", &cert))?;
        files::sync_directory(&self.cert)?;
        files::commit(&key, &self.key)?;
        files::commit(&cert, &self.cert)
    }

    /// Completes an interrupted [`PairPaths::replace`]: the key was moved, its certificate was not
    /// yet. What is staged of a swap that never began is removed.
    pub(crate) fn finish_replace(&self) -> Result<()> {
        let staged = files::staged_path(&self.cert);
        if staged.exists() {
            let key = read_key(&self.key)?;
            let next = files::read(&staged).and_then(|pem| Certificate::parse(&staged, &pem));
            if next.is_ok_and(|next| next.public_key == key.subject_public_key_info()) {
                files::commit(&staged, &self.cert)?;
            }
        }
        files::discard(&files::staged_path(&self.key))?;
        files::discard(&staged)
    }
}

/// A pair read from disk, found to belong together.
pub(crate) struct Stored {
    pub(crate) certificate: Certificate,
    pub(crate) key: KeyPair,
}

impl Stored {
    pub(crate) fn load(paths: &PairPaths) -> Result<Self> {
        let certificate = Certificate::parse(&paths.cert, &files::read(&paths.cert)?)?;
        let key = read_key(&paths.key)?;
        if certificate.public_key != key.subject_public_key_info() {
            return Err(Error::content(
                &paths.key,
                format!("is not the key of {}", paths.cert.display()),
            ));
        }
        Ok(Self { certificate, key })
    }
}

pub(crate) fn read_key(path: &Path) -> Result<KeyPair> {
    // The parser's own text could quote the key; it is left out.
    KeyPair::from_pem(&files::read(path)?)
        .map_err(|_| Error::content(path, "is not a PKCS #8 private key in PEM"))
}
