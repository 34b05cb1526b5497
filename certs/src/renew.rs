//! Re-issuing certificates before they end. Subject, names, usage and length of life stay; serial number and dates change.

use std::path::Path;

use rcgen::{KeyPair, PKCS_ECDSA_P256_SHA256};
use time::OffsetDateTime;

use crate::authority::{Authority, CLOCK_SKEW, Identity};
use crate::error::{Error, Result};
use crate::files;
use crate::profile::Usage;
use crate::report::{Action, Report};
use crate::store::{PairPaths, Stored};

/// How to renew.
#[derive(Clone, Copy, Debug, Default)]
pub struct RenewOptions {
    /// Renew also what has more than 30 % of its life left.
    pub force: bool,
    /// Give the certificate a new key. Without this only the certificate changes, in one rename,
    /// so a process that loads the pair at any instant finds one that fits.
    pub new_key: bool,
}

/// Renews the pair at `path` if it is due. `path` is a directory with `tls.crt` and `tls.key`, or
/// a `NAME.crt` with its `NAME.key` beside it. It must have been issued by `authority`.
pub fn renew(
    authority: &Authority,
    path: &Path,
    options: RenewOptions,
    now: OffsetDateTime,
) -> Result<Vec<Report>> {
    let paths = locate(path)?;
    paths.finish_replace()?;
    let Stored { certificate, key } = Stored::load(&paths)?;
    let fault = |reason: String| Error::content(&paths.cert, reason);
    if certificate.profile.usage == Usage::Authority {
        return Err(fault(
            "is an authority; make a new one and re-issue what it signed".to_owned(),
        ));
    }
    certificate
        .check_issued_by(authority.certificate())
        .map_err(fault)?;
    if !options.force && !certificate.is_due(now) {
        return Ok(vec![Report::certificate(
            Action::Kept,
            &paths.cert,
            &certificate,
        )]);
    }

    let key = if options.new_key {
        KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).map_err(|source| Error::Generate {
            subject: certificate.profile.subject(),
            source,
        })?
    } else {
        key
    };
    let lifetime = certificate.not_after - certificate.not_before - CLOCK_SKEW;
    let next = authority.sign(&certificate.profile, &key, lifetime, now)?;
    if !options.force && next.not_after <= certificate.not_after {
        return Err(fault(format!(
            "cannot outlive its CA, which ends at {}; make a new CA and re-issue what it signed",
            authority.certificate().not_after
        )));
    }

    let mut reports = vec![Report::certificate(Action::Renewed, &paths.cert, &next)];
    if options.new_key {
        paths.replace(&Identity {
            certificate: next,
            key_pem: key.serialize_pem(),
        })?;
        reports.push(Report::file(Action::Renewed, &paths.key));
    } else {
        files::replace(&paths.cert, &next.pem, files::PUBLIC)?;
    }
    Ok(reports)
}

fn locate(path: &Path) -> Result<PairPaths> {
    if path.is_dir() {
        return Ok(PairPaths::new(path, "tls"));
    }
    if path.extension().is_some_and(|extension| extension == "crt") {
        return Ok(PairPaths {
            cert: path.to_owned(),
            key: path.with_extension("key"),
        });
    }
    Err(Error::content(
        path,
        "is neither a directory with tls.crt nor a .crt file",
    ))
}
