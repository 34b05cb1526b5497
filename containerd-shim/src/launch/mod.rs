//! The launcher: from an OCI bundle to a running sandbox.
//!
//! [`subset`] decides, purely, whether a spec is one that we make ourselves; what is outside goes
//! to runc. [`prepare`] opens what the spec names: file systems, namespaces, cgroups. [`create`]
//! has the zygote make it of that.

pub mod capability;
pub mod cgroup;
pub mod create;
mod device;
pub mod options;
pub mod prepare;
mod rootfs;
pub mod seccomp;
pub mod subset;

pub use self::create::{CreateError, Created, Gate, SLOT_CONTROL, SLOT_GATE, SLOT_TERMINAL};
pub use self::prepare::{Exec, Launcher, PrepareError, Prepared, Request, Rootfs, Streams};
pub use self::rootfs::RootMount;
pub use self::subset::{Outside, Subset};
