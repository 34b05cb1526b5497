//! Creates and renews the certificates of a Sandman fleet and of the dev cluster.
//! Keys are ECDSA P-256; nothing that exists is overwritten except by renewal, and every file is
//! either absent, old or new.

pub mod approver;
mod authority;
mod certificate;
mod dev_pki;
mod error;
mod files;
mod fleet;
mod name;
mod profile;
mod renew;
mod report;
mod store;

pub use sandman_protocol::identity::Role;

pub use self::{
    authority::{Authority, Identity},
    certificate::Certificate,
    dev_pki::{DevPki, DevPkiSpec, User},
    error::{Error, Result},
    fleet::{FleetAuthority, IdentityPaths, Member},
    name::check_subdomain,
    profile::{Profile, Usage},
    renew::{RenewOptions, renew},
    report::{Action, Report},
    store::PairPaths,
};
