//! User namespaces of pods (`hostUsers: false`): a range of user and group ids that is one pod's
//! alone, and files that keep their owners inside it.
//!
//! Volumes and image layers are shown through mounts that map ids (mount_setattr(2)), so nothing
//! on disk is given to another owner. They are made here and not by the OCI runtime, because old
//! ones ignore that wish silently.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use nix::sched::CloneFlags;
use serde::{Deserialize, Serialize};

mod holder;
mod mapped;
mod root;

pub(crate) use self::holder::Holder;
pub(crate) use self::mapped::bind;
pub use self::root::map_root;

/// Ids of one pod, as Kubernetes has it: all that 16 bits can say.
pub const LENGTH: u32 = 65_536;

/// The ids of one pod: those from `first` are 0 and up inside.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct UserRange {
    /// Id of the host that is root's inside.
    pub first: u32,
}

/// A pod's user namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OwnUsers {
    /// Where it is pinned.
    pub namespace: PathBuf,
    /// Its ids.
    pub range: UserRange,
}

/// The part of the host's ids that pods get.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct UserIds {
    /// The lowest.
    pub first_id: u32,
    /// How many pods there can be with a range of their own.
    pub pods: u32,
}

impl Default for UserIds {
    fn default() -> Self {
        // Within what systemd leaves to containers, above what useradd gives to users.
        Self {
            first_id: 0x1000_0000,
            pods: 16_384,
        }
    }
}

impl UserIds {
    /// Says what is wrong with it.
    ///
    /// # Errors
    /// The key and what is allowed.
    pub fn check(&self) -> Result<(), (&'static str, String)> {
        if self.first_id < LENGTH {
            let text = format!("must be at least {LENGTH}: ids below are the host's own");
            return Err(("user_namespaces.first_id", text));
        }
        let end = u64::from(self.first_id) + u64::from(self.pods) * u64::from(LENGTH);
        if self.pods == 0 || end > u64::from(u32::MAX) {
            let most = (u32::MAX - self.first_id) / LENGTH;
            let text = format!("must be 1 to {most}: each has {LENGTH} ids from first_id on");
            return Err(("user_namespaces.pods", text));
        }
        Ok(())
    }
}

/// Which pod has which ids.
#[derive(Debug)]
pub struct Users {
    ids: UserIds,
    taken: Mutex<BTreeMap<UserRange, String>>,
}

impl Users {
    /// With nothing given away.
    #[must_use]
    pub fn new(ids: UserIds) -> Self {
        Self {
            ids,
            taken: Mutex::default(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<UserRange, String>> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps what a pod has by its record. False if it is another's.
    #[must_use]
    pub fn keep(&self, uid: &str, range: UserRange) -> bool {
        let mut taken = self.lock();
        taken.entry(range).or_insert_with(|| uid.to_owned()) == uid
    }

    /// The ids of a pod, new ones if it has none. `None` when all are taken. Write them down
    /// before they are used.
    #[must_use]
    pub fn take(&self, uid: &str) -> Option<UserRange> {
        let mut taken = self.lock();
        if let Some((range, _)) = taken.iter().find(|(_, holder)| *holder == uid) {
            return Some(*range);
        }
        let ranges = (0..self.ids.pods).map(|index| UserRange {
            first: self.ids.first_id + index * LENGTH,
        });
        // A kept range may lie across those of a configuration that was changed.
        let free = ranges.into_iter().find(|range| {
            let below = range.first.saturating_sub(LENGTH - 1);
            let above = range.first.saturating_add(LENGTH - 1);
            let mut near = taken.range(UserRange { first: below }..=UserRange { first: above });
            near.next().is_none()
        })?;
        taken.insert(free, uid.to_owned());
        Some(free)
    }

    /// Takes back the ids of a pod of which nothing is left.
    pub fn give_back(&self, uid: &str) {
        self.lock().retain(|_, holder| holder != uid);
    }
}

/// Whether this host can do it, with files in each of these folders.
///
/// # Errors
/// What the kernel refuses.
pub fn try_out(ids: UserIds, folders: &[&Path]) -> io::Result<()> {
    let range = UserRange {
        first: ids.first_id,
    };
    let holder = Holder::start(CloneFlags::CLONE_NEWUSER, range)?;
    let namespace = File::open(holder.namespace("user"))?;
    for folder in folders {
        mapped::copy(folder, namespace.as_fd())?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_two_pods_share_ids() {
        let users = Users::new(UserIds {
            first_id: 1 << 20,
            pods: 3,
        });
        let at = |index: u32| UserRange {
            first: (1 << 20) + index * LENGTH,
        };
        assert_eq!(users.take("a"), Some(at(0)));
        assert_eq!(users.take("a"), Some(at(0)));
        assert!(users.keep("b", at(1)) && users.keep("b", at(1)) && !users.keep("c", at(1)));
        assert_eq!(users.take("c"), Some(at(2)));
        assert_eq!(users.take("d"), None);
        users.give_back("a");
        assert_eq!(users.take("d"), Some(at(0)));
    }

    #[test]
    fn a_range_of_an_older_configuration_is_kept_clear_of() {
        let users = Users::new(UserIds {
            first_id: 1 << 20,
            pods: 3,
        });
        let across = UserRange {
            first: (1 << 20) + 100,
        };
        assert!(users.keep("old", across));
        let fresh = users.take("new").unwrap();
        assert_eq!(fresh.first, (1 << 20) + 2 * LENGTH);
    }

    #[test]
    fn bounds_are_checked() {
        UserIds::default().check().unwrap();
        let ids = |first_id, pods| UserIds { first_id, pods }.check().map_err(|(key, _)| key);
        assert_eq!(ids(0, 1), Err("user_namespaces.first_id"));
        assert_eq!(ids(LENGTH, 0), Err("user_namespaces.pods"));
        assert_eq!(ids(u32::MAX - LENGTH, 2), Err("user_namespaces.pods"));
    }
}
