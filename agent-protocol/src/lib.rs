//! What a host and the agent inside a sandbox say to each other over descriptor 3.
//!
//! One message is one datagram of a `SOCK_SEQPACKET` pair that was made before the sandbox
//! existed: it has no name that anybody could look for. Numbers are little endian, strings carry
//! their length, and every length and count has a limit that both sides enforce.
//!
//! The host asks ([`Request`]), numbering its requests from 1; the agent answers each one
//! ([`Reply`]) under that number, not necessarily in order, and tells what happens by itself under
//! the number 0. Descriptors travel beside a message: the three streams of a process beside
//! [`Request::Start`], a terminal's master beside [`Reply::Started`].
//!
//! The two trust each other differently. The agent believes the host. The host believes nothing:
//! root inside the sandbox can take the agent over, and then these messages are an attacker's.
//!
//! A host may go away and come back as another process. It then says [`Request::Hello`] with a
//! new nonce and ignores everything until the answer to it; the agent then tells of each process
//! that it still knows. Ends are kept until [`Request::Forget`].
#![no_std]

extern crate alloc;

mod reply;
mod request;
mod wire;

pub use reply::{Ended, Kind, Reply};
pub use request::{Capabilities, Limit, Request, Size, Start};
pub use wire::Malformed;

/// The agent's descriptor of the socket.
pub const DESCRIPTOR: i32 = 3;

/// Version of these messages. The agent of a running sandbox is as old as the sandbox, so a host
/// that does not speak its version enters by namespaces instead.
pub const VERSION: u16 = 1;

/// Longest message in bytes. Far below a socket's buffer, so that one always fits; a command line
/// that is longer is started by the host without the agent.
pub const MAX_MESSAGE: usize = 64 * 1024;

/// Most arguments, and most variables of an environment.
pub const MAX_STRINGS: usize = 4096;

/// Most supplementary groups.
pub const MAX_GROUPS: usize = 1024;

/// Most resource limits: Linux has 16.
pub const MAX_LIMITS: usize = 32;

/// Longest text of a refusal in bytes.
pub const MAX_TEXT: usize = 1024;

/// Most processes that an agent keeps in mind, running or ended and not forgotten.
pub const MAX_EXECS: usize = 256;

/// Longest [`Reply`] in bytes, so that a host needs no larger buffer.
pub const MAX_REPLY: usize = MAX_TEXT + 64;
