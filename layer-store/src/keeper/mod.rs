//! The process that stands between readers and bytes that are not there yet.
//!
//! The kernel asks through a fanotify group before a marked blob is read, and the reader waits for
//! the answer. That group **fails open**: with its last descriptor closed, waiting readers go on and
//! see zeros. Everything here follows from that.
//!
//! - The group belongs to a process of its own, `sandman-layer-keeper`, which speaks no network,
//!   decodes nothing, and needs no memory for a question.
//! - The queue has no limit: what overflows a bounded one is let through.
//! - A blob is opened first, then marked, then mounted. Opened later, filling it would wait for
//!   itself; mounted earlier, its readers would not be asked about.
//! - A second process, the [`Custodian`], holds copies of the group, the journal and every blob and
//!   mount. A keeper that is killed leaves readers waiting; its successor gets the copies, answers
//!   what the journal says is open, sweeps what it does not say, and only then reads on.
//! - Each question has a deadline, after which the reader gets `EIO`.
//! - Once the group is lost anyway, the custodian says so ([`KeeperEvent::GroupLost`]), and the
//!   sandboxes over incomplete layers must be stopped, unmounted and mounted anew.
//!
//! Where the kernel has no pre-content events, blobs are read through files of a FUSE file system
//! instead ([`Gate::Fuse`], see `fuse`): the questions are the same, and so is who answers them.
//!
//! [`desk`] takes and answers questions, [`table`] and [`journal`] are where they wait, [`server`]
//! is the loop around them; [`client`] and [`custodian`] are the other end.

mod blobs;
mod client;
mod custodian;
mod desk;
mod gate;
mod journal;
mod protocol;
mod server;
mod socket;
mod table;

pub use self::{
    client::{Asked, Controller, FillerLink, KeeperError},
    custodian::{Custodian, Device, KeeperConfig, KeeperEvent},
    protocol::{Gate, GroupId, Limits, Status},
    server::{Failure, Server},
    table::EventId,
};
pub use crate::sys::fanotify::{ByteRange, Verdict};
