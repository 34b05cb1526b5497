//! Tells when the kernel killed for lack of memory in a container's cgroup.

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::inotify::{self, CreateFlags, WatchFlags};
use tokio::io::unix::AsyncFd;

use super::cgroup::{Cgroups, table};
use crate::task::sys;

/// Follows one cgroup until it is removed.
pub(crate) struct Watch {
    /// v1: an eventfd that counts up at each lack of memory, and when the cgroup goes. v2: an
    /// inotify of `memory.events`.
    source: AsyncFd<OwnedFd>,
    /// Folder of the cgroup that counts memory.
    dir: PathBuf,
    /// Kills that were told.
    kills: u64,
}

impl Watch {
    /// For the container of `pid`. Begin before its command starts: a kill may be the first thing
    /// that happens. `None` where its memory counts together with others': a kill there says
    /// nothing of this one.
    pub(crate) fn new(pid: i32) -> io::Result<Option<Self>> {
        let cgroups = Cgroups::of(pid)?;
        let (source, dir) = match (cgroups.unified(), cgroups.controller("memory")) {
            (Some(dir), _) => match watch_file(&dir.join("memory.events")) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
                source => (source?, dir),
            },
            (None, Some(dir)) => (watch_event(dir)?, dir),
            (None, None) => return Ok(None),
        };
        Ok(Some(Self {
            kills: kills(dir),
            source,
            dir: dir.to_owned(),
        }))
    }

    /// Waits for the next kill; false when the cgroup is gone.
    pub(crate) async fn next(&mut self) -> bool {
        loop {
            if self.changed().await.is_err() {
                return false;
            }
            let kills = kills(&self.dir);
            let more = kills > self.kills;
            self.kills = kills;
            if more {
                return true;
            }
            if !self.dir.exists() {
                return false;
            }
        }
    }

    async fn changed(&self) -> io::Result<()> {
        // What is read does not matter: the cgroup's own counters are looked at.
        let mut buffer = [0; 512];
        loop {
            let mut ready = self.source.readable().await?;
            match ready.try_io(|fd| Ok(rustix::io::read(fd, &mut buffer)?)) {
                Ok(result) => return result.map(drop),
                Err(_not_ready) => {}
            }
        }
    }
}

fn watch_event(dir: &Path) -> io::Result<AsyncFd<OwnedFd>> {
    let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
    let control = File::open(dir.join("memory.oom_control"))?;
    let line = format!("{} {}", event.as_raw_fd(), control.as_raw_fd());
    fs::write(dir.join("cgroup.event_control"), line)?;
    sys::watch(event)
}

fn watch_file(path: &Path) -> io::Result<AsyncFd<OwnedFd>> {
    let events = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)?;
    inotify::add_watch(&events, path, WatchFlags::MODIFY | WatchFlags::DELETE_SELF)?;
    sys::watch(events)
}

/// Kills so far, by whichever file the cgroup has.
fn kills(dir: &Path) -> u64 {
    ["memory.oom_control", "memory.events"]
        .into_iter()
        .find_map(|file| table(dir, file).get("oom_kill").copied())
        .unwrap_or_default()
}
