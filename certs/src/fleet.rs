//! The fleet's own authority and the identities it gives to virtual nodes and hosts.
//! A certificate names its holder's role in a URI, so that a host's certificate never passes for a virtual node's.

use std::net::IpAddr;
use std::path::{Path, PathBuf};

use sandman_protocol::identity::{Role, RoleUri};
use time::OffsetDateTime;

use crate::authority::Authority;
use crate::error::{Error, Result};
use crate::files;
use crate::name::check_subdomain;
use crate::profile::{Profile, Usage};
use crate::report::{Action, Report};
use crate::store::{PairPaths, Stored};

/// The authority of a fleet carries this and the fleet's name; its members' URIs extend it.
const URI_PREFIX: &str = "spiffe://sandman.dev/fleet/";

/// A vnode dials, a host answers, and peers do both.
fn usage(role: Role) -> Usage {
    match role {
        Role::Vnode => Usage::Client,
        Role::Host => Usage::Server,
        Role::Peer => Usage::Peer,
    }
}

/// Who is to be certified.
#[derive(Clone, Debug)]
pub struct Member {
    /// What it is.
    pub role: Role,
    /// Its name in the fleet, a DNS-1123 subdomain; also its first DNS name.
    pub name: String,
    /// Further DNS names.
    pub dns: Vec<String>,
    /// Addresses it is reached at.
    pub ips: Vec<IpAddr>,
}

impl Member {
    fn profile(&self, fleet: &str) -> Result<Profile> {
        check_subdomain("--name", &self.name)?;
        for name in &self.dns {
            check_subdomain("--dns", name)?;
        }
        if self.role != Role::Vnode && self.ips.is_empty() {
            return Err(Error::Invalid {
                field: "--ip",
                value: String::new(),
                reason: format!(
                    "a {} is dialled by address and needs at least one",
                    self.role
                ),
            });
        }
        let uri = RoleUri::new(fleet, self.role, &self.name).map_err(|e| Error::Invalid {
            field: "--name",
            value: self.name.clone(),
            reason: e.to_string(),
        })?;
        let dns = std::iter::once(self.name.clone()).chain(self.dns.iter().cloned());
        Ok(Profile::new(&self.name, usage(self.role))
            .hosts(dns, self.ips.iter().copied())
            .uri(uri.to_string()))
    }
}

/// Files of one fleet identity.
#[derive(Clone, Debug)]
pub struct IdentityPaths {
    /// `tls.crt` and `tls.key`.
    pub pair: PairPaths,
    /// `ca.crt`, the fleet authority that its holder trusts.
    pub ca: PathBuf,
}

impl IdentityPaths {
    /// The files of an identity in `dir`, named as in a Kubernetes TLS secret.
    pub fn new(dir: &Path) -> Self {
        Self {
            pair: PairPaths::new(dir, "tls"),
            ca: dir.join("ca.crt"),
        }
    }
}

/// The authority of one fleet.
pub struct FleetAuthority {
    authority: Authority,
    paths: PairPaths,
    fleet: String,
}

impl FleetAuthority {
    /// Creates `DIR/ca.crt` and `DIR/ca.key` for a new fleet; neither may exist.
    pub fn create(dir: &Path, fleet: &str, days: u16) -> Result<Self> {
        check_subdomain("--name", fleet)?;
        let paths = PairPaths::new(dir, "ca");
        let profile = Profile::new("sandman fleet CA", Usage::Authority)
            .organization(fleet)
            .uri(format!("{URI_PREFIX}{fleet}"));
        let authority = Authority::generate(&profile, days, OffsetDateTime::now_utc())?;
        files::create_directory(dir)?;
        paths.create(&authority.identity())?;
        Ok(Self {
            authority,
            paths,
            fleet: fleet.to_owned(),
        })
    }

