//! The holder: parent of everything a shim starts, and memory for what a killed shim would lose.
//!
//! Tiny, single-threaded, asleep in epoll. It parses nothing of OCI and trusts its one client, the
//! shim, with everything but its own consistency.
//!
//! ```text
//! shim ──requests──► holder ──one launch at a time──► zygote
//!                     │ parent of                        │ clone3(CLONE_PARENT | ...)
//!                     ├── anchor (init of the sandboxes' PID namespace)
//!                     ├── zygote
//!                     ├── sandbox, sandbox, ...  ◄───────┘
//!                     └── runc's containers, loggers
//! ```
//!
//! **When the holder dies, its sandboxes end.** They and the zygote live in a PID namespace whose
//! init is the anchor, a process that only waits for the end of a pipe that the holder alone holds
//! open. The holder's death, however it comes, ends the pipe, the anchor, and with it, by the
//! kernel's own rule for an init, every process of the namespace. No sandbox can prevent that: the
//! anchor is out of their sight, and there is no `PDEATHSIG`, which a process may take back and
//! which follows a thread. The holder itself stays in the host's namespace, so that process ids
//! are the host's.
//!
//! **There is one waitpid**, in [`server`], and an exit is recorded before the process id can be
//! used again. A clone may end before the zygote has told its id: while a launch is under way an
//! unknown zombie is left a zombie until the zygote has answered.

pub mod client;
mod front;
pub mod protocol;
mod registry;
mod relay;
mod server;
mod spawn;
mod world;

pub use self::server::{SOCKET, serve};
pub use self::world::ZYGOTE;
pub(crate) use self::world::ZYGOTE_SOCKET;
