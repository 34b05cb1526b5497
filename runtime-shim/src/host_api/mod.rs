//! The gRPC service that virtual nodes command this host by.

mod attach;
mod exec;
mod inventory;
mod logs;
mod port_forward;
mod pump;
mod service;
mod stats;
mod term;
mod watch;

pub use self::exec::end_stale;
pub use self::inventory::{InventorySource, Machine, pods_wanted};
pub use self::service::HostService;
pub use self::term::Term;