    /// Loads the authority that [`FleetAuthority::create`] left in `dir`.
    pub fn load(dir: &Path) -> Result<Self> {
        let paths = PairPaths::new(dir, "ca");
        let authority = Authority::load(&paths, OffsetDateTime::now_utc())?;
        let fleet = match authority.certificate().profile.uris.as_slice() {
            [uri] => uri.strip_prefix(URI_PREFIX).map(ToOwned::to_owned),
            _ => None,
        };
        let fleet = fleet.ok_or_else(|| {
            Error::content(
                &paths.cert,
                "is not a fleet CA; make one with `sandman-certs fleet-ca`",
            )
        })?;
        check_subdomain("fleet", &fleet)?;
        Ok(Self {
            authority,
            paths,
            fleet,
        })
    }

    /// Loads the fleet's authority from `dir`, or creates it where there is none.
    pub fn load_or_create(dir: &Path, fleet: &str, days: u16) -> Result<Self> {
        let paths = PairPaths::new(dir, "ca");
        if !paths.cert.exists() && !paths.key.exists() {
            return Self::create(dir, fleet, days);
        }
        let found = Self::load(dir)?;
        if found.fleet != fleet {
            return Err(Error::content(
                &paths.cert,
                format!("belongs to the fleet {:?}, not {fleet:?}", found.fleet),
            ));
        }
        Ok(found)
    }

    /// Name of the fleet.
    pub fn fleet(&self) -> &str {
        &self.fleet
    }

    /// The signing part, for renewal.
    pub fn authority(&self) -> &Authority {
        &self.authority
    }

    /// What [`FleetAuthority::create`] wrote.
    pub fn reports(&self, action: Action) -> Vec<Report> {
        vec![
            Report::certificate(action, &self.paths.cert, self.authority.certificate()),
            Report::file(action, &self.paths.key),
        ]
    }

    /// Issues an identity into `out`, where none of its three files may exist.
    pub fn issue(&self, member: &Member, days: u16, out: &Path) -> Result<Vec<Report>> {
        let profile = member.profile(&self.fleet)?;
        let paths = IdentityPaths::new(out);
        let pair = &paths.pair;
        files::check_absent([pair.cert.as_path(), &pair.key, &paths.ca])?;
        let identity = self
            .authority
            .issue(&profile, days, OffsetDateTime::now_utc())?;
        files::create_directory(out)?;
        files::create(&paths.ca, &self.authority.certificate().pem, files::PUBLIC)?;
        pair.create(&identity)?;
        Ok(vec![
            Report::certificate(Action::Created, &pair.cert, &identity.certificate),
            Report::file(Action::Created, &pair.key),
            Report::certificate(Action::Created, &paths.ca, self.authority.certificate()),
        ])
    }

    /// Like [`FleetAuthority::issue`], but an identity found in `out` is kept if it is this
    /// member's, of this fleet and valid, and is an error otherwise. One without its certificate
    /// was never finished and is made anew.
    pub fn ensure(&self, member: &Member, days: u16, out: &Path) -> Result<Vec<Report>> {
        let profile = member.profile(&self.fleet)?;
        let paths = IdentityPaths::new(out);
        if !paths.pair.cert.exists() {
            // The certificate is written last: without it the rest is of a run that was cut short.
            files::discard(&paths.ca)?;
            files::discard(&paths.pair.key)?;
            return self.issue(member, days, out);
        }
        let found = Stored::load(&paths.pair)?.certificate;
        found
            .check_issued_by(self.authority.certificate())
            .and_then(|()| found.check_valid_at(OffsetDateTime::now_utc()))
            .and_then(|()| found.check_profile(&profile))
            .map_err(|reason| Error::content(&paths.pair.cert, reason))?;
        if files::read(&paths.ca)? != self.authority.certificate().pem {
            return Err(Error::content(
                &paths.ca,
                "is not the certificate of this fleet's CA",
            ));
        }
        Ok(vec![Report::certificate(
            Action::Kept,
            &paths.pair.cert,
            &found,
        )])
    }
}
