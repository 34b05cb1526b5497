//! The network of the dev cluster: one namespace a member, all on one bridge. Nothing is added to
//! the machine's own namespace but a loopback listener.

mod fabric;
pub(crate) mod forward;
mod member;
mod namespace;

pub(crate) use self::{
    fabric::ensure as ensure_fabric,
    member::{FABRIC_PREFIX, MAX_HOSTS, Member, POD_PREFIX, SERVICE_CIDR, endpoint},
    namespace::{NetNs, PIN_DIR, enter},
};
