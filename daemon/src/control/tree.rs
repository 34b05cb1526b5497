//! All processes that come from one: its session, and its descendants.
//!
//! A process that has left both, by a new session in an orphan, is beyond this; it is the
//! container's then, and ends with it.

use std::fs;
use std::path::Path;
use std::process::id;

use crate::sys::at;
use crate::sys::process::{self, Pid};

/// How often new processes are looked for: each round of a fork bomb is smaller than the last,
/// because what was found has been killed.
const ROUNDS: usize = 64;

#[derive(Clone, Copy, Debug)]
struct Process {
    pid: Pid,
    parent: Pid,
    session: Pid,
}

/// Sends `signal` to `leader` and to all that comes from it. Until `leader` is reaped, which the
/// caller does, no stranger has its number; others may have ended since they were seen, and their
/// numbers are of this sandbox still.
pub(super) fn signal(leader: Pid, signal: i32) {
    let rounds = if signal == libc::SIGKILL { ROUNDS } else { 1 };
    if signal == libc::SIGKILL {
        // First of all, so that it starts no more.
        drop(process::kill(leader, libc::SIGSTOP));
    }
    let mut done = Vec::new();
    for _ in 0..rounds {
        let found: Vec<_> = family(&processes(), leader)
            .into_iter()
            .filter(|pid| !done.contains(pid))
            .collect();
        if found.is_empty() {
            break;
        }
        for pid in &found {
            drop(process::kill(*pid, signal));
        }
        done.extend(found);
    }
    // Without a /proc there is at least itself.
    if !done.contains(&leader) {
        drop(process::kill(leader, signal));
    }
}

/// `leader`, its session and its descendants. Not zombies: they have ended.
fn family(all: &[Process], leader: Pid) -> Vec<Pid> {
    let mut family = vec![leader];
    loop {
        let before = family.len();
        for process in all {
            let belongs = process.session == leader || family.contains(&process.parent);
            if belongs && !family.contains(&process.pid) {
                family.push(process.pid);
            }
        }
        if family.len() == before {
            return family;
        }
    }
}

/// What runs in this PID namespace, if the kernel shows it.
fn processes() -> Vec<Process> {
    // Without one, the image may have put anything there; another namespace's has other numbers.
    let own = fs::read_link("/proc/self").is_ok_and(|link| link == Path::new(&id().to_string()));
    if !own || !at::is_proc(c"/proc") {
        return Vec::new();
    }
    let Ok(entries) = fs::read_dir("/proc") else {
        return Vec::new();
    };
    entries
        .filter_map(|entry| {
            let name = entry.ok()?.file_name();
            let pid = name.to_str()?.parse().ok()?;
            // Names of programs are any bytes.
            let stat = fs::read(format!("/proc/{pid}/stat")).ok()?;
            parse(pid, &stat)
        })
        .collect()
}

fn parse(pid: Pid, stat: &[u8]) -> Option<Process> {
    // The name may hold anything, also parentheses: what follows the last one is the kernel's.
    let after = stat.iter().rposition(|byte| *byte == b')')?;
    let mut fields = std::str::from_utf8(&stat[after + 1..])
        .ok()?
        .split_ascii_whitespace();
    if matches!(fields.next()?, "Z" | "X") {
        return None;
    }
    let parent = fields.next()?.parse().ok()?;
    let _group = fields.next()?;
    let session = fields.next()?.parse().ok()?;
    Some(Process {
        pid,
        parent,
        session,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_does_not_lead_astray() {
        let parsed = parse(5, b"5 (a) R 1 1) S 2 3 4 0 -1").unwrap();
        assert_eq!((parsed.parent, parsed.session), (2, 4));
        assert!(parse(5, b"5 (\xff) S 2 3 4").is_some());
        assert!(parse(5, b"5 (a) Z 2 3 4").is_none());
        for broken in [&b""[..], b"5 (a", b"5 (a) S", b"5 (a) S x y z"] {
            assert!(parse(5, broken).is_none());
        }
    }

    #[test]
    fn the_family_is_session_and_descendants() {
        let process = |pid, parent, session| Process {
            pid,
            parent,
            session,
        };
        let all = [
            process(1, 0, 1),
            process(7, 1, 7),    // the command
            process(10, 1, 10),  // the leader
            process(14, 13, 12), // found before its parent
            process(13, 10, 12), // a child with a session of its own
            process(15, 1, 10),  // an orphan in the session
            process(16, 7, 7),
        ];
        let mut found = family(&all, 10);
        found.sort_unstable();
        assert_eq!(found, [10, 13, 14, 15]);
    }
}
