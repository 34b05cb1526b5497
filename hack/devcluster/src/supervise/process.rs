//! Processes as `/proc` shows them. A process is known by pid and start time together: a pid alone
//! may have passed to a stranger, who must never be signalled.

use std::fs;
use std::path::Path;

use nix::errno::Errno;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde::{Deserialize, Serialize};

/// One process, for as long as it lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Identity {
    pid: u32,
    /// Clock ticks after boot; unchanged by exec.
    start_time: u64,
}

impl Identity {
    /// The process that has this pid now; none if there is no such process or it is a zombie.
    pub(crate) fn of(pid: u32) -> Option<Self> {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        let (state, start_time) = parse_stat(&stat)?;
        (!matches!(state, 'Z' | 'X')).then_some(Self { pid, start_time })
    }

    /// The calling process.
    pub(crate) fn own() -> Option<Self> {
        Self::of(std::process::id())
    }

    /// The number; only meaningful while the process is alive.
    pub(crate) fn pid(self) -> u32 {
        self.pid
    }

    /// Whether the same process still runs.
    pub(crate) fn is_alive(self) -> bool {
        Self::of(self.pid) == Some(self)
    }

    /// Signals the process if it is still the same one.
    pub(crate) fn signal(self, signal: Signal) -> anyhow::Result<()> {
        if !self.is_alive() {
            return Ok(());
        }
        match kill(Pid::from_raw(i32::try_from(self.pid)?), signal) {
            Ok(()) | Err(Errno::ESRCH) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}

/// State and start time: the name in between may hold spaces and parentheses.
fn parse_stat(stat: &str) -> Option<(char, u64)> {
    let after_name = &stat[stat.rfind(')')? + 1..];
    let mut fields = after_name.split_ascii_whitespace();
    let state = fields.next()?.chars().next()?;
    // Field 22 of the line; the state was field 3.
    let start_time = fields.nth(18)?.parse().ok()?;
    Some((state, start_time))
}

/// All pids of the machine.
pub(crate) fn pids() -> Vec<u32> {
    let Ok(entries) = fs::read_dir("/proc") else {
        return Vec::new();
    };
    entries
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .collect()
}

/// Resident memory of a process in bytes.
pub(crate) fn resident_bytes(pid: u32) -> Option<u64> {
    let status =
        fs::read_to_string(Path::new("/proc").join(pid.to_string()).join("status")).ok()?;
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmRSS:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib << 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_may_hold_anything() {
        let tail = "S 1 1 1 0 -1 4194560 0 0 0 0 0 0 0 0 20 0 1 0 4242 0 0";
        for name in ["sh", "a b", ") S 1 (", "x)"] {
            assert_eq!(
                parse_stat(&format!("17 ({name}) {tail}")),
                Some(('S', 4242))
            );
        }
        assert_eq!(parse_stat("17 (sh) S 1"), None);
    }

    #[test]
    fn a_process_is_itself_and_nobody_else() {
        let own = Identity::own().unwrap();
        assert!(own.is_alive());
        let stranger = Identity {
            start_time: own.start_time + 1,
            ..own
        };
        assert!(!stranger.is_alive());
        // Would end this test if it reached us.
        stranger.signal(Signal::SIGKILL).unwrap();
    }

    #[test]
    fn resident_memory_is_read() {
        assert!(resident_bytes(std::process::id()).unwrap() > 1 << 16);
    }
}
