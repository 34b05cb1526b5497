//! How a host gets at the bytes of its layers: the best way that works here.
//!
//! What works is tried, never read off a version: kernels are built and patched in many ways, and a
//! wrong guess shows zeros to programs.

mod fuse;
pub mod image;
mod probe;

pub use self::probe::{ProbeError, probe};

use std::path::Path;

use crate::keeper::Gate;

/// A way to the bytes of a layer, the best first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Member {
    /// EROFS over a sparse blob, filled at fanotify's pre-content events.
    Fanotify,
    /// EROFS over a file of a FUSE file system that stands for a sparse blob.
    Fuse,
    /// EROFS over a blob that is complete before it is mounted.
    Convert,
    /// containerd's own snapshots; the store is not used.
    Containerd,
}

impl Member {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Fanotify, Self::Fuse, Self::Convert, Self::Containerd];

    /// The name in configuration, metrics and labels.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Fanotify => "fanotify",
            Self::Fuse => "fuse",
            Self::Convert => "convert",
            Self::Containerd => "containerd",
        }
    }

    /// Whether a layer can be mounted before all its bytes are there.
    #[must_use]
    pub fn is_lazy(self) -> bool {
        self.gate() != Gate::Closed
    }

    /// How the keeper is to serve.
    #[must_use]
    pub fn gate(self) -> Gate {
        match self {
            Self::Fanotify => Gate::Fanotify,
            Self::Fuse => Gate::Fuse,
            Self::Convert | Self::Containerd => Gate::Closed,
        }
    }
}

/// A name that no member has.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("layer mode {0:?} is none of fanotify, fuse, convert, containerd")]
pub struct UnknownMember(String);

impl<'de> serde::Deserialize<'de> for Member {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let name = String::deserialize(deserializer)?;
        name.parse().map_err(serde::de::Error::custom)
    }
}

impl std::str::FromStr for Member {
    type Err = UnknownMember;

    fn from_str(name: &str) -> Result<Self, UnknownMember> {
        let found = Self::ALL.into_iter().find(|member| member.name() == name);
        found.ok_or_else(|| UnknownMember(name.chars().take(64).collect()))
    }
}

/// What was chosen, and why nothing better was.
#[derive(Debug)]
pub struct Choice {
    /// The way that is used.
    pub member: Member,
    /// Better ones that do not work here, with the reason.
    pub passed_over: Vec<(Member, String)>,
}

/// Chooses for a store in folder `root`. A forced member is taken when it works and is refused
/// otherwise: a host that silently does something else than it was told is worse than one that does
/// not start.
///
/// # Errors
/// The reason why the forced member does not work.
pub fn choose(root: &Path, forced: Option<Member>) -> Result<Choice, ProbeError> {
    if let Some(member) = forced {
        probe(member, root)?;
        return Ok(Choice {
            member,
            passed_over: Vec::new(),
        });
    }
    let mut passed_over = Vec::new();
    for member in Member::ALL {
        match probe(member, root) {
            Ok(()) => {
                return Ok(Choice {
                    member,
                    passed_over,
                });
            }
            Err(error) => passed_over.push((member, error.to_string())),
        }
    }
    // The last member has no probe that fails.
    Ok(Choice {
        member: Member::Containerd,
        passed_over,
    })
}
